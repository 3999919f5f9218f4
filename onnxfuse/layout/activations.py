"""Let gates of channels compute the activations that follow them, with the residual that they add."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, consumers, op_of, producer
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.bodies import behind, followed_by, times
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.layout.residuals import GATE
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

ALONE: Final = "activation"  # the fusion of one that stands alone
# The activations that are one operator with no inputs but x, by that operator.
ACTIVATIONS: Final = {
    "Elu": "elu",
    "HardSigmoid": "hard_sigmoid",
    "HardSwish": "hard_swish",
    "LeakyRelu": "leaky_relu",
    "Mish": "mish",
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Tanh": "tanh",
}
# Those that are a product of x and another one of x, by the operator of that.
PRODUCTS: Final = {"HardSigmoid": "scaled_hard_swish", "Sigmoid": "silu"}


@dataclass(frozen=True)
class Following:
    """A gate, the nodes behind it that are an activation of its result, and that activation."""

    gate: Node
    nodes: tuple[Node, ...]
    activation: str

    @property
    def end(self) -> Node:
        """The node that computes the result."""
        return self.nodes[-1]


def add_activations(
    graph: Graph,
    shapes: ShapeInfo,
    originals: Mapping[str, tuple[str, Perm]],
    records: Mapping[str, Fused],
    excluded: Collection[tuple[str, str]],
) -> list[Fused]:
    """Replace each channels-last gate and the activation behind it by one node, and return the records of these.

    Nothing else may read the gated image.  `originals` are the tensors of the original that new ones are Transposes of,
    and `records` those of the fused nodes, by name.  `excluded` are nodes that stay, each by the name of the fusion and
    of its output in the original.
    """
    every = [_following(graph, node) for node in graph.nodes]
    found = [one for one in every if one is not None and (GATE, _original(one.end, originals)) not in excluded]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    drop_functions(graph, {node for one in found for node in (one.gate, *one.nodes)})
    functions, made = LocalFunctions(graph), list[Fused]()
    for one in found:
        gate, attributes = one.gate, _attributes(one)
        body = _body(one, bodies, list(attributes))
        record = records[gate.name]
        labels = [label for node in one.nodes for label in _replaced(node, originals, records)]
        made.append(replace(record, replaces=(*record.replaces, *labels), output=_original(one.end, originals)))
        put_one_node(graph, shapes, functions, (gate, *one.nodes), gate, body, list(gate.inputs), attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _following(graph: Graph, end: Node) -> Following | None:
    """Return the activation of a gated image that a node ends, where nothing else reads that image."""
    activation = ACTIVATIONS.get(op_of(end)) or (str_attribute(end, "activation", "") if _is_fused(end) else "")
    if activation:
        gate = producer(end.inputs[0])
        if gate is not None and _is_gate(gate) and graph.sole_consumer(gate.outputs[0]) is end:
            return Following(gate, (end,), activation)
    for x, other in (end.inputs, end.inputs[::-1]) if op_of(end) == "Mul" else ():
        gate, factor = producer(x), producer(other)
        if gate is None or factor is None or op_of(factor) not in PRODUCTS or not _is_gate(gate):
            continue
        read = {*consumers(x)} == {factor, end} and not graph.is_kept(x)
        if read and factor.inputs[0] is x and graph.sole_consumer(other) is end:
            return Following(gate, (factor, end), PRODUCTS[op_of(factor)])
    return None


def _is_fused(node: Node) -> bool:
    """Return whether a node is an activation in several operators that was fused alone."""
    return node.domain == DOMAIN and str_attribute(node, "fusion", "") == ALONE


def _body(one: Following, bodies: Mapping[str, onnx.FunctionProto], attributes: Sequence[str]) -> onnx.FunctionProto:
    """Return the body of a gate followed by its activation."""
    gate, first = bodies[one.gate.op], one.nodes[0]
    if _is_fused(first):
        return behind(bodies[first.op], "x", gate, attributes)
    body = followed_by(gate, op_of(first), attributes, values=first.attrs)
    return times(body, gate.output[0]) if len(one.nodes) > 1 else body


def _replaced(node: Node, originals: Mapping[str, tuple[str, Perm]], records: Mapping[str, Fused]) -> tuple[str, ...]:
    """Return the labels of the nodes of the original that a node is."""
    if _is_fused(node):
        return records[node.name].replaces
    return (node.name or _original(node, originals),)


def _is_gate(node: Node) -> bool:
    attributes = (("fusion", GATE), ("layout", "nhwc"), ("activation", "none"))
    return node.domain == DOMAIN and all(str_attribute(node, name, "") == value for name, value in attributes)


def _original(node: Node, originals: Mapping[str, tuple[str, Perm]]) -> str:
    """Return the name that the original has for the output of a node."""
    output = node.outputs[0].name
    return originals[output][0] if output in originals else output


def _attributes(one: Following) -> dict[str, AttributeValue]:
    """Return the attributes of a gate with an activation, and its parameters where the node states them."""
    stated = {} if _is_fused(one.end) else one.nodes[0].attrs
    own: dict[str, AttributeValue] = {"activation": one.activation, **stated}
    names = {*str_attribute(one.gate, "attributes", "").split(), *own}
    return {**one.gate.attrs, "attributes": " ".join(sorted(names)), **own}
