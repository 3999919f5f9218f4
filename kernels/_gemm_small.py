"""Matrix products of a few rows, whose time is that of reading the weights: what runs them where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels import _gemm_stream
from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._gemm_mma import (
    RESERVED_BYTES,
    Tiling,
    arguments,
    candidate,
    epilogue_defines,
    parts,
    row_bytes,
    usable,
)
from onnxfuse.kernels._types import EARLY_ARCH, ITEM_BYTES, VECTOR_BYTES
from onnxfuse.provider.plan import Device, Kernel, Launch

MOST_ROWS: Final = 64  # of x: beyond, arithmetic counts as much as the weights' bytes
MOST_DOT_ROWS: Final = 8


@dataclass(frozen=True)
class Dots:
    """The constants of gemm_small.cu that a host chooses."""

    rows: int
    warps_n: int
    warps_k: int
    loads: int
    lanes: int = 32  # along n, where w is k x n
    unroll: int = 1  # where w is n x k

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"dots_{self.rows}x{self.warps_n}x{self.warps_k}_{self.loads}_{self.lanes}_{self.unroll}"


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to multiply a few rows, the likeliest first; none for many rows."""
    if gemm.m > MOST_ROWS:
        return []
    streams = _gemm_stream.plans(gemm, device) if _gemm_stream.usable(gemm, device) else []
    if gemm.beside:
        return streams
    tiles = _tilings(gemm, device) if usable(gemm, device) and not streams else []
    tiled = [candidate(gemm, tiling, device) for tiling in tiles]
    dots = [dots_candidate(gemm, _dots(gemm, device), device)] if gemm.m <= (1 if streams else MOST_DOT_ROWS) else []
    return [*streams, *dots, *tiled] if gemm.m == 1 else [*streams, *tiled, *dots]


def dots_candidate(gemm: Gemm, dots: Dots, device: Device) -> Candidate:
    """One launch of gemm_small.cu."""
    item = ITEM_BYTES[gemm.dtype]
    vector = row_bytes(gemm, gemm.k if gemm.transposed else gemm.n, VECTOR_BYTES) // item
    x_vector = row_bytes(gemm, gemm.k, VECTOR_BYTES) // item
    tile = dots.warps_n * (dots.loads if gemm.transposed else dots.lanes * vector)
    defines = {
        **epilogue_defines(gemm, tile),
        "ROWS": dots.rows, "WARPS_N": dots.warps_n, "WARPS_K": dots.warps_k, "LOADS": dots.loads, "LANES": dots.lanes,
        "UNROLL": dots.unroll, "MIN_BLOCKS": 1, "VECTOR": vector, "X_VECTOR": min(x_vector, dots.loads),
        "WEIGHTS_CONSTANT": int(gemm.constant),
    }  # fmt: skip
    grid, threads = (-(-gemm.n // tile), -(-gemm.m // dots.rows), 1), (32 * dots.warps_n * dots.warps_k, 1, 1)
    kernel, early = Kernel("gemm_small", "gemm_small", defines), device.arch >= EARLY_ARCH
    return Candidate(dots.name, (Launch(kernel, grid, threads, arguments(gemm), early=early),))


def _tilings(gemm: Gemm, device: Device) -> list[Tiling]:
    """With much of their memory on its way."""
    bm = 16 if gemm.m <= 16 else 32 if gemm.m <= 32 else 64
    found = []
    for bn in (64, 32) if gemm.n > 64 * device.multiprocessors else (32, 64):
        stage = (bm + parts(gemm) * bn) * 128
        stages = max(3, min(8, (device.shared_per_block // 2 - RESERVED_BYTES) // stage))
        found.append(Tiling(bm, bn, 128, stages, 2 if bm == 64 else 1, bn // 32))
    return found


def _dots(gemm: Gemm, device: Device) -> Dots:
    """For the number of rows and the layout of w."""
    rows = next(count for count in (1, 2, 4, 8) if gemm.m <= count)
    vector = VECTOR_BYTES // ITEM_BYTES[gemm.dtype]
    if gemm.transposed:
        unroll, warps = 4 // min(rows, 4), 4
        while unroll > 1 and 32 * vector * warps * unroll > gemm.k:
            unroll //= 2
        while warps > 1 and 32 * vector * warps > gemm.k:
            warps //= 2
        return Dots(rows, 4 // warps, warps, 2, unroll=unroll)
    if gemm.n >= 7 * vector * device.multiprocessors:
        return Dots(rows, 1, 8, 8 if rows < 4 else 4, lanes=8)
    return Dots(rows, 1, 16 if rows < 4 else 8, 8 if rows < 4 else 4, lanes=4)  # more blocks, with more of k in each
