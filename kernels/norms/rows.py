"""How rows are divided among threads, warps, blocks and clusters: the host side of rows.cuh.

Where the number of rows is symbolic, there are fewer tilings, as each kernel of them is compiled before the first run.
Every tiling is right for any number of rows, so that choices are soft guards.
Where their length is, tilings come from any_length.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

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

MAX_GRID: Final = 2**31 - 1  # blocks of a launch
CLUSTER_ARCH: Final = 90  # compute capability from which blocks form clusters
MAX_CLUSTER: Final = 8  # the portable limit
MAX_THREADS: Final = 1024  # per block

# Values per thread live in fp32 registers beside their weights: 48 registers for 16 values, up to 80 for 32.
USUAL_VALUES: Final = 16  # per thread
MAX_VALUES: Final = 32  # per thread
MAX_WARP_VALUES: Final = 32  # per thread, up to which a warp has the row to itself: no barrier
MAX_PREFETCH_VALUES: Final = 16  # per thread, up to which there are registers for weights loaded along with the row
MAX_WARP_PREFETCH_VALUES: Final = 24  # the same in a warp's row that nothing is added to
MAX_BLOCK_VALUES: Final = 20  # per thread, in a block of 1024 threads, which have 64 registers each
USUAL_THREADS: Final = 512  # per block, before threads take more values
RESIDENT_BYTES: Final = 48 << 10  # bytes of rows to keep resident per multiprocessor, where registers are the limit
WARP_BLOCK_THREADS: Final = 128  # per block whose rows belong to a warp or less
REGISTERS: Final = 65536  # per multiprocessor
# (registers per thread, registers for data) where a thread holds a part of a row and loads the next
# one's; addresses and sums need the others. A warp holds its row with the weights, a block without.
WARP_PERSISTENT_REGISTERS: Final = (128, 72)
BLOCK_PERSISTENT_REGISTERS: Final = (64, 32)
MAX_PERSISTENT_ROUNDS: Final = 4  # rows per resident block, up to which a persistent grid is expected to be faster
ARCHS_OF_32_BLOCKS: Final = (80, 90, 100)  # compute capabilities with 32 resident blocks on a multiprocessor
MAX_RESIDENT_BLOCKS: Final = 16  # per multiprocessor, on the others
MIN_REGISTERS: Final = 64  # per thread, to which a kernel may be held: fewer would slow none down, but help none

# Few rows: their latency is all that counts, so that many chunks are better than a wide block's barrier (33x1023 fp16,
# layer_norm on an H200: 1.51 us with 128 threads, 1.65 with 512), and more blocks than threads without work
# (64 rows of 40960, group_norm: 6.6 us in clusters of 8 with 128 threads, 13.3 in clusters of 4 with 1024).
FEW_ROWS_CHUNKS: Final = 8
FEW_ROWS_VALUES: Final = 40
FEW_ROWS_THREADS: Final = 128

# Short rows that are small altogether: narrower vectors for more threads or more loads of a thread at once (4096x64
# fp16, layer_norm: 1.87 us with vectors of 2, 2.04 with 8).
SMALL_ELEMENTS: Final = 1 << 19  # elements of all rows
SHORT_ROW: Final = 256  # elements
SHORT_ROW_WIDTH: Final = 2
SHORT_ROW_VALUES: Final = 8

# Long rows are kept in shared memory: 512x65536 fp16 takes 39 us on an H200, 43 in registers, because three blocks'
# worth is on its way at once. With a residual there is twice as much to keep, and registers are faster.
SHARED_BLOCKS: Final = ((512, 2), (256, 3))  # (threads, resident blocks) where one block has the row, where several do
SHARED_CHUNKS: Final = 4
SHARED_BYTES: Final = 64 << 10  # per block, so that three are resident
SPARE_SHARED_BYTES: Final = 12 << 10  # per block, for partial sums
CLUSTER_THREADS: Final = 512  # per block that shares its row with others in registers
CLUSTER_MIN_BLOCKS: Final = 2
REREAD_THREADS: Final = 512  # per block whose rows are read twice
REREAD_CHUNKS: Final = 8  # vectors per thread and batch; each needs its own addresses


@dataclass(frozen=True)
class RowTiling:
    """The constants of rows.cuh."""

    width: int
    threads: int
    chunks: int
    rows_per_block: int = 1
    cluster: int = 1
    prefetch_weights: bool = False
    persistent: bool = False
    in_shared: bool = False
    min_blocks: int = 1
    max_blocks: int = MAX_GRID  # per launch; with fewer blocks than rows, blocks take further rows
    longest: int | None = None  # elements of the longest row, where the length is symbolic; 0: there is no limit

    @property
    def defines(self) -> Defines:
        """The tiling as compile-time constants."""
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

    An element takes `item_bytes` of each input, and `weight_bytes` of operands that all rows share. A block has at most
    `max_threads`, as long as these can hold the row. Raises ValueError for a row of 2**31 elements or more.
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
    """Return the same tiling with resident blocks only, which load their next rows while they compute.

    None where each row has a block, where all rows are resident at once, and where registers cannot hold it all.
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
    if not is_warp and (device.arch < 90 or max(item_bytes) > 2):  # these spill registers
        return None
    return replace(tiling, prefetch_weights=is_warp, min_blocks=resident, max_blocks=max_blocks)


def persistent_is_faster(usual: RowTiling, persistent: RowTiling, rows: int, device: Device) -> bool:
    """Return whether a persistent grid is expected to be faster.

    It is where the rows are not resident all at once, but not many times more.
    """
    blocks = estimate(_ceil_div(rows, usual.rows_per_block))
    return bool(usual.min_blocks * device.multiprocessors < blocks <= MAX_PERSISTENT_ROUNDS * persistent.max_blocks)


def with_registers_to_spare(tiling: RowTiling) -> RowTiling | None:
    """Return a tiling for a kernel with a program; None if registers do not hold the program's operands."""
    if tiling.threads <= 32:
        return tiling
    return None if tiling.max_blocks < MAX_GRID else replace(tiling, min_blocks=max(1, tiling.min_blocks - 1))


def _rows_of_warps(rows: int, length: int, width: int, few: bool, adds: bool, device: Device) -> RowTiling:
    """Return a tiling that gives each row a warp or less, with fewer rows in a block where blocks would be too few.

    Blocks have 32 to 128 threads; where the number of rows is symbolic, 64 or 128.
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
    """Return the resident blocks per multiprocessor if registers hold each row (as inputs or fp32) and its weights."""
    if device.arch < 80:
        return 1  # the code for it needs more registers than are counted here
    words = max(4, sum(item_bytes)) + weight_bytes  # bytes per value
    registers = 16 + tiling.width * tiling.chunks * words // 4
    per_thread = max(MIN_REGISTERS, 8 * _ceil_div(registers, 8))
    fitting = REGISTERS // (per_thread * tiling.threads * tiling.rows_per_block)
    return max(1, min(fitting, 32 if device.arch in ARCHS_OF_32_BLOCKS else MAX_RESIDENT_BLOCKS))


def _row_of_a_block(packs: int, width: int, threads: int) -> RowTiling:
    """Return a tiling whose blocks each have one row in registers."""
    chunks = _ceil_div(packs, threads)
    prefetch = chunks * width <= MAX_PREFETCH_VALUES
    resident = max(1, RESIDENT_BYTES // (threads * chunks * VECTOR_BYTES))
    return RowTiling(width, threads, chunks, prefetch_weights=prefetch, min_blocks=1 if prefetch else resident)


def _few_rows_of_clusters(packs: int, width: int, device: Device) -> RowTiling | None:
    """Return a tiling of many small blocks to a row, then of larger ones; None if their registers cannot hold it."""
    chunks = FEW_ROWS_VALUES // width
    cluster = cluster_size(packs / (FEW_ROWS_THREADS * chunks), device)
    threads = _next_power_of_two(packs / (cluster * chunks))
    if threads > USUAL_THREADS:
        threads, chunks = MAX_THREADS, MAX_BLOCK_VALUES // width
    if not _fits(packs, threads, chunks, cluster):
        return None
    return RowTiling(width, threads, _ceil_div(packs, threads * cluster), 1, cluster)


def _many_rows_of_clusters(packs: int, width: int, item_bytes: Sequence[int], device: Device) -> RowTiling | None:
    """Return a tiling of as many blocks to a row as leave a thread few enough values; None if the row is too long."""
    chunks = (MAX_VALUES if max(item_bytes) <= 2 else USUAL_VALUES) // width
    cluster = cluster_size(packs / (CLUSTER_THREADS * chunks), device)
    if not _fits(packs, CLUSTER_THREADS, chunks, cluster):
        return None
    chunks = _ceil_div(packs, CLUSTER_THREADS * cluster)
    return RowTiling(width, CLUSTER_THREADS, chunks, 1, cluster, min_blocks=CLUSTER_MIN_BLOCKS)


def _row_in_shared_memory(length: int, width: int, item_bytes: Sequence[int], device: Device) -> RowTiling:
    """Return a tiling whose blocks keep the row in shared memory; else one whose blocks read the row twice.

    The row is read twice where it does not fit, and where inputs differ in width: in shared memory a thread's vectors
    of all inputs lie side by side, each of them at a multiple of its size.
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
    """Return the shared memory of a block for its part of a row, with whole words for each input's vectors."""
    per_batch = tiling.chunks * tiling.threads
    slots = per_batch * _ceil_div(length // tiling.width, per_batch * tiling.cluster)
    return slots * sum(max(4, tiling.width * size) for size in item_bytes)


def _fits(packs: int, threads: int, chunks: int, cluster: int) -> bool:
    return packs <= threads * chunks * cluster


def cluster_size(wanted: float, device: Device) -> int:
    """Return how many blocks share a row, where so many are wanted."""
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
    """Return STREAMED for tensors of these rows, by the kernel's arguments if it depends on symbolic sizes.

    It is 0 there for rows of single elements: to choose between two stores of each takes more registers than there are.
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
    """Return the launch of a kernel of rows.cuh; an element takes `item_bytes` of each input.

    Raises ValueError if the number of rows is symbolic, and there are more than a launch has blocks for.
    """
    groups, max_blocks = _ceil_div(rows, tiling.rows_per_block), min(tiling.max_blocks, MAX_GRID // tiling.cluster)
    many, constant = tiling.width * tiling.chunks > MAX_PREFETCH_VALUES, bool(defines["WEIGHTS_CONSTANT"])
    prefetch = tiling.prefetch_weights and (constant or not many)  # loads that must precede the sum's store would spill
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
    """Return whether all blocks are whole, and whether the next kernel starts early, by the number of rows.

    Where the length is known, `row_tiling` has asked already whether rows are few.
    """
    few, rest = 2 * device.multiprocessors, rows % tiling.rows_per_block
    if tiling.longest is None:
        release: int | str = int(estimate(rows) <= few)
    else:
        blocks = few // tiling.rows_per_block * tiling.cluster
        release = macro(lambda: rows <= few, f"gridDim.x <= {blocks}", rows)
    return {"FULL_BLOCKS": int(always(lambda: rest == 0, rest)), "RELEASE": release}
