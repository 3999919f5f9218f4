"""Divides a loop nest among threads, by rows or by elements, and chooses the width of vectors.

In this module, a list is one of `Nest.lists`: the loop variables over rows, over the elements of a row, or over the
elements of a reduction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from onnxfuse.algebra.indices import NOTHING, flat, replaced
from onnxfuse.algebra.sizes import Size, number_of, terms_of
from onnxfuse.kernels.elementwise.elements import RESIDENT_THREADS, SMALL_VECTORS, SMALL_WIDTH
from onnxfuse.kernels.region.costs import BYTE_COST, THREAD_COST, WARP, cost, cost_of_bytes
from onnxfuse.kernels.region.interleaved import (
    MAX_INTERLEAVED,
    MIN_CHUNK_BYTES,
    chunk_of,
    interleaved,
    interleaved_lanes,
)
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, ROWS, Nest, Variable, flattened
from onnxfuse.kernels.region.operators import BYTES, MAX_INSTRUCTIONS
from onnxfuse.kernels.region.region import Region
from onnxfuse.kernels.region.scratch_reductions import StoredByKey
from onnxfuse.kernels.region.shared_memory_staging import staged_values
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.region.tile_sides import TILE_AREA, tile_area, tile_sides
from onnxfuse.kernels.region.traffic import accesses, is_side_by_side, moved_along, typical
from onnxfuse.kernels.tensors import VECTOR_BYTES
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import always, estimate, is_symbolic, maximum, minimum

MAX_WIDTH: Final = 8  # maximum number of elements per vector
THREADS: Final = 128  # threads per block
ROW_THREADS: Final = 256  # threads per block, if threads exchange partial results
MAX_SERIAL: Final = 8  # maximum number of elements of a row that one thread reduces alone
MAX_WARP_ELEMENTS: Final = 1024  # maximum number of elements of a row for one warp; a block computes a longer row
FEW_ROWS: Final = 4  # rows per multiprocessor: below this number, rows count as few
MANY_ROUNDS_FEW_ROWS: Final = 8  # replaces FEW_ROWS if a lane would have more than MAX_WARP_ROUNDS vectors of a row
FEW_ROWS_WARP_ELEMENTS: Final = 256  # replaces MAX_WARP_ELEMENTS if rows are few
MAX_HELD: Final = 32  # maximum number of a row's elements that a thread holds in registers between loops
MIN_KEPT_BYTES: Final = 16384  # per row: shared memory keeps rows from this size on; the L1 cache holds shorter ones
KEPT_THREADS: Final = 1024  # wanted threads per multiprocessor if shared memory keeps rows
KEPT_DTYPES: Final = ("float16", "bfloat16", "float32")
COPYING_ARCH: Final = 80  # compute capability from which on copies to shared memory take no registers
MIN_COPIED: Final = 4  # minimum bytes of an asynchronous copy to shared memory
SPARE_BYTES: Final = 2048  # bytes of shared memory that a block needs in addition to its row
# Elements per row from which on vectors are shifted: the first vector begins at the row's first aligned element.
MIN_SHIFTED: Final = 2048
MAX_WARP_ROUNDS: Final = 8  # maximum number of vectors of a row per lane, if lanes of one warp share the row
ROUND_COST: Final = 16  # estimated instructions of a lane per round, in which it reads and computes one vector
EXCHANGE_COST: Final = 8  # estimated instructions to merge the results of two lanes
MAX_TILED_WORDS: Final = 8  # maximum number of words per element of a tile in shared memory
MIN_TILED: Final = 8  # minimum number of elements along each axis that is tiled
TILE_COST: Final = 30  # estimated instructions per element of a tile
CHEAPER: Final = 0.9  # an alternative is chosen only if it costs less than this share of the default's cost
COLUMNS: Final = 32  # adjacent threads with different rows, in the tiling Columns; other threads have the same rows
MANY_BLOCKS: Final = 2  # wanted blocks of columns per multiprocessor; vectors are narrowed until there are enough
MIN_SHARED_ELEMENTS: Final = 32  # elements per row from which on several threads share a row in the tiling Columns
MIN_SHARES: Final = 4  # blocks per row: fewer do not pay for the extra launch that merges their results
MIN_NARROW_SHARES: Final = (
    2  # replaces MIN_SHARES if single elements are read: sharing rows adds a launch, which can then use vectors
)
MIN_DIVIDED_ROUNDS: Final = 32  # minimum vectors per thread of a block with a whole row, for blocks to share the row
MAX_CHAIN: Final = 3  # maximum number of reductions of dynamic length that need one another, if blocks share rows
MANY_DIMS: Final = 2  # dynamic dims that count rows of dynamic length: from this number on, blocks do not share rows
MAX_SHARES: Final = 512  # maximum number of blocks per row; one block or warp merges their accumulators
MAX_COLUMN_SHARES: Final = 16  # maximum blocks per column; each thread that reads the result merges their accumulators
MERGING_ROUNDS: Final = 8  # vectors per thread of blocks that merge the shares of a reduction with a single result
MERGING_BLOCKS: Final = 4  # minimum blocks per multiprocessor, for blocks to have so many vectors per thread
MIN_ROUNDS: Final = 4  # minimum number of vectors per thread of a block that has a share of a row
Repeats: TypeAlias = tuple[str, int]  # a variable, and the number of its neighbouring values per thread
ONCE: Final[Repeats] = ("", 1)
MAX_REPEATS: Final = 8
REPEATING_THREADS: Final = 1024  # minimum number of threads per multiprocessor if each has several values of a variable
AHEAD_THREADS: Final = 256  # like REPEATING_THREADS, for threads that load the operands of all values first
AHEAD_BYTES: Final = 128  # maximum bytes per thread that are loaded ahead
SCATTERING_THREADS: Final = 1024  # wanted threads per multiprocessor; with fewer, each thread gets fewer elements
SplitBy: TypeAlias = Literal["", "branches", "stores"]


@dataclass(frozen=True)
class Tiling:
    """The way in which a loop nest is divided among threads; each subclass below is one way.

    If several blocks each have a share of a row, a later launch merges their accumulators.
    """

    threads: int  # number of threads per block
    shares: Size = field(default=1, kw_only=True)  # number of blocks that share one row, or the same columns


@dataclass(frozen=True)
class Elements(Tiling):
    """Each thread computes vectors of the outputs."""

    width: int = 1
    is_scattered: bool = False  # a thread's elements are not adjacent
    repeated: str = ""  # each thread computes several neighbouring values of this variable
    repeats: int = 1  # the number of values of `repeated` per thread
    reads_ahead: bool = False  # a thread loads its operands for all `repeats` values before it computes
    has_tail: bool = False  # each element after the last whole vector gets its own thread
    rounds: int = 1  # vectors of a thread, which are a block's threads apart


@dataclass(frozen=True)
class Tile(Tiling):
    """A block computes a tile: its vectors are read along one variable, and stored along the nest's last variable."""

    width: int
    across: str  # name of the variable along which vectors are read
    sides: tuple[int, int]  # elements of a tile along the variable `across`, and along the last variable
    store_width: int  # elements per vector that is stored


@dataclass(frozen=True)
class Rows(Tiling):
    """Each row is computed by a block, a warp, or some lanes of a warp; vectors lie along the row."""

    lanes: int = 0  # lanes of a warp that compute a row together; 0 if a block does
    widths: Mapping[str, int] = field(default_factory=dict)  # for each list of variables: elements per vector
    # For each list of variables whose vectors begin at the first aligned element of a row: these vectors.
    shifted: Mapping[str, Lanes] = field(default_factory=dict)
    memory: int = 0  # bytes of shared memory for operands of the row that several loops read


@dataclass(frozen=True)
class Columns(Tiling):
    """Vectors lie across rows: each element of a vector (a lane) belongs to another row.

    Threads with the same rows divide the elements of these rows among them.
    """

    width: int
    columns: int  # number of adjacent threads of a block that have different rows


@dataclass(frozen=True)
class Merge(Tiling):
    """Some lanes of a warp merge the accumulators of the blocks that shared a row."""

    lanes: int = WARP


def tiling_of(nest: Nest, region: Region) -> Tiling:
    """Return the tiling of a loop nest: its division among threads."""
    if not nest.levels:
        return _tile(nest, region) or _elements(nest, region)
    name = nest.elements_of(nest.levels[0][0], region.shapes)[0]
    return _columns(nest, name, region) if _prefers_columns(nest, name, region) else _rows(nest, name, region)


def _elements(nest: Nest, region: Region) -> Elements:
    """Return the tiling of a loop nest whose threads compute vectors of the outputs."""
    sizes, device = region.sizes, region.device
    _, lanes, (repeated, repeats) = _best_lanes(nest, region)
    count = sizes.value(nest.count(ELEMENTS))
    is_between = repeats > 1 and (short := interleaved(nest)) is not None and short.name == repeated
    width = lanes.width if is_between else _narrowed(count, lanes.width, device)
    if lanes.scattered:
        width = width if is_symbolic(count) else _narrowed(count, width, device, SCATTERING_THREADS)
        return Elements(THREADS, width, is_scattered=True)
    variables = nest.lists[ELEMENTS]
    # A tail is the elements after the last whole vector. With several variables there is no tail, because the width
    # divides the last variable. `sizes.divisor` would not find the width in a product of several extents.
    has_tail = width > 1 and len(variables) == 1 and sizes.divisor(variables[0].extent) % width != 0
    ahead = repeats > 1 and not is_between and _are_few(count, width * repeats, device)
    return Elements(THREADS, width, False, repeated, repeats, ahead, has_tail)


def in_rounds(tiling: Tiling, nest: Nest, region: Region) -> Tiling:
    """Return the tiling of a loop nest each of whose blocks merges shares: fewer blocks, which have more vectors."""
    if not isinstance(tiling, Elements) or tiling.has_tail or tiling.is_scattered or tiling.repeats > 1:
        return tiling
    if len(nest.outputs) != 1:
        return tiling
    count = region.sizes.value(nest.count(ELEMENTS))
    least = tiling.width * tiling.threads * MERGING_ROUNDS * MERGING_BLOCKS * region.device.multiprocessors
    return replace(tiling, rounds=MERGING_ROUNDS) if estimate(count) >= least else tiling


def _rows(nest: Nest, name: str, region: Region) -> Rows:
    """Return the tiling of a loop nest with one row per warp or block, and vectors along the rows."""
    sizes, device = region.sizes, region.device
    length, rows = sizes.value(nest.count(name)), sizes.value(nest.count(ROWS))
    widths = {each: width_along(nest, each, region) for each in nest.lists if each != ROWS}
    is_long = always(lambda: length > MAX_WARP_ROUNDS * WARP * widths[name], rows, length)
    most = (MANY_ROUNDS_FEW_ROWS if is_long else FEW_ROWS) * device.multiprocessors
    few = always(lambda: rows < most, rows, length)
    warp = estimate(length) <= (FEW_ROWS_WARP_ELEMENTS if few else MAX_WARP_ELEMENTS)
    counts = {each: sizes.value(nest.count(each)) for each in widths}
    row_bytes = sum(each.moved for each in accesses(nest, region.program)) / max(1, typical(nest.count(ROWS)))
    threads = _lanes(counts, widths, rows, row_bytes, device) if warp else ROW_THREADS
    for each, count in counts.items():
        while widths[each] > 1 and not is_symbolic(count) and count // (widths[each] // 2) <= threads:
            widths[each] //= 2
    if warp:
        return Rows(THREADS, threads, widths)
    found = {each: _shifted(nest, each, region) for each in widths if region.aligned and widths[each] == 1}
    shifted = {each: lanes for each, lanes in found.items() if lanes}
    width = shifted[name].width if name in shifted else widths[name]
    fewest = MIN_SHARES if width > 1 else MIN_NARROW_SHARES
    rounds = length // (width * ROW_THREADS)
    shares = _shares(rows, rounds, region, fewest=fewest) if _may_share(nest, length) else 1
    memory = _row_memory(nest, name, width, name in shifted, region) if shares == 1 else 0
    blocks = device.shared_per_block // memory if memory else math.inf
    threads = ROW_THREADS if ROW_THREADS * blocks >= KEPT_THREADS else 2 * ROW_THREADS
    return Rows(threads, 0, widths, shifted, memory, shares=shares)


def _row_memory(nest: Nest, name: str, width: int, is_shifted: bool, region: Region) -> int:
    """Return the bytes of shared memory that keep the operands of a row that several loops read; 0 if none are kept.

    Short rows are kept in registers instead, unless their vectors are shifted (begin at a row's first aligned element).
    """
    count, last = number_of(nest.count(name)), nest.lists[name][-1].name
    loops = sum(nest.elements_of(level[0], region.shapes)[0] == name for level in nest.levels) + (name == ELEMENTS)
    along = [each for each in accesses(nest, region.program) if each.operand and each.address.factor(last) == 1]
    along = [each for each in along if region.program.dtypes[each.operand] in KEPT_DTYPES]
    if count is None or loops < 2 or not along or region.device.arch < COPYING_ARCH:
        return 0
    if not is_shifted and count * len(along) <= MAX_HELD * ROW_THREADS:
        return 0
    needed = sum(count * each.item_bytes for each in along if width * each.item_bytes >= MIN_COPIED)
    return needed if MIN_KEPT_BYTES <= needed <= region.device.shared_per_block - SPARE_BYTES else 0


def _shifted(nest: Nest, name: str, region: Region) -> Lanes | None:
    """Return lanes that access rows by shifted vectors; None if that is not possible.

    If a row does not begin at an aligned address, its first vector begins at the row's first aligned element.  All
    accesses along the rows must have the same misalignment.
    """
    variables = nest.lists[name]
    if len(variables) != 1 or (number_of(variables[0].extent) or 0) < MIN_SHIFTED:
        return None
    along = [each for each in accesses(nest, region.program) if each.address.factor(variables[0].name) == 1]
    if not along:
        return None
    width = min(MAX_WIDTH, VECTOR_BYTES // max(along, key=lambda each: each.moved).item_bytes)
    rest = replaced(along[0].address, {variables[0].name: NOTHING})
    if any(atom.kind == "value" for atom in rest.atoms()):  # the shift depends on an index that a Gather loads later
        return None
    lanes = Lanes(variables[0].name, width, rest=rest)
    return lanes if all(lanes.are_contiguous(each.address, region.sizes) for each in along) else None


def _lanes(counts: Mapping[str, int], widths: Mapping[str, int], rows: int, row_bytes: float, device: Device) -> int:
    """Return the number of lanes per row with the least cost; at most one lane per vector.

    With fewer lanes, each lane loops more often.  If rows are few, more lanes share a row.
    """
    if is_symbolic(*counts.values()):
        return WARP
    vectors = max(count // widths[name] for name, count in counts.items())
    fewest = 0 if is_symbolic(rows) else SMALL_VECTORS * device.multiprocessors // rows
    found, least = WARP, math.inf
    for lanes in (32, 16, 8, 4, 2, 1):
        rounds = -(-vectors // lanes)
        own = lanes * (THREAD_COST + ROUND_COST * rounds + EXCHANGE_COST * (lanes.bit_length() - 1))
        taken = max(own, BYTE_COST * row_bytes)
        if lanes < fewest or rounds > MAX_WARP_ROUNDS:
            break
        if taken < CHEAPER * least or lanes >= 2 * vectors:
            found, least = lanes, taken
    return found


def _columns(nest: Nest, name: str, region: Region) -> Columns:
    """Return the tiling (division among threads) of a loop nest whose rows are adjacent in memory."""
    sizes = region.sizes
    length, rows = sizes.value(nest.count(name)), sizes.value(nest.count(ROWS))
    moved = sum(each.moved for each in accesses(nest, region.program))
    is_crossed = 2 * moved_along(nest, nest.lists[ROWS][-1], region.program) < moved
    width = 1 if is_crossed else width_along(nest, ROWS, region)
    many = estimate(rows // width) > RESIDENT_THREADS * region.device.multiprocessors
    shared = not many and estimate(length) >= MIN_SHARED_ELEMENTS
    fewest = MANY_BLOCKS * region.device.multiprocessors * (COLUMNS if shared else ROW_THREADS)
    if not many and not is_symbolic(rows):
        while width > SMALL_WIDTH and rows // width < fewest:
            width //= 2
    if not shared:
        return Columns(ROW_THREADS, width, ROW_THREADS)
    blocks, rounds = -(-rows // (width * COLUMNS)), length // (ROW_THREADS // COLUMNS)
    shares = _shares(blocks, rounds, region, MAX_COLUMN_SHARES) if _may_share(nest, length) else 1
    return Columns(ROW_THREADS, width, COLUMNS, shares=shares)


def _may_share(nest: Nest, length: int) -> bool:
    """Return whether blocks can share rows of this length.

    If the length is dynamic, a template, which has the plans for all sizes, needs more kernels: two for each reduction
    that reads results of other reductions.  Rows that are counted by two dynamic dims are rarely so few that blocks
    should share them.
    """
    dims = {name for monomial, _ in terms_of(nest.count(ROWS)) for name in monomial}
    return not is_symbolic(length) or (len(nest.levels) <= MAX_CHAIN and len(dims) < MANY_DIMS)


def _shares(blocks: int, rounds: int, region: Region, most: int = MAX_SHARES, fewest: int = MIN_SHARES) -> Size:
    """Return the number of blocks among which the elements of a row are divided.

    If rows were not divided, there would be `blocks` blocks, with `rounds` vectors for each thread.  If rows are
    divided, there are at most as many blocks as the GPU can hold at a time.
    """
    resident = RESIDENT_THREADS * region.device.multiprocessors // ROW_THREADS
    shares = maximum(1, minimum(resident // blocks, rounds // MIN_ROUNDS, most))
    if not estimate(rounds) >= MIN_DIVIDED_ROUNDS or not estimate(shares) >= fewest:
        return 1
    return region.sizes.named(f"at most {most} shares of {rounds!r} rounds by {blocks!r} blocks", shares)


def _tile(nest: Nest, region: Region) -> Tile | None:
    """Return tiles for an elementwise loop nest that reads and stores along different variables; None for others."""
    variables = nest.lists[ELEMENTS]
    if nest.levels or nest.stores or len(variables) < 2 or _most_lanes(nest) < TILE_AREA // THREADS:
        return None
    last = variables[-1]
    if not is_side_by_side(flat(nest.place, nest.shape), last):
        return None
    loads = [each for each in accesses(nest, region.program) if each.operand and last.name in each.address.variables()]
    crossed = [each for each in loads if not is_side_by_side(each.address, last)]
    moved = {each: sum(load.moved for load in crossed if is_side_by_side(load.address, each)) for each in variables}
    across = max(variables[:-1], key=lambda each: moved[each])
    if not moved[across] or any((number_of(each.extent) or MIN_TILED) < MIN_TILED for each in (across, last)):
        return None
    own, *_ = _best_lanes(nest, region)
    if max(cost_of_bytes(nest, region), TILE_COST) >= CHEAPER * own:
        return None
    words = _staged_words(nest, across, region)
    if words > MAX_TILED_WORDS:
        return None
    width = width_along(nest, across, region, "branches")
    store_width = _store_width(nest, region) if region.aligned else 1
    vectors = THREADS * min(width, store_width)
    area = tile_area(region.sizes.value(nest.count(ELEMENTS)), vectors, words, region.device)
    sides = tile_sides(across.extent, last.extent, area)
    return Tile(THREADS, width, across.name, sides, store_width)


def _staged_words(nest: Nest, across: Variable, region: Region) -> int:
    """Return the words of shared memory per element of a tile."""
    staged = staged_values(nest, across, region.program, region.shapes)
    return sum(BYTES[region.program.dtypes[name]] // 4 or 1 for name, _ in staged)


def _store_width(nest: Nest, region: Region) -> int:
    """Return the elements per vector with which all outputs are stored along the last variable."""
    last, address = nest.lists[ELEMENTS][-1], flat(nest.place, nest.shape)
    widest = min(_widest(nest), VECTOR_BYTES // max(BYTES[region.program.dtypes[name]] for name in nest.outputs))
    widths = _widths(last.extent, widest, region.sizes)
    return next((each for each in widths if Lanes(last.name, each).are_contiguous(address, region.sizes)), 1)


def fastest_variables(nest: Nest, region: Region, stored: StoredByKey) -> Nest:
    """Return a loop nest with the variables, and their order, that make an element cheapest.

    A nest with reductions is returned unchanged.
    """
    if nest.levels or nest.stores or len(nest.lists[ELEMENTS]) < 2 or _tile(nest, region):
        return nest
    others = [flattened(nest, region.program, region.shapes, stored), *_turned(nest, region)]
    if len(nest.lists[ELEMENTS]) > 2:
        behind = flattened(nest, region.program, region.shapes, stored, kept=1)
        others += [behind] if _best_lanes(behind, region)[2] != ONCE else []

    def taken(each: Nest) -> tuple[float, int]:
        own, lanes, repeats = _best_lanes(each, region)
        short = interleaved(each)
        if short and short.name == repeats[0]:
            order = 1  # if costs are equal, this nest is preferred, because it takes fewer instructions
        else:
            order = 0 if each is nest and repeats == ONCE else 2 if repeats == ONCE else 3
        return own / (CHEAPER if lanes.scattered else 1), order

    return min([nest, *others], key=taken)


def _turned(nest: Nest, region: Region) -> Iterator[Nest]:
    """Yield a loop nest in which the variable along which most bytes are read is innermost; nothing if it is already.

    In that nest, operands are loaded as vectors, and neighbouring threads store neighbouring elements.
    """
    variables, last = nest.lists[ELEMENTS], nest.lists[ELEMENTS][-1]
    loads = [each for each in accesses(nest, region.program) if each.operand]
    moved = {each: sum(load.moved for load in loads if load.address.factor(each.name) == 1) for each in variables}
    along = max(variables, key=lambda each: (moved[each], each == last))
    if along != last:
        yield replace(nest, lists={**nest.lists, ELEMENTS: (*(each for each in variables if each != along), along)})


def _best_lanes(nest: Nest, region: Region) -> tuple[float, Lanes, Repeats]:
    """Return the least cost per element of a loop nest without reductions, and the lanes and repeats that have it."""
    variables = nest.lists[ELEMENTS]
    name, names = (variables[-1].name if variables else ""), frozenset(each.name for each in variables)
    whole = Lanes(name, width_along(nest, ELEMENTS, region))
    others = [Lanes(name, width_along(nest, ELEMENTS, region, "branches"))]
    others += [Lanes(name, width_along(nest, ELEMENTS, region, "stores"))]
    apart = [width for width in (MAX_WIDTH, MAX_WIDTH // 2) if width <= _widest(nest)]
    others += [Lanes("", width, names) for width in apart] if names else []
    found = {(lanes, ONCE): cost(nest, lanes, region) for lanes in dict.fromkeys([whole, *others])}
    short = interleaved(nest)
    repeating = [interleaved_lanes(short, others[1])] if short else [whole, *others[:2]]
    for lanes in dict.fromkeys(repeating):
        for repeats in _repeats(nest, lanes.width, region):
            own = cost(nest, lanes, region, *repeats)
            count = region.sizes.value(nest.count(ELEMENTS))
            few = not short and _are_few(count, lanes.width * repeats[1], region.device)
            found[lanes, repeats] = own / (CHEAPER if few else 1)
    best = min(found, key=lambda each: (found[each], each[0].scattered != frozenset()))
    chosen = best if found[best] < CHEAPER * found[whole, ONCE] else (whole, ONCE)
    return found[chosen], *chosen


def _repeats(nest: Nest, width: int, region: Region) -> Iterator[Repeats]:
    """Yield repeats that save loads: a variable, and a number of its values that each thread computes.

    At each step all lanes of a warp have the same value of the variable, so that accesses stay as contiguous as before.
    At least half of the threads that the GPU can hold must remain, and loads must not be in a branch, so that all loads
    are in flight together.  Fewer threads suffice if each of them first loads its operands for all values.  Threads
    with single elements gain nothing: Swin's biases take a tenth longer with repeats.

    If the outputs' innermost variable is short, a thread computes all of its values; the compiler then knows the value
    that selects a part of a Concat.
    """
    count = region.sizes.value(nest.count(ELEMENTS))
    if is_symbolic(count) or nest.inner:
        return
    short = interleaved(nest)
    if short and isinstance(short.extent, int):
        own = width * short.extent
        dtypes = [region.program.dtypes[name] for name in nest.outputs]
        chunks = [BYTES[dtype] * chunk_of(own, dtype) for dtype in dtypes]
        is_enough = count // own >= REPEATING_THREADS * region.device.multiprocessors
        is_enough = is_enough and own <= min(MAX_INTERLEAVED, _most_lanes(nest))
        is_known = all(index.variables() <= {short.name} for index, _ in nest.bounds)
        if is_enough and is_known and min(chunks) >= MIN_CHUNK_BYTES:
            yield short.name, short.extent
        return
    if nest.bounds or width == 1:
        return
    loads, inner = [each.address.variables() for each in accesses(nest, region.program) if each.operand], 1
    for before, each in itertools.pairwise(reversed(nest.lists[ELEMENTS])):
        inner *= typical(before.extent)
        if inner >= WARP * width and any(read and each.name not in read for read in loads):
            repeats = MAX_REPEATS
            while repeats > 1:
                is_ahead = _bytes_along(nest, each, region) * width * repeats <= AHEAD_BYTES
                is_enough = count // (width * repeats) >= AHEAD_THREADS * region.device.multiprocessors
                is_enough = is_enough if is_ahead else not _are_few(count, width * repeats, region.device)
                is_enough = is_enough and width * repeats <= _most_lanes(nest)
                if is_enough and region.sizes.divisor(each.extent) % repeats == 0:
                    yield each.name, repeats
                repeats //= 2


def _are_few(count: int, elements: int, device: Device) -> bool:
    """Return whether threads with `elements` elements each are too few to hide the latency of a load per thread."""
    return count // elements < REPEATING_THREADS * device.multiprocessors


def _most_lanes(nest: Nest) -> int:
    """Return the maximum number of elements per thread, which decreases with the instructions per element."""
    return MAX_INSTRUCTIONS // max(1, nest.instructions)


def _widest(nest: Nest) -> int:
    """Return the maximum number of elements per vector of a thread."""
    return next((width for width in (8, 4, 2) if width <= _most_lanes(nest)), 1)


def _bytes_along(nest: Nest, variable: Variable, region: Region) -> int:
    """Return the bytes per element of all operands whose address depends on a variable."""
    reads = (each for each in accesses(nest, region.program) if each.operand)
    return sum(each.item_bytes for each in reads if variable.name in each.address.variables())


def of_one_block(tilings: Sequence[Tiling]) -> list[Tiling]:
    """Return tilings with equally many threads per block, because one launch runs the blocks of all loop nests.

    With several nests, none keeps rows in shared memory: all blocks of the launch would reserve that memory, and few
    blocks would be resident.
    """
    threads = max(each.threads for each in tilings)

    def of_block(each: Tiling) -> Tiling:
        if isinstance(each, Columns) and each.columns == each.threads:
            return replace(each, threads=threads, columns=threads)
        if isinstance(each, Rows) and len(tilings) > 1:
            return replace(each, threads=threads, memory=0)
        return replace(each, threads=threads)

    return list(map(of_block, tilings))


def _narrowed(count: int, width: int, device: Device, vectors: int = SMALL_VECTORS) -> int:
    """Return a smaller width if a tensor has fewer than `vectors` vectors per multiprocessor; else `width`."""
    small = vectors * device.multiprocessors
    if is_symbolic(count):
        return min(width, SMALL_WIDTH) if estimate(count // width) < small else width
    while width > SMALL_WIDTH and count // width < small:
        width //= 2
    return width


def _prefers_columns(nest: Nest, name: str, region: Region) -> bool:
    """Return whether adjacent threads get adjacent rows: if more accesses are then contiguous, or if rows are short."""
    rows, elements = nest.lists[ROWS], nest.lists[name]
    if not rows:
        return False
    length = number_of(nest.count(name))
    if not elements or (length is not None and length <= MAX_SERIAL):
        return True
    return moved_along(nest, rows[-1], region.program) > moved_along(nest, elements[-1], region.program)


def width_along(nest: Nest, name: str | Variable, region: Region, split_by: SplitBy = "") -> int:
    """Return the elements per vector along a variable, or along the last variable of a list.

    The width divides the variable's extent, unless the nest has only this variable: then single elements follow the
    last vector.  The result is the width with which whole vectors move the most bytes; among equals, the widest.
    Neither stores nor branches may split a vector, unless `split_by` is "branches", which allows branches to split it,
    or "stores", which allows both.  A vector of the operand with the most bytes has at most 16 bytes; vectors of other
    operands may take several loads.
    """
    last = name if isinstance(name, Variable) else next(reversed(nest.lists[name]), None)
    if last is None or not region.aligned:
        return 1
    along = [each for each in accesses(nest, region.program) if each.address.factor(last.name) == 1]
    if not along:
        return 1
    widest = min(_widest(nest), VECTOR_BYTES // max(along, key=lambda each: each.moved).item_bytes)
    best, most = 1, 0
    is_flat = not nest.levels and len(nest.lists[ELEMENTS]) == 1
    for width in _all_widths(widest) if is_flat else _widths(last.extent, widest, region.sizes):
        lanes = Lanes(last.name, width)
        if not split_by and not all(lanes.are_on_one_side(index, bound, region.sizes) for index, bound in nest.bounds):
            continue
        whole = [each for each in along if lanes.are_contiguous(each.address, region.sizes)]
        is_stored_so = split_by == "stores" or all(each.operand or each in whole for each in along)
        moved = sum(each.moved for each in whole)
        if is_stored_so and moved > most:
            best, most = width, moved
    return best


def _all_widths(widest: int) -> Iterator[int]:
    """Yield powers of two as widths, the widest first; separate threads compute the elements after the last vector."""
    while widest > 1:
        yield widest
        widest //= 2


def _widths(extent: Size, widest: int, sizes: Sizes) -> Iterator[int]:
    """Yield widths that divide an extent, the widest first.

    If an extent is dynamic, and `widest` divides its present value, the plan is restricted to extents that `widest`
    divides.
    """
    known = sizes.divisor(extent)
    if known % widest and not isinstance(extent, int) and sizes.value(extent) % widest == 0:
        sizes.note_divisor(extent, widest)
        known = widest
    width = widest
    while width > 1:
        if known % width == 0:
            yield width
        width //= 2
