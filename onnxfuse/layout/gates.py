"""Fuse channel gates into the pointwise convolutions that read them.

A channel gate multiplies each channel of an image by one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.node import Node, producer
from onnxfuse.layout.fusions import CONVOLUTION, GATE
from onnxfuse.layout.joins import Call, Joined, Joins
from onnxfuse.rewrite.chain_bodies import chained

# The name of the operand that holds one factor per channel: an operand of channel_scale, and the last operand of a
# convolution that a gate was fused into.
OPERAND: Final = "gate"
UNPADDED: Final = ("NOTSET", "VALID")  # values of auto_pad without padding


def gates(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last gate joined with the pointwise convolution that is its only reader."""
    for node in joins.graph.nodes:
        call = pointwise(joins, node)
        gate = joins.call(producer(node.inputs[0])) if call is not None else None
        if call is None or gate is None or not _is_plain(gate) or joins.graph.sole_consumer(node.inputs[0]) is not node:
            continue
        operands = {**call.operands, **gate.operands}  # the gate's x replaces the convolution's x
        yield Joined((gate.node, node), call, chained(gate.body, call.body), operands, {})


def _is_plain(gate: Call) -> bool:
    """Return whether a node is a gate without fused operators after it."""
    return gate.is_channels_last(GATE) and gate.activation == "none" and list(gate.operands) == ["x", OPERAND]


def pointwise(joins: Joins, node: Node | None) -> Call | None:
    """Return the call of a channels-last 1x1 convolution that reads every pixel exactly once; None for other nodes."""
    call = joins.call(node)
    if node is None or call is None or not call.is_channels_last(CONVOLUTION) or [*call.operands][:2] != ["x", "w"]:
        return None
    w = joins.shapes.shape(node.inputs[1]) or ()
    found = (
        str_attribute(node, "w_layout", "") == "ohwi"
        and set(w[1:-1]) == {1}
        and set(ints_attribute(node, "strides", [1])) == {1}
        and not any(ints_attribute(node, "pads", []))
        and str_attribute(node, "auto_pad", "NOTSET") in UNPADDED
        and int_attribute(node, "group", 1) == 1
    )
    return call if found else None
