"""The picture of a graph before and after fusing, as data that the page draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from onnxfuse.passes.folded import Folded
from onnxfuse.report.blocks import Block, Item, Scope, find_blocks
from onnxfuse.report.fates import FATES, Fates, find_fates
from onnxfuse.report.outline import Outline, OutlineNode, Rewritten
from onnxfuse.rewrite.replace import Fused


class Table:
    """A table of texts; each is stored once and referred to by its number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text, which is added if it is new."""
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        """The texts by number."""
        return list(self.numbers)


def picture(graph: Rewritten, fused: Sequence[Fused], folded: Iterable[Folded], texts: Table) -> dict[str, Any]:
    """Return both graphs, the fate of each node, and the blocks of the graph after fusing.

    `fused` lists the fused nodes of all graphs.  The entry "matches" has those of this graph: it maps a node's index in
    `fused` to its index after fusing and a list of the nodes that it replaced.  This list has indices, or the names of
    nodes that were made while the graph was simplified.

    A node is a list: its label, operator, attributes, output types, types of weights, and producers; all texts except
    the label are numbers in `texts`.  For nodes before fusing, the list also has the fate, as an index in FATES, and
    the index of the node that represents the node after fusing, or -1.
    """
    numbers = {id(one): i for i, one in enumerate(fused)}
    fates = find_fates(graph, [one for one in fused if one.where == graph.where], folded)
    before, after = graph.before, graph.after
    old = [
        [*row, FATES.index(fate), -1 if by is None else by]
        for row, fate, by in zip(_rows(before, texts), fates.fates, fates.stands_for, strict=True)
    ]
    blocks = find_blocks(
        [_label(node, after) for node in after.nodes],
        [_drop_unknown(row) for row in _readings(after)],
        _scopes(graph, fates),
    )
    return {
        "where": graph.where,
        "before": old,
        "after": list(_rows(after, texts)),
        "fates": dict(fates.counts),
        "matches": {numbers[id(one)]: [index, list(fates.replaced[index])] for index, one in fates.records.items()},
        "order": list(blocks.order),
        "items": [_item(item) for item in blocks.items],
    }


def _rows(graph: Outline, texts: Table) -> list[list[Any]]:
    rows = []
    for node, reads in zip(graph.nodes, _readings(graph), strict=True):
        attributes = "\n".join(f"{name} = {text}" for name, text in node.attributes.items() if text)
        types = "\n".join(graph.types.get(name, "") for name in node.outputs)
        weights = ", ".join(graph.types[name] for name in node.inputs if name in graph.constants)
        read = list(dict.fromkeys(_drop_unknown(reads)))
        rows.append([node.label, *map(texts.number, (node.op, attributes, types, weights)), read])
    return rows


def _readings(graph: Outline) -> list[list[int | None]]:
    producer = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    return [[producer.get(name) for name in node.inputs] for node in graph.nodes]


def _drop_unknown(nodes: Sequence[int | None]) -> list[int]:
    return [each for each in nodes if each is not None]


def _label(node: OutlineNode, graph: Outline) -> tuple[object, ...]:
    """Return the properties by which nodes count as equal: operator, attributes, and types of weights and outputs."""
    weights = tuple(graph.types[name] for name in node.inputs if name in graph.constants)
    types = tuple(graph.types.get(name, "") for name in node.outputs)
    return node.op, tuple(sorted(node.attributes.items())), weights, types, len(node.inputs)


def _scopes(graph: Rewritten, fates: Fates) -> list[Scope]:
    """Return the scope of each node after fusing: the one in which most of the nodes are that it computes."""
    found = [Counter[Scope]() for _ in graph.after.nodes]
    for node, fate, by in zip(graph.before.nodes, fates.fates, fates.stands_for, strict=True):
        if by is not None and fate in ("fused", "stays"):
            found[by][node.scope] += 1
    return [
        max(scopes, key=lambda scope: scopes[scope]) if scopes else node.scope
        for node, scopes in zip(graph.after.nodes, found, strict=True)
    ]


def _item(item: Item) -> int | list[Any]:
    """Return an item as JSON: a node is its position, and a block a list of copies, length, items and scope."""
    if not isinstance(item, Block):
        return item
    return [item.copies, item.length, [_item(each) for each in item.items], "/".join(item.scope)]
