"""Join fused nodes with their neighbours once images are channels-last, so that several nodes become one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import AttributeValue, Node, Tensor
from onnxfuse.layout.writer import Writer
from onnxfuse.rewrite.replace import (
    FunctionCall,
    Fused,
    LocalFunctions,
    attributes_of,
    drop_functions,
    labels,
    put_call,
)


@dataclass(frozen=True)
class Joined:
    """Nodes to replace by one fused node, which computes the last node's output.

    `named` is one of the replaced nodes.  The new node takes over the name, the fusion and the attributes of `named`,
    with the attributes in `own` replaced or added.  If `fusion` is given, the new node has this fusion instead, and
    only the attributes in `own`.
    """

    nodes: tuple[Node, ...]
    named: Call
    body: onnx.FunctionProto
    operands: Mapping[str, Tensor]
    own: Mapping[str, AttributeValue]
    fusion: str = ""


@dataclass(frozen=True)
class Call:
    """A fused node, or an operator that can become one (see `Deferred`), with its operands, attributes and function."""

    node: Node
    operands: Mapping[str, Tensor]
    attributes: Mapping[str, AttributeValue]
    body: onnx.FunctionProto

    @property
    def fusion(self) -> str:
        """The name of the fusion."""
        return str(self.attributes["fusion"])

    @property
    def activation(self) -> str:
        """The name of the activation; "none" if there is none."""
        return str(self.attributes.get("activation", "none"))

    def is_channels_last(self, fusion: str) -> bool:
        """Return whether the call is a channels-last node of this fusion."""
        layouts = self.attributes.get("layout"), self.attributes.get("x_layout", "nhwc")
        return self.fusion == fusion and set(layouts) == {"nhwc"}


@dataclass
class Joins:
    """A graph whose images are channels-last, while fused nodes in it are joined with their neighbours.

    `writer` has written the channels-last images, and `known` holds the names of the tensors that the graph had before
    that.  `records` holds the records of fused nodes, by name.  `excluded` holds the nodes that must not be joined, as
    (fusion, name of the output in the original model).
    """

    writer: Writer
    records: dict[str, Fused]
    known: Collection[str] = frozenset()
    excluded: Collection[tuple[str, str]] = frozenset()
    bodies: Mapping[str, onnx.FunctionProto] = field(default_factory=dict)  # name -> function that fused nodes call
    made: list[Fused] = field(default_factory=list)  # records of joined nodes

    def __post_init__(self) -> None:
        """Copy the references to graph and shapes from the writer."""
        self.graph, self.shapes, self.originals = self.writer.graph, self.writer.shapes, self.writer.originals

    def call(self, node: Node | None) -> Call | None:
        """Return the Call of a fused node, or of a deferred one, which becomes a fused node if no region takes it.

        Returns None for any other node, and for a node whose function is not known.
        """
        later = self.graph.deferred.get(node) if node is not None else None
        if node is None or (later is None and node.domain != DOMAIN):
            return None
        function, attributes = (later.function, later.attributes) if later else (node.op, node.attrs)
        inputs = [node.inputs[i] for i in later.inputs] if later else node.inputs
        body, names = self.bodies.get(function), _words(attributes, "operands")
        if body is None or len(names) != len(inputs):
            return None
        return Call(node, dict(zip(names, inputs, strict=True)), attributes, body)

    def apply(self, rule: Rule) -> None:
        """Replace the groups of nodes that a rule yields by one fused node each."""
        self.bodies = {f.name: f for f in self.graph.functions if f.domain == DOMAIN}
        found = list(rule(self))
        joined = {node for one in found for node in one.nodes}
        self.graph.deferred = {node: one for node, one in self.graph.deferred.items() if node not in joined}
        drop_functions(self.graph, joined)
        functions = LocalFunctions(self.graph)
        for one in found:
            self._put(functions, one)
        if found:
            self.graph.remove_dead()
            self.graph.sort()

    def _put(self, functions: LocalFunctions, one: Joined) -> None:
        (output,), named, fusion = one.nodes[-1].outputs, one.named, one.fusion or one.named.fusion
        known, name = self.records.get(named.node.name), named.node.name
        kept = {} if one.fusion else {each: named.attributes[each] for each in _words(named.attributes, "attributes")}
        attributes = attributes_of(self.shapes, fusion, one.operands, [output], {**kept, **one.own})
        one.body.name, one.body.doc_string = fusion, "" if one.fusion else named.body.doc_string
        one.body.input[:], one.body.attribute[:] = list(one.operands), sorted(attributes)
        replaced = tuple(label for node in one.nodes for label in labels(node, self.records))
        dims = known.dims if known and not one.fusion else {}
        record = Fused(fusion, name, replaced, dims, self.original(output))
        call = FunctionCall(functions.add(one.body), name, list(one.operands.values()), [output], attributes)
        joined = put_call(self.shapes, one.nodes, call)
        self.writer.written |= {joined} if named.node in self.writer.written else set()
        self.records[name] = record
        self.made.append(record)

    def original(self, tensor: Tensor) -> str:
        """Return the name of the original model's tensor that this tensor equals, perhaps in the other layout."""
        return self.originals[tensor.name][0] if tensor.name in self.originals else tensor.name


Rule: TypeAlias = Callable[[Joins], Iterator[Joined]]


def _words(attributes: Mapping[str, AttributeValue], name: str) -> list[str]:
    return str(attributes.get(name, "")).split()
