"""The fused nodes that other operators join, and the matches that are worth a fused node only if some do."""

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
    """Says which fused nodes elementwise operators may join, and fuses what is fused only where they do.

    `fusions` are those whose nodes operators may join, where their declarations say so.  `exclude` holds matches that
    stay unfused and regions that stay as they are, each by the name of its fusion, or REGION, and of its first output;
    and what joins no other node, by that node's fusion.  `keep` holds the labels of nodes that are in no match and no
    region.
    """

    graph: Graph
    shapes: ShapeInfo
    fusions: Sequence[Fusion]
    functions: LocalFunctions
    exclude: Collection[tuple[str, str]] = frozenset()
    keep: Set[str] = frozenset()

    @cached_property
    def epilogues(self) -> dict[str, bool | str]:
        """What the declarations of fusions say of their epilogues, where they have any: True, or the one layout."""
        return {fusion.name: fusion.epilogue for fusion in self.fusions if fusion.epilogue}

    def may_be_region(self, outputs: Iterable[str]) -> bool:
        """Return whether nodes with these outputs may be a region, which is known by the first."""
        return (REGION, next(iter(outputs))) not in self.exclude

    def takes_epilogue(self, node: Node) -> bool:
        """Return whether operators may join a fused node."""
        return self.epilogues.get(str(node.attrs["fusion"]), False) in (True, node.attrs.get("layout"))

    @cached_property
    def _matchers(self) -> list[Matcher]:
        only_if_joined = [each for each in self.fusions if any("joined" in guard.names for guard in each.guards)]
        return [Matcher(self.graph, self.shapes, fusion, joined=True) for fusion in only_if_joined]

    def match_at(self, tensor: Tensor) -> Match | None:
        """Return the match that ends at a tensor and is worth a fused node only if operators join it; None if none."""
        maker = producer(tensor)
        if maker is None or maker.domain not in ("", "ai.onnx"):
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
        """Replace a match by its fused node; None, and nothing changes, where the opset has no spelling of its body."""
        found = replace_match(self.graph, self.shapes, match, self.functions)
        return found if isinstance(found, Fused) else None
