"""Select the matches to replace: each node is tried as the end of every fusion, and the largest match wins."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import OperatorSet, walk
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match import Match, Matcher, Miss
from onnxfuse.match.accept import refusal
from onnxfuse.match.prefilter import may_occur
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import REGION, Fused, LocalFunctions, replace_match
from onnxfuse.rewrite.unlike_attention import unlike_attention

MAX_NODES_BETWEEN = 24  # nodes visited on the way from a product of an attention to its Softmax or other product
NEAR_MISS_SHARE = 0.3  # a miss is reported if at least this share of the pattern's nodes matched


@dataclass(frozen=True)
class FusionResult:
    """The result of `fuse`: the fused nodes, and all misses."""

    fused: tuple[Fused, ...] = ()
    missed: tuple[Miss, ...] = ()
    remaining: frozenset[str] = frozenset()  # names of the nodes that are left in the graph after fusing
    attentions: frozenset[str] = frozenset()  # names of the last products of all attentions

    def near(self, with_regions: bool = False) -> list[Miss]:
        """Return the misses worth reading, nearest first: many nodes matched, and the node was not fused.

        Every attention that is not fused has one miss: the one where most nodes matched.  `with_regions` adds misses at
        nodes that regions took, except misses of the fusions that are tried last: a region computes these as well.
        """
        by_name = {n for one in self.fused if one.fusion != REGION for n in one.replaces if n not in one.joined}
        taken = {name for one in self.fused for name in one.replaces}
        unfused = [
            m for m in self.missed
            if m.node in self.remaining and m.node not in (by_name if with_regions and not m.fusion.last else taken)
        ]  # fmt: skip
        near = {id(m): m for m in unfused if m.matched > 1 and m.matched >= NEAR_MISS_SHARE * m.of}
        nearest: dict[str, Miss] = {}
        for miss in unfused:
            if miss.node in self.attentions and has_softmax(miss.fusion):
                nearest[miss.node] = max(nearest.get(miss.node, miss), miss, key=lambda m: m.matched)
        near |= {id(miss): miss for miss in nearest.values()}
        return sorted(near.values(), key=nearness)


def nearness(miss: Miss) -> tuple[float, str, str]:
    """Return a key that sorts misses so that the miss nearest to a match comes first."""
    return -miss.matched / miss.of, miss.fusion.name, miss.node


@functools.cache
def has_softmax(fusion: Fusion) -> bool:
    """Return whether a fusion is an attention: it has a MatMul and a Softmax, and is not declared with `last`."""
    ops = {op for term in walk(*fusion.outputs) for op in term.own_ops}
    return not fusion.last and {"MatMul", "Softmax"} <= ops


def ends_of_attention(graph: Graph) -> list[Node]:
    """Return the last products of attentions: their first operand comes from a Softmax of another product."""
    softmaxes = (node for node in graph.nodes if op_of(node) == "Softmax")
    scores = {node for node in softmaxes if any(map(_is_product, nodes_up_to_products(node.inputs)))}
    after = _nodes_down_to_products(scores)  # most products are after no scores, and are not searched back from
    ends = (node for node in graph.nodes if node in after and _is_product(node))
    return [node for node in ends if any(each in scores for each in nodes_up_to_products(node.inputs[:1]))]


def _nodes_down_to_products(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that nodes lead to, down to products, which are included."""
    work, seen = list(nodes), set[Node]()
    while work:
        read = {reader for tensor in work.pop().outputs for reader in tensor.outputs} - seen
        seen |= read
        work += (node for node in read if not _is_product(node))
    return seen


def _is_product(node: Node) -> bool:
    return op_of(node) in ("MatMul", "Einsum")


def nodes_up_to_products(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes that compute tensors, nearest first, back to products; at most MAX_NODES_BETWEEN."""
    work, seen = list(tensors), set[Node]()
    while work and len(seen) < MAX_NODES_BETWEEN:
        made = producer(work.pop(0))
        if made is not None and made not in seen:
            seen.add(made)
            yield made
            work += () if _is_product(made) else made.inputs


Leave: TypeAlias = Callable[[Match], bool]  # a function that returns whether a match is not replaced


def leave_none(match: Match) -> bool:
    """Return False: every match is replaced (the default of `Selection.leave`)."""
    return False


@dataclass(frozen=True)
class Selection:
    """Which matches are allowed to be replaced, and which operators the bodies can have.

    operators  the set of operators that are allowed in bodies
    contrib    names of nodes that a body may replace with operators of com.microsoft, whatever `operators` says
    exclude    matches that are not replaced, as pairs of the fusion's name and the first output's name
    keep       labels of nodes that no match is allowed to contain
    leave      a function that returns whether a match is not replaced; only called for fusions that are tried last
    """

    operators: OperatorSet = "onnx"
    contrib: Set[str] = frozenset()
    exclude: Collection[tuple[str, str]] = frozenset()
    keep: Set[str] = frozenset()
    leave: Leave = leave_none


def fuse(
    graph: Graph,
    shapes: ShapeInfo,
    fusions: Sequence[Fusion],
    selection: Selection = Selection(),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> FusionResult:
    """Replace matches of the fusions in the graph.

    Nodes are tried from outputs to inputs, until nothing changes.  `progress` gets the number of nodes that were tried
    and the number of all nodes.
    """
    graph.remember_origins()
    attentions, unlike = frozenset(map(node_label, ends_of_attention(graph))), unlike_attention(graph, shapes)
    functions = LocalFunctions(graph, selection.operators, selection.contrib)
    fused: list[Fused] = []
    sweep = _Sweep(graph, shapes, functions, progress)
    for is_last in (False, True):
        turn = [fusion for fusion in fusions if fusion.last is is_last]
        sweep.by_root = _by_root(graph, shapes, turn, selection)
        nodes = graph.nodes[::-1] if sweep.by_root else []
        while nodes:
            new = sweep.run(nodes)
            fused += new
            # A complete match is refused if a node outside reads its tensors; that node can have been replaced since.
            refused = {miss.node for miss in sweep.misses.values() if miss.complete} if new else set()
            nodes = [node for node in graph.nodes[::-1] if node_label(node) in refused]
    remaining = frozenset(map(node_label, graph.nodes))
    missed = tuple(_explained(miss, unlike) for miss in sweep.misses.values())
    told = {miss.node for miss in missed if has_softmax(miss.fusion)}
    untold = {label: reason for label, reason in unlike.items() if label in remaining and label not in told}
    missed += tuple(_unlike(each, *why) for each in fusions if each.name == "attention" for why in untold.items())
    return FusionResult(tuple(fused), missed, remaining, attentions)


def _explained(miss: Miss, unlike: Mapping[str, str]) -> Miss:
    """Return the miss; if its node ends a structure that is unlike an attention, a miss of an attention says so."""
    reason = unlike.get(miss.node) if has_softmax(miss.fusion) else None
    return miss if reason is None else miss._replace(sentence=functools.partial(str, reason))


def _unlike(fusion: Fusion, label: str, reason: str) -> Miss:
    """Return the miss at a node with which no match of the fusion begins, such as an Einsum."""
    return Miss(fusion, label, 1, lambda: 1, functools.partial(str, reason), fusion.span, (label,))


@dataclass(frozen=True)
class _Candidate:
    """A fusion's matcher, and the limits of the selection: which of its matches are not replaced."""

    matcher: Matcher
    excluded: frozenset[str]
    selection: Selection

    def at(self, tensor: Tensor) -> Match | Miss | None:
        """Return the match that ends at the tensor, or the miss that came nearest."""
        if tensor.name in self.excluded:
            return None
        found = self.matcher.at(tensor)
        if not isinstance(found, Match):
            return found
        keep = self.selection.keep
        is_kept = keep and any(node_label(node) in keep for node in found.nodes)
        return None if is_kept or (found.fusion.last and self.selection.leave(found)) else found


def _by_root(
    graph: Graph, shapes: ShapeInfo, fusions: Sequence[Fusion], selection: Selection
) -> Mapping[str, Sequence[_Candidate]]:
    """Return the matchers of the fusions that can occur, by the operators that the fusions can end with."""
    by_root: dict[str, list[_Candidate]] = defaultdict(list)
    present = {op_of(node) for node in graph.nodes}
    for fusion in fusions:
        # Created even if the fusion cannot occur, because this checks the fusion's declaration.
        matcher = Matcher(graph, shapes, fusion)
        if may_occur(fusion, present):
            excluded = frozenset(out for name, out in selection.exclude if name == fusion.name)
            for op in matcher.prefilter.fusion_root_ops:
                by_root[op].append(_Candidate(matcher, excluded, selection))
    return by_root


@dataclass
class _Sweep:
    """Tries nodes as the ends of fusions, and replaces the matches."""

    graph: Graph
    shapes: ShapeInfo
    functions: LocalFunctions
    progress: Callable[[int, int], None]
    by_root: Mapping[str, Sequence[_Candidate]] = field(default_factory=dict)
    misses: dict[tuple[str, str], Miss] = field(default_factory=dict)

    def run(self, nodes: Sequence[Node]) -> list[Fused]:
        """Try every node once, and return the new fused nodes.

        A match with side outputs waits until all nodes were tried, because other matches have priority.  A side output
        is an output that the match does not compute on the way to its first output.
        """
        fused: list[Fused | None] = []
        later: dict[int, tuple[Node, Match | None]] = {}
        for i, node in enumerate(nodes):
            self.progress(i, len(nodes))
            if not node.outputs or op_of(node) not in self.by_root or id(node) in later:
                continue
            matches, missed = _matches_at(node, self.by_root[op_of(node)])
            matches = _prefer_disjoint(matches, self.by_root)
            if matches and matches[0].has_side_outputs:
                later |= {id(other): (other, None) for other in matches[0].nodes} | {id(node): (node, matches[0])}
            else:
                fused.append(self.fuse_first(matches, missed))
        for node, match in sorted(later.values(), key=lambda one: -self.graph.position.get(one[0], 0)):
            if match is not None and _is_intact(self.graph, match):
                fused.append(self.fuse_first([match], []))
            if node.outputs and op_of(node) in self.by_root:
                fused.append(self.fuse_first(*_matches_at(node, self.by_root[op_of(node)])))
        done = [one for one in fused if one is not None]
        if done:
            self.graph.remove_dead()
            self.graph.sort()
        return done

    def fuse_first(self, matches: Sequence[Match], missed: Sequence[Miss]) -> Fused | None:
        """Replace the first match whose body can be written; if there is none, record the misses and return None."""
        refused = []
        for match in matches:
            result = replace_match(self.graph, self.shapes, match, self.functions)
            if isinstance(result, Fused):
                return result
            refused.append(result)
        for miss in (*missed, *refused):
            key = miss.fusion.name, miss.node
            if miss.complete or key not in self.misses or not self.misses[key].complete:
                self.misses[key] = miss  # a refused complete match is kept, because it explains more
        return None


def _is_intact(graph: Graph, match: Match) -> bool:
    """Return whether a match is still possible after the replacement of other matches."""
    return all(n.outputs for n in match.nodes) and not refusal(graph, match.nodes, match.outputs, match.operands)


def _matches_at(node: Node, candidates: Sequence[_Candidate]) -> tuple[list[Match], list[Miss]]:
    """Return the matches that end at the node, the largest first, and the misses."""
    found = [candidate.at(node.outputs[0]) for candidate in candidates]
    matches = (m for m in found if isinstance(m, Match))
    return sorted(matches, key=lambda m: (-len(m.nodes), m.fusion.name)), [m for m in found if isinstance(m, Miss)]


def _prefer_disjoint(matches: Sequence[Match], by_root: Mapping[str, Sequence[_Candidate]]) -> list[Match]:
    """Put a smaller match first if a further output of the largest one is the end of another fusion.

    For example, add_layer_norm has the sum of a matrix product and a residual as its further output.  With the smaller
    match, layer_norm, the product adds the residual, and the norm only reads the sum.  Where other nodes read the sum
    too, that saves one trip of the tensor to memory; where none do, the traffic is equal, but the product's arithmetic
    hides part of it.  On an H200 (benchmarks/results), a norm of 4096x768 in float16 takes 5.1 us as layer_norm and
    7.4 us as add_layer_norm if its input comes from memory, and 3.2 us and 4.3 us if it comes from the L2 cache.  Bias
    and residual make a product of 768 terms 1.0 us longer.
    """
    if len(matches) < 2 or matches[0].has_side_outputs:
        return list(matches)
    ends = {id(t.inputs[0]) for t in matches[0].outputs[1:] if _ends_here(t, by_root)}
    return sorted(matches, key=lambda match: any(id(node) in ends for node in match.nodes))


def _ends_here(tensor: Tensor, by_root: Mapping[str, Sequence[_Candidate]]) -> bool:
    """Return whether a fusion of several nodes ends at the tensor."""
    node = tensor.inputs[0]
    found = (candidate.at(node.outputs[0]) for candidate in by_root.get(op_of(node), ()))
    return any(isinstance(m, Match) and len(m.nodes) > 1 and not m.has_side_outputs for m in found)
