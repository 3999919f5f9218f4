"""Let gates of channels compute the activations that follow them, with the residual that they add."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, op_of, producer
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.bodies import followed_by
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.layout.residuals import GATE
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

# The activations that are one operator in every opset, with no inputs but x; those in several nodes are fused nodes.
ACTIVATIONS: Final = {
    "Elu": "elu",
    "HardSigmoid": "hard_sigmoid",
    "LeakyRelu": "leaky_relu",
    "Relu": "relu",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Tanh": "tanh",
}


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
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        gate = producer(node.inputs[0]) if op_of(node) in ACTIVATIONS else None
        if gate is None or not _is_gate(gate) or graph.sole_consumer(gate.outputs[0]) is not node:
            continue
        if (GATE, _original(node, originals)) not in excluded:
            found[node] = gate
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    drop_functions(graph, set(found.values()))
    functions, made = LocalFunctions(graph), list[Fused]()
    for node, gate in found.items():
        original, op = _original(node, originals), op_of(node)
        attributes = _attributes(gate, node)
        body = followed_by(bodies[gate.op], op, list(attributes), values=node.attrs)
        record = records[gate.name]
        made.append(replace(record, replaces=(*record.replaces, node.name or original), output=original))
        put_one_node(graph, shapes, functions, (gate, node), gate, body, list(gate.inputs), attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _is_gate(node: Node) -> bool:
    attributes = (("fusion", GATE), ("layout", "nhwc"), ("activation", "none"))
    return node.domain == DOMAIN and all(str_attribute(node, name, "") == value for name, value in attributes)


def _original(node: Node, originals: Mapping[str, tuple[str, Perm]]) -> str:
    """Return the name that the original has for the output of a node."""
    output = node.outputs[0].name
    return originals[output][0] if output in originals else output


def _attributes(gate: Node, node: Node) -> dict[str, AttributeValue]:
    """Return the attributes of a gate with the activation of a node, and its parameters where the node states them."""
    own: dict[str, AttributeValue] = {"activation": ACTIVATIONS[op_of(node)], **node.attrs}
    names = {*str_attribute(gate, "attributes", "").split(), *own}
    return {**gate.attrs, "attributes": " ".join(sorted(names)), **own}
