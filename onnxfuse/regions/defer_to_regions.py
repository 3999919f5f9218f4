"""Leave a match to regions where it is cheaper in a region, or joined with the fused node before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.algebra.operators import FREE
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.match import Match
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.regions.norms import NORMS
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.reductions import REDUCTIONS
from onnxfuse.steps import REGIONS, step

MAX_VIEWS = 4  # maximum number of views between a match and a neighbouring operator


@dataclass
class DeferToRegions:
    """Decides whether a match is left to regions, because its nodes can join a neighbour in a region or a fused node.

    Fused alone, such a match (a softmax, an activation) would read or write a tensor in memory.  This tensor is not
    needed if one fused node computes both the match and the neighbour.  `joining` says which fused nodes elementwise
    operators may join.  Fused nodes that operators may join in one layout only are not considered, because layouts are
    assigned later.  `spelled` holds the names of nodes that replace an operator of another tool (see `spell_out`);
    matches of such nodes are not left to regions.
    """

    joining: Joining
    spelled: Set[str]
    has_left: bool = False  # whether any match was left to regions

    def __call__(self, match: Match) -> bool:
        """Return whether a match is left to regions."""
        with step(REGIONS):
            return self._is_left(match)

    def _is_left(self, match: Match) -> bool:
        inside = _nodes_up_to_operands(match)
        if self.joining.graph.opset < MIN_OPSET or not all(map(self._may_be_in_region, inside)):
            return False
        others = itertools.chain(_siblings(self.joining.graph, match, inside), *map(_beside, inside))
        outside = (other for other in others if other not in inside)
        behind = (other for node in inside for tensor in node.outputs for other in _behind(tensor, MAX_VIEWS))
        is_left = any(map(self._may_be_in_region, outside)) or any(map(self._may_be_joined, inside))
        is_left = is_left or any(map(self._may_be_taken_in, behind))
        self.has_left |= is_left
        return is_left

    def _may_be_joined(self, node: Node) -> bool:
        """Return whether a node may join the fused node whose result it reads."""
        return op_of(node) in POINTWISE and any(map(self._is_joined, node.inputs))

    def _is_joined(self, tensor: Tensor) -> bool:
        """Return whether operators may join the node that computes a tensor."""
        maker = producer(tensor)
        if maker is not None and maker.domain == DOMAIN:
            return self.joining.epilogues.get(str(maker.attrs["fusion"]), "nhwc") != "nhwc"
        return self.joining.match_at(tensor) is not None

    def _may_be_taken_in(self, node: Node) -> bool:
        """Return whether a node is a fused norm, which may be merged into the region whose result it reads."""
        return node.domain == DOMAIN and node.attrs["fusion"] in self.joining.epilogues.keys() & {*NORMS}

    @cached_property
    def _host(self) -> set[Node]:
        return set(host_nodes(self.joining.graph, self.joining.shapes))

    def _may_be_in_region(self, node: Node) -> bool:
        is_onnx = not node.domain or node.domain == "ai.onnx"
        labels = {node.name, node_label(node)}
        if not is_onnx or not labels.isdisjoint(self.joining.keep) or not labels.isdisjoint(self.spelled):
            return False
        form = normal_form(self.joining.graph, self.joining.shapes, node)
        return node not in self._host and not isinstance(form, str)


def _nodes_up_to_operands(match: Match) -> set[Node]:
    """Return the nodes of a match, and the nodes through which it reads its operands, such as Slices."""
    operands = {tensor.name for tensor in match.operands.values()}
    found, work = set(match.nodes), list(match.nodes)
    while work:
        makers = (producer(tensor) for tensor in work.pop().inputs if tensor.name not in operands)
        new = {maker for maker in makers if maker is not None and maker not in found}
        found |= new
        work += new
    return found


def _siblings(graph: Graph, match: Match, inside: Set[Node]) -> Iterator[Node]:
    """Yield elementwise operators and reductions that read an operand of a match, and can run before the match."""
    position = graph.position  # nodes that were added since the graph was sorted have no position
    first = min(position.get(node, 0) for node in inside)
    for tensor in match.operands.values():
        for node in consumers(tensor) if not is_constant(tensor) else ():
            makers = (producer(each) for each in node.inputs)
            is_ready = all(maker is None or position.get(maker, first) < first for maker in makers)
            if is_ready and (op_of(node) in POINTWISE or op_of(node) in REDUCTIONS):
                yield node


def _beside(node: Node) -> Iterator[Node]:
    """Yield the operators that a node reads or that read it, directly or through views."""
    for tensor in node.inputs:
        yield from _before(tensor, MAX_VIEWS)
    for tensor in node.outputs:
        yield from _behind(tensor, MAX_VIEWS)


def _before(tensor: Tensor, steps: int) -> Iterator[Node]:
    made = producer(tensor)
    if made is not None and op_of(made) not in FREE:
        yield made
    elif made is not None and steps:
        yield from _before(made.inputs[0], steps - 1)


def _behind(tensor: Tensor, steps: int) -> Iterator[Node]:
    for reader in consumers(tensor):
        if op_of(reader) not in FREE:
            yield reader
        elif steps:
            yield from _behind(reader.outputs[0], steps - 1)
