"""Attention with mma.sync, for every shape, mask and dtype: the host side of attention_mma.cu and attention_mma.cuh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._attention import Attention, Heads, Scores
from onnxfuse.kernels._attention_blocks import NEGLIGIBLE
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._types import ABSENT, EARLY_ARCH, ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Scalar

TENSOR_CORES_FROM: Final = 80  # compute capability with bf16 and TF32 products and asynchronous copies
LARGEST_HEAD: Final = 256
LOG2_E: Final = math.log2(math.e)
LOWEST: Final = -1.6e38  # attention_mma.cuh's
MASKS: Final = {"none": 0, "boolean": 1, "inverted": 2, "additive": 3}
MASK_STORAGE: Final = {**STORAGE, "bool": "b8"}
MOST: Final = 4  # candidates
REGISTERS: Final = 65536  # of a multiprocessor
CROWDED: Final = 160  # registers of a thread below which queries are read again for each tile of keys
STREAM_KEYS: Final = 1024  # where rows are few, more keys than these are split over blocks: _attention_decode.py


@dataclass(frozen=True)
class Tiling:
    """How a block works: see attention_mma.cuh."""

    row_warps: int  # WARPS_M
    key_warps: int  # WARPS_N
    keys: int  # BLOCK_K
    tiles: int = 1  # MT
    stages: int = 2
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        """Of a block."""
        return 16 * self.tiles * self.row_warps

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.row_warps * self.key_warps

    @property
    def name(self) -> str:
        """What tells it from others."""
        return f"{self.rows}x{self.keys}/{self.row_warps}x{self.key_warps}/{self.stages}"


def product(problem: Attention, device: Device) -> str:
    """Which products: attention_mma.cuh's PRODUCT."""
    if device.arch < TENSOR_CORES_FROM:
        return "FP32"
    return "HALF" if problem.dtype != "float32" else "TF32" if problem.tf32 else "FP32"


def unit(problem: Attention, device: Device) -> int:
    """Bytes of an element in shared memory."""
    return 4 if product(problem, device) == "FP32" else ITEM_BYTES[problem.dtype]


def shared_bytes(problem: Attention, tiling: Tiling, device: Device, shares: bool) -> int:
    """Bytes of shared memory of a block; `shares`: its results meet there."""
    kind, item = product(problem, device), unit(problem, device)
    k_row = _odd_sixteens(_up(problem.size, {"HALF": 16, "TF32": 8, "FP32": 4}[kind]) * item)
    value_size = _up(problem.value_size, 16 if kind == "HALF" else 8)
    tiles = tiling.rows * k_row + tiling.stages * tiling.keys * (k_row + _odd_sixteens(value_size * item))
    results = tiling.rows * 4 * (tiling.key_warps * (value_size + 8 + 2) + 2)
    return max(tiles, results if shares else 0)


def fitted(problem: Attention, tiling: Tiling, device: Device, shares: bool = False) -> Tiling | None:
    """The tiling, or one with fewer stages, keys or rows that fits into shared memory; None where none does."""
    least = (8 if product(problem, device) == "FP32" else 16) * tiling.key_warps
    while shared_bytes(problem, tiling, device, shares or tiling.key_warps > 1) > device.shared_per_block:
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        elif tiling.keys > least:
            tiling = replace(tiling, keys=tiling.keys // 2)
        elif tiling.row_warps > 1:
            tiling = replace(tiling, row_warps=tiling.row_warps // 2)
        else:
            return None
    return tiling


def defines(problem: Attention, tiling: Tiling, device: Device, returns: bool = False) -> Defines:
    """The kernel's constants, which do not depend on lengths: a growing cache needs no new kernel.

    `returns`: a block may begin again with what it has left out, as it has all keys of its rows.
    """
    group = problem.heads // problem.kv_heads
    most, wanted = NEGLIGIBLE[problem.dtype]
    returns = returns and problem.added and problem.causal is not None and problem.masked_score <= most
    return {
        "T": STORAGE[problem.dtype], "OUT_T": STORAGE[problem.out_dtype or problem.dtype],
        "SIZE": problem.size, "VALUE_SIZE": problem.value_size, "GROUP": group,
        "PRODUCT": product(problem, device), "MT": tiling.tiles, "WARPS_M": tiling.row_warps,
        "WARPS_N": tiling.key_warps, "BLOCK_K": tiling.keys, "STAGES": tiling.stages,
        "Q_KEPT": int(_keeps_queries(problem, tiling, device)),
        "MIN_BLOCKS": tiling.min_blocks, "ACCESS": access(problem), "OUT_ACCESS": out_access(problem),
        "RAW": int(_is_raw(problem)), "CAUSAL": int(problem.causal is not None), "SOFTCAP": int(problem.softcap != 0),
        "ZERO_ROWS": int(problem.zero_rows), "MASK": MASKS[problem.mask_kind], "BIAS": int(problem.bias is not None),
        "ADDED": int(problem.added), "RETURNS": int(returns), "WANTED": wanted * LOG2_E,
        **_scores_defines("MASK", problem.mask, problem), **_scores_defines("BIAS", problem.bias, problem),
    }  # fmt: skip


def _is_raw(problem: Attention) -> bool:
    """Whether scores can stay without their scale until they are exponentiated."""
    replaced = problem.mask_kind in ("boolean", "inverted") and problem.masked_score > -math.inf
    added = problem.added or problem.mask_kind == "additive"
    changed = replaced or added or problem.bias is not None or problem.softcap != 0
    return problem.scale > 0 and not changed


def _keeps_queries(problem: Attention, tiling: Tiling, device: Device) -> bool:
    """Whether registers have room for the queries besides what masks and biases need."""
    kind = product(problem, device)
    registers = 4 * tiling.tiles * (-(-problem.size // 16) if kind == "HALF" else -(-problem.size // 8))
    crowded = REGISTERS // (tiling.threads * tiling.min_blocks) < CROWDED
    return kind != "FP32" and not crowded and registers <= (16 if problem.mask or problem.bias else 32)


def _scores_defines(name: str, scores: Scores | None, problem: Attention) -> Defines:
    if scores is None:
        return {f"{name}_T": "b8", f"{name}_ROWS": 0, f"{name}_PAIRS": 0}
    strides = (scores.batch, scores.head, scores.query)
    pairs = scores.key == 1 and scores.aligned and not any(stride % 2 for stride in strides)
    by_row = int(_by_row(problem, scores))
    return {f"{name}_T": MASK_STORAGE[scores.dtype], f"{name}_ROWS": by_row, f"{name}_PAIRS": int(pairs)}


def _by_row(problem: Attention, scores: Scores | None) -> bool:
    """Whether rows of a block have scores of their own."""
    if scores is None:
        return False
    return bool(scores.query and problem.queries > 1) or bool(scores.head and problem.heads > problem.kv_heads)


def access(problem: Attention) -> int:
    """Bytes of an access to q, k and v: all that begins at a multiple of these is aligned."""
    item = ITEM_BYTES[problem.dtype]
    if not problem.aligned:
        return item
    extents = [problem.size, problem.value_size]
    extents += [stride for heads in (problem.q, problem.k, problem.v) for stride in _strides(heads)]
    offsets = [heads.pointer.offset for heads in (problem.q, problem.k, problem.v)]
    return math.gcd(VECTOR_BYTES, *(extent * item for extent in extents), *offsets)


def out_access(problem: Attention) -> int:
    """Elements of an access to the result."""
    item = ITEM_BYTES[problem.out_dtype or problem.dtype]
    if not problem.aligned:
        return 1
    extents = (problem.value_size, problem.out.batch, problem.out.head, problem.out.row)
    return math.gcd(VECTOR_BYTES, *(extent * item for extent in extents), problem.out.pointer.offset) // item


def arguments(problem: Attention, row_tiles: int) -> tuple[Argument, ...]:
    """attention_mma.cuh's ATTENTION_PARAMETERS."""
    heads = (problem.q, problem.k, problem.v, problem.out)
    scores = (problem.mask, problem.bias)
    integers = (
        *(each.key if each else 0 for each in scores),
        problem.queries, problem.keys, problem.kv_heads, row_tiles, problem.causal or 0,
    )  # fmt: skip
    return (
        *(each.pointer for each in heads),
        *(each.pointer if each else ABSENT for each in scores),
        *(Scalar(stride, "int64") for each in heads for stride in _strides(each)),
        *(Scalar(stride, "int64") for each in scores for stride in _score_strides(each)),
        *(Scalar(number, "int32") for number in integers),
        *(Scalar(number, "float32") for number in _score_units(problem)),
    )


def _strides(heads: Heads) -> tuple[int, int, int]:
    return heads.batch, heads.head, heads.row


def _score_strides(scores: Scores | None) -> tuple[int, int, int]:
    return (scores.batch, scores.head, scores.query) if scores else (0, 0, 0)


def _score_units(problem: Attention) -> tuple[float, float, float]:
    """scale, masked, cap: what makes scores, in units of log2(e), of products."""
    masked = problem.masked_score if problem.added or problem.mask_kind in ("boolean", "inverted") else 0.0
    masked = masked if math.isinf(masked) else max(LOWEST, min(-LOWEST, masked * LOG2_E))
    if problem.softcap:
        return problem.scale / problem.softcap, masked, problem.softcap * LOG2_E
    return problem.scale * LOG2_E, masked, 0.0


def plans(problem: Attention, device: Device) -> list[Candidate]:
    """The ways to run it, the likeliest first; none where head sizes are too large for this GPU."""
    if max(problem.size, problem.value_size) > LARGEST_HEAD:
        return []
    found = (fitted(problem, tiling, device) for tiling in _ranked(problem, device))
    kept = dict.fromkeys(tiling for tiling in found if tiling)
    return [_candidate(problem, tiling, device) for tiling in list(kept)[:MOST]]


def _candidate(problem: Attention, tiling: Tiling, device: Device) -> Candidate:
    rows = problem.queries * (problem.heads // problem.kv_heads)
    row_tiles = -(-rows // tiling.rows)
    blocks = row_tiles * problem.kv_heads * problem.batch
    constants = defines(problem, tiling, device, returns=tiling.key_warps == 1)
    kernel = Kernel("attention_mma", "attention_mma", constants)
    shared = shared_bytes(problem, tiling, device, tiling.key_warps > 1)
    early = device.arch >= EARLY_ARCH
    step = Launch(kernel, (blocks, 1, 1), (tiling.threads, 1, 1), arguments(problem, row_tiles), shared, early=early)
    return Candidate(f"attention_mma {tiling.name}", (step,))


def _ranked(problem: Attention, device: Device) -> list[Tiling]:
    """Tilings with enough blocks for the chip and no idle warps first, those with most rows before others."""
    rows = problem.queries * (problem.heads // problem.kv_heads)
    tilings = list(_tilings(max(problem.size, problem.value_size), product(problem, device)))

    def rank(tiling: Tiling) -> tuple[bool, bool, int]:
        blocks = -(-rows // tiling.rows) * problem.kv_heads * problem.batch
        enough = blocks >= device.multiprocessors
        return (tiling.rows > _up(rows, 16), not enough, -tiling.rows if enough else -blocks)

    if problem.mask or problem.bias or problem.added:  # their elements, or what is seen, are in registers, too
        tilings = [tiling for tiling in tilings if tiling.tiles == 1]
    if problem.added or _by_row(problem, problem.mask) or _by_row(problem, problem.bias):
        tilings = [tiling for tiling in tilings if tiling.row_warps <= 4]
    if problem.mask and problem.bias:
        tilings = [replace(t, min_blocks=1, keys=max(t.keys // 2, 16 * t.key_warps)) for t in tilings]
    return sorted((t for t in tilings if t.key_warps == 1 or problem.keys <= STREAM_KEYS or rows <= 64), key=rank)


def _tilings(size: int, kind: str) -> Iterator[Tiling]:
    if kind == "FP32" and size > 128:  # registers have no room for what warps that share keys need besides
        yield from (Tiling(2, 1, 16), Tiling(1, 1, 16))
        return
    if kind == "FP32":
        yield from (Tiling(4, 1, 32), Tiling(2, 2, 32), Tiling(1, 4, 64))
        return
    if size <= 64:
        yield from (Tiling(4, 1, 64, min_blocks=3), Tiling(7, 1, 64, min_blocks=2), Tiling(4, 1, 64, 2))
        yield from (Tiling(2, 2, 64), Tiling(1, 4, 128))
    elif size <= 128:
        yield from (Tiling(4, 1, 64), Tiling(2, 2, 64), Tiling(1, 4, 64))
    else:
        yield from (Tiling(4, 1, 32), Tiling(2, 2, 64), Tiling(1, 4, 64))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _odd_sixteens(count: int) -> int:
    return (-(-count // 16) | 1) * 16
