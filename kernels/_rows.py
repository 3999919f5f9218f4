"""How rows are divided among threads, warps, blocks and clusters: the host side of rows.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._types import VECTOR_BYTES, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Plan, TensorSpec

MAX_GRID: Final = 2**31 - 1
CLUSTER_ARCH: Final = 90
MAX_CLUSTER: Final = 8  # the portable limit
MAX_THREADS: Final = 1024

# Values per thread, which live in fp32 registers beside their weights: 48 registers for 16, up to 80 for 32.
USUAL_VALUES: Final = 16
MOST_VALUES: Final = 32
WARP_VALUES: Final = 32  # up to this a warp has the row to itself: no barrier
EARLY_VALUES: Final = 16  # up to this there are registers for weights that are loaded along with the row
BLOCK_VALUES: Final = 20  # the most in a block of 1024 threads, which have 64 registers each
RESIDENT_BYTES: Final = 48 << 10  # of rows that a multiprocessor shall hold, where registers limit it
USUAL_THREADS: Final = 512  # of a block, before threads take more values
CLUSTER_THREADS: Final = 256  # of a block that shares its row: several such blocks fit on a multiprocessor
LONG_THREADS: Final = 512  # of a block whose rows do not fit into registers
LONG_CHUNKS: Final = 8  # and vectors per thread and batch, of which each needs addresses of its own
WARP_BLOCK: Final = 128  # threads of a block whose rows are of a warp or less


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
    min_blocks: int = 1

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
            "MIN_BLOCKS": self.min_blocks,
        }


def tiling(rows: int, length: int, width: int, device: Device, most_threads: int = USUAL_THREADS) -> Tiling:
    """A tiling for `rows` rows of `length` elements, loaded `width` at a time.

    `most_threads` of a block, as long as these can hold the row.
    """
    packs = length // width
    few = rows <= 2 * device.multiprocessors  # then a row's latency is all that counts
    if length <= 32 * WARP_VALUES and not (few and packs > 32):
        return _warp_rows(rows, packs, width, device)
    threads, cluster = _few_rows(packs, width, device) if few else _many_rows(packs, width, device, most_threads)
    chunks = _over(packs, threads * cluster)
    if chunks * width > (BLOCK_VALUES if threads == MAX_THREADS else MOST_VALUES):
        return Tiling(width, LONG_THREADS, min(LONG_CHUNKS, USUAL_VALUES // width), 1, cluster)
    early = chunks * width <= EARLY_VALUES
    resident = RESIDENT_BYTES // (threads * chunks * VECTOR_BYTES)
    return Tiling(width, threads, chunks, 1, cluster, early, min_blocks=1 if early else max(1, resident))


def _warp_rows(rows: int, packs: int, width: int, device: Device) -> Tiling:
    """A warp or less for a row; fewer rows in a block where there would be too few blocks."""
    threads = min(32, _power(packs))
    chunks = _over(packs, threads)
    side_by_side = WARP_BLOCK // threads
    while side_by_side * threads > 32 and _over(rows, side_by_side) < 2 * device.multiprocessors:
        side_by_side //= 2
    return Tiling(width, threads, chunks, side_by_side, early=chunks * width <= EARLY_VALUES)


def _few_rows(packs: int, width: int, device: Device) -> tuple[int, int]:
    """(threads, cluster): one value or vector per thread, then more, then more threads, then more blocks."""
    if packs * width <= USUAL_THREADS * USUAL_VALUES:
        return min(USUAL_THREADS, _power(packs)), 1
    return _spread(packs, MAX_THREADS, USUAL_VALUES // width, device)


def _many_rows(packs: int, width: int, device: Device, most_threads: int) -> tuple[int, int]:
    """(threads, cluster): few values per thread, then more threads, then more blocks, then more values."""
    if packs * width <= USUAL_THREADS * USUAL_VALUES:
        return min(most_threads, _power(packs * width / USUAL_VALUES)), 1
    return _spread(packs, CLUSTER_THREADS, MOST_VALUES // width, device)


def _spread(packs: int, threads: int, chunks: int, device: Device) -> tuple[int, int]:
    """(threads, cluster): as many blocks of `threads` as take `chunks` each; larger blocks if there are too few."""
    most = MAX_CLUSTER if device.arch >= CLUSTER_ARCH else 1
    cluster = min(most, _power(packs / (threads * chunks)))
    return min(MAX_THREADS, _power(packs / (cluster * chunks))), cluster


def _power(number: float) -> int:
    """The power of two that is not less."""
    result = 1
    while result < number:
        result *= 2
    return result


def _over(number: int, parts: int) -> int:
    return -(-number // parts)


def row_launch(kernel: str, tiles: Tiling, rows: int, defines: Defines, arguments: Sequence[Argument]) -> Launch:
    """The launch of a kernel of rows.cuh."""
    groups, most = _over(rows, tiles.rows_per_block), MAX_GRID // tiles.cluster
    tiles, blocks = replace(tiles, loop=tiles.loop or groups > most), min(groups, most)
    return Launch(
        Kernel(kernel, kernel, {**defines, **tiles.defines}),
        (blocks * tiles.cluster, 1, 1),
        (tiles.threads, tiles.rows_per_block, 1),
        tuple(arguments),
        cluster=tiles.cluster,
    )


def row_plan(outputs: Sequence[TensorSpec], rows: int, length: int, launch: Launch) -> Plan:
    """No launch where there is nothing to compute."""
    return Plan(tuple(outputs), (launch,) if rows * length else ())
