"""The host side of attention_mma.cu and attention_mma.cuh: attention by mma.sync for all shapes, masks and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.attention.blocks import NEGLIGIBLE
from onnxfuse.kernels.attention.problem import INDEX_STORAGE, Attention, ScoreTensor, score_argument
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH, REGISTERS
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines, float32, int32, struct
from onnxfuse.runtime.plan import Device, Kernel, Launch, Struct
from onnxfuse.runtime.symint import always, estimate, gcd, is_symbolic

MAX_HEAD_DIM: Final = 256
LOG2_E: Final = math.log2(math.e)
LOWEST: Final = -1.6e38  # lowest score, times log2(e): LOWEST of attention_mma_tiles.cuh
MASK_MACROS: Final = {"none": 0, "boolean": 1, "inverted": 2, "additive": 3}
MASK_STORAGE: Final = {**STORAGE, "bool": "b8"}
MAX_CONFIGS: Final = 4
CROWDED_REGISTERS: Final = 160  # with fewer registers per thread, queries are read again for each tile of keys
MIN_SPLIT_KEYS: Final = 1024  # with more keys, warps share keys only if a key head has at most 64 rows


@dataclass(frozen=True)
class MmaAttentionConfig:
    """A choice of macros of attention_mma.cuh: numbers of warps, tile sizes, and stages."""

    warps_m: int  # warps that have rows of their own
    warps_n: int  # warps that share the keys of a tile
    block_n: int  # keys of a tile
    m_tiles: int = 1  # tiles of sixteen rows per warp
    stages: int = 2
    min_blocks: int = 1  # blocks that must fit on a multiprocessor: a bound on registers

    @property
    def block_m(self) -> int:
        """The rows of a block."""
        return 16 * self.m_tiles * self.warps_m

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"{self.block_m}x{self.block_n}/{self.warps_m}x{self.warps_n}/{self.stages}"


def implementations(problem: Attention, device: Device) -> list[Implementation]:
    """Return the implementations, the expected fastest first; none if head dims are too large for this GPU."""
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return []
    configs = SQUARE if problem.positions else _ranked(problem, device)
    found = (fitted(problem, config, device) for config in configs)
    kept = dict.fromkeys(config for config in found if config)
    return [_implementation(problem, config, device) for config in list(kept)[:MAX_CONFIGS]]


def _implementation(problem: Attention, config: MmaAttentionConfig, device: Device) -> Implementation:
    rows = problem.queries * problem.gqa_group
    row_tiles = -(-rows // config.block_m)
    blocks = row_tiles * problem.kv_heads * problem.batch
    constants = defines(problem, config, device, second_pass=config.warps_n == 1)
    kernel = Kernel("attention_mma", "attention_mma", constants)
    shared = shared_bytes(problem, config, device, config.warps_n > 1)
    pdl = device.has_pdl
    step = Launch(kernel, (blocks, 1, 1), (config.threads, 1, 1), (argument(problem, row_tiles),), shared, pdl=pdl)
    return Implementation(f"attention_mma {config.name}", (problem.with_program(step),))


def _ranked(problem: Attention, device: Device) -> list[MmaAttentionConfig]:
    """Return the configs sorted by three criteria: no idle warps; enough blocks for the GPU; larger tiles.

    Among configs with too few blocks, those with the most blocks come first.
    """
    rows = problem.queries * problem.gqa_group
    configs = list(_configs(max(problem.head_dim, problem.head_dim_v), math_kind(problem, device)))

    def rank(config: MmaAttentionConfig) -> tuple[bool, bool, int]:
        blocks = -(-rows // config.block_m) * problem.kv_heads * problem.batch
        enough = blocks >= device.multiprocessors
        return (config.block_m > _round_up(rows, 16), not enough, -config.block_m if enough else -blocks)

    if problem.mask or problem.bias or problem.add_masked_score:  # their elements or row limits take registers as well
        configs = [config for config in configs if config.m_tiles == 1]
    by_row = problem.add_masked_score or any(_differs_by_row(problem, x) for x in (problem.mask, problem.bias))
    if by_row or problem.lengths:
        configs = [config for config in configs if config.warps_m <= 4]
    if problem.bias and (problem.mask or (problem.slopes and problem.add_masked_score)):
        configs = [replace(c, min_blocks=1, block_n=max(c.block_n // 2, 16 * c.warps_n)) for c in configs]
    if problem.is_symbolic:
        return _ranked_for_dynamic_sizes(problem, configs, device)
    return sorted((c for c in configs if c.warps_n == 1 or problem.keys <= MIN_SPLIT_KEYS or rows <= 64), key=rank)


def _ranked_for_dynamic_sizes(
    problem: Attention, configs: list[MmaAttentionConfig], device: Device
) -> list[MmaAttentionConfig]:
    """Return the configs; the first is the largest one without idle warps and with enough blocks for the GPU.

    Few configs are tested, because each test on a dynamic size adds a guard, a condition on the sizes for which the
    plan is used.
    """
    rows, heads = estimate(problem.queries * problem.gqa_group), estimate(problem.kv_heads * problem.batch)
    if is_symbolic(rows):  # also offer blocks of 128 and of 64 rows
        configs = [config for config in configs if config.warps_m <= 4]
    ordered = sorted(configs, key=lambda config: -config.block_m)
    best = ordered[-1]
    for config in ordered:
        is_busy = rows > config.block_m - 16
        if is_busy and (config.warps_n == 1 or rows <= 64 or estimate(problem.keys) <= MIN_SPLIT_KEYS):
            best = config
            if math.ceil(rows / config.block_m) * heads >= device.multiprocessors:
                break
    return [best, *(config for config in ordered if config is not best)]


# Attention with `positions` takes as many keys as rows, and is limited by shared memory: larger tiles first.
SQUARE: Final = tuple(MmaAttentionConfig(warps, 1, 16 * warps) for warps in (4, 2, 1))


def _configs(head_dim: int, kind: str) -> Iterator[MmaAttentionConfig]:
    config = MmaAttentionConfig
    if kind == "FP32" and head_dim > 128:  # too few registers for warps that share keys
        yield from (config(2, 1, 16), config(1, 1, 16))
        return
    if kind == "FP32":
        yield from (config(4, 1, 32), config(2, 2, 32), config(1, 4, 64))
        return
    if head_dim <= 64:
        yield from (config(4, 1, 64, min_blocks=3), config(7, 1, 64, min_blocks=2), config(4, 1, 64, 2))
        yield from (config(2, 2, 64), config(1, 4, 128))
    elif head_dim <= 128:
        yield from (config(4, 1, 64), config(2, 2, 64), config(1, 4, 64))
    else:
        yield from (config(4, 1, 32), config(2, 2, 64), config(1, 4, 64))


def math_kind(problem: Attention, device: Device) -> str:
    """Return the macro MATH_KIND of attention_mma.cuh: the instruction of the products."""
    if device.arch < MMA_ARCH:
        return "FP32"
    if problem.dtype != "float32":
        return "HALF"
    return "TF32" if problem.tf32 and not problem.quantized else "FP32"


def shared_item_bytes(problem: Attention, device: Device) -> int:
    """Return the bytes of an element in shared memory."""
    return 4 if math_kind(problem, device) == "FP32" else ITEM_BYTES[problem.dtype]


def shared_bytes(problem: Attention, config: MmaAttentionConfig, device: Device, combines: bool) -> int:
    """Return the bytes of shared memory of a block; with `combines`, its warps combine their results in this memory.

    Tiles of a quantized cache hold bytes, and the new rows of keys and values follow the tiles as queries do.
    """
    kind, item = math_kind(problem, device), shared_item_bytes(problem, device)
    head_dim = _round_up(problem.head_dim, {"HALF": 16, "TF32": 8, "FP32": 4}[kind])
    head_dim_v = _round_up(problem.head_dim_v, 16 if kind == "HALF" else 8)
    q_row, key_item = _odd_sixteens(head_dim * item), 1 if problem.quantized else item
    rows = config.block_m + (2 * (config.block_m // problem.gqa_group) if problem.quantized else 0)
    stage = config.block_n * (_odd_sixteens(head_dim * key_item) + _odd_sixteens(head_dim_v * key_item))
    tiles = rows * q_row + config.stages * stage
    results = config.block_m * 4 * (config.warps_n * (head_dim_v + 8 + 2) + 2)
    if problem.positions:  # two windows and their positions, and sums in float32; see attention_mma_relative.cuh
        tiles += 4 * config.block_n * (q_row + 4) + config.block_m * (config.block_n + 4) * 4
    return max(tiles, results if combines else 0)


def fitted(
    problem: Attention, config: MmaAttentionConfig, device: Device, combines: bool = False
) -> MmaAttentionConfig | None:
    """Return the config, or one with fewer stages, keys or rows, that fits into shared memory; None if none fits."""
    min_block_n = (8 if math_kind(problem, device) == "FP32" else 16) * config.warps_n
    while shared_bytes(problem, config, device, combines or config.warps_n > 1) > device.shared_per_block:
        if problem.positions:
            return None
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_n > min_block_n:
            config = replace(config, block_n=config.block_n // 2)
        elif config.warps_m > 1:
            config = replace(config, warps_m=config.warps_m // 2)
        else:
            return None
    return config


def defines(problem: Attention, config: MmaAttentionConfig, device: Device, second_pass: bool = False) -> Defines:
    """Return the macros of attention_mma.cuh. Lengths are arguments, so that a growing cache needs no new kernel.

    With `second_pass`, a block has all keys of its rows, so it can begin again with the tiles that it skipped.
    """
    negligible, second_pass_below = NEGLIGIBLE[problem.dtype]
    skips_causal_tiles = problem.add_masked_score and problem.causal is not None and problem.masked_score <= negligible
    return {
        "T": STORAGE[problem.dtype], "OUT_T": STORAGE[problem.out_dtype or problem.dtype],
        "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v, "GQA_GROUP": problem.gqa_group,
        "MATH_KIND": math_kind(problem, device), "M_TILES": config.m_tiles, "WARPS_M": config.warps_m,
        "WARPS_N": config.warps_n, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "Q_IN_REGISTERS": int(_keeps_queries(problem, config, device)),
        "MIN_BLOCKS": config.min_blocks, "ACCESS_BYTES": access_bytes(problem), "OUT_WIDTH": out_width(problem),
        "SCALE_IN_EXPONENT": int(_scales_in_exponent(problem)), "CAUSAL": int(problem.causal is not None),
        "SOFTCAP": int(problem.softcap != 0), "ZERO_MASKED_ROWS": int(problem.zero_masked_rows),
        "MASK": MASK_MACROS[problem.mask_kind], "BIAS": bias_macro(problem),
        "SLOPE_T": STORAGE[problem.slopes.dtype if problem.slopes else "float32"],
        "ADD_MASKED_SCORE": int(problem.add_masked_score), "SECOND_PASS": int(second_pass and skips_causal_tiles),
        "SECOND_PASS_BELOW": second_pass_below * LOG2_E, **length_defines(problem),
        **_score_defines("MASK", problem.mask, problem), **_score_defines("BIAS", problem.bias, problem),
        **(problem.quantized.defines if problem.quantized else {}),
        **({"RELATIVE": 1, "INDEX_T": INDEX_STORAGE[problem.positions[0].index_dtype]} if problem.positions else {}),
    }  # fmt: skip


def length_defines(problem: Attention) -> Defines:
    """Return the macros that say whether there are lengths, a window and sinks."""
    sink = problem.sinks.dtype if problem.sinks else "float32"
    found: Defines = {"LENGTHS": int(problem.lengths is not None), "WINDOW": int(problem.window is not None)}
    return found | {"SINKS": int(problem.sinks is not None), "SINK_T": STORAGE[sink]}


def bias_macro(problem: Attention) -> int:
    """Return the macro BIAS: 0 without a bias, 1 with a bias, 2 with a bias that is multiplied by a slope per head."""
    return 0 if problem.bias is None else 2 if problem.slopes else 1


def _scales_in_exponent(problem: Attention) -> bool:
    """Return whether scores can stay unscaled until they are exponentiated (macro SCALE_IN_EXPONENT)."""
    replaced = problem.mask_kind in ("boolean", "inverted") and problem.masked_score > -math.inf
    added = problem.add_masked_score or problem.mask_kind == "additive"
    changed = replaced or added or problem.bias is not None or problem.softcap != 0 or problem.sinks is not None
    changed = changed or problem.positions is not None
    return problem.scale > 0 and not changed and not problem.quantized  # the scale of keys may be negative


def _keeps_queries(problem: Attention, config: MmaAttentionConfig, device: Device) -> bool:
    """Return whether the queries fit into registers in addition to the elements of masks and biases."""
    kind = math_kind(problem, device)
    registers = 4 * config.m_tiles * (-(-problem.head_dim // 16) if kind == "HALF" else -(-problem.head_dim // 8))
    crowded = REGISTERS // (config.threads * config.min_blocks) < CROWDED_REGISTERS
    return kind != "FP32" and not crowded and registers <= (16 if problem.mask or problem.bias else 32)


def _score_defines(name: str, scores: ScoreTensor | None, problem: Attention) -> Defines:
    if scores is None:
        return {f"{name}_T": "b8", f"{name}_BY_ROW": 0, f"{name}_PAIRS": 0}
    pairs = scores.reads_pairs(f"p.{name.lower()}.multiples_of(2)")
    by_row = int(_differs_by_row(problem, scores))
    return {f"{name}_T": MASK_STORAGE[scores.dtype], f"{name}_BY_ROW": by_row, f"{name}_PAIRS": pairs}


def _differs_by_row(problem: Attention, scores: ScoreTensor | None) -> bool:
    """Return whether the rows of a block read different elements of a mask or bias."""
    if scores is None:
        return False
    _, by_head, by_query = scores.differs
    one_query = always(lambda: problem.queries == 1, problem.queries)
    return (by_query and not one_query) or (by_head and problem.gqa_group > 1)


def access_bytes(problem: Attention) -> int:
    """Return the widest access, in bytes, for which q, k and v are aligned."""
    item = ITEM_BYTES[problem.dtype]
    if not problem.aligned:
        return item
    tensors = (problem.q, problem.k, problem.v)
    extents = [problem.head_dim, problem.head_dim_v, *(stride for heads in tensors for stride in heads.strides)]
    offsets = [heads.pointer.offset for heads in tensors]
    width: int = gcd(VECTOR_BYTES, *(extent * item for extent in extents), *offsets)
    return width


def out_width(problem: Attention) -> int:
    """Return the elements per access to the result: the macro OUT_WIDTH."""
    item = ITEM_BYTES[problem.out_dtype or problem.dtype]
    if not problem.aligned:
        return 1
    extents = (problem.head_dim_v, *problem.out.strides)
    width: int = gcd(VECTOR_BYTES, *(extent * item for extent in extents), problem.out.pointer.offset) // item
    return width


def argument(problem: Attention, row_tiles: int) -> Struct:
    """Return the struct Problem of attention_mma_tiles.cuh."""
    tensors = (problem.q, problem.k, problem.v, problem.out)
    scores, positions = (problem.mask, problem.bias), problem.positions or ()
    causal = 0 if problem.causal is None else problem.causal
    return struct(
        *(each.argument for each in tensors),
        *map(score_argument, scores),
        *(each.argument for each in positions),
        *(each.pointer if each else ABSENT for each in (problem.slopes, problem.sinks)),
        problem.lengths or ABSENT,
        *int32(*(each.key_stride if each else 0 for each in scores)),
        *int32(problem.queries, problem.keys, problem.kv_heads, row_tiles, causal, problem.window or 0),
        *float32(*_score_scalars(problem), *(each.scale * LOG2_E for each in positions)),
    )


def _score_scalars(problem: Attention) -> tuple[float, float, float]:
    """Return (scale, masked score, cap) with which the kernel computes scores times log2(e) from products q k^T."""
    boolean = problem.add_masked_score or problem.mask_kind in ("boolean", "inverted")
    masked = problem.masked_score if boolean else 0.0
    masked = masked if math.isinf(masked) else max(LOWEST, min(-LOWEST, masked * LOG2_E))
    if problem.softcap:
        return problem.scale / problem.softcap, masked, problem.softcap * LOG2_E
    return problem.scale * LOG2_E, masked, 0.0


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _odd_sixteens(count: int) -> int:
    """Return the bytes of a row in shared memory: an odd multiple of 16, so that eight rows have no bank conflicts."""
    return (-(-count // 16) | 1) * 16
