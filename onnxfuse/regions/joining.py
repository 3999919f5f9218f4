"""The fused nodes that operators may join, and the matches that are worth a fused node only if operators join it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match import Match, Matcher
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions, replace_match


@dataclass
class Joining:
    """Decides which fused nodes elementwise operators may join, and fuses matches that pay only with such operators.

    Operators may join a node of one of `fusions` if the fusion's declaration allows it.  `exclude` holds pairs.
    (fusion, first output) is a match that stays unfused, and (REGION, first output) a region that is not formed.
    (fusion of a node, first output of operators) means that the operators must not join the node.  `keep` holds the
    labels of nodes that must be in no match and no region.
    """

    graph: Graph
    shapes: ShapeInfo
    fusions: Sequence[Fusion]
    functions: LocalFunctions
    exclude: Collection[tuple[str, str]] = frozenset()
    keep: Set[str] = frozenset()

    @cached_property
    def epilogues(self) -> dict[str, bool | str]:
        """The epilogues that fusions declare, by fusion name: True, or the only layout that allows one."""
        return {fusion.name: fusion.epilogue for fusion in self.fusions if fusion.epilogue}

    def may_be_region(self, outputs: Iterable[str]) -> bool:
        """Return whether nodes with these outputs may be a region; `exclude` names a region by its first output."""
        return (REGION, next(iter(outputs))) not in self.exclude

    def takes_epilogue(self, node: Node) -> bool:
        """Return whether operators may join a fused node as its epilogue."""
        return self.epilogues.get(str(node.attrs["fusion"]), False) in (True, node.attrs.get("layout"))

    @cached_property
    def _matchers(self) -> list[Matcher]:
        only_if_joined = [each for each in self.fusions if any("joined" in guard.names for guard in each.guards)]
        return [Matcher(self.graph, self.shapes, fusion, joined=True) for fusion in only_if_joined]

    def match_at(self, tensor: Tensor) -> Match | None:
        """Return the match that ends at a tensor and pays only if operators join it; None if there is none."""
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
