"""Let pointwise convolutions take in the gates of channels that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, producer
from onnxfuse.layout.bodies import behind
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.layout.residuals import CONVOLUTION, GATE
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

OPERAND: Final = "gate"  # of a channel_scale, and the last one of a convolution that has taken it in
UNPADDED: Final = ("NOTSET", "VALID")  # values of auto_pad


def join_gates(graph: Graph, shapes: ShapeInfo, records: Mapping[str, Fused]) -> list[Fused]:
    """Replace each channels-last gate and the pointwise convolution that alone reads it by one node.

    Returns the records of these nodes; `records` are those of the fused nodes, by name.
    """
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        gate = producer(node.inputs[0]) if is_pointwise(shapes, node) else None
        if gate is not None and _is_plain(gate) and graph.sole_consumer(gate.outputs[0]) is node:
            found[node] = gate
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    drop_functions(graph, {*found, *found.values()})
    functions, made = LocalFunctions(graph), list[Fused]()
    for node, gate in found.items():
        record, before = records[node.name], records[gate.name]
        attributes: dict[str, AttributeValue] = {**node.attrs, "operands": " ".join([*operands_of(node), OPERAND])}
        body = behind(bodies[node.op], "x", bodies[gate.op], list(attributes))
        made.append(replace(record, replaces=(*before.replaces, *record.replaces)))
        x, factors = gate.inputs
        inputs = [x, *node.inputs[1:], factors]
        put_one_node(graph, shapes, functions, (gate, node), node, body, inputs, attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def operands_of(node: Node) -> list[str]:
    """Return the names of the operands of a fused node."""
    return str_attribute(node, "operands", "").split()


def is_fused(node: Node, fusion: str) -> bool:
    """Return whether a node is a channels-last one of a fusion."""
    return node.domain == DOMAIN and str_attribute(node, "fusion", "") == fusion and _is_channels_last(node)


def _is_channels_last(node: Node) -> bool:
    return str_attribute(node, "layout", "") == "nhwc" and str_attribute(node, "x_layout", "nhwc") == "nhwc"


def _is_plain(node: Node) -> bool:
    """Return whether a node is a gate with nothing behind it."""
    plain = str_attribute(node, "activation", "none") == "none"
    return is_fused(node, GATE) and plain and operands_of(node) == ["x", OPERAND]


def is_pointwise(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a channels-last convolution whose filters have one tap, which reads every pixel once."""
    operands = operands_of(node)
    if not is_fused(node, CONVOLUTION) or operands[:2] != ["x", "w"] or len(operands) != len(node.inputs):
        return False
    w = shapes.shape(node.inputs[1]) or ()
    return (
        str_attribute(node, "w_layout", "") == "ohwi"
        and set(w[1:-1]) == {1}
        and set(ints_attribute(node, "strides", [1])) == {1}
        and not any(ints_attribute(node, "pads", []))
        and str_attribute(node, "auto_pad", "NOTSET") in UNPADDED
        and int_attribute(node, "group", 1) == 1
    )
