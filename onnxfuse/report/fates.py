"""Find the fate of each node of a graph: fused, folded away, merged with others, or kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from onnxfuse.passes.folded import Folded
from onnxfuse.report.outline import Rewritten
from onnxfuse.rewrite.replace import Fused

Fate: TypeAlias = Literal["fused", "weights", "merged", "constant", "stays"]
FATES: Final[tuple[Fate, ...]] = get_args(Fate)
CONSTANT: Final = "Constant"  # name of ONNX's operator
CONSTANT_KINDS: Final = frozenset({"constant", "shape", "branch", "carried"})  # kinds of folded nodes with known values


@dataclass(frozen=True)
class Fates:
    """The fate of each node of a graph, by the node's index, and the node of the new graph that represents it.

    fused     a fused node computes it
    weights   its effect is folded into the weights of the node that represents it
    merged    it was rewritten or removed; the node that computes its consumers' results represents it
    constant  its value is known before the model runs
    stays     it is unchanged in the new graph

    `stands_for` holds, for each node, the index of the node of the new graph that represents it, or None.
    """

    fates: tuple[Fate, ...]
    stands_for: tuple[int | None, ...]
    records: Mapping[int, Fused]  # the record of each fused node, by its index in the new graph
    # The nodes that each fused node replaced, by the fused node's index in the new graph.  A replaced node is given by
    # its index in the old graph, or by its name if it was made while the graph was simplified.
    replaced: Mapping[int, tuple[int | str, ...]]
    counts: Mapping[Fate, int]  # the number of nodes by fate, without Constants


def find_fates(graph: Rewritten, fused: Iterable[Fused], folded: Iterable[Folded]) -> Fates:
    """Return the fate of each node of `graph.before`, and the node of `graph.after` that represents it.

    fused   the records of the fused nodes of `graph.after`
    folded  the records of the nodes of `graph.before` that passes folded away
    """
    before, after = graph.before.nodes, graph.after.nodes
    by_label = {node.label: i for i, node in enumerate(before)}
    new_by_label = {node.label: i for i, node in enumerate(after)}
    new_by_output = {name: i for i, node in enumerate(after) for name in node.outputs}
    records = {}
    for one in fused:
        index = new_by_label.get(one.node, new_by_output.get(one.output))
        if index is not None:
            records[index] = one
    replaced = {index: tuple(by_label.get(label, label) for label in one.replaces) for index, one in records.items()}
    stands_for: list[int | None] = [None] * len(before)
    fates: list[Fate] = ["merged"] * len(before)
    into = {one.node: one for one in folded if one.kind != "pad"}  # a Pad becomes an attribute; weights do not change
    for i, node in enumerate(before):
        if node.label in into:
            fates[i] = "constant" if into[node.label].kind in CONSTANT_KINDS else "weights"
        elif (same := new_by_label.get(node.label)) is not None and same not in records:
            fates[i], stands_for[i] = "stays", same
        elif node.op == CONSTANT:
            fates[i] = "constant"
    for index, nodes in replaced.items():
        for each in nodes:
            if isinstance(each, int):
                fates[each], stands_for[each] = "fused", index
    for i, node in enumerate(before):
        target = by_label.get(into[node.label].into) if fates[i] == "weights" else None
        if target is not None:
            stands_for[i] = stands_for[target]
    _follow_outputs(graph, records, fates, stands_for)
    counts = Counter(fate for fate, node in zip(fates, before, strict=True) if node.op != CONSTANT)
    return Fates(tuple(fates), tuple(stands_for), records, replaced, {fate: counts[fate] for fate in FATES})


def _follow_outputs(
    graph: Rewritten, records: Mapping[int, Fused], fates: Sequence[Fate], stands_for: list[int | None]
) -> None:
    """Set the representative of old nodes that have none to the new node whose outputs they help to compute.

    An old node is assigned to a new node if it lies on a path from outputs of other new nodes to an output of this one.
    """
    producer = {name: i for i, node in enumerate(graph.before.nodes) for name in node.outputs}
    ends: dict[int, list[int]] = defaultdict(list)  # for each new node, the old nodes that compute its outputs
    computed = set()
    for index, node in enumerate(graph.after.nodes):
        names = [graph.originals.get(name, name) for name in node.outputs]
        if index in records:
            names.append(records[index].output)
        computed.update(names)
        ends[index] = list({producer[name]: None for name in names if name in producer})
    for index, work in ends.items():
        seen = set(work)
        while work:
            i = work.pop()
            if stands_for[i] is None and fates[i] not in ("constant", "stays"):
                stands_for[i] = index
            if stands_for[i] == index:
                read = graph.before.nodes[i].inputs
                inputs = {producer[name] for name in read if name in producer and name not in computed}
                work += inputs - seen
                seen |= inputs
