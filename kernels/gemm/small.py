"""Chooses kernels for products of a few rows, which take as long as reading the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm import mma, stream
from onnxfuse.kernels.gemm.mma import MmaConfig, arguments, row_bytes, shape_defines
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import RESERVED_BYTES
from onnxfuse.kernels.selection import by_rows, selects
from onnxfuse.kernels.tensors import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import for_later_plans

MAX_ROWS: Final = 64  # maximum rows of x; with more, arithmetic takes as long as reading the weights
MAX_DOT_ROWS: Final = 8


@dataclass(frozen=True)
class DotConfig:
    """The macros of gemm_small.cu that this module chooses."""

    rows: int
    warps_n: int
    warps_k: int
    loads: int
    lanes: int = 32  # lanes of a warp along n; only if w is k x n
    unroll: int = 1  # vectors in flight per lane; only if w is n x k

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"dots_{self.rows}x{self.warps_n}x{self.warps_k}_{self.loads}_{self.lanes}_{self.unroll}"


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations for a few rows, the expected fastest first; none for more than MAX_ROWS rows."""
    if gemm.m > MAX_ROWS:
        return []
    streamed = stream.implementations(gemm, device) if stream.is_supported(gemm, device) else []
    if gemm.grouped:
        return streamed
    is_tiled = mma.is_supported(gemm, device) and not streamed and not selects(gemm)
    configs = _mma_configs(gemm, device) if is_tiled else []
    tiled = [mma.implementation(gemm, config, device) for config in configs]
    if (not streamed or _takes_one_round(gemm, device)) and gemm.m == 1:
        return [dot_implementation(gemm, _dot_config(gemm, device), device), *streamed, *tiled]
    with for_later_plans(gemm.m if streamed or tiled else 0):
        has_dots = gemm.m <= (1 if streamed else MAX_DOT_ROWS)
        dots = [dot_implementation(gemm, _dot_config(gemm, device), device)] if has_dots else []
    return [*streamed, *tiled, *dots]


def _takes_one_round(gemm: Gemm, device: Device) -> bool:
    """Return whether dots of one row load all weights at once, with most lanes, so that they beat gemm_stream.

    They then wait once for memory, and no barrier.  On an H200, in us by dots and by gemm_stream: 1x1024x1024 1.8 and
    2.3, 1x3072x768 2.8 and 3.1, 1x768x768 1.9 and 1.9; but 1x512x512 1.9 and 1.7, where half of the lanes have no
    row of w, and 1x1280x1280 3.5 and 2.3, in two rounds.
    """
    if gemm.transposed or gemm.up:
        return False
    config = _dot_config(replace(gemm, m=1), device)
    rows = config.warps_k * (32 // config.lanes) * config.loads
    return config.lanes == 4 and rows // 2 < gemm.k <= rows


def dot_implementation(gemm: Gemm, config: DotConfig, device: Device) -> Implementation:
    """Return one launch of gemm_small.cu."""
    item = ITEM_BYTES[gemm.dtype]
    vector = row_bytes(gemm, gemm.k if gemm.transposed else gemm.n, VECTOR_BYTES) // item
    x_vector = row_bytes(gemm, gemm.k, VECTOR_BYTES) // item
    tile_n = config.warps_n * (config.loads if gemm.transposed else config.lanes * vector)
    defines = {
        **shape_defines(gemm, tile_n),
        "ROWS": config.rows, "WARPS_N": config.warps_n, "WARPS_K": config.warps_k, "LOADS": config.loads,
        "LANES": config.lanes, "UNROLL": config.unroll, "MIN_BLOCKS": 1, "VECTOR": vector,
        "X_VECTOR": min(x_vector, config.loads), "WEIGHTS_CONSTANT": int(gemm.weights_constant),
    }  # fmt: skip
    grid, threads = (-(-gemm.n // tile_n), -(-gemm.m // config.rows), 1), (32 * config.warps_n * config.warps_k, 1, 1)
    kernel, given = with_program(Kernel("gemm_small", "gemm_small", defines), arguments(gemm), gemm.program)
    return by_rows(config.name, Launch(kernel, grid, threads, given, pdl=device.has_pdl), gemm, gemm.n, tile_n)


def _mma_configs(gemm: Gemm, device: Device) -> list[MmaConfig]:
    """Return configs of gemm_mma.cu with many stages, so that many bytes of weights are in flight."""
    tile_m = 16 if gemm.m <= 16 else 32 if gemm.m <= 32 else 64
    configs = []
    for tile_n in (64, 32) if gemm.n > 64 * device.multiprocessors else (32, 64):
        stage = (tile_m + gemm.weight_count * tile_n) * 128
        stages = max(3, min(8, (device.shared_per_block // 2 - RESERVED_BYTES) // stage))
        configs.append(MmaConfig(tile_m, tile_n, 128, stages, 2 if tile_m == 64 else 1, tile_n // 32))
    return configs


def _dot_config(gemm: Gemm, device: Device) -> DotConfig:
    """Return the config for the number of rows and the layout of w."""
    rows = next(count for count in (1, 2, 4, 8) if gemm.m <= count)
    vector = VECTOR_BYTES // ITEM_BYTES[gemm.dtype]
    if gemm.transposed:
        unroll, warps = 4 // min(rows, 4), 4
        while unroll > 1 and 32 * vector * warps * unroll > gemm.k:
            unroll //= 2
        while warps > 1 and 32 * vector * warps > gemm.k:
            warps //= 2
        return DotConfig(rows, 4 // warps, warps, 2, unroll=unroll)
    if gemm.n >= 7 * vector * device.multiprocessors:
        return DotConfig(rows, 1, 8, 8 if rows < 4 else 4, lanes=8)
    # Narrower tiles give more blocks, in which more lanes divide k.
    return DotConfig(rows, 1, 16 if rows < 4 else 8, 8 if rows < 4 else 4, lanes=4)
