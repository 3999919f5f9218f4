"""Matrix products of a few rows, whose time is that of reading the weights: gemm_small.cu, and gemm_mma.cu in parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

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
from onnxfuse.kernels._types import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.provider.plan import Device, Kernel, Launch

MOST_ROWS: Final = 64  # of x: beyond, arithmetic counts as much as the weights' bytes
MOST_DOT_ROWS: Final = 8
FEWEST_TILED_ROWS: Final = 1  # up to here dot products are faster than tiles of 16 rows
CLUSTERS_FROM: Final = 90  # compute capability


@dataclass(frozen=True)
class Dots:
    """The constants of gemm_small.cu that a host chooses."""

    rows: int
    warps_n: int
    warps_k: int
    loads: int
    lanes: int = 32  # along n, where w is k x n
    unroll: int = 1  # where w is n x k
    cluster: int = 1

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"dots_{self.rows}x{self.warps_n}x{self.warps_k}_{self.loads}_{self.lanes}_{self.unroll}_{self.cluster}"


def dots_candidate(gemm: Gemm, dots: Dots) -> Candidate:
    """One launch of gemm_small.cu."""
    item = ITEM_BYTES[gemm.dtype]
    vector = row_bytes(gemm, gemm.k if gemm.transposed else gemm.n, VECTOR_BYTES) // item
    x_vector = row_bytes(gemm, gemm.k, VECTOR_BYTES) // item
    tile = dots.warps_n * (dots.loads if gemm.transposed else dots.lanes * vector)
    defines = {
        **epilogue_defines(gemm, tile, dots.cluster),
        "ROWS": dots.rows, "WARPS_N": dots.warps_n, "WARPS_K": dots.warps_k, "LOADS": dots.loads, "LANES": dots.lanes,
        "UNROLL": dots.unroll, "MIN_BLOCKS": 1, "VECTOR": vector, "X_VECTOR": min(x_vector, dots.loads),
    }  # fmt: skip
    grid = (-(-gemm.n // tile) * dots.cluster, -(-gemm.m // dots.rows), 1)
    threads = 32 * dots.warps_n * dots.warps_k
    launch = Launch(
        Kernel("gemm_small", "gemm_small", defines), grid, (threads, 1, 1), arguments(gemm), cluster=dots.cluster
    )
    return Candidate(dots.name, (launch,))


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to multiply a few rows, the likeliest first; none for many rows."""
    if gemm.m > MOST_ROWS:
        return []
    tiled = [candidate(gemm, tiling) for tiling in _tilings(gemm, device)] if usable(gemm, device) else []
    dots = [dots_candidate(gemm, _dots(gemm, device))] if gemm.m <= MOST_DOT_ROWS else []
    return [*dots, *tiled] if gemm.m <= FEWEST_TILED_ROWS else [*tiled, *dots]


def _tilings(gemm: Gemm, device: Device) -> list[Tiling]:
    """With as many blocks as multiprocessors or more, and much of their memory on its way."""
    bm = 16 if gemm.m <= 16 else 32 if gemm.m <= 32 else 64
    found = []
    for bn in (64, 32):
        stage = (bm + parts(gemm) * bn) * 128
        stages = max(3, min(8, (device.shared_per_block // 2 - RESERVED_BYTES) // stage))
        tiling = Tiling(bm, bn, 128, stages, 2 if bm == 64 else 1, bn // 32)
        cluster = _cluster(tiling.tiles(gemm), -(-gemm.k * ITEM_BYTES[gemm.dtype] // 128), device)
        found.append(replace(tiling, cluster=cluster))
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
    cluster = _cluster(-(-gemm.n // (8 * vector)) // 2, -(-gemm.k // 256), device)
    return Dots(rows, 1, 8, 8 if rows < 4 else 4, lanes=8, cluster=cluster)


def _cluster(tiles: int, most: int, device: Device) -> int:
    """Blocks to share a tile, so that there are about as many as multiprocessors."""
    cluster = 1
    while device.arch >= CLUSTERS_FROM and cluster < min(8, most) and 2 * cluster * tiles <= device.multiprocessors:
        cluster *= 2
    return cluster
