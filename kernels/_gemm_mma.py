"""Matrix products by mma.sync, for every size and alignment on compute capability 8.0 and later: gemm_mma.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._gemm_pad import launches, padded, scratch_bytes, whole
from onnxfuse.kernels._types import ABSENT, EARLY_ARCH, ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Scalar

MMA_FROM: Final = 80  # compute capability with bf16, TF32 and cp.async
SUMS_PAD: Final = 8  # PITCH - BN of gemm_mma.cu
CHUNKS: Final = {16: 12, 8: 8, 4: 6, 2: 5}  # of a thread at most, by the bytes of a copy: more do not fit its registers
RESERVED_BYTES: Final = 1024  # of shared memory, for each block


@dataclass(frozen=True)
class Tiling:
    """The constants of gemm_mma.cu that a host chooses."""

    bm: int
    bn: int
    bk_bytes: int  # 64 or 128
    stages: int
    warps_m: int
    warps_n: int
    min_blocks: int = 1  # that must fit on a multiprocessor: a bound on registers

    @property
    def name(self) -> str:
        """What a report calls it."""
        return f"mma_{self.bm}x{self.bn}x{self.bk_bytes}b{self.stages}"

    def shared(self, parts: int) -> int:
        """Bytes of dynamic shared memory: stages, whose place the sums take."""
        stages = self.stages * (self.bm + parts * self.bn) * self.bk_bytes
        return max(stages, 4 * parts * self.bm * (self.bn + SUMS_PAD))

    def chunks(self, parts: int) -> int:
        """16 bytes of a stage each, that a thread copies."""
        return (self.bm + parts * self.bn) * self.bk_bytes // VECTOR_BYTES // (32 * self.warps_m * self.warps_n)

    def tiles(self, gemm: Gemm) -> int:
        """How many there are of y."""
        return -(-gemm.m // self.bm) * -(-gemm.n // self.bn)


# Up to 64 x 64 for each warp: the larger, the less often shared memory is read for a product. A gated product holds
# two sums for each element of y.
SINGLE: Final = (
    Tiling(128, 128, 64, 3, 2, 2, min_blocks=2),
    Tiling(64, 128, 64, 4, 2, 2, min_blocks=2),
    Tiling(64, 64, 64, 6, 2, 2, min_blocks=3),
)
GATED: Final = (
    Tiling(128, 64, 64, 4, 2, 2, min_blocks=2),
    Tiling(64, 64, 64, 4, 2, 2, min_blocks=2),
)


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Its tilings for this product, the likeliest first; none where the device or the precision does not allow it."""
    return [candidate(gemm, tiling, device) for tiling in _tilings(gemm, device)]


def plans_of_copies(gemm: Gemm, device: Device) -> list[Candidate]:
    """The same on copies of operands, whose rows move in vectors; none where they do as they are."""
    if not padded(gemm, residual=False)[1]:
        return []
    return [candidate(gemm, tiling, device, copied=True) for tiling in _tilings(gemm, device)]


def _tilings(gemm: Gemm, device: Device) -> list[Tiling]:
    if not usable(gemm, device):
        return []
    fitting = [t for t in (GATED if gemm.up else SINGLE) if t.shared(parts(gemm)) <= device.shared_per_block]
    return sorted(fitting, key=lambda t: cost(gemm, t, device))


def usable(gemm: Gemm, device: Device) -> bool:
    """Whether mma.sync computes this product as precisely as it must be, and 32 bits count its rows."""
    return device.arch >= MMA_FROM and (gemm.dtype != "float32" or gemm.tf32) and gemm.m < 2**31 - 2**16


def parts(gemm: Gemm) -> int:
    """How many products share x."""
    return 2 if gemm.up else 1


def cost(gemm: Gemm, tiling: Tiling, device: Device) -> float:
    """What to order tilings by: rounds of tiles over the chip, times what a tile takes; larger ones are denser."""
    resident = device.multiprocessors * tiling.min_blocks
    rounds = -(-tiling.tiles(gemm) // resident)
    dense = 1.0 if tiling.bm * tiling.bn >= 128 * 64 else 1.25
    return rounds * tiling.bm * tiling.bn * tiling.min_blocks * dense


def candidate(gemm: Gemm, tiling: Tiling, device: Device, copied: bool = False) -> Candidate:
    """One launch, of that tiling or one with more threads; `copied`: after one that copies x and w to whole vectors."""
    gemm, copies = padded(gemm, residual=False) if copied else (gemm, [])
    tiling = _fitted(gemm, tiling, copied)
    kernel = Kernel("gemm_mma", "gemm_mma", _defines(gemm, tiling, copied))
    grid, threads = (tiling.tiles(gemm), 1, 1), (32 * tiling.warps_m * tiling.warps_n, 1, 1)
    early = device.arch >= EARLY_ARCH
    launch = Launch(kernel, grid, threads, arguments(gemm), tiling.shared(parts(gemm)), early=early)
    name = f"{tiling.name} of copies" if copied else tiling.name
    return Candidate(name, (*launches(copies, device), launch), scratch_bytes(copies))


def epilogue_defines(gemm: Gemm, tile: int) -> Defines:
    """The constants of gemm_epilogue.cuh, where a block finishes so many columns."""
    width = row_bytes(gemm, gemm.n, VECTOR_BYTES) // ITEM_BYTES[gemm.dtype]
    return {
        "ITEM_T": STORAGE[gemm.dtype], "COLUMNS": gemm.n, "DEPTH": gemm.k, "TRANSPOSED": int(gemm.transposed),
        "WIDTH": math.gcd(width, tile), "PARTS": parts(gemm),
        "BIAS": int(gemm.bias is not None), "UP_BIAS": int(gemm.up_bias is not None),
        "COLUMN_SCALE": int(gemm.column_scale is not None), "RESIDUAL": int(gemm.residual is not None),
        "ACTIVATION": gemm.activation, "PRECISE": int(gemm.dtype == "float32"),
    }  # fmt: skip


def _fitted(gemm: Gemm, tiling: Tiling, copied: bool) -> Tiling:
    """So that a thread's part of a stage stays in registers: its addresses, or itself where elements are copied."""
    most = CHUNKS[min(_accesses(gemm, copied))]
    if tiling.chunks(parts(gemm)) > most and tiling.bk_bytes > 64:
        tiling = replace(tiling, bk_bytes=64, stages=2 * tiling.stages)
    while tiling.chunks(parts(gemm)) > most and tiling.bn // tiling.warps_n > 16:
        tiling = replace(tiling, warps_n=2 * tiling.warps_n)
    return tiling


def _rows(gemm: Gemm) -> tuple[int, int]:
    """Elements of a row of x and of w."""
    return gemm.k, gemm.k if gemm.transposed else gemm.n


def _accesses(gemm: Gemm, copied: bool) -> tuple[int, int]:
    """Bytes of one copy of x and of w to shared memory."""
    x, w = _rows(gemm)
    if copied:
        return VECTOR_BYTES, VECTOR_BYTES
    return row_bytes(gemm, x, VECTOR_BYTES), row_bytes(gemm, w, VECTOR_BYTES)


def _defines(gemm: Gemm, tiling: Tiling, copied: bool) -> Defines:
    x_copy, w_copy = _accesses(gemm, copied)
    x_pitch, w_pitch = (whole(row, gemm.dtype) if copied else row for row in _rows(gemm))
    return {
        **epilogue_defines(gemm, tiling.bn),
        "BM": tiling.bm, "BN": tiling.bn, "BK_BYTES": tiling.bk_bytes, "STAGES": tiling.stages,
        "WARPS_M": tiling.warps_m, "WARPS_N": tiling.warps_n,
        "MIN_BLOCKS": tiling.min_blocks if min(x_copy, w_copy) == 16 else 1,  # narrow copies take registers
        "GROUP": 8, "X_COPY": x_copy, "W_COPY": w_copy, "X_PITCH": x_pitch, "W_PITCH": w_pitch,
    }  # fmt: skip


def row_bytes(gemm: Gemm, row: int, widest: int) -> int:
    """Bytes of an access to rows of so many elements: at most `widest`, one element where pointers are misaligned."""
    item = ITEM_BYTES[gemm.dtype]
    if not gemm.aligned:
        return item
    while row * item % widest:
        widest //= 2
    return widest


def arguments(gemm: Gemm) -> tuple[Argument, ...]:
    """Of gemm_mma.cu and gemm_small.cu."""
    places = (gemm.x, gemm.w, gemm.up, gemm.bias, gemm.up_bias, gemm.column_scale, gemm.residual, gemm.y)
    numbers = (Scalar(gemm.alpha, "float32"), Scalar(gemm.beta, "float32"), Scalar(gemm.m, "int32"))
    return (*(ABSENT if place is None else place for place in places), *numbers)
