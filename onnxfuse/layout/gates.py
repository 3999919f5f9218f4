"""Fuse channel gates into the pointwise convolutions that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.node import Node, producer
from onnxfuse.layout.fusions import CONVOLUTION, GATE
from onnxfuse.layout.joins import Joined, Joins, is_channels_last, operands_of, with_attributes
from onnxfuse.rewrite.chain_bodies import chained

OPERAND: Final = "gate"  # a channel_scale's gate operand; a convolution that took in a gate has it as its last operand
UNPADDED: Final = ("NOTSET", "VALID")  # values of auto_pad without padding


def gates(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last gate joined with the pointwise convolution that is its only reader."""
    for node in joins.graph.nodes:
        gate = producer(node.inputs[0]) if is_pointwise(joins.shapes, node) else None
        if gate is None or not _is_plain(gate) or joins.graph.sole_consumer(gate.outputs[0]) is not node:
            continue
        body, (x, factors) = chained(joins.bodies[gate.op], joins.bodies[node.op]), gate.inputs
        yield Joined((gate, node), node, body, (x, *node.inputs[1:], factors), with_attributes(node, {}, OPERAND))


def _is_plain(node: Node) -> bool:
    """Return whether a node is a gate without fused operators after it."""
    plain = str_attribute(node, "activation", "none") == "none"
    return is_channels_last(node, GATE) and plain and operands_of(node) == ["x", OPERAND]


def is_pointwise(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a channels-last 1x1 convolution that reads every pixel exactly once."""
    operands = operands_of(node)
    if not is_channels_last(node, CONVOLUTION) or operands[:2] != ["x", "w"] or len(operands) != len(node.inputs):
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
