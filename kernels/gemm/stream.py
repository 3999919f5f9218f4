"""The host side of gemm_stream.cu: products of a few rows whose weights stream in by TMA, from sm_90 on.

With a norm, the kernel first normalizes the rows of x, so that they are not in the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.mma import shape_defines
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import RESERVED_BYTES, fitting_blocks
from onnxfuse.kernels.prologue_node import norm_vectors
from onnxfuse.kernels.selection import by_rows
from onnxfuse.kernels.tensors import ABSENT, int32
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Pointer, Struct, TensorMap

TMA_ARCH: Final = 90  # the first compute capability with TMA
ROW_BYTES: Final = 128  # bytes along k per stage
TILE_K: Final = 64  # elements along k per stage
PANEL: Final = 64  # columns of a TMA box if w is k x n
SUMS_PADDING: Final = 4  # floats of padding per row of sums: SUMS_PITCH - TILE_N of gemm_stream.cu
NORM_PADDING: Final = 16  # bytes of padding per normalized row of x
MAX_SUMS: Final = 4096  # maximum sums per warp: 128 per thread
TILES_M: Final = (8, 16, 32, 64)
TILES_N: Final = (32, 64, 128)  # smallest first: with equally many bytes in flight, small tiles give more blocks
CLUSTERS: Final = (1, 2, 4, 8)
# The largest cluster by the rows of a tile: 64x768x3072 takes 5.9 us in clusters of eight on an H200, and 5.1 in pairs,
# which exchange fewer sums.
MAX_CLUSTER: Final = {8: 8, 16: 8, 32: 8, 64: 2}
# This share of the multiprocessors reads nearly as fast as all of them: on an H200, 20x2048x2048 takes 4.7 us in 64
# blocks, and 5.4 in 64 clusters of two.
BUSY_SHARE: Final = 0.45
NORM_ROWS: Final = (1, 2, 4, 8)  # rows of x that a block can normalize
MAX_NORM_VECTORS: Final = 8  # maximum vectors of x that a thread keeps in registers for a norm
NORM_SHARE: Final = 0.5  # minimum ratio of the weights in flight with a norm to those without it


@dataclass(frozen=True)
class StreamConfig:
    """The macros of gemm_stream.cu that this module chooses."""

    tile_m: int
    tile_n: int
    stages: int
    warps: int = 4
    cluster: int = 1

    @property
    def name(self) -> str:
        """The config's name in reports."""
        split = f"_split{self.cluster}" if self.cluster > 1 else ""
        return f"stream_{self.tile_m}x{self.tile_n}_{self.warps}x{self.stages}{split}"

    def stage(self, gemm: Gemm) -> int:
        """Return the bytes of a stage."""
        return ((0 if gemm.norm else self.tile_m) + gemm.weight_count * self.tile_n) * ROW_BYTES

    def shared(self, gemm: Gemm) -> int:
        """Return the bytes of dynamic shared memory.

        It holds the warps' rings and mbarriers, space for peers' sums, and the normalized rows of x, with space for the
        warps' sums of squares.
        """
        exchange = gemm.weight_count * self.tile_m * self.tile_n * 4 + 8 if self.cluster > 1 else 0
        rows = norm_rows(gemm) if gemm.norm else 0
        normalized = rows * (_k_steps(gemm) * ROW_BYTES + NORM_PADDING) + 16 * -(-4 * rows * self.warps // 16)
        return self.warps * self.stages * (self.stage(gemm) + 8) + exchange + normalized


def is_supported(gemm: Gemm, device: Device) -> bool:
    """Return whether TMA can read these operands, and mma.sync multiplies them as precisely as required."""
    columns = [each.n for each in gemm.products]
    rows = [gemm.k] if gemm.transposed else [gemm.k, *columns]  # elements per row of every matrix
    return (
        device.arch >= TMA_ARCH
        and gemm.dtype in ("float16", "bfloat16")
        and gemm.aligned
        and all(row % 8 == 0 for row in rows)
        and min(gemm.m, *columns) > 0
    )


def fits(gemm: Gemm, config: StreamConfig, device: Device) -> bool:
    """Return whether a config's tiles fit into registers and shared memory.

    The sums of a warp must fit into its registers, and later into the shared memory of its stages, which they replace.
    The stages of all warps must fit into the shared memory of a block.
    """
    weights = gemm.weight_count
    sums = weights * config.tile_m * config.tile_n
    ring = config.stages * config.stage(gemm)
    staged = weights * config.tile_m * (config.tile_n + SUMS_PADDING) * 4
    is_held = sums <= MAX_SUMS and staged <= ring and config.shared(gemm) <= device.shared_per_block
    return is_held and _normalizes(gemm, config)


def norm_rows(gemm: Gemm) -> int:
    """Return the macro NORM_ROWS for a product of at most eight rows."""
    return next(rows for rows in NORM_ROWS if gemm.m <= rows)


def normalizing_implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations that normalize the rows of x, the expected fastest first.

    The list is empty if x has too many rows, or rows that are too long for the registers of a block.  Normalized rows
    must leave room for at least NORM_SHARE of the weights in flight.  All blocks must be resident at the same time,
    because each normalizes x again: a product of 2048x128256 takes 167 us with the norm on an H200, and 130 after it.
    """
    if gemm.m > NORM_ROWS[-1] or not is_supported(gemm, device):
        return []
    plain = replace(gemm, norm=None)
    least = NORM_SHARE * max((_rank(plain, config, device) for config in _configs(plain, device)), default=0)
    found = (config for config in _configs(gemm, device) if _rank(gemm, config, device) >= least)
    at_once = (config for config in found if _block_count(gemm, config) <= _resident(gemm, config, device))
    return [implementation(gemm, config) for config in at_once]


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations; first the one with the most bytes of weights in flight."""
    return [implementation(gemm, config) for config in _configs(gemm, device)]


def _configs(gemm: Gemm, device: Device) -> list[StreamConfig]:
    tile_m = next((rows for rows in TILES_M if gemm.m <= rows), TILES_M[-1])
    found = [config for tile_n in TILES_N if (config := _config(gemm, tile_m, tile_n, device))]
    return sorted(found, key=lambda config: -_rank(gemm, config, device))


def _config(gemm: Gemm, tile_m: int, tile_n: int, device: Device) -> StreamConfig | None:
    """Return the config for tiles of tile_m x tile_n; None if none fits.

    The cluster is the smallest that fills the GPU or has all weights in flight, unless a larger one has 1.5 times as
    many weights in flight, in at most a block per multiprocessor.
    """
    best = None
    largest = min(_k_steps(gemm), MAX_CLUSTER[tile_m])
    for cluster in (cluster for cluster in CLUSTERS if cluster <= largest):
        config = _with_ring(gemm, StreamConfig(tile_m, tile_n, 1, 1, cluster), device)
        if config and fits(gemm, config, device) and (best is None or _is_better(gemm, config, best, device)):
            best = config
    return best


def _is_better(gemm: Gemm, config: StreamConfig, than: StreamConfig, device: Device) -> bool:
    """Return whether a config is better than one of smaller clusters.

    The latter suffices if it fills the GPU, or if its blocks have all their weights in flight. On an H200, 16x768x768
    takes 2.3 us in 24 blocks of four warps, and 2.7 in 96 blocks of one warp, in clusters of four.
    """
    if _block_count(gemm, config) > device.multiprocessors:
        return False
    has_all = than.warps * than.stages * than.cluster >= _k_steps(gemm)
    suffices = has_all or _block_count(gemm, than) >= BUSY_SHARE * device.multiprocessors
    return not suffices or _in_flight(gemm, config, device) > 1.5 * _in_flight(gemm, than, device)


def _normalizes(gemm: Gemm, config: StreamConfig) -> bool:
    """Return whether a block's threads can hold the rows of x in registers, if it normalizes them."""
    return gemm.norm is None or norm_vectors(norm_rows(gemm), gemm.k, config.warps) <= MAX_NORM_VECTORS


def _with_ring(gemm: Gemm, config: StreamConfig, device: Device) -> StreamConfig | None:
    """Return the config with warps and stages that fit into all or half of a multiprocessor's shared memory."""
    steps = -(-_k_steps(gemm) // config.cluster)
    # Clusters of more than two blocks cannot use every multiprocessor unless two blocks fit on each.
    alone = config.cluster <= 2 and _block_count(gemm, config) <= device.multiprocessors
    room = device.shared_per_block if alone else device.shared_per_block // 2 - RESERVED_BYTES

    def with_warps(warps: int) -> StreamConfig | None:
        empty = replace(config, stages=0, warps=warps).shared(gemm)
        stage = replace(config, stages=1, warps=warps).shared(gemm) - empty
        stages = min(-(-steps // warps), (room - empty) // stage)
        return replace(config, stages=stages, warps=warps) if stages >= min(2, -(-steps // warps)) else None

    few = next((found for warps in (4, 2, 1) if steps >= 2 * warps or warps == 1 if (found := with_warps(warps))), None)
    many = with_warps(8) if config.tile_m <= 16 and (steps >= 16 or gemm.norm) else None
    if gemm.norm and not (few and _normalizes(gemm, few)):
        return many  # some warps may have no step of k, but their threads normalize rows
    return many if few and many and 8 * many.stages > 0.85 * few.warps * few.stages else few


def _in_flight(gemm: Gemm, config: StreamConfig, device: Device) -> int:
    """Return the amount of weights that the rings of all resident blocks hold, in columns times steps of k.

    A ring is the shared memory into which a warp copies weights ahead of their multiplication.
    """
    each = min(config.warps * config.stages, -(-_k_steps(gemm) // config.cluster)) * config.tile_n
    return min(_block_count(gemm, config), _resident(gemm, config, device)) * each


def _resident(gemm: Gemm, config: StreamConfig, device: Device) -> int:
    """Return how many blocks the GPU runs at the same time."""
    return min(2, fitting_blocks(config.shared(gemm), device)) * device.multiprocessors


def _rank(gemm: Gemm, config: StreamConfig, device: Device) -> int:
    """Return the amount of weights in flight; halved for clusters of over two blocks, unless all weights are in flight.

    Some blocks of large clusters start late: 16x2048x8192 on an H200 takes 12.7 us in clusters of eight, 10.4 in pairs.
    """
    in_flight, total = _in_flight(gemm, config, device), _k_steps(gemm) * sum(each.n for each in gemm.products)
    return total if in_flight >= total else in_flight // (2 if config.cluster > 2 else 1)


def _tile_count(gemm: Gemm, tile_m: int, tile_n: int) -> int:
    return _row_count(gemm, tile_m) * sum(-(-each.n // tile_n) for each in gemm.products)


def _row_count(gemm: Gemm, tile_m: int) -> int:
    """Return the number of rows of tiles: the integer 1 if one tile has all rows of x, even if m is symbolic."""
    return 1 if gemm.m <= tile_m else -(-gemm.m // tile_m)


def _block_count(gemm: Gemm, config: StreamConfig) -> int:
    return _tile_count(gemm, config.tile_m, config.tile_n) * config.cluster


def _k_steps(gemm: Gemm) -> int:
    return -(-gemm.k // TILE_K)


def implementation(gemm: Gemm, config: StreamConfig) -> Implementation:
    """Return one launch of gemm_stream.cu, which computes the grouped products too."""
    gemms = gemm.products
    tiles = [-(-each.n // config.tile_n) for each in gemms]
    defines = [shape_defines(each, config.tile_n // config.cluster) for each in gemms]
    kernel_defines = {
        **defines[0], "WIDTH": min(int(each["WIDTH"]) for each in defines),
        "PRODUCTS": len(gemms), "GEMM_N_2": gemms[1].n if len(gemms) > 1 else 0,
        "GEMM_N_3": gemms[2].n if len(gemms) > 2 else 0,
        "TILE_M": config.tile_m, "TILE_N": config.tile_n, "STAGES": config.stages, "WARPS": config.warps,
        "CLUSTER": config.cluster,
        "WEIGHTS_CONSTANT": int(all(each.weights_constant for each in gemms)), "NORM": 0,
    }  # fmt: skip
    if gemm.norm:
        is_constant = kernel_defines["WEIGHTS_CONSTANT"] and gemm.norm.has_constant_scale
        kernel_defines |= {
            **gemm.norm.defines(), "NORM_ROWS": norm_rows(gemm), "WEIGHTS_CONSTANT": int(is_constant),
        }  # fmt: skip
    grid = (sum(tiles) * config.cluster, _row_count(gemm, config.tile_m), 1)
    kernel = Kernel("gemm_stream", "gemm_stream", kernel_defines)
    kernel, given = with_program(kernel, _arguments(gemms, config), gemm.program)
    launch = Launch(
        kernel, grid, (32 * config.warps, 1, 1), given, config.shared(gemm), config.cluster, pdl=True,
    )  # fmt: skip
    return by_rows(config.name, launch, gemm, gemm.n, config.tile_n // config.cluster)


def _arguments(gemms: Sequence[Gemm], config: StreamConfig) -> tuple[Argument, ...]:
    first = gemms[0]
    x: Argument = first.x
    if not first.norm:
        x = _tensor_map(first, first.x, (first.k, first.m), (TILE_K, config.tile_m))
    maps = [x]
    for gemm in gemms:
        sizes, box = (gemm.n, gemm.k), (min(PANEL, config.tile_n), TILE_K)
        if gemm.transposed:
            sizes, box = (gemm.k, gemm.n), (TILE_K, config.tile_n)
        maps += [_tensor_map(gemm, weight, sizes, box) for weight in (gemm.w, gemm.up) if weight]
    others = [Struct((gemm.bias or ABSENT, gemm.y)) for gemm in gemms[1:]]
    norm = (first.norm.argument,) if first.norm else ()
    return (*maps, *others, first.epilogue_operands, *int32(first.m), *norm)


def _tensor_map(gemm: Gemm, pointer: Pointer, sizes: tuple[int, int], box: tuple[int, int]) -> TensorMap:
    """Return the TMA map, with swizzled boxes, of a contiguous matrix; sizes are (columns, rows)."""
    dtype: Literal["float16", "bfloat16"] = "float16" if gemm.dtype == "float16" else "bfloat16"
    return TensorMap(pointer, dtype, sizes, (2 * sizes[0],), box, swizzle=128 if box[0] == TILE_K else 64)
