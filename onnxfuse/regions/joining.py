"""Decide which fused nodes elementwise operators can join, and which matches are fused only with such operators.

Operators that join a fused node run in its kernel.  Some matches of patterns are not fused, because their nodes can
become part of regions, which are fused nodes of any connected operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match import Match, Matcher
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions, drop_functions, replace_match
from onnxfuse.steps import REGIONS, step

NORMS: Final = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


@dataclass
class Joining:
    """Decides which fused nodes elementwise operators can join, and fuses matches that pay only with such operators.

    Operators can join a node of one of `fusions` if the fusion's declaration allows it.  `exclude` holds pairs:
    (fusion, first output) names a match that stays unfused, (REGION, first output) a region that is not formed, and
    (fusion, first output of operators) operators that must not join a node of this fusion.  `keep` holds the labels of
    nodes that must be in no match and no region.  `spelled` holds the labels of nodes that replace an operator of
    another tool (see `spell_out`): matches with such nodes are not left to regions.
    """

    graph: Graph
    shapes: ShapeInfo
    fusions: Sequence[Fusion]
    functions: LocalFunctions
    exclude: Collection[tuple[str, str]] = frozenset()
    keep: Set[str] = frozenset()
    spelled: Set[str] = frozenset()
    left: set[frozenset[Node]] = field(default_factory=set)  # the nodes of each match that is left to regions

    @cached_property
    def epilogues(self) -> dict[str, bool | str]:
        """The fusions whose nodes can have an epilogue, by name: True, or the only layout with which they can."""
        return {fusion.name: fusion.epilogue for fusion in self.fusions if fusion.epilogue}

    def may_be_region(self, outputs: Iterable[str]) -> bool:
        """Return whether nodes with these outputs can be a region; `exclude` names a region by its first output."""
        return (REGION, next(iter(outputs))) not in self.exclude

    def takes_epilogue(self, node: Node) -> bool:
        """Return whether operators can join a fused node as its epilogue."""
        return self.epilogues.get(str(node.attrs["fusion"]), False) in (True, node.attrs.get("layout"))

    def takes_selection(self, node: Node, match: Match | None) -> bool:
        """Return whether operators that end in an ArgMax or ArgMin can join a fused node, or the node of a match."""
        fusion = match.fusion.name if match else str(node.attrs["fusion"])
        return any(each.selection for each in self.fusions if each.name == fusion)

    def takes_prologue(self, node: Node) -> bool:
        """Return whether a norm can join a fused node as its prologue."""
        return node.domain == DOMAIN and str(node.attrs["fusion"]) in self._prologues

    @cached_property
    def _prologues(self) -> set[str]:
        return {fusion.name for fusion in self.fusions if fusion.prologue}

    def is_norm(self, node: Node) -> bool:
        """Return whether a node is a fused norm that operators can join, and that can become part of a region."""
        fusion = str(node.attrs["fusion"]) if node.domain == DOMAIN else ""
        return fusion in NORMS and fusion in self.epilogues

    @cached_property
    def _matchers(self) -> list[Matcher]:
        only_if_joined = [each for each in self.fusions if any("joined" in guard.names for guard in each.guards)]
        return [Matcher(self.graph, self.shapes, fusion, joined=True) for fusion in only_if_joined]

    def match_at(self, tensor: Tensor) -> Match | None:
        """Return a match whose result is `tensor`, of a fusion that pays only if operators or a norm join its node.

        Return None if there is no such match.
        """
        maker = producer(tensor)
        if maker is None:
            return None
        for matcher in self._matchers:
            if op_of(maker) not in matcher.prefilter.fusion_root_ops:
                continue
            match = matcher.at(tensor)
            if isinstance(match, Match) and not self._is_kept(match):
                return match
        return None

    def _is_kept(self, match: Match) -> bool:
        excluded = (match.fusion.name, match.outputs[0].name) in self.exclude
        return excluded or any(node_label(node) in self.keep for node in match.nodes)

    def replace(self, match: Match) -> Fused | None:
        """Replace a match by its fused node, and return its record; None, without changes, if that is impossible."""
        found = replace_match(self.graph, self.shapes, match, self.functions)
        return found if isinstance(found, Fused) else None

    def drop_functions(self, called: Collection[Node]) -> None:
        """Remove the functions that only the nodes in `called` call, before these get other functions.

        Functions of subgraphs stay, because only the main graph knows all calls.
        """
        if called and not self.graph.is_subgraph:
            drop_functions(self.graph, called)
            self.functions.names_by_variant.clear()  # other functions may get the names

    def leaves_to_regions(self, match: Match) -> bool:
        """Return whether a match, such as a softmax, is not fused at first, because all its nodes can be in a region.

        A region of the match and its neighbours keeps a tensor in registers that a kernel of the match alone would read
        or write in memory.  A region never consists of one match alone: a match that no region takes is fused later.
        """
        with step(REGIONS):
            nodes = _nodes_up_to_operands(match)
            is_left = self.graph.opset >= MIN_OPSET and all(map(self._may_be_in_region, nodes))
        if is_left:
            self.left.add(nodes)
        return is_left

    def is_match(self, nodes: Iterable[Node]) -> bool:
        """Return whether these nodes are all nodes of one match that was left to regions."""
        return frozenset(nodes) in self.left

    @cached_property
    def _host(self) -> set[Node]:
        return set(host_nodes(self.shapes))

    def _may_be_in_region(self, node: Node) -> bool:
        if any(label in self.keep or label in self.spelled for label in (node.name, node_label(node))):
            return False
        return node not in self._host and not isinstance(normal_form(self.shapes, node), str)


def _nodes_up_to_operands(match: Match) -> frozenset[Node]:
    """Return the nodes of a match, and the nodes through which it reads its operands, such as Slices."""
    operands = {tensor.name for tensor in match.operands.values()}
    found, work = set(match.nodes), list(match.nodes)
    while work:
        makers = (producer(tensor) for tensor in work.pop().inputs if tensor.name not in operands)
        new = {maker for maker in makers if maker is not None and maker not in found}
        found |= new
        work += new
    return frozenset(found)
