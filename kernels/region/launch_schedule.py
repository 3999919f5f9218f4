"""The launches of a region: the loop nests of each launch, and the reductions that separate launches store."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from onnxfuse.algebra.indices import variable_index
from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.kernels.region.costs import WARP
from onnxfuse.kernels.region.nests import ELEMENTS, ROWS, Nest, make_nest, make_stored_nest, with_row_outputs
from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.reductions import Instance, Key
from onnxfuse.kernels.region.region import Region
from onnxfuse.kernels.region.scratch_reductions import Stored, StoredByKey, stored
from onnxfuse.kernels.region.shapes import Shapes
from onnxfuse.kernels.region.tilings import (
    THREADS,
    Columns,
    Merge,
    Tiling,
    fastest_variables,
    in_rounds,
    of_one_block,
    tiling_of,
)
from onnxfuse.kernels.region.traffic import accesses, with_contiguous_last
from onnxfuse.region_operators import REDUCTIONS
from onnxfuse.runtime.symint import estimate

Keys: TypeAlias = tuple[Key, ...]  # keys of the reductions that one nest stores
# The number of elements from which a separate launch computes a reduction of `Nest.inner`.  With fewer elements, each
# thread that reads the result computes it alone.
MIN_STORED_ELEMENTS: Final = 32


@dataclass(frozen=True)
class Work:
    """A loop nest, its tiling (division among threads), and the reductions that it stores."""

    nest: Nest
    tiling: Tiling
    stored: tuple[Stored, ...] = ()


@dataclass
class Stages:
    """The loop nests of each launch with their tilings, in order, and the reductions that earlier launches store."""

    launches: list[list[Work]] = field(default_factory=list)
    stored: dict[Key, Stored] = field(default_factory=dict)

    def add(self, launch: int, work: Work) -> None:
        """Add a loop nest with its tiling (division among threads) to a launch."""
        while len(self.launches) <= launch:
            self.launches.append([])
        self.launches[launch].append(work)


def stages_of(region: Region, groups: Sequence[Sequence[str]]) -> Stages:
    """Return the launches that compute the outputs; each of `groups` has the outputs of one shape."""
    program, shapes, found = region.program, region.shapes, dict[Key, Stored]()
    groups = _grouped(program, shapes, groups)
    while True:
        made = [make_nest(program, shapes, names, found) for names in groups]
        nests = [_arranged(region, nest, found) for nest in made]
        own: dict[Keys, Nest] = {(key,): _stored_nest(region, (key,), found) for key in found}
        slow = [each for nest in (*nests, *own.values()) for each in _slow(region, nest)]
        if all(each.key in found for each in slow):
            nests = _with_rows(region, with_row_outputs(nests, program, shapes, found), found)
            return _in_order(region, nests, _with_common_rows(region, own, found), found)
        for each in slow:
            found.setdefault(each.key, stored(each, f"p{len(found)}", shapes))


def _grouped(program: Program, shapes: Shapes, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Merge groups of outputs with equally many elements, if one loop nest for both reads less than two."""
    found, left = list[list[str]](), [list(each) for each in groups]
    while left:
        own = left.pop(0)
        for other in list(left):
            if _share_reads(program, shapes, own, other):
                own += other
                left.remove(other)
        found.append(own)
    return found


def _share_reads(program: Program, shapes: Shapes, own: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether one loop nest for two groups of outputs reads fewer bytes than two nests."""
    a, b = shapes.of[own[0]], shapes.of[other[0]]
    is_same = [dim for dim in a if dim != 1] == [dim for dim in b if dim != 1]
    reduces = any(each.name in REDUCTIONS for each in program.operations)
    if product(a) != product(b) or (reduces and not is_same):
        return False
    bytes_read = [
        sum(each.moved for each in accesses(make_nest(program, shapes, names, {}), program) if each.operand)
        for names in ([*own, *other], own, other)
    ]
    return bytes_read[0] < bytes_read[1] + bytes_read[2]


def _with_rows(region: Region, nests: Sequence[Nest], stored: StoredByKey) -> list[Nest]:
    """Merge loop nests that compute one element per row into other nests that read the same rows.

    The rows are then read from memory only once; a second read takes them from the L1 cache.
    """
    found = list(nests)
    for rows in nests:
        for i, other in enumerate(found if rows in found else ()):
            joined = _joined(region, rows, other, stored) if other != rows else None
            if joined:
                found[i] = joined
                found.remove(rows)
                break
    return found


def _joined(region: Region, rows: Nest, other: Nest, stored: StoredByKey) -> Nest | None:
    """Return one loop nest for `other` and `rows`; None if that is impossible.

    The outputs of `rows` have one element per row of `other`.
    """
    program, shapes = region.program, region.shapes
    shape = _shape_of_rows(region, rows, other)
    if shape is None or other.inner:
        return None
    if not {operand for operand, _ in rows.accesses if operand} & {operand for operand, _ in other.accesses}:
        return None
    given = {**other.row_outputs, **dict.fromkeys(rows.outputs, shape)}
    joined = _arranged(region, make_nest(program, shapes, other.outputs, stored, given), stored)
    if joined.inner or joined.count(ROWS) != product(shape) or tiling_of(joined, region).shares != 1:
        return None
    return joined


def _shape_of_rows(region: Region, rows: Nest, other: Nest) -> Shape | None:
    """Return the shape that the outputs of `rows` have in the axes of `other`: 1 along the axes that are reduced.

    The result is None unless `rows` has only reductions over the same axes, of values that have the shape of `other`
    (apart from axes of size 1).
    """
    instances = [each for level in rows.levels for each in level]
    if not instances or rows.inner or rows.row_outputs or rows.lists[ELEMENTS]:
        return None
    own = [(dim, variable_index(f"o{axis}", dim)) for axis, dim in enumerate(rows.shape) if dim != 1]
    axes, found = [axis for axis, dim in enumerate(other.shape) if dim != 1], set[Shape]()
    for each in instances:
        places = [(dim, at) for dim, at in zip(region.shapes.of[each.value], each.kept, strict=True) if dim != 1]
        if [dim for dim, _ in places] != [other.shape[axis] for axis in axes]:
            return None
        if [(dim, at) for dim, at in places if at is not None] != own:
            return None
        reduced = {axis for axis, (_, at) in zip(axes, places, strict=True) if at is None}
        found.add(tuple(1 if axis in reduced else dim for axis, dim in enumerate(other.shape)))
    return found.pop() if len(found) == 1 else None


def _stored_nest(region: Region, keys: Keys, found: StoredByKey) -> Nest:
    """Return the loop nest that computes and stores reductions; one reduction can use the results of another."""
    others = {key: each for key, each in found.items() if key not in keys or len(keys) == 1}
    made = make_stored_nest(region.program, region.shapes, [found[key] for key in keys], others)
    return _arranged(region, made, found)


def _with_common_rows(region: Region, own: Mapping[Keys, Nest], found: StoredByKey) -> dict[Keys, Nest]:
    """Merge loop nests that store reductions of the same rows: one launch computes all, and reads each row once.

    A nest is merged into one whose results it reads, or into one with which it shares a single row that blocks share,
    such as the minimum and the maximum of a DynamicQuantizeLinear.
    """
    joined = dict[Keys, Nest]()
    for keys, nest in own.items():
        for others, other in joined.items():
            of_one_row, reads = _share_one_row(region, nest, other), bool(nest.reads & set(others))
            made = _stored_nest(region, (*others, *keys), found) if reads or of_one_row else None
            if made and (of_one_row or (_has_rows_of(region, made, (nest, other)) and made.reads <= other.reads)):
                del joined[others]
                joined[*others, *keys] = made
                break
        else:
            joined[keys] = nest
    return joined


def _share_one_row(region: Region, nest: Nest, other: Nest) -> bool:
    """Return whether blocks share the single row of both loop nests, which read the same operands and no reductions."""
    pair = nest, other
    if any(each.reads or each.inner or each.count(ROWS) != 1 for each in pair):
        return False
    shares = [tiling_of(each, region).shares for each in pair]
    read = [{name for name, _ in each.accesses} for each in pair]
    return shares[0] == shares[1] != 1 and read[0] == read[1]


def _has_rows_of(region: Region, made: Nest, nests: Sequence[Nest]) -> bool:
    """Return whether a loop nest has the same rows as all `nests`, and no row is shared among blocks."""
    is_whole = not made.inner and all(tiling_of(each, region).shares == 1 for each in (made, *nests))
    return is_whole and all(each.shape == made.shape and each.count(ROWS) == made.count(ROWS) for each in nests)


def _arranged(region: Region, nest: Nest, found: Mapping[Key, Stored]) -> Nest:
    """Return a loop nest with the order and the split of variables that make it fastest."""
    nest = with_contiguous_last(nest, region.program)
    return fastest_variables(nest, region, found)


def _slow(region: Region, nest: Nest) -> Iterator[Instance]:
    """Yield the reductions of a loop nest that separate launches should compute."""
    shapes = region.shapes
    if nest.levels and tiling_of(nest, region).shares != 1:
        yield from (each for level in nest.levels for each in level if each not in nest.stores)
    for each in nest.inner:
        count = shapes.sizes.value(each.count(shapes))
        if 0 not in shapes.of[each.value] and estimate(count) >= MIN_STORED_ELEMENTS:
            yield each


def _in_order(region: Region, nests: Sequence[Nest], own: Mapping[Keys, Nest], found: StoredByKey) -> Stages:
    """Assign loop nests to launches; each nest comes after the nests whose reductions it reads."""
    stages, tilings = Stages(), {keys: tiling_of(nest, region) for keys, nest in own.items()}
    together = {key: keys for keys in own for key in keys}
    merged = {keys for keys, tiling in tilings.items() if tiling.shares != 1 and _is_merged(keys, own, nests)}

    def first_launch(nest: Nest) -> int:
        return max((ready(key) for key in nest.reads), default=0)

    @functools.cache
    def ready(key: Key) -> int:
        return first_launch(own[together[key]]) + (2 if together[key] in merged else 1)

    for keys, nest in own.items():
        tiling, launch = tilings[keys], first_launch(nest)
        is_across = isinstance(tiling, Columns) and tiling.shares != 1
        shared = {key: replace(found[key], shares=tiling.shares, is_across=is_across) for key in keys}
        if keys in merged:
            stages.stored |= {key: found[key] for key in keys}
            merging = Merge(THREADS, 1 if is_across else WARP, shares=tiling.shares)
            stages.add(launch + 1, Work(nest, merging, (replace(found[keys[0]], is_across=is_across),)))
            shared = {key: replace(each, pointer=f"{each.pointer}_shares") for key, each in shared.items()}
        else:
            stages.stored |= shared
        stages.add(launch, Work(nest, tiling, tuple(shared.values())))
    for nest in nests:
        tiling = tiling_of(nest, region)
        if any(stages.stored[key].is_whole for key in nest.reads):
            tiling = in_rounds(tiling, nest, region)
        stages.add(first_launch(nest), Work(nest, tiling))
    stages.launches = [_of_one_launch(works) for works in stages.launches]
    return stages


def _is_merged(keys: Keys, own: Mapping[Keys, Nest], nests: Sequence[Nest]) -> bool:
    """Return whether a separate launch merges the shares of a reduction before other launches read it.

    Shares are the partial results of several blocks.  There is no such launch in two cases.  If the reduction has a
    single result, each block that reads the result merges the shares.  If all readers compute one element per result,
    each thread merges the shares of its result.
    """
    places = own[keys].count(ROWS)
    readers = [nest for nest in (*nests, *own.values()) if nest.reads & set(keys)]
    return places != 1 and any(nest.count(ROWS) * nest.count(ELEMENTS) != places or nest.levels for nest in readers)


def _of_one_launch(works: Sequence[Work]) -> list[Work]:
    """Return the loop nests of one launch, changed so that all have the same number of threads per block."""
    tilings = of_one_block([work.tiling for work in works])
    return [replace(work, tiling=tiling) for work, tiling in zip(works, tilings, strict=True)]
