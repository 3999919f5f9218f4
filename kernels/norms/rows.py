"""Tilings that divide rows among threads, warps, blocks and clusters: the host side of rows.cuh.

If the number of rows is symbolic, fewer tilings are offered, because each is compiled before the first run. Every
tiling is correct for any number of rows. So the choice adds only soft guards: conditions on the sizes for which a plan
is expected to be the fastest, not for which it is correct.
If the length of rows is symbolic, tilings come from any_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.multiprocessor import REGISTERS
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STREAMED_FROM_BYTES,
    VECTOR_BYTES,
    Defines,
    is_streamed,
    macro,
)
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, TensorSpec
from onnxfuse.runtime.symint import always, estimate, is_symbolic, minimum

MAX_GRID: Final = 2**31 - 1  # largest number of blocks per launch
CLUSTER_ARCH: Final = 90  # the lowest compute capability with thread block clusters
MAX_CLUSTER: Final = 8  # blocks per cluster; the portable limit
MAX_THREADS: Final = 1024  # threads per block

# Limits on the values per thread. A thread keeps its values in fp32 registers, together with their weights: 48
# registers for 16 values, up to 80 for 32.
USUAL_VALUES: Final = 16  # values per thread
MAX_VALUES: Final = 32  # values per thread
MAX_WARP_VALUES: Final = 32  # values per thread up to which one warp has a whole row and needs no barrier
MAX_PREFETCH_VALUES: Final = 16  # values per thread up to which registers can also hold weights loaded early
MAX_WARP_PREFETCH_VALUES: Final = 24  # replaces MAX_PREFETCH_VALUES for a row of one warp without a residual
MAX_BLOCK_VALUES: Final = 20  # values per thread in blocks of 1024 threads, where a thread has 64 registers
USUAL_THREADS: Final = 512  # up to this block size, longer rows get more threads, not more values per thread
RESIDENT_BYTES: Final = 48 << 10  # bytes of rows in flight per multiprocessor, which bounds the registers per thread
WARP_BLOCK_THREADS: Final = 128  # threads per block if a row has one warp or less
# (registers per thread, registers for data) of persistent grids, whose threads hold their part of a row and load the
# next row; addresses and sums take the other registers. If a warp has a row, its threads also hold the weights.
WARP_PERSISTENT_REGISTERS: Final = (128, 72)
BLOCK_PERSISTENT_REGISTERS: Final = (64, 32)
MAX_PERSISTENT_ROUNDS: Final = 4  # rows per resident block up to which a persistent grid is expected to be faster
ARCHS_OF_32_BLOCKS: Final = (80, 90, 100)  # compute capabilities with 32 resident blocks per multiprocessor
MAX_RESIDENT_BLOCKS: Final = 16  # resident blocks per multiprocessor on other GPUs
MIN_REGISTERS: Final = 64  # least registers to assume per thread; a lower limit gives no better tilings

# Vectors per thread if there are few rows, where only latency counts. Many vectors per thread are then better than the
# barrier of a large block: layer_norm of 33x1023 fp16 on an H200 takes 1.51 us with 128 threads, and 1.65 with 512.
# Many small blocks are better than few large ones: group_norm of 64 rows of 40960 takes 6.6 us in clusters of 8 blocks
# of 128 threads, and 13.3 us in clusters of 4 blocks of 1024 threads.
FEW_ROWS_CHUNKS: Final = 8
FEW_ROWS_VALUES: Final = 40
FEW_ROWS_THREADS: Final = 128

# Small tensors of short rows use narrower vectors, for more threads or more loads in flight per thread (layer_norm of
# 4096x64 fp16: 1.87 us with vectors of 2, 2.04 us with vectors of 8).
SMALL_ELEMENTS: Final = 1 << 19  # elements of all rows
SHORT_ROW: Final = 256  # largest number of elements of a short row
SHORT_ROW_WIDTH: Final = 2
SHORT_ROW_VALUES: Final = 8

# Long rows are kept in shared memory, so that the loads of three blocks are in flight at once: 512x65536 fp16 takes
# 39 us on an H200, and 43 us in registers. With a residual there are twice as many bytes, and registers are faster.
SHARED_BLOCKS: Final = ((512, 2), (256, 3))  # (threads, resident blocks): one block per row, several blocks per row
SHARED_CHUNKS: Final = 4
SHARED_BYTES: Final = 64 << 10  # bytes per block, so that three blocks are resident
SPARE_SHARED_BYTES: Final = 12 << 10  # bytes per block for partial sums
CLUSTER_THREADS: Final = 512  # threads per block of a cluster that keeps a row in registers
CLUSTER_MIN_BLOCKS: Final = 2
REREAD_THREADS: Final = 512  # threads per block that reads its rows twice
REREAD_CHUNKS: Final = 8  # vectors per thread and batch if rows are read twice


@dataclass(frozen=True)
class RowTiling:
    """A choice of macros of rows.cuh, and the bound on the grid."""

    width: int
    threads: int
    chunks: int
    rows_per_block: int = 1
    cluster: int = 1
    prefetch_weights: bool = False
    persistent: bool = False
    in_shared: bool = False
    min_blocks: int = 1
    max_blocks: int = MAX_GRID  # blocks per launch; if rows exceed this, blocks loop over rows
    longest: int | None = None  # for a symbolic length: maximum elements of a row, or 0 for no limit; else None

    @property
    def defines(self) -> Defines:
        """The compile-time macros that describe the tiling to rows.cuh."""
        return {
            "WIDTH": self.width,
            "THREADS": self.threads,
            "CHUNKS": self.chunks,
            "ROWS_PER_BLOCK": self.rows_per_block,
            "CLUSTER": self.cluster,
            "PREFETCH_WEIGHTS": int(self.prefetch_weights),
            "PERSISTENT": int(self.persistent),
            "IN_SHARED": int(self.in_shared),
            "MIN_BLOCKS": self.min_blocks,
        }


def row_tiling(
    rows: int,
    length: int,
    width: int,
    device: Device,
    item_bytes: Sequence[int],
    weight_bytes: int = 0,
    max_threads: int = USUAL_THREADS,
) -> RowTiling:
    """Return the tiling for `rows` rows of `length` elements; one load takes `width` of them.

    `item_bytes` are the bytes per element of each input; `weight_bytes` are the bytes per element of operands that all
    rows share. A block has at most `max_threads` threads, unless they cannot hold the row. Raises ValueError for rows
    of 2**31 elements or more.
    """
    if length >= 2**31:
        raise ValueError(f"a row has {length} elements; the kernels take less than 2**31")
    few = estimate(rows) <= 2 * device.multiprocessors
    if length <= 32 * MAX_WARP_VALUES and not (few and length // width > 32):
        tiling = _rows_of_warps(rows, length, width, few, len(item_bytes) > 1, device)
        resident = resident_blocks(tiling, device, item_bytes, weight_bytes)
        wanted = 1 if few else _ceil_div(_ceil_div(rows, tiling.rows_per_block), device.multiprocessors)
        return replace(tiling, min_blocks=resident if is_symbolic(wanted) else min(resident, wanted))
    if length <= USUAL_THREADS * USUAL_VALUES:
        values = min(USUAL_VALUES, FEW_ROWS_CHUNKS * width) if few else USUAL_VALUES
        threads = min(USUAL_THREADS if few else max_threads, max(32, _next_power_of_two(length / values)))
        return _row_of_a_block(length // width, width, threads)
    if few:
        found = _few_rows_of_clusters(length // width, width, device)
    else:
        found = _many_rows_of_clusters(length // width, width, item_bytes, device)
        if found and found.cluster > 1 and len(item_bytes) == 1:
            found = None
    return found or _row_in_shared_memory(length, width, item_bytes, device)


def persistent_tiling(
    tiling: RowTiling, rows: int, length: int, device: Device, item_bytes: Sequence[int], weight_bytes: int
) -> RowTiling | None:
    """Return the tiling with a persistent grid: only resident blocks, which load their next row while they compute.

    Return None if all rows are resident at once, or if the rows, the next rows and the weights exceed the registers.
    """
    is_warp, threads = tiling.threads <= 32, tiling.threads * tiling.rows_per_block
    registers, max_words = WARP_PERSISTENT_REGISTERS if is_warp else BLOCK_PERSISTENT_REGISTERS
    resident = REGISTERS // (registers * threads)
    max_blocks = resident * device.multiprocessors
    pack = 4 * tiling.width + sum(max(4, tiling.width * size) for size in item_bytes)  # register bytes per vector
    words = tiling.chunks * (pack + (tiling.width * weight_bytes if is_warp else 0)) // 4
    in_registers = _fits(length // tiling.width, tiling.threads, tiling.chunks, 1) and not tiling.in_shared
    if words > max_words or not in_registers or device.arch not in ARCHS_OF_32_BLOCKS:
        return None
    if estimate(_ceil_div(rows, tiling.rows_per_block)) <= max_blocks:
        return None
    if not is_warp and (device.arch < 90 or max(item_bytes) > 2):  # persistent blocks would spill registers here
        return None
    return replace(tiling, prefetch_weights=is_warp, min_blocks=resident, max_blocks=max_blocks)


def persistent_is_faster(usual: RowTiling, persistent: RowTiling, rows: int, device: Device) -> bool:
    """Return whether a persistent grid is expected to be faster.

    It is faster if the usual grid has more blocks than the GPU holds at once, but at most MAX_PERSISTENT_ROUNDS times
    as many as the persistent grid.
    """
    blocks = estimate(_ceil_div(rows, usual.rows_per_block))
    return bool(usual.min_blocks * device.multiprocessors < blocks <= MAX_PERSISTENT_ROUNDS * persistent.max_blocks)


def with_registers_to_spare(tiling: RowTiling) -> RowTiling | None:
    """Return the tiling with registers left for the operands of fused operators; None if there are too few."""
    if tiling.threads <= 32:
        return tiling
    return None if tiling.max_blocks < MAX_GRID else replace(tiling, min_blocks=max(1, tiling.min_blocks - 1))


def _rows_of_warps(rows: int, length: int, width: int, few: bool, adds: bool, device: Device) -> RowTiling:
    """Return a tiling with at most one warp per row, and fewer rows per block if there would be too few blocks.

    Blocks have 32 to 128 threads; if the number of rows is symbolic, 64 or 128.
    """
    threads, most, least = min(32, _next_power_of_two(length // width)), WARP_BLOCK_THREADS, 32
    if is_symbolic(rows) and not few:
        least = WARP_BLOCK_THREADS // 2
    small = estimate(rows * length) <= SMALL_ELEMENTS
    if small and few:
        width = min(width, max(1, _next_power_of_two(length / 32 + 1) // 2))
        threads = min(32, _next_power_of_two(length // width))
    elif small and length <= SHORT_ROW:
        width = min(width, SHORT_ROW_WIDTH)
        threads = min(threads, max(SHORT_ROW_VALUES, _next_power_of_two(length / SHORT_ROW_VALUES)))
        most = least if is_symbolic(rows) else most
    chunks, rows_per_block = _ceil_div(length // width, threads), most // threads
    blocks = 2 * device.multiprocessors
    while not few and rows_per_block * threads > least and estimate(_ceil_div(rows, rows_per_block)) < blocks:
        rows_per_block //= 2
    prefetch = chunks * width <= (MAX_PREFETCH_VALUES if adds else MAX_WARP_PREFETCH_VALUES)
    return RowTiling(width, threads, chunks, rows_per_block, prefetch_weights=prefetch)


def resident_blocks(tiling: RowTiling, device: Device, item_bytes: Sequence[int], weight_bytes: int) -> int:
    """Return how many blocks fit on a multiprocessor if registers hold rows (as stored or in fp32) and weights."""
    if device.arch < 80:
        return 1  # code for these GPUs needs more registers than are counted here
    words = max(4, sum(item_bytes)) + weight_bytes  # bytes per value
    registers = 16 + tiling.width * tiling.chunks * words // 4
    per_thread = max(MIN_REGISTERS, 8 * _ceil_div(registers, 8))
    fitting = REGISTERS // (per_thread * tiling.threads * tiling.rows_per_block)
    return max(1, min(fitting, 32 if device.arch in ARCHS_OF_32_BLOCKS else MAX_RESIDENT_BLOCKS))


def _row_of_a_block(packs: int, width: int, threads: int) -> RowTiling:
    """Return a tiling whose blocks each keep one row in registers."""
    chunks = _ceil_div(packs, threads)
    prefetch = chunks * width <= MAX_PREFETCH_VALUES
    resident = max(1, RESIDENT_BYTES // (threads * chunks * VECTOR_BYTES))
    return RowTiling(width, threads, chunks, prefetch_weights=prefetch, min_blocks=1 if prefetch else resident)


def _few_rows_of_clusters(packs: int, width: int, device: Device) -> RowTiling | None:
    """Return a tiling for few rows: clusters of small blocks, else of larger ones; None if a row does not fit."""
    chunks = FEW_ROWS_VALUES // width
    cluster = cluster_size(packs / (FEW_ROWS_THREADS * chunks), device)
    threads = _next_power_of_two(packs / (cluster * chunks))
    if threads > USUAL_THREADS:
        threads, chunks = MAX_THREADS, MAX_BLOCK_VALUES // width
    if not _fits(packs, threads, chunks, cluster):
        return None
    return RowTiling(width, threads, _ceil_div(packs, threads * cluster), 1, cluster)


def _many_rows_of_clusters(packs: int, width: int, item_bytes: Sequence[int], device: Device) -> RowTiling | None:
    """Return a tiling with enough blocks per row to fit the values into registers; None if the row is too long."""
    chunks = (MAX_VALUES if max(item_bytes) <= 2 else USUAL_VALUES) // width
    cluster = cluster_size(packs / (CLUSTER_THREADS * chunks), device)
    if not _fits(packs, CLUSTER_THREADS, chunks, cluster):
        return None
    chunks = _ceil_div(packs, CLUSTER_THREADS * cluster)
    return RowTiling(width, CLUSTER_THREADS, chunks, 1, cluster, min_blocks=CLUSTER_MIN_BLOCKS)


def _row_in_shared_memory(length: int, width: int, item_bytes: Sequence[int], device: Device) -> RowTiling:
    """Return a tiling whose blocks keep the row in shared memory, or else read it twice.

    The row is read twice if it does not fit, or if inputs differ in item size: in shared memory, a thread's vectors of
    all inputs are adjacent, and each must be aligned to its size.
    """
    cluster = cluster_size(length * sum(item_bytes) / SHARED_BYTES, device)
    threads, resident = SHARED_BLOCKS[cluster > 1]
    chunks = min(SHARED_CHUNKS if device.arch >= CLUSTER_ARCH else 2, MAX_VALUES // width)
    tiling = RowTiling(width, threads, chunks, 1, cluster, in_shared=True, min_blocks=resident)
    same_width = len(set(item_bytes)) == 1
    if same_width and shared_bytes(tiling, length, item_bytes) <= device.shared_per_block - SPARE_SHARED_BYTES:
        return tiling
    chunks = min(REREAD_CHUNKS, USUAL_VALUES // width)
    return RowTiling(width, REREAD_THREADS, chunks, 1, cluster_size(MAX_CLUSTER, device))


def shared_bytes(tiling: RowTiling, length: int, item_bytes: Sequence[int]) -> int:
    """Return the bytes of shared memory with which a block keeps its part of a row, each vector in whole words."""
    per_batch = tiling.chunks * tiling.threads
    slots = per_batch * _ceil_div(length // tiling.width, per_batch * tiling.cluster)
    return slots * sum(max(4, tiling.width * size) for size in item_bytes)


def _fits(packs: int, threads: int, chunks: int, cluster: int) -> bool:
    return packs <= threads * chunks * cluster


def cluster_size(wanted: float, device: Device) -> int:
    """Return a valid cluster size for `wanted` blocks per row."""
    return min(MAX_CLUSTER if device.arch >= CLUSTER_ARCH else 1, _next_power_of_two(wanted))


def _next_power_of_two(number: float) -> int:
    """Return the lowest power of two that is not less than the number."""
    result = 1
    while result < number:
        result *= 2
    return result


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def streamed_rows(tensors: Sequence[TensorSpec], length: int, width: int) -> int | str:
    """Return the macro STREAMED for tensors of these rows; for symbolic sizes, an expression over kernel arguments.

    For symbolic sizes and single-element accesses, the macro is 0, because a choice between two stores at run time
    takes too many registers.
    """
    if width == 1:
        return is_streamed(tensors)
    row_bytes = sum(ITEM_BYTES[tensor.dtype] for tensor in tensors)
    if is_symbolic(length):
        return is_streamed(tensors, f"rows * length > {STREAMED_FROM_BYTES // row_bytes}")
    return is_streamed(tensors, f"rows > {STREAMED_FROM_BYTES // (row_bytes * length)}")


def row_launch(
    kernel: str,
    tiling: RowTiling,
    rows: int,
    defines: Defines,
    arguments: Sequence[Argument],
    item_bytes: Sequence[int],
    device: Device,
) -> Launch:
    """Return the launch of a kernel of rows.cuh; `item_bytes` are the bytes per element of each input.

    Raises ValueError if the number of rows is symbolic and the rows need more blocks than a launch can have.
    """
    groups, max_blocks = _ceil_div(rows, tiling.rows_per_block), min(tiling.max_blocks, MAX_GRID // tiling.cluster)
    many, constant = tiling.width * tiling.chunks > MAX_PREFETCH_VALUES, bool(defines["WEIGHTS_CONSTANT"])
    prefetch = tiling.prefetch_weights and (constant or not many)  # early weight loads can spill registers
    further = tiling.max_blocks < MAX_GRID if is_symbolic(rows) else groups > max_blocks
    if is_symbolic(rows) and not further and groups > max_blocks:
        raise ValueError(f"{kernel}: {rows} rows are more than a launch has blocks for")
    tiling = replace(tiling, persistent=tiling.persistent or further, prefetch_weights=prefetch)
    blocks, length = minimum(groups, max_blocks) if further else groups, defines["ROW"]
    constants = {**defines, **tiling.defines, **_whole_rows(tiling, rows, device)}
    if tiling.longest is not None:
        constants |= {"ROW": "length", "BATCHED": int(tiling.in_shared or not tiling.longest)}
        length = tiling.longest
    return Launch(
        Kernel(kernel, kernel, constants),
        (blocks * tiling.cluster, 1, 1),
        (tiling.threads, tiling.rows_per_block, 1),
        tuple(arguments),
        shared=shared_bytes(tiling, int(length), item_bytes) if tiling.in_shared else 0,
        cluster=tiling.cluster,
        pdl=device.has_pdl,
    )


def _whole_rows(tiling: RowTiling, rows: int, device: Device) -> Defines:
    """Return the macros FULL_BLOCKS and RELEASE, which depend on the number of rows.

    If the length is known, `row_tiling` has already added a guard (a condition on sizes): whether there are few rows.
    """
    few, rest = 2 * device.multiprocessors, rows % tiling.rows_per_block
    if tiling.longest is None:
        release: int | str = int(estimate(rows) <= few)
    else:
        blocks = few // tiling.rows_per_block * tiling.cluster
        release = macro(lambda: rows <= few, f"gridDim.x <= {blocks}", rows)
    return {"FULL_BLOCKS": int(always(lambda: rest == 0, rest)), "RELEASE": release}
