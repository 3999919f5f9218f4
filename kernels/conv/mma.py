"""The host side of conv_mma.cu: convolutions as matrix products by mma.sync or fma, of every shape and on every GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.config_subset import few
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.problem import Conv, three
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.cublaslt import epilogue
from onnxfuse.kernels.gemm.mma import GROUP_M, MmaConfig
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH, fitting_blocks
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer
from onnxfuse.runtime.symint import best_first, is_symbolic, maximum

MAX_DIMS: Final = 3  # spatial axes
MAX_CONFIGS: Final = 6
MAX_FEW: Final = 5  # configs for dynamic sizes, not counting the kernel that adds up sums
FEW_SLICES: Final = (
    1,
    3,
    8,
)  # numbers of slices of k for dynamic sizes; the kernel that adds up the sums of slices differs for each number
SLICES: Final = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of slices of k; each slice has its own block along z
MIN_SLICE_TILES: Final = 3  # tiles of k per slice
MAX_CHUNKS: Final = {16: 8, 8: 8, 4: 6, 2: 4}  # maximum 16-byte chunks of a stage per thread, by bytes per copy

# Costs and rates in clock cycles of one multiprocessor; they serve to order configs by expected time.
MULTIPLY_BYTES: Final = 2048  # rows x columns x bytes of k that mma.sync multiplies per cycle
TF32_MULTIPLY_BYTES: Final = 920  # MULTIPLY_BYTES in TF32: 128x128 blocks of 64 bytes take 1140 cycles on an H200
EXACT_PRODUCTS: Final = 110  # fma instructions per cycle
LOAD_BYTES: Final = 48  # bytes from L2 per cycle
COPY_CYCLES: Final = 0.09  # cycles per copy to shared memory, including its address and bounds check
STEP_CYCLES: Final = 220  # cycles per stage, if the block is alone on a multiprocessor
BLOCK_CYCLES: Final = 1600  # cycles per block before the first stage arrives and after the last
EPILOGUE_CYCLES: Final = 0.1  # cycles per element of y
SECOND_LAUNCH_CYCLES: Final = 2000
PARTIAL_BYTES: Final = 24  # bytes of fp32 sums written or read per cycle


@dataclass(frozen=True)
class ConvConfig:
    """The tile of a block of conv_mma.cu, and the number of slices of k, which is the grid's size along z."""

    tile: MmaConfig
    slices: int = 1

    def name(self, conv: Conv, device: Device) -> str:
        """Return the config's name in reports."""
        kind = "fma" if is_exact(conv, device) else "mma"
        split = f" k/{self.slices}" if self.slices > 1 else ""
        return f"conv_{kind} {self.tile.tile_m}x{self.tile.tile_n}x{self.tile.tile_k_bytes}b{self.tile.stages}{split}"


MMA_TILES: Final = (
    MmaConfig(128, 128, 64, 3, 2, 2, min_blocks=2),
    MmaConfig(64, 128, 64, 4, 2, 2, min_blocks=2),
    MmaConfig(128, 64, 64, 4, 2, 2, min_blocks=2),
    MmaConfig(64, 64, 64, 6, 2, 2, min_blocks=3),
    MmaConfig(256, 64, 64, 3, 4, 1, min_blocks=2),
    MmaConfig(128, 32, 64, 5, 4, 1, min_blocks=4),
    MmaConfig(64, 32, 64, 6, 2, 1, min_blocks=6),
)
EXACT_TILES: Final = (  # each warp computes 64 x 32 elements
    MmaConfig(128, 64, 64, 3, 2, 2, min_blocks=3),
    MmaConfig(64, 64, 64, 4, 1, 2, min_blocks=4),
    MmaConfig(128, 32, 64, 3, 2, 1, min_blocks=4),
)


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first.

    The list is empty if x or y is empty, for more than three spatial axes, and if pixel indices exceed 32 bits.
    """
    if not conv.pixels * conv.m * conv.c * conv.taps or len(conv.kernel) > MAX_DIMS or conv.pixels >= 2**31 - 2**16:
        return []
    chosen = best_first(configs(conv, device), lambda config: cycles(conv, config, device))
    return [implementation(conv, config, device) for config in chosen[:MAX_CONFIGS]]


def is_exact(conv: Conv, device: Device) -> bool:
    """Return whether products must use fma: mma.sync lacks the dtype, or rounds to TF32 where that is not allowed."""
    if conv.dtype == "float16":
        return False
    return device.arch < MMA_ARCH or (conv.dtype == "float32" and not conv.tf32)


def configs(conv: Conv, device: Device) -> list[ConvConfig]:
    """Return, for each tile that fits the device, a config without slices of k and one with the best number of slices.

    For dynamic sizes, return only a few configs; at any size, at least one of them is fast.
    """
    if is_symbolic(conv.n, *conv.sizes):
        return few_configs(usual(conv), device)
    found = []
    for tile in _tiles(conv, device):
        counts = _slices(conv, tile, SLICES)
        best = min(counts, key=lambda count: cycles(conv, ConvConfig(tile, count), device))
        found += [ConvConfig(tile, count) for count in sorted({1, best})]
    return found


def _tiles(conv: Conv, device: Device) -> list[MmaConfig]:
    """Return the tiles that fit the device."""
    given = EXACT_TILES if is_exact(conv, device) else MMA_TILES
    tiles = [_with_enough_threads(conv, each, device) for each in given]
    return [tile for tile in tiles if tile.shared(1) <= device.shared_per_block]


def _slices(conv: Conv, tile: MmaConfig, counts: Sequence[int]) -> list[int]:
    """Return the `counts` of slices that leave each slice at least MIN_SLICE_TILES tiles of k."""
    if conv.program:  # its operators run in the epilogue of conv_mma.cu, on complete sums: k is not sliced
        return [1]
    return [count for count in counts if count == 1 or k_tiles(conv, tile) >= count * MIN_SLICE_TILES]


@functools.lru_cache(maxsize=512)
def few_configs(problems: tuple[Conv, ...], device: Device) -> list[ConvConfig]:
    """Return a few configs: for each of `problems`, which differ only in dynamic sizes, at least one is fast."""
    tiles = _tiles(problems[0], device)
    given = [ConvConfig(tile, count) for tile in tiles for count in _slices(problems[0], tile, FEW_SLICES)]
    return few(given, problems, lambda conv, config: cycles(conv, config, device), MAX_FEW)


def implementation(conv: Conv, config: ConvConfig, device: Device) -> Implementation:
    """Return one launch, or two with slices of k: one writes sums to scratch memory, and one adds them up."""
    tile, pdl = config.tile, device.has_pdl
    kernel = Kernel("conv_mma", "conv_mma", defines(conv, config, device))
    partial = Pointer("scratch", 0) if config.slices > 1 else ABSENT
    kernel, given = with_program(kernel, (*conv.arguments, partial), conv.program)
    grid, threads = (tile_count(conv, tile), 1, config.slices), (32 * tile.warps_m * tile.warps_n, 1, 1)
    launch = Launch(kernel, grid, threads, given, tile.shared(1), pdl=pdl)
    name = config.name(conv, device)
    if config.slices == 1:
        return Implementation(name, (launch,))
    sums = 4 * config.slices * conv.pixels * conv.m
    return Implementation(name, (launch, epilogue(as_gemm(conv), device, config.slices)), (sums,))


# ---- sizes ------------------------------------------------------------------------------------------------------


def tile_count(conv: Conv, tile: MmaConfig) -> int:
    """Return the number of tiles of y in all groups."""
    return -(-conv.pixels // tile.tile_m) * -(-(conv.m // conv.group) // tile.tile_n) * conv.group


def k_tiles(conv: Conv, tile: MmaConfig) -> int:
    """Return the number of stages along k."""
    return -(-conv.taps * (conv.c // conv.group) * ITEM_BYTES[conv.dtype] // tile.tile_k_bytes)


def cycles(conv: Conv, config: ConvConfig, device: Device) -> float:
    """Estimate the clock cycles of a multiprocessor, accurately enough to order configs.

    Resident blocks share the throughput of a multiprocessor; a block that is alone waits for its own copies.
    """
    tile = config.tile
    item = ITEM_BYTES[conv.dtype]
    outputs = tile.tile_m * tile.tile_n
    if is_exact(conv, device):
        multiply = outputs * (tile.tile_k_bytes // item) / EXACT_PRODUCTS
    else:
        multiply = outputs * tile.tile_k_bytes / (TF32_MULTIPLY_BYTES if item == 4 else MULTIPLY_BYTES)
    load = (tile.tile_m + tile.tile_n) * tile.tile_k_bytes / LOAD_BYTES
    x_copy, w_copy = copy_bytes(conv)
    copies = (tile.tile_m / x_copy + tile.tile_n / w_copy) * tile.tile_k_bytes * COPY_CYCLES
    steps = -(-k_tiles(conv, tile) // config.slices)
    resident = resident_blocks(tile, tile.shared(1), device)
    blocks = -(-tile_count(conv, tile) * config.slices // device.multiprocessors)
    rounds = -(-blocks // resident)
    busy = blocks * (steps * max(multiply + copies, load) + outputs * EPILOGUE_CYCLES)
    alone = rounds * (steps * max(STEP_CYCLES, multiply + copies) + BLOCK_CYCLES)
    found: float = maximum(busy + BLOCK_CYCLES, alone)
    if config.slices > 1:
        moved = 8 * config.slices * conv.pixels * conv.m / device.multiprocessors
        found += SECOND_LAUNCH_CYCLES + moved / PARTIAL_BYTES
    return found


def resident_blocks(tile: MmaConfig, shared: int, device: Device) -> int:
    """Return how many blocks with `shared` bytes of shared memory fit on a multiprocessor, at most `min_blocks`."""
    return max(1, min(tile.min_blocks, fitting_blocks(shared, device)))


def copy_bytes(conv: Conv) -> tuple[int, int]:
    """Return (bytes per copy of x, bytes per copy of w) from global to shared memory."""
    channels, filters = conv.c // conv.group, conv.m // conv.group
    x = 1 if conv.x_nchw else channels
    w = filters if conv.w_hwio else conv.taps * channels
    return _row_bytes(conv, x), _row_bytes(conv, w)


def _row_bytes(conv: Conv, row: int) -> int:
    """Return the bytes per access to rows of `row` elements: at most 16; one element if misaligned."""
    item = ITEM_BYTES[conv.dtype]
    return math.gcd(row * item, VECTOR_BYTES) if conv.aligned else item


def _with_enough_threads(conv: Conv, tile: MmaConfig, device: Device) -> MmaConfig:
    """Return a tile with enough threads to hold addresses or elements of a stage in registers.

    Without cp.async the tile has two stages, because only one stage is in flight at a time.
    """
    if device.arch < MMA_ARCH:
        tile = replace(tile, stages=2)
    if is_exact(conv, device):
        return tile
    limit = MAX_CHUNKS[min(copy_bytes(conv))]
    while tile.chunks(1) > limit and tile.tile_n // tile.warps_n > 16:
        tile = replace(tile, warps_n=2 * tile.warps_n)
    return tile


# ---- the launch ---------------------------------------------------------------------------------------------------


def defines(conv: Conv, config: ConvConfig, device: Device) -> Defines:
    """Return the macros of conv_mma.cu."""
    tile = config.tile
    x_copy, w_copy = copy_bytes(conv)
    kernel, strides, dilations = three(conv.kernel, 1), three(conv.strides, 1), three(conv.dilations, 1)
    filters = conv.m // conv.group
    vectors = min(x_copy, w_copy) == VECTOR_BYTES and device.arch >= MMA_ARCH
    return {
        **conv.epilogue_defines(), "DIMS": len(conv.kernel),
        "KERNEL_D": kernel[0], "KERNEL_H": kernel[1], "KERNEL_W": kernel[2],
        "STRIDE_D": strides[0], "STRIDE_H": strides[1], "STRIDE_W": strides[2],
        "DILATION_D": dilations[0], "DILATION_H": dilations[1], "DILATION_W": dilations[2],
        "GROUPS": conv.group, "CHANNELS": conv.c // conv.group, "FILTERS": filters,
        "X_NCHW": int(conv.x_nchw), "TRANSPOSED": int(not conv.w_hwio), "EXACT": int(is_exact(conv, device)),
        "SPLIT": int(config.slices > 1), "WIDTH": _row_bytes(conv, filters) // ITEM_BYTES[conv.dtype],
        "TILE_M": tile.tile_m, "TILE_N": tile.tile_n, "TILE_K_BYTES": tile.tile_k_bytes, "STAGES": tile.stages,
        "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "X_COPY": x_copy, "W_COPY": w_copy, "GROUP_M": GROUP_M,
        "MIN_BLOCKS": tile.min_blocks if vectors else 1,  # narrower copies need more registers
    }  # fmt: skip
