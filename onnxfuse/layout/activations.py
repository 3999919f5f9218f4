"""Fuse activations into the channel gates whose results they read.

A channel gate multiplies each channel of an image by one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx

from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of, producer
from onnxfuse.layout.fusions import GATE
from onnxfuse.layout.joins import Call, Joined, Joins
from onnxfuse.region_operators import ACTIVATION_OF
from onnxfuse.rewrite.chain_bodies import chained, function_of

ALONE: Final = "activation"  # fusion name of an activation that does not follow a fused node
# Activations that are one operator with x as its only input: operator -> activation name.  A Gelu has no name here and
# is not fused, because it can be either of two activations.
ACTIVATIONS: Final = {"Relu": "relu", "Tanh": "tanh", **ACTIVATION_OF, "Gelu": ""}
# Activations that are x times a function of x: operator of that function -> activation name.
PRODUCTS: Final = {"HardSigmoid": "scaled_hard_swish", "Sigmoid": "silu"}


def activations(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last gate (a channel_scale) joined with the activation that alone reads the gate's result."""
    for end in joins.graph.nodes:
        gate, following, activation = _activation(joins, end)
        if gate is None or (GATE, joins.original(end.outputs[0])) in joins.excluded:
            continue
        fused = joins.call(end)
        own: dict[str, AttributeValue] = {"activation": activation, **({} if fused else following[0].attrs)}
        body = chained(gate.body, fused.body if fused else _operators(following))
        yield Joined((gate.node, *following), gate, body, gate.operands, own)


def _operators(nodes: Sequence[Node]) -> onnx.FunctionProto:
    """Return a function that applies the first node's operator to x and, given a second node, multiplies by x."""
    product = [onnx.helper.make_node("Mul", ["x", "t1"], ["t2"], domain="")] if len(nodes) > 1 else []
    first = onnx.helper.make_node(op_of(nodes[0]), ["x"], ["t1"], domain="")
    first.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in nodes[0].attrs.items())
    return function_of(["x"], [first, *product])


def _activation(joins: Joins, end: Node) -> tuple[Call | None, tuple[Node, ...], str]:
    """Return the gate, the nodes of the activation that ends with `end`, and its name; (None, (), "") if no gate."""
    graph, fused = joins.graph, joins.call(end)
    activation = fused.activation if fused and fused.fusion == ALONE else ACTIVATIONS.get(op_of(end))
    if activation:
        gate = _gate(joins, end.inputs[0])
        if gate is not None and graph.sole_consumer(end.inputs[0]) is end:
            return gate, (end,), activation
    for x, other in (end.inputs, end.inputs[::-1]) if op_of(end) == "Mul" else ():
        gate, factor = _gate(joins, x), producer(other)
        if gate is None or factor is None or op_of(factor) not in PRODUCTS:
            continue
        read = {*consumers(x)} == {factor, end} and not graph.is_kept(x)
        if read and factor.inputs[0] is x and graph.sole_consumer(other) is end:
            return gate, (factor, end), PRODUCTS[op_of(factor)]
    return None, (), ""


def _gate(joins: Joins, tensor: Tensor) -> Call | None:
    """Return the channels-last gate that computes a tensor, if it has no activation."""
    gate = joins.call(producer(tensor))
    return gate if gate is not None and gate.is_channels_last(GATE) and gate.activation == "none" else None
