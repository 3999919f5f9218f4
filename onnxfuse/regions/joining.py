"""What fuses before regions, with them, and after them: matches that wait, and operators that join fused nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match import Match, Matcher
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.normal_form import MIN_OPSET, normal_form
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions, replace_match
from onnxfuse.steps import REGIONS, step


@dataclass
class Joining:
    """Says which fused nodes elementwise operators may join, which matches wait for regions, and which are made late.

    A match that waits is fused if no region takes its nodes together with others.  A match may be worth a fused node
    only if operators join that.  `fusions` are those of the model; operators join their nodes where `joins` and their
    declarations say so.  `exclude` holds matches that stay unfused and regions that stay as they are, each by the name
    of its fusion, or REGION, and of its first output; and operators that join no other node, by that node's fusion.
    `keep` holds the labels of nodes that are in no match and no region.
    """

    graph: Graph
    shapes: ShapeInfo
    fusions: Sequence[Fusion]
    functions: LocalFunctions
    exclude: Collection[tuple[str, str]] = frozenset()
    keep: Set[str] = frozenset()
    joins: bool = True
    spelled: Set[str] = frozenset()  # names of nodes whose fusion must not wait
    has_waiting: bool = False  # whether a match waits

    @cached_property
    def epilogues(self) -> dict[str, bool | str]:
        """What the declarations of fusions say of their epilogues, where they have any: True, or the one layout."""
        return {fusion.name: fusion.epilogue for fusion in self.fusions if fusion.epilogue and self.joins}

    def may_be_region(self, outputs: Iterable[str]) -> bool:
        """Return whether nodes with these outputs may be a region, which is known by the first."""
        return (REGION, next(iter(outputs))) not in self.exclude

    def takes_epilogue(self, node: Node) -> bool:
        """Return whether operators may join a fused node."""
        return self.epilogues.get(str(node.attrs["fusion"]), False) in (True, node.attrs.get("layout"))

    @cached_property
    def _matchers(self) -> list[Matcher]:
        fusions = self.fusions if self.joins else ()
        only_if_joined = [each for each in fusions if any("joined" in guard.names for guard in each.guards)]
        return [Matcher(self.graph, self.shapes, fusion, joined=True) for fusion in only_if_joined]

    @cached_property
    def _last_matchers(self) -> list[Matcher]:
        return [Matcher(self.graph, self.shapes, fusion) for fusion in self.fusions if self._may_wait(fusion)]

    def match_at(self, tensor: Tensor) -> Match | None:
        """Return the match that ends at a tensor and is worth a fused node only if operators join it; None if none."""
        maker = producer(tensor)
        is_added = maker is None or maker.domain is None  # a pass added the producer to the model
        return None if is_added else self._match_at(tensor, self._matchers)

    def _match_at(self, tensor: Tensor, matchers: Sequence[Matcher]) -> Match | None:
        maker = producer(tensor)
        if maker is None or maker.domain not in ("", "ai.onnx", None):
            return None
        for matcher in matchers:
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

    # --- matches that wait ----------------------------------------------------------------------------------------

    def waits(self, match: Match) -> bool:
        """Return whether a match waits for regions, because all of its nodes may be in one.

        Such a fusion (a softmax, an activation) would read or write a tensor that a region with more operators does
        not.
        """
        with step(REGIONS):
            if self.graph.opset < MIN_OPSET or not self._may_wait(match.fusion):
                return False
            waits = all(map(self._may_be_in_region, _nodes_up_to_operands(match)))
            self.has_waiting |= waits
            return waits

    def _may_wait(self, fusion: Fusion) -> bool:
        """Return whether a fusion is one of those that take what others leave, and layouts do not know it."""
        return fusion.last and not fusion.channels_last

    @cached_property
    def _host(self) -> set[Node]:
        return set(host_nodes(self.graph, self.shapes))

    def _may_be_in_region(self, node: Node) -> bool:
        labels = {node.name, node_label(node)}
        if node.domain not in ("", "ai.onnx", None) or node in self._host:
            return False
        if not labels.isdisjoint(self.keep) or not labels.isdisjoint(self.spelled):
            return False
        return not isinstance(normal_form(self.graph, self.shapes, node), str)

    def is_one_match(self, nodes: Collection[Node], outputs: Mapping[str, Tensor]) -> bool:
        """Return whether nodes are those of one match that waits: its kernel then does what a region would do."""
        match = self._match_at(next(iter(outputs.values())), self._last_matchers)
        return match is not None and set(match.nodes) <= set(nodes) <= _nodes_up_to_operands(match)


def _nodes_up_to_operands(match: Match) -> set[Node]:
    """Return the nodes of a match, and those that it reads its operands through, such as Slices of them."""
    operands = {tensor.name for tensor in match.operands.values()}
    found, work = set(match.nodes), list(match.nodes)
    while work:
        makers = (producer(tensor) for tensor in work.pop().inputs if tensor.name not in operands)
        new = {maker for maker in makers if maker is not None and maker not in found}
        found |= new
        work += new
    return found
