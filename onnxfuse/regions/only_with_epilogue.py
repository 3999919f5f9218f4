"""Matches that are worth a fused node only if operators join it, such as a product that nothing else follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from functools import cached_property

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, op_of, producer
from onnxfuse.match import Match, Matcher
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import Fused, LocalFunctions, replace_match


class OnlyWithEpilogue:
    """Finds such matches, and replaces one once it is known that operators join it.

    `fusions` are those that operators join, whose conditions may ask whether they do.  `exclude` and `keep` are as in
    `assign_regions`.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: ShapeInfo,
        fusions: Sequence[Fusion],
        functions: LocalFunctions,
        exclude: Collection[tuple[str, str]] = frozenset(),
        keep: Set[str] = frozenset(),
    ) -> None:
        """Take what `at` and `replace` need; nothing is matched yet."""
        self._graph, self._shapes, self._functions = graph, shapes, functions
        self._exclude, self._keep = exclude, keep
        self._fusions = [each for each in fusions if any("joined" in guard.names for guard in each.guards)]

    @cached_property
    def _matchers(self) -> list[Matcher]:
        return [Matcher(self._graph, self._shapes, fusion, joined=True) for fusion in self._fusions]

    def at(self, tensor: Tensor) -> Match | None:
        """Return the match that ends at a tensor; None if there is none."""
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
        excluded = (match.fusion.name, match.outputs[0].name) in self._exclude
        return excluded or any(node_label(node) in self._keep for node in match.nodes)

    def replace(self, match: Match) -> Fused | None:
        """Replace a match by its fused node; None, and nothing changes, where the opset has no spelling of its body."""
        found = replace_match(self._graph, self._shapes, match, self._functions)
        return found if isinstance(found, Fused) else None
