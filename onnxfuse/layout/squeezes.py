"""Make one node of the mean over an image and the two small products that compute a gate of its channels from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import onnx

from onnxfuse.activations import PRELU
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, producer
from onnxfuse.layout.bodies import behind, with_operands
from onnxfuse.layout.gates import is_fused, is_pointwise, operands_of
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

SQUEEZE: Final = "squeeze_excite"
MEAN: Final = "global_average_pool"
SECOND: Final = {"w": "w_2", "bias": "bias_2"}  # the operands of the second product
ACTIVATION: Final = ("activation", "alpha", "beta")


def join_squeezes(graph: Graph, shapes: ShapeInfo, records: Mapping[str, Fused]) -> list[Fused]:
    """Replace each channels-last mean over an image, and the two products behind it, by one node.

    The second product has as many results as the image has channels, and nothing else reads what lies between the
    three.  Returns the records of the new nodes; `records` are those of the fused nodes, by name.
    """
    found = list(_squeezes(graph, shapes))
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    drop_functions(graph, {node for nodes in found for node in nodes})
    functions, made = LocalFunctions(graph), list[Fused]()
    for mean, first, second in found:
        attributes = _attributes(first, second)
        body = _body(bodies[mean.op], bodies[first.op], bodies[second.op], attributes)
        replaced = (name for node in (mean, first, second) for name in records[node.name].replaces)
        made.append(Fused(SQUEEZE, second.name, tuple(replaced), {}, records[second.name].output))
        inputs = [mean.inputs[0], *first.inputs[1:], *second.inputs[1:]]
        put_one_node(graph, shapes, functions, (mean, first, second), second, body, inputs, attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _squeezes(graph: Graph, shapes: ShapeInfo) -> Iterator[tuple[Node, Node, Node]]:
    for second in graph.nodes:
        first = producer(second.inputs[0]) if _is_product(shapes, second) else None
        mean = producer(first.inputs[0]) if first is not None and _is_product(shapes, first) else None
        if first is None or mean is None or not is_fused(mean, MEAN):
            continue
        image, gate = shapes.shape(mean.inputs[0]), shapes.shape(second.outputs[0])
        alone = graph.sole_consumer(mean.outputs[0]) is first and graph.sole_consumer(first.outputs[0]) is second
        if alone and image and gate and isinstance(gate[-1], int) and image[-1] == gate[-1]:
            yield mean, first, second


def _is_product(shapes: ShapeInfo, node: Node) -> bool:
    plain = operands_of(node) in (["x", "w"], ["x", "w", "bias"])
    return plain and is_pointwise(shapes, node) and str_attribute(node, "activation", "none") != PRELU


def _attributes(first: Node, second: Node) -> dict[str, AttributeValue]:
    own: dict[str, AttributeValue] = {name: second.attrs[name] for name in ("layout", "output_ranks")}
    own |= {name: first.attrs[name] for name in ACTIVATION if name in first.attrs}
    own |= {f"{name}_2": second.attrs[name] for name in ACTIVATION if name in second.attrs}
    operands = [*operands_of(first), *(SECOND[name] for name in operands_of(second)[1:])]
    return {
        "fusion": SQUEEZE,
        "operands": " ".join(operands),
        "output_types": second.attrs["output_types"],
        "attributes": " ".join(sorted(own)),
        **own,
    }


def _body(
    mean: onnx.FunctionProto,
    first: onnx.FunctionProto,
    second: onnx.FunctionProto,
    attributes: Mapping[str, AttributeValue],
) -> onnx.FunctionProto:
    names = list(attributes)
    body = behind(with_operands(second, SECOND), "x", behind(first, "x", mean, names), names)
    body.input[:] = str(attributes["operands"]).split()
    body.doc_string = ""
    return body
