"""Attention on Hopper: attention_hopper.cu, and attention_blocks.cu, which tells it what a mask leaves of each tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from onnxfuse.kernels import _attention_blocks
from onnxfuse.kernels._attention import Attention, Heads, Scores
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._types import ABSENT, ITEM_BYTES, STORAGE, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap

LARGEST_HEAD: Final = 256
PANEL: Final = 64  # columns that lie together in shared memory: 128 bytes
ALIGNMENT: Final = 8  # elements; tensor maps want strides of whole 16 bytes
BARRIER_BYTES: Final = 512
LAZY_FROM: Final = 64  # wider results are rescaled only where a row's maximum has grown by much
KEPT_BYTES: Final = 24 << 20  # keys and values of the heads that run together; L2 has 50 MB
LOWEST: Final = -3.4028234663852886e38
SCALES: Final = (1e-6, 1e6)  # with which what a mask adds may be divided by the scale, in fp32
UNLIKE: Final = 128.0  # from a score to one beside which it has no weight


@dataclass(frozen=True)
class Tiling:
    """How a block works: `groups` warpgroups of 64 queries each, tiles of `keys` keys, `stages` of them in flight."""

    groups: int
    keys: int
    stages: int
    blocks: int = 1  # on a multiprocessor
    turns: bool = False  # warpgroups issue their products in turns
    slowness: float = 1.0  # of a multiprocessor that is full of them, beside other tilings of the same head size

    def shared(self, size: int, value_size: int) -> int:
        """Bytes of shared memory."""
        panels = [math.ceil(columns / PANEL) for columns in (size, value_size)]
        return 128 * (self.groups * 64 * max(panels) + self.stages * self.keys * sum(panels)) + BARRIER_BYTES

    @property
    def threads(self) -> int:
        """In a block."""
        return 128 * self.groups + (128 if self.rebalanced else 32)

    @property
    def rebalanced(self) -> bool:
        """Whether registers go from the warpgroup that copies to the others."""
        return self.groups > 1 and self.blocks == 1

    @property
    def registers(self) -> int:
        """That a thread may use: what attention_hopper.cu takes, or an even share of a scheduler's 512 x 32."""
        if self.rebalanced:
            return {2: 224, 3: 160, 4: 112}[self.groups]
        return min(255, 512 // math.ceil(self.blocks * self.threads / 128) // 8 * 8)


# By the wider of head and value size. Slowness: on an H200, 2 x 16 heads of 8192 queries and keys, or 2048.
TILINGS: Final = {
    64: (
        Tiling(1, 64, 2, 3),
        Tiling(3, 128, 2, turns=True, slowness=0.95),
        Tiling(4, 64, 4),
        Tiling(1, 48, 3, 3),
        Tiling(1, 128, 2, 2, slowness=1.2),
        Tiling(2, 128, 2, turns=True, slowness=1.13),
        Tiling(2, 64, 3, slowness=1.3),
    ),
    128: (
        Tiling(2, 128, 2, turns=True),
        Tiling(1, 64, 2, 2, slowness=1.02),
        Tiling(2, 64, 3, slowness=1.2),
        Tiling(1, 32, 2, 2, slowness=1.3),
    ),
    192: (
        Tiling(2, 96, 2, turns=True),
        Tiling(1, 64, 2, slowness=1.02),
        Tiling(2, 64, 2, slowness=1.1),
        Tiling(1, 32, 2, slowness=1.3),
    ),
    256: (
        Tiling(2, 80, 2, turns=True),
        Tiling(1, 64, 2, slowness=1.3),
        Tiling(2, 48, 2, slowness=1.2),
        Tiling(2, 32, 2, slowness=1.3),
        Tiling(1, 32, 2, slowness=1.5),
    ),
}
ENDS: Final = 100  # keys' worth of time that a block takes to begin and to end
TILE_KEYS: Final = 8  # keys' worth of time that each tile takes besides its own
OTHER_REGISTERS: Final = 28  # of a thread, besides scores, weights, results and what is added to scores
ADDED_REGISTERS: Final = 8  # more, where what the mask and the diagonal leave out is one sum


def plans(problem: Attention, device: Device) -> list[Candidate]:
    """The ways to run it, the likeliest first; none where this GPU, the dtype, sizes or alignment are not for it."""
    if device.arch != 90 or not _fits(problem):
        return []
    if problem.mask_kind == "additive" and problem.mask and problem.mask.head and problem.bias is None:
        # A bias by another name: a pass over it would read as much as the attention itself.
        problem = replace(problem, mask_kind="none", mask=None, bias=problem.mask)
    wider = max(problem.size, problem.value_size)
    # Under a mask, heads up to 64 are fastest in small blocks, which leave more out.
    tilings = [
        tiling
        for tiling in TILINGS[next(limit for limit in TILINGS if wider <= limit)]
        if tiling.shared(problem.size, problem.value_size) * tiling.blocks <= device.shared_per_block
        and _registers(problem, tiling, late=True) <= tiling.registers
        and (problem.mask is None or wider > 64 or tiling.groups * tiling.keys <= 128)
    ]
    return [candidate(problem, tiling) for tiling in sorted(tilings, key=lambda each: _time(problem, each, device))]


def _time(problem: Attention, tiling: Tiling, device: Device) -> float:
    """What a multiprocessor needs, in the time that a warpgroup takes for a key: waves of blocks, and tiles of keys."""
    blocks = math.ceil(problem.queries / (64 * tiling.groups)) * problem.heads * problem.batch
    together = min(tiling.blocks, math.ceil(blocks / device.multiprocessors))
    waves = blocks / (device.multiprocessors * together)
    keys = problem.keys
    if problem.causal is None:
        waves = math.ceil(waves)
    else:  # half of the keys, and half of what the diagonal crosses; short rows come last and fill up
        keys = min(keys, (keys + 64 * tiling.groups + tiling.keys) // 2)
    keys = math.ceil(keys / tiling.keys) * (tiling.keys + TILE_KEYS) + ENDS
    return max(1, waves) * together * tiling.groups * keys * tiling.slowness


def _registers(problem: Attention, tiling: Tiling, late: bool) -> int:
    """What a thread needs: its share of scores, weights, results, and of what bias and mask add to the scores.

    `late`: a mask's elements are loaded after the products.
    """
    columns = ALIGNMENT * math.ceil(problem.value_size / ALIGNMENT)
    added = [x for x in (problem.bias, None if late else problem.mask) if x and x.dtype != "bool"]
    words = sum((tiling.keys // 8 if x.key else 1) * (2 if x.query else 1) * ITEM_BYTES[x.dtype] // 2 for x in added)
    others = OTHER_REGISTERS + problem.added * ADDED_REGISTERS
    return tiling.keys // 2 + tiling.keys // 4 + columns // 2 + words + others


def _fits(problem: Attention) -> bool:
    tensors = (
        (problem.q, problem.queries, problem.heads),
        (problem.k, problem.keys, problem.kv_heads),
        (problem.v, problem.keys, problem.kv_heads),
        (problem.out, problem.queries, problem.heads),
    )
    return (
        problem.dtype in ("float16", "bfloat16")
        and problem.aligned
        and not (problem.added and problem.masked_score > _attention_blocks.NEGLIGIBLE[problem.dtype][0])
        and all(0 < size <= LARGEST_HEAD and size % ALIGNMENT == 0 for size in (problem.size, problem.value_size))
        and min(problem.batch, problem.heads, problem.queries, problem.keys) > 0
        and all(_mappable(x, rows, heads, problem.batch) for x, rows, heads in tensors)
    )


def _mappable(x: Heads, rows: int, heads: int, batch: int) -> bool:
    """Whether a tensor map can describe it: 40 bits of stride, no overlap."""
    strides = ((x.row, rows), (x.head, heads), (x.batch, batch))
    return (
        all(extent == 1 or (0 < stride < 1 << 39 and stride % ALIGNMENT == 0) for stride, extent in strides)
        and x.pointer.offset % 16 == 0
    )


def candidate(problem: Attention, tiling: Tiling) -> Candidate:
    """The launches of one tiling."""
    mask = problem.mask if problem.mask_kind != "none" else None
    name = f"hopper {64 * tiling.groups}x{tiling.keys}, {tiling.stages} stages, {tiling.blocks} blocks"
    if mask is None or mask.query == 0:
        return Candidate(name, (_launch(problem, tiling, mask, ABSENT, ABSENT),))
    tiles = _attention_blocks.tiles(problem, mask, tiling.keys)
    flags, bits = Pointer("scratch", 0), Pointer("scratch", 1)
    steps = (
        _attention_blocks.launch(problem, mask, tiling.keys, flags, bits),
        _launch(problem, tiling, mask, flags, bits),
    )
    return Candidate(name, steps, (tiles, tiles * _attention_blocks.bit_bytes(tiling.keys)))


def _launch(problem: Attention, tiling: Tiling, mask: Scores | None, flags: Argument, bits: Argument) -> Launch:
    rows = math.ceil(problem.queries / (64 * tiling.groups))
    integers = (
        *(problem.queries, problem.keys, problem.heads, problem.heads // problem.kv_heads, problem.batch),
        *(problem.causal or 0, _together(problem)),
    )
    numbers = (problem.scale, problem.softcap or 1.0, *_units(problem))
    planes = (0, 0)
    if mask:
        planes = ((problem.heads if mask.head else 1) if mask.batch else 0, int(mask.head != 0))
    arguments = (
        _map(problem, problem.q, problem.queries, problem.heads, problem.size, 64),
        _map(problem, problem.k, problem.keys, problem.kv_heads, problem.size, tiling.keys),
        _map(problem, problem.v, problem.keys, problem.kv_heads, problem.value_size, tiling.keys),
        _map(problem, problem.out, problem.queries, problem.heads, problem.value_size, 64),
        *(Scalar(number, "int32") for number in integers),
        *(Scalar(number, "float32") for number in numbers),
        *_scores(mask),
        *_scores(problem.bias),
        *(flags, bits),
        *(Scalar(number, "int32") for number in planes),
    )
    return Launch(
        Kernel("attention_hopper", "attention_hopper", _defines(problem, tiling, mask), arch_specific=True),
        (rows * problem.heads * problem.batch, 1, 1),
        (tiling.threads, 1, 1),
        arguments,
        tiling.shared(problem.size, problem.value_size),
        early=True,
    )


def _raw(problem: Attention) -> bool:
    """Whether scores keep the units of q k^T until they are exponentiated."""
    plain = problem.scale > 0 and not (problem.softcap or problem.bias)
    divided = problem.mask is not None or problem.added
    return plain and (not divided or SCALES[0] <= problem.scale <= SCALES[1])


def _units(problem: Attention) -> tuple[float, float, float, float]:
    """attention_hopper.cu's masked_score, unit, lowest and wanted."""
    unit = 1 / problem.scale if _raw(problem) else 1.0
    lowest = LOWEST / max(1.0, 1.5 / unit)  # times scale and log2(e) it is still finite
    masked, wanted = problem.masked_score, problem.masked_score + UNLIKE
    if problem.mask and problem.mask_kind == "additive":
        wanted = _attention_blocks.NEGLIGIBLE[problem.mask.dtype][1]
    if problem.added:
        wanted = _attention_blocks.NEGLIGIBLE[problem.dtype][1]
    return masked if math.isinf(masked) else max(masked * unit, lowest), unit, lowest, max(wanted * unit, lowest)


def _defines(problem: Attention, tiling: Tiling, mask: Scores | None) -> Defines:
    additive = mask is not None and problem.mask_kind == "additive"
    return {
        "T": STORAGE[problem.dtype],
        "SIZE": problem.size,
        "VALUE_SIZE": problem.value_size,
        "GROUPS": tiling.groups,
        "KEYS_TILE": tiling.keys,
        "STAGES": tiling.stages,
        "BLOCKS": tiling.blocks,
        "PINGPONG": int(tiling.turns),
        "LAZY": int(problem.value_size > LAZY_FROM),
        "CAUSAL": int(problem.causal is not None),
        "RAW": int(_raw(problem)),
        "SOFTCAP": int(problem.softcap != 0),
        "ZERO_ROWS": int(problem.zero_rows),
        **_attention_blocks.mask_defines(problem),
        "ADDED": int(problem.added),
        "FINITE": int(additive or ((problem.added or mask is not None) and math.isfinite(problem.masked_score))),
        "LATE": int(additive and _registers(problem, tiling, late=False) > tiling.registers),
        **_access("MASK", problem, mask),
        "BIAS": int(problem.bias is not None),
        **_access("BIAS", problem, problem.bias),
    }


def _access(name: str, problem: Attention, scores: Scores | None) -> Defines:
    """The type of its elements, whether it differs along keys and queries, and whether it can be read two by two."""
    if scores is None:
        return {f"{name}_T": "f16", f"{name}_KEY": 0, f"{name}_QUERY": 0, f"{name}_PAIRS": 0}
    even = all(n % 2 == 0 for n in (scores.batch, scores.head, scores.query, problem.keys))
    pairs = scores.key == 1 and even and scores.aligned and scores.dtype != "bool"
    return {
        f"{name}_T": STORAGE.get(scores.dtype, "b8"),
        f"{name}_KEY": scores.key,
        f"{name}_QUERY": int(scores.query != 0),
        f"{name}_PAIRS": int(pairs),
    }


def _scores(scores: Scores | None) -> Sequence[Argument]:
    if scores is None:
        return (ABSENT, *(Scalar(0, "int64") for _ in range(3)))
    return (scores.pointer, *(Scalar(stride, "int64") for stride in (scores.batch, scores.head, scores.query)))


def _together(problem: Attention) -> int:
    """How many heads work on their longest rows at the same time: as many as have their keys and values in L2."""
    planes = problem.heads * problem.batch
    if problem.causal is None and not (problem.mask and problem.mask.query):
        return 1
    each = 2 * problem.keys * (problem.size + problem.value_size) * problem.kv_heads / problem.heads
    return max(1, min(planes, int(KEPT_BYTES / each)))


def _map(problem: Attention, x: Heads, rows: int, heads: int, size: int, box_rows: int) -> TensorMap:
    sizes = (size, rows, heads, problem.batch)
    strides = tuple(
        2 * (stride if extent > 1 else size) for stride, extent in zip((x.row, x.head, x.batch), sizes[1:], strict=True)
    )
    dtype: Literal["float16", "bfloat16"] = "bfloat16" if problem.dtype == "bfloat16" else "float16"
    return TensorMap(x.pointer, dtype, sizes, strides, (PANEL, box_rows, 1, 1), 128)
