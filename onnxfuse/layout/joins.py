"""Join fused nodes with their neighbours once images are channels-last, so that several nodes become one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor
from onnxfuse.layout.axes import Perm
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, drop_functions, put_call


@dataclass(frozen=True)
class Joined:
    """Nodes to replace by one fused node, which gets the last node's output and the name of `named`, one of the nodes.

    `attributes` holds the new node's fusion and the names of its operands, in the order of `inputs`.
    """

    nodes: tuple[Node, ...]
    named: Node
    body: onnx.FunctionProto
    inputs: tuple[Tensor, ...]
    attributes: Mapping[str, AttributeValue]


@dataclass
class Joins:
    """A graph with channels-last images, while nodes in it are joined.

    `known` holds the tensors from before the layouts were assigned, and `originals` maps new tensors to those that they
    are Transposes of.  `records` holds the records of fused nodes, by name.  `written` holds the channels-last nodes.
    `excluded` holds the nodes that must not be joined, as (fusion, name of the output in the original model).
    """

    graph: Graph
    shapes: ShapeInfo
    originals: MutableMapping[str, tuple[str, Perm]]
    records: dict[str, Fused]
    written: set[Node]
    known: Collection[str] = frozenset()
    excluded: Collection[tuple[str, str]] = frozenset()
    bodies: Mapping[str, onnx.FunctionProto] = field(default_factory=dict)  # name -> function that fused nodes call
    made: list[Fused] = field(default_factory=list)  # records of joined nodes

    def apply(self, rule: Rule) -> None:
        """Replace the groups of nodes that a rule yields by one fused node each."""
        self.bodies = {f.name: f for f in self.graph.functions if f.domain == DOMAIN}
        found = list(rule(self))
        drop_functions(self.graph, {node for one in found for node in one.nodes})
        functions = LocalFunctions(self.graph)
        for one in found:
            self._put(functions, one)
        if found:
            self.graph.remove_dead()
            self.graph.sort()

    def _put(self, functions: LocalFunctions, one: Joined) -> None:
        (output,), fusion = one.nodes[-1].outputs, str(one.attributes["fusion"])
        one.body.input[:] = str(one.attributes["operands"]).split()
        one.body.attribute[:] = sorted(one.attributes)
        is_of_fusion, known = str_attribute(one.named, "fusion", "") == fusion, self.records.get(one.named.name)
        one.body.name, one.body.doc_string = fusion, self.bodies[one.named.op].doc_string if is_of_fusion else ""
        labels = tuple(label for node in one.nodes for label in self._labels(node))
        dims = known.dims if known and is_of_fusion else {}
        record = Fused(fusion, one.named.name, labels, dims, self.original(output))
        call = FunctionCall(functions.add(one.body), record.node, one.inputs, [output], one.attributes)
        joined = put_call(self.graph, self.shapes, one.nodes, call)
        self.written |= {joined} if one.named in self.written else set()
        self.records[record.node] = record
        self.made.append(record)

    def _labels(self, node: Node) -> tuple[str, ...]:
        """Return the labels of the original model's nodes that a node replaces; an operator replaces itself."""
        record = self.records.get(node.name)
        return record.replaces if record else (node.name or self.original(node.outputs[0]),)

    def original(self, tensor: Tensor) -> str:
        """Return the name of the original model's tensor that this tensor equals, perhaps in the other layout."""
        return self.originals[tensor.name][0] if tensor.name in self.originals else tensor.name


Rule: TypeAlias = Callable[[Joins], Iterator[Joined]]


def operands_of(node: Node) -> list[str]:
    """Return the names of a fused node's operands."""
    return str_attribute(node, "operands", "").split()


def is_channels_last(node: Node, fusion: str) -> bool:
    """Return whether a node is a channels-last node of this fusion."""
    layouts = str_attribute(node, "layout", ""), str_attribute(node, "x_layout", "nhwc")
    return node.domain == DOMAIN and str_attribute(node, "fusion", "") == fusion and set(layouts) == {"nhwc"}


def with_attributes(node: Node, own: Mapping[str, AttributeValue], *operands: str) -> dict[str, AttributeValue]:
    """Return a fused node's attributes, with the values in `own` replaced or added, and with `operands` appended."""
    names = {*str_attribute(node, "attributes", "").split(), *own}
    every = " ".join((*operands_of(node), *operands))
    return {**node.attrs, "operands": every, "attributes": " ".join(sorted(names)), **own}
