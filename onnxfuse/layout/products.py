"""Store weights of products as kernels read them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.bodies import channels_last_function
from onnxfuse.layout.fusions import QUANTIZED_PRODUCT
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, drop_functions, put_call

TURNED: Final[Perm] = (1, 0)


def store_rows(shapes: ShapeInfo, recorded: Collection[Fused]) -> dict[str, tuple[str, Perm]]:
    """Store the weights of products of integers as (n, k), so that integers that kernels add are adjacent.

    Nodes with records in `recorded` change, unless something else reads their weight.  Returns the name of each new
    weight with the weight that it is a Transpose of, and the perm.  The body turns the weight back, which onnxruntime
    computes when it loads the model.
    """
    graph, names = shapes.graph, {one.node for one in recorded}
    found = [node for node in graph.nodes if node.name in names and _has_columns(node)]
    weights = {weight.name: weight for node in found if is_constant(weight := _weight(node))}
    weights = {name: weight for name, weight in weights.items() if set(consumers(weight)) <= {*found}}
    found = [node for node in found if _weight(node).name in weights]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if found and not graph.is_subgraph:
        drop_functions(graph, found)
    functions, originals = LocalFunctions(graph), dict[str, tuple[str, Perm]]()
    for name, weight in weights.items():
        stored = graph.constant(f"{name}/nk", np.ascontiguousarray(constant_value(graph, weight).T))
        originals[stored.name] = name, TURNED
        for node in consumers(weight):
            inputs, body = list(node.inputs), bodies[node.op]
            index = next(i for i, tensor in enumerate(inputs) if tensor is weight)
            inputs[index] = stored
            turned = channels_last_function(body, {body.input[index]: TURNED}, {})
            turned.name = QUANTIZED_PRODUCT
            attributes = {**node.attrs, "weight_layout": "nk"}
            call = FunctionCall(functions.add(turned), node.name, inputs, list(node.outputs), attributes)
            put_call(shapes, [node], call)
    if found:
        graph.remove_dead()
        graph.sort()
    return originals


def _has_columns(node: Node) -> bool:
    is_product = node.domain == DOMAIN and str_attribute(node, "fusion", "") == QUANTIZED_PRODUCT
    return is_product and str_attribute(node, "weight_layout", "") == "kn"


def _weight(node: Node) -> Tensor:
    return node.inputs[str_attribute(node, "operands", "").split().index("w")]
