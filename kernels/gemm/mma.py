"""The host side of gemm_mma.cu: matrix products by mma.sync, for every size and alignment, from sm_80 on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.pad import launches, padded, padded_columns, scratch_bytes
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, VECTOR_BYTES, Defines, int32
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch
from onnxfuse.runtime.symint import best_first

SUMS_PADDING: Final = 8  # floats of padding per row of sums: SUMS_PITCH - TILE_N of gemm_mma.cuh
MAX_CHUNKS: Final = {16: 12, 8: 8, 4: 6, 2: 5}  # chunks of 16 bytes that a thread's registers hold, by bytes per copy
GROUP_M: Final = 8  # rows of tiles in a group; tiles are computed down the columns of a group


@dataclass(frozen=True)
class MmaConfig:
    """The macros of gemm_mma.cu that this module chooses."""

    tile_m: int
    tile_n: int
    tile_k_bytes: int  # bytes along k per stage: 64 or 128
    stages: int
    warps_m: int
    warps_n: int
    min_blocks: int = 1  # minimum resident blocks per multiprocessor: a bound on registers

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"mma_{self.tile_m}x{self.tile_n}x{self.tile_k_bytes}b{self.stages}"

    def shared(self, weights: int) -> int:
        """Return the bytes of dynamic shared memory: the stages, which later hold the sums."""
        stages = self.stages * (self.tile_m + weights * self.tile_n) * self.tile_k_bytes
        return max(stages, 4 * weights * self.tile_m * (self.tile_n + SUMS_PADDING))

    def chunks(self, weights: int) -> int:
        """Return how many 16-byte chunks of a stage each thread copies."""
        chunks = (self.tile_m + weights * self.tile_n) * self.tile_k_bytes // VECTOR_BYTES
        return chunks // (32 * self.warps_m * self.warps_n)

    def tiles(self, gemm: Gemm) -> int:
        """Return the number of tiles of y."""
        return -(-gemm.m // self.tile_m) * -(-gemm.n // self.tile_n)


# Each warp has up to 64 x 64 elements: larger tiles read shared memory less often per multiplication. A gated product
# has two sums per element of y.
PLAIN_CONFIGS: Final = (
    MmaConfig(128, 128, 64, 3, 2, 2, min_blocks=2),
    MmaConfig(64, 128, 64, 4, 2, 2, min_blocks=2),
    MmaConfig(64, 64, 64, 6, 2, 2, min_blocks=3),
)
GATED_CONFIGS: Final = (
    MmaConfig(128, 64, 64, 4, 2, 2, min_blocks=2),
    MmaConfig(64, 64, 64, 4, 2, 2, min_blocks=2),
)
# Configs for products whose x has a gate: for few columns of y, where memory is the limit, and for few rows.
GATE_CONFIGS: Final = (
    MmaConfig(128, 32, 64, 4, 4, 1, min_blocks=4),
    MmaConfig(64, 32, 64, 4, 4, 1, min_blocks=6),
    MmaConfig(64, 32, 64, 5, 4, 1, min_blocks=6),
    MmaConfig(64, 64, 128, 4, 2, 2, min_blocks=3),
    MmaConfig(128, 64, 64, 4, 4, 1, min_blocks=3),
    MmaConfig(32, 96, 128, 4, 2, 2, min_blocks=2),
    MmaConfig(32, 32, 128, 6, 2, 1, min_blocks=4),
)
GATE_COLUMNS: Final = 64  # loading x and multiplying it by the gate take as long as computing this many columns of y
SMALL_TILE: Final = 128 * 64  # elements of y per tile; with fewer, each element takes SMALL_TILE_FACTOR times as long
SMALL_TILE_FACTOR: Final = 1.25
GATE_TILE: Final = 1500  # the fixed cost of a tile, as a number of elements of y that take as long


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations, the expected fastest first; none if the device or the precision rules them out."""
    return [implementation(gemm, config, device) for config in _configs(gemm, device)]


def implementations_of_copies(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return implementations that first copy the operands to padded rows; none if all rows are already aligned."""
    if not padded(gemm, residual=False)[1]:
        return []
    return [implementation(gemm, config, device, copied=True) for config in _configs(gemm, device)]


def _configs(gemm: Gemm, device: Device) -> list[MmaConfig]:
    if not is_supported(gemm, device):
        return []
    configs = GATED_CONFIGS if gemm.up else GATE_CONFIGS if gemm.gate else PLAIN_CONFIGS
    fitting = [config for config in configs if config.shared(gemm.weight_count) <= device.shared_per_block]
    return best_first(fitting, lambda config: cost(gemm, config, device))


def is_supported(gemm: Gemm, device: Device) -> bool:
    """Return whether mma.sync computes this product as precisely as required, and 32 bits hold its row indices."""
    return device.arch >= MMA_ARCH and (gemm.dtype != "float32" or gemm.tf32) and gemm.m < 2**31 - 2**16


def cost(gemm: Gemm, config: MmaConfig, device: Device) -> float:
    """Return a relative cost of a config: waves of tiles over the GPU, times the time per tile.

    With a gate, on an H200, for 18 products of EfficientNet-B0 and MobileNetV3 with 32 images, the config with the
    least cost takes at most 1.02 times as long as the fastest if y has at most 112 columns, else at most 1.33 times.
    """
    waves = -(-config.tiles(gemm) // (device.multiprocessors * config.min_blocks))
    elements = config.tile_m * config.tile_n
    tile = elements * (1.0 if elements >= SMALL_TILE else SMALL_TILE_FACTOR)
    if gemm.gate:
        tile = config.tile_m * GATE_COLUMNS + elements + GATE_TILE
    return waves * config.min_blocks * tile


def implementation(gemm: Gemm, config: MmaConfig, device: Device, copied: bool = False) -> Implementation:
    """Return the launch with `config`, or with more threads if needed.

    If `copied`, a launch that copies x and w to padded rows comes first.
    """
    gemm, copies = padded(gemm, residual=False) if copied else (gemm, [])
    config = _with_enough_threads(gemm, config, copied)
    kernel = Kernel("gemm_mma", "gemm_mma", _defines(gemm, config, copied))
    given = (*arguments(gemm), gemm.gate or ABSENT, *int32(gemm.gate_rows))
    kernel, given = with_program(kernel, given, gemm.program)
    grid, threads = (config.tiles(gemm), 1, 1), (32 * config.warps_m * config.warps_n, 1, 1)
    pdl = device.has_pdl
    launch = Launch(kernel, grid, threads, given, config.shared(gemm.weight_count), pdl=pdl)
    name = f"{config.name} of copies" if copied else config.name
    return Implementation(name, (*launches(copies, device), launch), scratch_bytes(copies))


def shape_defines(gemm: Gemm, columns: int) -> Defines:
    """Return macros for kernels with compile-time n and k; each of their blocks computes `columns` columns of y."""
    width = row_bytes(gemm, gemm.n, VECTOR_BYTES) // ITEM_BYTES[gemm.dtype]
    return {
        **gemm.epilogue_defines(),
        "GEMM_N": gemm.n, "GEMM_K": gemm.k, "TRANSPOSED": int(gemm.transposed), "WIDTH": math.gcd(width, columns),
    }  # fmt: skip


def _with_enough_threads(gemm: Gemm, config: MmaConfig, copied: bool) -> MmaConfig:
    """Return `config`, with shorter stages or more threads if registers could not hold a thread's part of a stage."""
    limit = MAX_CHUNKS[min(_copy_bytes(gemm, copied))]
    if config.chunks(gemm.weight_count) > limit and config.tile_k_bytes > 64:
        config = replace(config, tile_k_bytes=64, stages=2 * config.stages)
    while config.chunks(gemm.weight_count) > limit and config.tile_n // config.warps_n > 16:
        config = replace(config, warps_n=2 * config.warps_n)
    return config


def _row_elements(gemm: Gemm) -> tuple[int, int]:
    """Return the elements per row of x, and per row of w."""
    return gemm.k, gemm.k if gemm.transposed else gemm.n


def _copy_bytes(gemm: Gemm, copied: bool) -> tuple[int, int]:
    """Return the bytes of one copy of x and of w to shared memory."""
    x, w = _row_elements(gemm)
    if copied:
        return VECTOR_BYTES, VECTOR_BYTES
    return row_bytes(gemm, x, VECTOR_BYTES), row_bytes(gemm, w, VECTOR_BYTES)


def _defines(gemm: Gemm, config: MmaConfig, copied: bool) -> Defines:
    x_copy, w_copy = _copy_bytes(gemm, copied)
    x_pitch, w_pitch = (padded_columns(row, gemm.dtype) if copied else row for row in _row_elements(gemm))
    return {
        **shape_defines(gemm, config.tile_n),
        "TILE_M": config.tile_m, "TILE_N": config.tile_n, "TILE_K_BYTES": config.tile_k_bytes,
        "STAGES": config.stages, "WARPS_M": config.warps_m, "WARPS_N": config.warps_n,
        "MIN_BLOCKS": config.min_blocks if min(x_copy, w_copy) == 16 else 1,  # narrow copies need more registers
        "GROUP_M": GROUP_M, "X_COPY": x_copy, "W_COPY": w_copy, "X_PITCH": x_pitch, "W_PITCH": w_pitch,
        "X_GATE": int(gemm.gate is not None),
    }  # fmt: skip


def row_bytes(gemm: Gemm, row: int, widest: int) -> int:
    """Return the bytes per access to rows of `row` elements: at most `widest`, or one element if misaligned."""
    item = ITEM_BYTES[gemm.dtype]
    if not gemm.aligned:
        return item
    while row * item % widest:
        widest //= 2
    return widest


def arguments(gemm: Gemm) -> tuple[Argument, ...]:
    """Return the arguments of gemm_mma.cu and gemm_small.cu."""
    return gemm.x, gemm.w, gemm.up or ABSENT, gemm.epilogue_operands, *int32(gemm.m)
