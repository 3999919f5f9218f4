"""Put one fused node in place of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor
from onnxfuse.rewrite.replace import LocalFunctions


def put_one_node(
    graph: Graph,
    shapes: ShapeInfo,
    functions: LocalFunctions,
    nodes: Sequence[Node],
    named: Node,
    body: onnx.FunctionProto,
    inputs: Sequence[Tensor],
    attributes: Mapping[str, AttributeValue],
) -> None:
    """Put a fused node in place of `nodes`, with the output of the last and the name of `named`, which is one of them.

    `body` is that of its function, and `attributes` names its fusion.  `Graph.remove_dead` removes what stood there.
    """
    (output,) = nodes[-1].outputs
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()
    op = function_name(functions, body, str(attributes["fusion"]))
    graph.add_node(op, inputs, [output], attributes, name=named.name, domain=DOMAIN)
    graph.record_type(output, shapes.dtype(output), shapes.shape(output))


def function_name(functions: LocalFunctions, body: onnx.FunctionProto, fusion: str) -> str:
    """Return the name of the function with that body: one that the model has, or a new one, named like its fusion."""
    for function in functions.graph.functions:
        body.name = function.name
        if body == function:
            return function.name
    body.name = fusion
    return functions.add(body)
