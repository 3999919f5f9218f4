"""How rows are divided among threads, warps, blocks and clusters: the host side of rows.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._types import EARLY_ARCH, VECTOR_BYTES, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Plan, TensorSpec

MAX_GRID: Final = 2**31 - 1
CLUSTER_ARCH: Final = 90
MAX_CLUSTER: Final = 8  # the portable limit
MAX_THREADS: Final = 1024

# Values per thread live in fp32 registers beside their weights: 48 registers for 16 values, up to 80 for 32.
USUAL_VALUES: Final = 16
MOST_VALUES: Final = 32
WARP_VALUES: Final = 32  # up to this a warp has the row to itself: no barrier
EARLY_VALUES: Final = 16  # up to this there are registers for weights that are loaded along with the row
WARP_EARLY_VALUES: Final = 24  # the same in a warp's row that nothing is added to
BLOCK_VALUES: Final = 20  # the most in a block of 1024 threads, which have 64 registers each
USUAL_THREADS: Final = 512  # of a block, before threads take more values
RESIDENT_BYTES: Final = 48 << 10  # of rows that a multiprocessor shall hold, where registers limit it
WARP_BLOCK: Final = 128  # threads of a block whose rows are of a warp or less
REGISTERS: Final = 65536  # of a multiprocessor
# Registers of a thread that holds a part of a row and loads the next one's, and how many of them may hold data, as
# addresses and sums need some: of a warp's row with its weights, and of a block's without.
WARP_LOOP: Final = (128, 72)
BLOCK_LOOP: Final = (64, 32)
FEW_LOOPS: Final = 4  # up to so many rows of a block a loop is expected to be faster than blocks that come and go
MANY_BLOCKS: Final = (80, 90, 100)  # compute capabilities with 32 resident blocks on a multiprocessor, of a warp each
MOST_BLOCKS: Final = 16  # on the others
FEWEST_REGISTERS: Final = 64  # per thread, to which a kernel may be held: fewer would slow none down, but help none

# Few rows: their latency is all that counts, so that many chunks are better than a wide block's barrier (33x1023 fp16,
# layer_norm on an H200: 1.51 us with 128 threads, 1.65 with 512), and more blocks than threads without work
# (64 rows of 40960, group_norm: 6.6 us in clusters of 8 with 128 threads, 13.3 in clusters of 4 with 1024).
FEW_CHUNKS: Final = 8
FEW_VALUES: Final = 40
FEW_THREADS: Final = 128

# Short rows that are small altogether: narrower vectors for more threads or more loads of a thread at once (4096x64
# fp16, layer_norm: 1.87 us with vectors of 2, 2.04 with 8).
SMALL_ELEMENTS: Final = 1 << 19
SHORT_ROW: Final = 256
SHORT_WIDTH: Final = 2
SHORT_VALUES: Final = 8

# Long rows are held in shared memory: 512x65536 fp16 takes 39 us on an H200, 43 in registers, because three blocks'
# worth is on its way at once. With a residual there is twice as much to hold, and registers are faster.
HELD_BLOCKS: Final = ((512, 2), (256, 3))  # threads, resident blocks: where one has the row, where several share it
HELD_CHUNKS: Final = 4
HELD_BYTES: Final = 64 << 10  # of a block, so that three are resident
SPARE_BYTES: Final = 12 << 10  # of a block's shared memory, for partials
SPREAD_THREADS: Final = 512  # of a block that shares its row with others in registers
SPREAD_BLOCKS: Final = 2
LONG_THREADS: Final = 512  # of a block whose rows are read twice
LONG_CHUNKS: Final = 8  # and vectors per thread and batch, of which each needs addresses of its own


@dataclass(frozen=True)
class Tiling:
    """The constants of rows.cuh."""

    width: int
    threads: int
    chunks: int
    rows_per_block: int = 1
    cluster: int = 1
    early: bool = False
    loop: bool = False
    held: bool = False
    min_blocks: int = 1
    most_blocks: int = MAX_GRID  # of a launch; with fewer than there are rows for, blocks take further ones in a loop

    @property
    def defines(self) -> Defines:
        """For the compiler."""
        return {
            "WIDTH": self.width,
            "THREADS": self.threads,
            "CHUNKS": self.chunks,
            "ROWS_PER_BLOCK": self.rows_per_block,
            "CLUSTER": self.cluster,
            "EARLY": int(self.early),
            "LOOP": int(self.loop),
            "HELD": int(self.held),
            "MIN_BLOCKS": self.min_blocks,
        }


def tiling(
    rows: int,
    length: int,
    width: int,
    device: Device,
    item_bytes: Sequence[int],
    weight_bytes: int = 0,
    most_threads: int = USUAL_THREADS,
) -> Tiling:
    """A tiling for `rows` rows of `length` elements, loaded `width` at a time.

    An element takes `item_bytes` of each input, and `weight_bytes` of what all rows share; `most_threads` of a block,
    as long as these can hold the row.  Raises ValueError for rows whose elements 31 bits do not count.
    """
    if length >= 2**31:
        raise ValueError(f"a row has {length} elements; the kernels take less than 2**31")
    few = rows <= 2 * device.multiprocessors
    if length <= 32 * WARP_VALUES and not (few and length // width > 32):
        tiles = _warp_rows(rows, length, width, few, len(item_bytes) > 1, device)
        return replace(tiles, min_blocks=_one_wave(rows, tiles, device, item_bytes, weight_bytes))
    if length <= USUAL_THREADS * USUAL_VALUES:
        values = min(USUAL_VALUES, FEW_CHUNKS * width) if few else USUAL_VALUES
        threads = min(USUAL_THREADS if few else most_threads, max(32, _power(length / values)))
        return _kept(length // width, width, threads)
    if few:
        tiles = _few_spread(length // width, width, device)
    else:
        tiles = _many_spread(length // width, width, item_bytes, device)
        if tiles and tiles.cluster > 1 and len(item_bytes) == 1:
            tiles = None
    return tiles or _held(length, width, item_bytes, device)


def _warp_rows(rows: int, length: int, width: int, few: bool, adds: bool, device: Device) -> Tiling:
    """A warp or less for a row; fewer rows in a block where there would be too few blocks."""
    threads = min(32, _power(length // width))
    if rows * length <= SMALL_ELEMENTS and few:
        width = min(width, max(1, _power(length / 32 + 1) // 2))
        threads = min(32, _power(length // width))
    elif rows * length <= SMALL_ELEMENTS and length <= SHORT_ROW:
        width = min(width, SHORT_WIDTH)
        threads = min(threads, max(SHORT_VALUES, _power(length / SHORT_VALUES)))
    chunks, side_by_side = _over(length // width, threads), WARP_BLOCK // threads
    while not few and side_by_side * threads > 32 and _over(rows, side_by_side) < 2 * device.multiprocessors:
        side_by_side //= 2
    early = chunks * width <= (EARLY_VALUES if adds else WARP_EARLY_VALUES)
    return Tiling(width, threads, chunks, side_by_side, early=early)


def looping(
    tiles: Tiling, rows: int, length: int, device: Device, item_bytes: Sequence[int], weight_bytes: int
) -> Tiling | None:
    """The same with resident blocks only, which load their next rows while they compute.

    None where a row has a block, where all rows are resident, and where registers cannot hold it all.
    """
    warp, threads = tiles.threads <= 32, tiles.threads * tiles.rows_per_block
    registers, most_words = WARP_LOOP if warp else BLOCK_LOOP
    resident = REGISTERS // (registers * threads)
    most = resident * device.multiprocessors
    pack = 4 * tiles.width + sum(max(4, tiles.width * size) for size in item_bytes)  # bytes in registers
    words = tiles.chunks * (pack + (tiles.width * weight_bytes if warp else 0)) // 4
    kept = _fits(length // tiles.width, tiles.threads, tiles.chunks, 1) and not tiles.held
    if words > most_words or not kept or device.arch not in MANY_BLOCKS or _over(rows, tiles.rows_per_block) <= most:
        return None
    if not warp and (device.arch < 90 or max(item_bytes) > 2):  # which spill
        return None
    return replace(tiles, early=warp, min_blocks=resident, most_blocks=most)


def loops_win(usual: Tiling, loop: Tiling, rows: int, device: Device) -> bool:
    """Whether a loop is expected to be faster: where the rows are not resident at once, but not many times more."""
    blocks = _over(rows, usual.rows_per_block)
    return usual.min_blocks * device.multiprocessors < blocks <= FEW_LOOPS * loop.most_blocks


def _one_wave(rows: int, tiles: Tiling, device: Device, item_bytes: Sequence[int], weight_bytes: int) -> int:
    """Resident blocks that take all rows at once, as far as there are registers for inputs or values, and weights."""
    if device.arch < 80:
        return 1  # its code needs more registers than this counts
    words = max(4, sum(item_bytes)) + weight_bytes  # of a value, in bytes
    registers = 16 + tiles.width * tiles.chunks * words // 4
    wanted = _over(_over(rows, tiles.rows_per_block), device.multiprocessors)
    fitting = REGISTERS // (max(FEWEST_REGISTERS, 8 * _over(registers, 8)) * tiles.threads * tiles.rows_per_block)
    return max(1, min(wanted, fitting, 32 if device.arch in MANY_BLOCKS else MOST_BLOCKS))


def _kept(packs: int, width: int, threads: int) -> Tiling:
    """A block that has the row in registers."""
    chunks = _over(packs, threads)
    early = chunks * width <= EARLY_VALUES
    resident = max(1, RESIDENT_BYTES // (threads * chunks * VECTOR_BYTES))
    return Tiling(width, threads, chunks, early=early, min_blocks=1 if early else resident)


def _few_spread(packs: int, width: int, device: Device) -> Tiling | None:
    """Many small blocks, then larger ones; None where their registers cannot hold the row."""
    chunks = FEW_VALUES // width
    cluster = _cluster(packs / (FEW_THREADS * chunks), device)
    threads = _power(packs / (cluster * chunks))
    if threads > USUAL_THREADS:
        threads, chunks = MAX_THREADS, BLOCK_VALUES // width
    return (
        Tiling(width, threads, _over(packs, threads * cluster), 1, cluster)
        if _fits(packs, threads, chunks, cluster)
        else None
    )


def _many_spread(packs: int, width: int, item_bytes: Sequence[int], device: Device) -> Tiling | None:
    """As many blocks as take few enough values; None where their registers cannot hold the row."""
    chunks = (MOST_VALUES if max(item_bytes) <= 2 else USUAL_VALUES) // width
    cluster = _cluster(packs / (SPREAD_THREADS * chunks), device)
    if not _fits(packs, SPREAD_THREADS, chunks, cluster):
        return None
    return Tiling(width, SPREAD_THREADS, _over(packs, SPREAD_THREADS * cluster), 1, cluster, min_blocks=SPREAD_BLOCKS)


def _held(length: int, width: int, item_bytes: Sequence[int], device: Device) -> Tiling:
    """Blocks with the row in shared memory; where it does not fit, or inputs differ in width, they read it twice.

    There a thread's vectors of all inputs lie side by side, each of them at a multiple of its size.
    """
    cluster = _cluster(length * sum(item_bytes) / HELD_BYTES, device)
    threads, resident = HELD_BLOCKS[cluster > 1]
    chunks = min(HELD_CHUNKS if device.arch >= CLUSTER_ARCH else 2, MOST_VALUES // width)
    tiles = Tiling(width, threads, chunks, 1, cluster, held=True, min_blocks=resident)
    same = len(set(item_bytes)) == 1
    if same and held_bytes(tiles, length, item_bytes) <= device.shared_per_block - SPARE_BYTES:
        return tiles
    return Tiling(width, LONG_THREADS, min(LONG_CHUNKS, USUAL_VALUES // width), 1, _cluster(MAX_CLUSTER, device))


def held_bytes(tiles: Tiling, length: int, item_bytes: Sequence[int]) -> int:
    """Shared memory of a block for its part of a row: whole words for each input's vectors."""
    slots = tiles.chunks * tiles.threads * _over(length // tiles.width, tiles.threads * tiles.cluster * tiles.chunks)
    return slots * sum(max(4, tiles.width * size) for size in item_bytes)


def _fits(packs: int, threads: int, chunks: int, cluster: int) -> bool:
    return packs <= threads * chunks * cluster


def _cluster(blocks: float, device: Device) -> int:
    """The blocks that share a row, where so many are wanted."""
    return min(MAX_CLUSTER if device.arch >= CLUSTER_ARCH else 1, _power(blocks))


def _power(number: float) -> int:
    """The power of two that is not less."""
    result = 1
    while result < number:
        result *= 2
    return result


def _over(number: int, parts: int) -> int:
    return -(-number // parts)


def row_launch(
    kernel: str,
    tiles: Tiling,
    rows: int,
    defines: Defines,
    arguments: Sequence[Argument],
    item_bytes: Sequence[int],
    device: Device,
) -> Launch:
    """The launch of a kernel of rows.cuh; an element takes `item_bytes` of each input."""
    groups, most = _over(rows, tiles.rows_per_block), min(tiles.most_blocks, MAX_GRID // tiles.cluster)
    many, constant = tiles.width * tiles.chunks > EARLY_VALUES, bool(defines["WEIGHTS_CONSTANT"])
    early = tiles.early and (constant or not many)  # loads that must come before the sum's store would spill
    tiles = replace(tiles, loop=tiles.loop or groups > most, early=early)
    blocks = min(groups, most)
    constants = {
        **defines, **tiles.defines, "FULL_BLOCKS": int(rows % tiles.rows_per_block == 0),
        "RELEASE": int(rows <= 2 * device.multiprocessors),
    }  # fmt: skip
    return Launch(
        Kernel(kernel, kernel, constants),
        (blocks * tiles.cluster, 1, 1),
        (tiles.threads, tiles.rows_per_block, 1),
        tuple(arguments),
        shared=held_bytes(tiles, int(defines["ROW"]), item_bytes) if tiles.held else 0,
        cluster=tiles.cluster,
        early=device.arch >= EARLY_ARCH,
    )


def row_plan(outputs: Sequence[TensorSpec], rows: int, length: int, launch: Launch) -> Plan:
    """No launch where there is nothing to compute."""
    return Plan(tuple(outputs), (launch,) if rows * length else ())
