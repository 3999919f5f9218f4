"""Divide a graph into blocks that can be drawn closed: repeats, such as the equal layers of a transformer, and scopes.

`reading_order` lists the nodes so that the nodes of one layer are adjacent.  A repeated block is then a run of nodes in
which each node equals the node a fixed distance after it; it is drawn once.  Where more than MAX_ITEMS nodes and blocks
remain side by side, those with names in one scope, such as `/encoder/layer.0/`, form a block.  Where names have no
scopes, blocks end where few values pass from one to the next.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from onnxfuse.ir.dtypes import Array

MAX_PERIOD: Final = 600  # maximum number of nodes in one copy of a block
MIN_SAVED: Final = 3  # minimum number of nodes that a repeated block saves; smaller blocks are drawn in full
MAX_ITEMS: Final = 24  # nodes and blocks drawn side by side, which a window shows; more are divided into blocks
SECTION: Final = 12  # nodes and blocks in a block that is divided off without regard to names
MIN_IN_SCOPE: Final = 3  # minimum number of nodes and blocks in the block of a scope
Scope: TypeAlias = tuple[str, ...]  # the parts of a name before its last "/"
# Distances, in positions of the reading order, that are tried in turn.  If nodes with equal labels read the same value,
# and two of them are at least this far apart, the order starts with the node that computes the value.  None disables
# this.
DISTANCES: Final = (4, 12, 40, None)


@dataclass(frozen=True)
class Block:
    """A run of nodes that repeats the same items `copies` times; `items` lists those of the first copy (copy 0).

    `length` is the number of nodes in one copy: position `i` in the first copy corresponds to position `i + k * length`
    in copy k.  A block with one copy is a part of a long graph.  `scope` is the scope that the names of all nodes of
    the first copy share.
    """

    items: tuple[Item, ...]
    copies: int
    length: int
    scope: Scope = ()


Item: TypeAlias = "int | Block"


@dataclass(frozen=True)
class Blocks:
    """The reading order, as a list of node indices, and the items of the graph.

    An item is a block, or the position of a single node in the reading order.
    """

    order: tuple[int, ...]
    items: tuple[Item, ...]


def find_blocks(
    labels: Sequence[Hashable], reads: Sequence[Sequence[int]], scopes: Sequence[Scope] | None = None
) -> Blocks:
    """Return the blocks of an acyclic graph.

    labels  the properties that equal nodes share, such as the operator and its attributes
    reads   for each node, the indices of the producers of its inputs, in the order of the inputs
    scopes  for each node, the scope of its name; by default no name has a scope
    """
    interned: dict[Hashable, int] = {}
    numbers = np.array([interned.setdefault(label, len(interned)) for label in labels], np.int64)
    best: tuple[int, tuple[int, ...], tuple[Item, ...], list[list[int]]] | None = None
    tried: set[tuple[int, ...]] = set()
    base = reading_order(reads, ())
    for distance in DISTANCES:
        ahead = _shared_values(numbers, reads, base, distance) if distance else set[int]()
        order = tuple(reading_order(reads, ahead)) if ahead else tuple(base)
        if order in tried:
            continue
        tried.add(order)
        position = {node: i for i, node in enumerate(order)}
        moved = [[position[each] for each in reads[node]] for node in order]
        items = tuple(_repeats(numbers[list(order)], moved, 0, len(order)))
        drawn = _drawn(items)
        if best is None or drawn < best[0]:
            best = drawn, order, items, moved
    assert best is not None
    _, order, items, moved = best
    return Blocks(order, _Divided(moved, [scopes[node] if scopes else () for node in order]).blocks(items))


def reading_order(reads: Sequence[Sequence[int]], ahead: Iterable[int]) -> list[int]:
    """Return the indices of all nodes in an order in which producers precede their consumers.

    The order is the postorder of a depth-first search that starts at nodes without consumers, and goes from each node
    to its producers.  A node therefore comes directly after the last producer that the search reached from it.

    reads  for each node, the indices of the producers of its inputs, in the order of the inputs
    ahead  nodes that start the order, with the nodes that they depend on before them
    """
    read = {each for one in reads for each in one}
    roots = [*sorted(ahead), *(node for node in range(len(reads)) if node not in read)]
    order: list[int] = []
    seen: set[int] = set()
    for root in roots:
        work: list[tuple[int, Iterator[int]]] = [(root, iter(reads[root]))] if root not in seen else []
        seen.add(root)
        while work:
            node, inputs = work[-1]
            new = next((each for each in inputs if each not in seen), None)
            if new is None:
                order.append(node)
                work.pop()
            else:
                seen.add(new)
                work.append((new, iter(reads[new])))
    return order


def _shared_values(labels: Array, reads: Sequence[Sequence[int]], order: Sequence[int], distance: int) -> Set[int]:
    """Return the producers of values, such as masks, whose readers have equal labels but lie far apart in the order."""
    position = {node: i for i, node in enumerate(order)}
    readers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for node, inputs in enumerate(reads):
        for index, each in enumerate(inputs):
            readers[each, int(labels[node]), index].append(position[node])
    return {node for (node, _, _), found in readers.items() if max(found) - min(found) >= distance}


def _drawn(items: Iterable[Item]) -> int:
    """Return how many boxes a drawing of the items needs: one per node, and one more per repeated block."""
    return sum(1 if isinstance(item, int) else 1 + _drawn(item.items) for item in items)


@dataclass(frozen=True)
class _Run:
    """Copies of a block: the start of the first copy, the nodes per copy, and the number of copies."""

    start: int
    period: int
    copies: int

    @property
    def saved(self) -> int:
        return (self.copies - 1) * self.period


def _repeats(labels: Array, reads: Sequence[Sequence[int]], start: int, end: int) -> Iterator[Item]:
    """Yield the nodes and repeated blocks between two positions.

    The block that saves the most nodes is taken first; then the nodes before it, after it and in it are searched.
    """
    work = [(start, end)]
    while work:
        start, end = work.pop()
        run = _longest_run(labels, reads, start, end)
        if run is None:
            yield from range(start, end)
            continue
        stop = run.start + run.copies * run.period
        if start < run.start:
            work += [(stop, end), (run.start, stop), (start, run.start)]
            continue
        inner = tuple(_repeats(labels, reads, run.start, run.start + run.period)) if run.period > 1 else (run.start,)
        yield Block(inner, run.copies, run.period)
        if stop < end:
            work.append((stop, end))


def _longest_run(labels: Array, reads: Sequence[Sequence[int]], start: int, end: int) -> _Run | None:
    """Return the run of copies between two positions that saves the most nodes; None if none saves enough."""
    part = labels[start:end]
    found: list[_Run] = []
    for period in range(1, min(len(part) // 2, MAX_PERIOD) + 1):
        equal = np.concatenate([[0], (part[:-period] == part[period:]).astype(np.int8), [0]])
        edges = np.flatnonzero(np.diff(equal))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if last - first >= max(period, MIN_SAVED):
                found.append(_Run(start + first, period, (last - first) // period + 1))
    for run in sorted(found, key=lambda each: (-each.saved, each.period)):
        if exact := _exact_run(labels, reads, run, end):
            return exact
    return None


def _exact_run(labels: Array, reads: Sequence[Sequence[int]], run: _Run, end: int) -> _Run | None:
    """Return the run, perhaps shifted to start at a later node, so that few values enter a copy.

    A shift is possible if the labels continue to repeat after the last copy.  In all copies, corresponding nodes must
    read corresponding nodes.  Among such shifts with the most copies, the one with the fewest values that enter a copy
    is chosen.  Returns None if there is no such shift.
    """
    period = run.period
    last = run.start + run.copies * period
    while last < end and labels[last] == labels[last - period]:
        last += 1
    choices = []
    for shift in range(min(period, last - run.start)):
        copies = (last - run.start - shift) // period
        first = run.start + shift
        if copies < 2 or (copies - 1) * period < MIN_SAVED or not _linked_alike(reads, first, period, copies):
            continue
        crossing = {each for node in range(first + period, first + 2 * period) for each in reads[node]}
        choices.append((-copies, sum(each < first + period for each in crossing), first))
    if not choices:
        return None
    copies, _, first = min(choices)
    return _Run(first, period, -copies)


def _linked_alike(reads: Sequence[Sequence[int]], start: int, period: int, copies: int) -> bool:
    """Return whether, in all copies of a block, corresponding nodes read corresponding nodes of their own copy."""

    def inside(copy: int, node: int) -> list[int]:
        begin = start + copy * period
        return [each - begin for each in reads[begin + node] if each >= begin]

    first = [inside(0, node) for node in range(period)]
    return all(inside(copy, node) == first[node] for copy in range(1, copies) for node in range(period))


@dataclass(frozen=True)
class _Divided:
    """Divides long lists of items into blocks; `reads` and `scopes` are those of the nodes in the reading order."""

    reads: Sequence[Sequence[int]]
    scopes: Sequence[Scope]

    def blocks(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Return the items with those in repeated blocks divided, and themselves divided if there are too many."""
        inner = tuple(
            item if isinstance(item, int) else replace(self._block(item.items, item.length), copies=item.copies)
            for item in items
        )
        return self._in_parts(self._by_scope(inner)) if len(inner) > MAX_ITEMS else inner

    def _block(self, items: tuple[Item, ...], length: int) -> Block:
        start = _span(items[0])[0]
        return Block(self.blocks(items), 1, length, _common(self.scopes[start : start + length]))

    def _by_scope(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Return the items, with a block for each run of items that share a longer scope than all items do."""
        scopes = [_common(self.scopes[slice(*_span(item))]) for item in items]
        depth = len(_common(scopes)) + 1
        result: list[Item] = []
        for scope, run in itertools.groupby(zip(scopes, items, strict=True), lambda pair: pair[0][:depth]):
            found = tuple(item for _, item in run)
            is_block = len(scope) == depth and MIN_IN_SCOPE <= len(found) < len(items)
            result += [self._joined(found)] if is_block else found
        return tuple(result)

    def _in_parts(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Return the items, grouped into blocks at narrow places if there are more than MAX_ITEMS."""
        if len(items) <= MAX_ITEMS:
            return items
        count = round(len(items) / SECTION)
        bounds = [0, *(_narrowest(items, self.reads, i * len(items) // count) for i in range(1, count)), len(items)]
        return self._in_parts(tuple(self._joined(items[a:b]) for a, b in itertools.pairwise(bounds) if a < b))

    def _joined(self, items: tuple[Item, ...]) -> Block:
        """Return a block of one copy, whose items were divided before."""
        start, end = _span(items[0])[0], _span(items[-1])[1]
        parts = self._in_parts(self._by_scope(items)) if len(items) > MAX_ITEMS else items
        return Block(parts, 1, end - start, _common(self.scopes[start:end]))


def _common(scopes: Sequence[Scope]) -> Scope:
    """Return the scope that contains all of these scopes."""
    first, last = min(scopes), max(scopes)
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


def _narrowest(items: Sequence[Item], reads: Sequence[Sequence[int]], near: int) -> int:
    """Return the index close to `near` at which the fewest values pass from earlier to later items."""
    reach = SECTION // 4
    starts = {at: _span(items[at])[0] for at in range(near - reach, near + reach)}
    window = range(min(starts.values()), min(max(starts.values()) + 4 * SECTION, len(reads)))

    def crossing(at: int) -> int:
        return len({each for node in window if node >= starts[at] for each in reads[node] if each < starts[at]})

    return min(starts, key=lambda at: (crossing(at), abs(at - near)))


def _span(item: Item) -> tuple[int, int]:
    """Return the positions where an item, including all its copies, begins and ends."""
    if isinstance(item, int):
        return item, item + 1
    start = _span(item.items[0])[0]
    return start, start + item.copies * item.length
