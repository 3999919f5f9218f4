"""Fuse activations, and the residuals that they add, into the channel gates before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx

from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import AttributeValue, Node, consumers, op_of, producer
from onnxfuse.layout.fusions import GATE
from onnxfuse.layout.joins import Joined, Joins, is_channels_last, with_attributes
from onnxfuse.region_operators import ACTIVATION_OF
from onnxfuse.rewrite.chain_bodies import chained, function_of

ALONE: Final = "activation"  # fusion name of an activation that does not follow a fused node
# Activations that are one operator with x as its only input: operator -> activation name.  A Gelu may be one of two.
ACTIVATIONS: Final = {"Relu": "relu", "Tanh": "tanh", **ACTIVATION_OF, "Gelu": ""}
# Activations that are x times a function of x: operator of that function -> activation name.
PRODUCTS: Final = {"HardSigmoid": "scaled_hard_swish", "Sigmoid": "silu"}


def activations(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last gate joined with the activation of its result, which nothing else reads."""
    for end in joins.graph.nodes:
        nodes, activation = _activation(joins, end)
        if not activation or (GATE, joins.original(end.outputs[0])) in joins.excluded:
            continue
        gate, *following = nodes
        is_fused = _is_fused(end)
        stated = {} if is_fused else following[0].attrs
        own: dict[str, AttributeValue] = {"activation": activation, **stated}
        body = chained(joins.bodies[gate.op], joins.bodies[end.op] if is_fused else _operators(following))
        yield Joined(nodes, gate, body, tuple(gate.inputs), with_attributes(gate, own))


def _operators(nodes: Sequence[Node]) -> onnx.FunctionProto:
    """Return a function that applies the first node's operator to x and, given a second node, multiplies by x."""
    product = [onnx.helper.make_node("Mul", ["x", "t1"], ["t2"], domain="")] if len(nodes) > 1 else []
    first = onnx.helper.make_node(op_of(nodes[0]), ["x"], ["t1"], domain="")
    first.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in nodes[0].attrs.items())
    return function_of(["x"], [first, *product])


def _activation(joins: Joins, end: Node) -> tuple[tuple[Node, ...], str]:
    """Return the gate and the activation nodes that `end` completes, and the activation's name; else () and ""."""
    graph = joins.graph
    activation = ACTIVATIONS.get(op_of(end)) or (str_attribute(end, "activation", "") if _is_fused(end) else "")
    if activation:
        gate = producer(end.inputs[0])
        if gate is not None and _is_gate(gate) and graph.sole_consumer(gate.outputs[0]) is end:
            return (gate, end), activation
    for x, other in (end.inputs, end.inputs[::-1]) if op_of(end) == "Mul" else ():
        gate, factor = producer(x), producer(other)
        if gate is None or factor is None or op_of(factor) not in PRODUCTS or not _is_gate(gate):
            continue
        read = {*consumers(x)} == {factor, end} and not graph.is_kept(x)
        if read and factor.inputs[0] is x and graph.sole_consumer(other) is end:
            return (gate, factor, end), PRODUCTS[op_of(factor)]
    return (), ""


def _is_fused(node: Node) -> bool:
    """Return whether a node is a fused activation of several operators that follows no fused node."""
    return node.domain == DOMAIN and str_attribute(node, "fusion", "") == ALONE


def _is_gate(node: Node) -> bool:
    return is_channels_last(node, GATE) and str_attribute(node, "activation", "") == "none"
