"""The host side of attention_hopper.cu.

Under a mask, attention_blocks.cu runs first and finds the tiles to skip. In TF32, attention_values.cu runs first and
transposes the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.attention import blocks, hopper_rotation, values
from onnxfuse.kernels.attention.mma import bias_macro, length_defines
from onnxfuse.kernels.attention.problem import Attention, ScoreTensor, score_argument
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, STORAGE, Defines, float32, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, Struct, TensorMap, Value
from onnxfuse.runtime.symint import always, best_first, is_symbolic, maximum, minimum

PANEL_BYTES: Final = 128  # bytes of a row of a panel of shared memory
ALIGNMENT: Final = 8  # every stride is a multiple of this number of elements: TMA needs multiples of 16 bytes
BARRIER_BYTES: Final = 512  # bytes of shared memory reserved for mbarriers
MAX_ROTATED_BEFORE: Final = 64  # for a head_dim of at most this, a separate launch rotates the queries
LAZY_RESCALE_FROM: Final = 0  # for a larger head_dim_v, results are rescaled only if a row's maximum grows by much
L2_KEY_VALUE_BYTES: Final = 24 << 20  # bytes of keys and values for the heads that run together; L2 has 50 MB
LOWEST: Final = -3.4028234663852886e38
DIVISIBLE_SCALES: Final = (1e-6, 1e6)  # range of scales by which mask elements can be divided in fp32
LOG2_E: Final = math.log2(math.e)
# (Limit of |x|, coefficients of x, x^3, ...): odd polynomials that approximate tanh with an error of at most TANH_ERROR
# up to that limit, and are monotonic everywhere. With a cap of 50 they change a score by 6e-5: an eighth of the error
# of rounding the weight to fp16.
CAP_POLYNOMIALS: Final = (
    (0.4, (0.99997883, -0.33225425, 0.11942388)),
    (0.9, (0.99998674, -0.33298706, 0.13076786, -0.04593853, 0.00984349)),
)
TANH_ERROR: Final = 1.2e-6
# Range of softcaps that use a polynomial. With lower softcaps, it is rarely accurate for all scores that have a weight.
CAPS: Final = (24.0, 100.0)
CAP_RATES: Final = (1e-4, 1e3)  # range of scale / cap in which the polynomials' coefficients stay in fp32's range
KEPT: Final = 1024  # a row keeps its reference score while a thread's weights of the row add up to at most this
WEIGHTLESS: Final = 17.5  # -ln of a weight that rounds to 0: exp(-17.5) is below half of the smallest fp16 number
NEGLIGIBLE_GAP: Final = 128.0  # score difference beyond which the lower score has no weight


@dataclass(frozen=True)
class HopperAttentionConfig:
    """A choice of macros of attention_hopper.cu, and of the number of blocks per multiprocessor."""

    warpgroups: int  # consumer warpgroups per block, each with 64 queries
    block_n: int  # keys of a tile
    stages: int  # tiles of keys in flight, and as many tiles of values
    blocks: int = 1  # blocks per multiprocessor
    pingpong: bool = False  # whether the warpgroups take turns in issuing their products
    relative_time: float = 1.0  # time of a full multiprocessor, relative to other configs of the same head dim

    def shared(self, head_dim: int, head_dim_v: int, item: int = 2) -> int:
        """Return the bytes of shared memory of a block, for elements of `item` bytes."""
        of_keys, of_values = (
            math.ceil(columns * item / PANEL_BYTES) * PANEL_BYTES for columns in (head_dim, head_dim_v)
        )
        queries = self.warpgroups * 64 * max(of_keys, of_values)
        if item == 4:  # transposed
            of_values = _value_columns(head_dim_v) * item
        return queries + self.stages * self.block_n * (of_keys + of_values) + BARRIER_BYTES

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 128 * self.warpgroups + (128 if self.reallocates_registers else 32)

    @property
    def reallocates_registers(self) -> bool:
        """Whether the warpgroup of the producer hands registers over to the consumers (setmaxnreg)."""
        return self.warpgroups > 1 and self.blocks == 1

    @property
    def registers(self) -> int:
        """The registers that each consumer thread has at least.

        These are the fewest `consumer_registers` of attention_hopper_shape.cuh if registers are reallocated, else an
        equal share of a scheduler's registers.
        """
        if self.reallocates_registers:
            return {2: 224, 3: 160, 4: 112}[self.warpgroups]
        return min(255, 512 // math.ceil(self.blocks * self.threads / 128) // 8 * 8)


# Configs by the largest head_dim_v that they serve, which determines most registers. Relative times and constants of
# `_time` were fitted on an H200 to 44 cases with heads of 64 elements and 14 cases with heads of 128, plain and causal,
# with 77 to 4096 queries: the config that `_time` chooses takes 1.005 times as long as the fastest. With 2048 queries,
# head_dim 96 and head_dim_v 64, the first config of key 64 takes 73.9 us, and the best config of key 128 takes 84.4.
# With head_dim 192 and head_dim_v 128, the first config of key 128 takes 129.6 us, and the best of key 192 takes 142.5.
CONFIGS: Final = {
    64: (
        HopperAttentionConfig(1, 64, 2, 3),
        HopperAttentionConfig(4, 64, 4, relative_time=0.975),
        HopperAttentionConfig(1, 128, 2, 2, relative_time=1.24),
        HopperAttentionConfig(1, 48, 2, 4, relative_time=0.917),
        HopperAttentionConfig(3, 128, 2, pingpong=True, relative_time=1.15),
        HopperAttentionConfig(1, 48, 3, 3, relative_time=1.01),
        HopperAttentionConfig(2, 128, 2, pingpong=True, relative_time=1.25),
        HopperAttentionConfig(2, 64, 3, relative_time=1.33),
    ),
    128: (
        HopperAttentionConfig(2, 128, 2, pingpong=True),
        HopperAttentionConfig(1, 64, 2, 2, relative_time=0.86),
        HopperAttentionConfig(2, 64, 3, relative_time=1.23),
        HopperAttentionConfig(1, 32, 2, 2, relative_time=1.36),
    ),
    192: (
        HopperAttentionConfig(2, 96, 2, pingpong=True),
        HopperAttentionConfig(1, 64, 2, relative_time=0.94),
        HopperAttentionConfig(2, 64, 2, relative_time=1.02),
        HopperAttentionConfig(1, 32, 2, relative_time=1.0),
    ),
    256: (
        HopperAttentionConfig(2, 80, 2, pingpong=True),
        HopperAttentionConfig(1, 64, 2, relative_time=1.24),
        HopperAttentionConfig(2, 48, 2, relative_time=1.07),
        HopperAttentionConfig(2, 32, 2, relative_time=1.04),
        HopperAttentionConfig(1, 32, 2, relative_time=1.2),
    ),
}
# The same in TF32, whose tiles are whole panels of 32 transposed values. For 16 cases on an H200, the config that
# `_time` chooses takes 1.01 times as long as the fastest of all that were timed.
TF32_CONFIGS: Final = {
    64: (
        HopperAttentionConfig(1, 64, 2, 2),
        HopperAttentionConfig(3, 64, 3, pingpong=True, relative_time=0.85),
        HopperAttentionConfig(4, 32, 4, relative_time=0.81),
    ),
    128: (
        HopperAttentionConfig(2, 64, 2, pingpong=True),
        HopperAttentionConfig(1, 64, 2, relative_time=1.25),
        HopperAttentionConfig(1, 32, 2, 2, relative_time=1.24),
    ),
}
MAX_BLOCK_N: Final = max(config.block_n for configs in CONFIGS.values() for config in configs)
# The number of configs that a node of dynamic length gets, by the keys of CONFIGS; each config is a kernel to compile.
CONFIGS_OF_DYNAMIC_LENGTH: Final = {64: 4, 128: 2, 192: 2, 256: 2}
BLOCK_OVERHEAD: Final = 205  # time to start and end a block, in units of the time per key
TILE_OVERHEAD: Final = 32  # overhead per tile, in units of the time per key
SLACK: Final = 0.01  # fraction by which the estimate of a node of dynamic length may exceed the lowest one
IDLE_SHARE: Final = 0.155  # an empty block slot of a multiprocessor costs this share of a resident block's time
PROGRAM_REGISTERS: Final = 24  # registers per thread, for the operands that an epilogue program loads at once
OTHER_REGISTERS: Final = 28  # registers per thread, for all but scores, weights, results, mask and bias
ADD_MASKED_REGISTERS: Final = 8  # further registers per thread, for ADD_MASKED_SCORE with a cap or from 64 keys on
DYNAMIC_PAIRS_REGISTERS: Final = 16  # registers per thread, if the kernel decides at run time how to read masks


def implementations(problem: Attention, device: Device) -> list[Implementation]:
    """Return the implementations, the expected fastest first; none if GPU, dtype, sizes or alignment exclude them."""
    if device.arch != 90 or not _is_supported(problem):
        return []
    if problem.mask_kind == "additive" and problem.mask and problem.mask.differs[1] and problem.bias is None:
        # Treat the mask as a bias: a pass over it would read as many bytes as the attention itself.
        problem = replace(problem, mask_kind="none", mask=None, bias=problem.mask)
    table, limit = _configs(problem), _limit(problem, device)
    # Under a mask, small blocks skip more tiles: they are fastest for heads of up to 64 elements, and for masks whose
    # rows differ.
    mask = problem.mask
    largest = math.inf if mask is None or limit > 64 else 64 if mask.differs[2] else 128
    configs = [
        config
        for config in table[limit]
        if _fits(problem, config, device)
        and _registers(problem, config, late_mask=True) <= config.registers
        and config.warpgroups * config.block_n <= largest
    ]
    if is_symbolic(problem.queries):
        configs = _few(problem, configs, limit)
    ordered = best_first(configs, lambda config: _time(problem, config, device), SLACK)
    return [implementation(problem, config) for config in ordered]


def _limit(problem: Attention, device: Device) -> int:
    """Return the smallest key of the configs, from head_dim_v on, whose first fits; the largest key if none fits."""
    table = _configs(problem)
    limits = [limit for limit in table if problem.head_dim_v <= limit]
    return next((limit for limit in limits if _fits(problem, table[limit][0], device)), limits[-1])


def _configs(problem: Attention) -> Mapping[int, tuple[HopperAttentionConfig, ...]]:
    """Return the configs for the dtype, by the largest head_dim_v that they serve."""
    return TF32_CONFIGS if problem.dtype == "float32" else CONFIGS


def _fits(problem: Attention, config: HopperAttentionConfig, device: Device) -> bool:
    """Return whether `config.blocks` blocks fit into the shared memory of a multiprocessor."""
    return _shared(problem, config) * config.blocks <= device.shared_per_block


def _few(problem: Attention, configs: list[HopperAttentionConfig], limit: int) -> list[HopperAttentionConfig]:
    """Return the few configs among which a node of dynamic length chooses.

    `configs` are those for heads of up to `limit` elements.

    In 58 cases on an H200, plain and causal, the config that `_time` chooses among these takes 1.01 times as long as
    the fastest of all configs in the geometric mean, and 1.10 times at most.
    """
    if problem.bias and problem.mask and problem.mask_kind == "additive":
        configs = [_with_room(problem, config) for config in configs]
    if problem.mask and problem.mask.differs[2] and limit < 256:
        # Each tile size needs its own attention_blocks kernel, so one size is chosen. Masks that differ between queries
        # are mostly causal. For causal masks, tiles of 64 x 64 take 1 to 2 % more time than the best size; for other
        # masks, 7 % more at head_dim 64 and 5 % at 128.
        small = [config for config in configs if (config.warpgroups, config.block_n) == (1, 64)]
        return small or configs[:1]
    if problem.causal is not None and limit == 64:
        return [config for config in configs if config.warpgroups * config.block_n <= 128][:3]
    return configs[: CONFIGS_OF_DYNAMIC_LENGTH[limit]]


def _time(problem: Attention, config: HopperAttentionConfig, device: Device) -> float:
    """Estimate the time as waves of blocks times tiles of keys, in units of a warpgroup's time per key."""
    blocks = -(-problem.queries // (64 * config.warpgroups)) * problem.heads * problem.batch
    resident = minimum(config.blocks, -(-blocks // device.multiprocessors))
    waves = blocks / (device.multiprocessors * resident)
    keys = problem.keys
    if problem.causal is None:
        waves = math.ceil(waves)
    # Under a causal mask, a block processes half of the keys on average, plus half of the tile on the diagonal. Blocks
    # with few keys come last and fill gaps, so the number of waves is not rounded up.
    else:
        keys = minimum(keys, (keys + 64 * config.warpgroups + config.block_n) // 2)
    keys = -(-keys // config.block_n) * (config.block_n + TILE_OVERHEAD) + BLOCK_OVERHEAD
    places = resident + IDLE_SHARE * (config.blocks - resident)
    time: float = maximum(1, waves) * places * config.warpgroups * keys * config.relative_time
    return time


def _registers(problem: Attention, config: HopperAttentionConfig, late_mask: bool) -> int:
    """Return the registers per thread: for scores, weights, results, and the elements of bias and mask.

    `late_mask`: a mask's elements are loaded after the products.
    """
    columns = ALIGNMENT * math.ceil(problem.head_dim_v / ALIGNMENT)
    bias = None if _begins_with_bias(problem) else problem.bias
    added = [x for x in (bias, None if late_mask else problem.mask) if x and x.dtype != "bool"]
    words = sum(
        (config.block_n // 8 if x.key_stride else 1) * (2 if x.differs[2] else 1) * ITEM_BYTES[x.dtype] // 2
        for x in added
    )
    adds = problem.add_masked_score and (config.block_n >= 64 or problem.softcap != 0)
    others = OTHER_REGISTERS + adds * ADD_MASKED_REGISTERS
    weights = config.block_n // 2 * ITEM_BYTES[problem.dtype] // 4
    return config.block_n // 2 + weights + columns // 2 + words + others


def _lacks_registers(problem: Attention, config: HopperAttentionConfig) -> bool:
    """Return whether registers cannot hold the elements of an additive mask during the products."""
    bias = None if _begins_with_bias(problem) else problem.bias
    added = [x for x in (problem.mask, bias) if x and x.reads_pairs(2, problem.keys) == 2]
    dynamic = len(added) if len(added) == 2 or any(x.differs[2] for x in added) else 0
    return _registers(problem, config, late_mask=False) + dynamic * DYNAMIC_PAIRS_REGISTERS > config.registers


def _with_room(problem: Attention, config: HopperAttentionConfig) -> HopperAttentionConfig:
    """Return the config, with one block fewer per multiprocessor if bias and additive mask would spill otherwise."""
    return replace(config, blocks=max(1, config.blocks - 1)) if _lacks_registers(problem, config) else config


def _is_supported(problem: Attention) -> bool:
    tensors = (
        (problem.q, problem.queries, problem.heads),
        (problem.k, problem.keys, problem.kv_heads),
        (problem.v, problem.keys, problem.kv_heads),
        (problem.out, problem.queries, problem.heads),
    )
    head_dims = (problem.head_dim, problem.head_dim_v)
    largest = max(_configs(problem))
    return (
        (problem.dtype != "float32" or (problem.tf32 and not problem.lengths))
        and not problem.out_dtype
        and not (problem.window and problem.mask)
        and problem.aligned
        and not (problem.add_masked_score and problem.masked_score > blocks.NEGLIGIBLE[problem.dtype][0])
        and all(0 < head_dim <= largest and head_dim % ALIGNMENT == 0 for head_dim in head_dims)
        and all(extent > 0 for extent in (problem.batch, problem.heads, problem.queries, problem.keys))
        and all(_has_tensor_map(x, rows, heads, problem.batch) for x, rows, heads in tensors)
    )


def _has_tensor_map(x: HeadTensor, rows: int, heads: int, batch: int) -> bool:
    """Return whether a tensor map can describe `x`: its strides fit 40 bits, no elements overlap, and it is aligned."""
    extents = (batch, heads, rows)
    return (
        all(
            _is_one(extent) or (0 < stride < 1 << 39 and stride % ALIGNMENT == 0)
            for stride, extent in zip(x.strides, extents, strict=True)
        )
        and x.pointer.offset % 16 == 0
    )


def _rotates(problem: Attention) -> bool:
    """Return whether the kernel itself applies `problem.rotation` to the queries, instead of reading `problem.q`.

    Each block then reads the tables' rows for its queries before it begins: twice as many bytes as the queries. On an
    H200, with 2048 queries and 32 heads of 128 elements, this takes 0.96 times as long as a separate launch, in the
    mean of eight forms of rotation. With heads of 64, whose blocks have twice as many rows, the factor is 1.03.
    """
    rotation = problem.rotation
    return (
        rotation is not None
        and problem.dtype != "float32"
        and problem.head_dim > MAX_ROTATED_BEFORE
        and rotation.aligned
        and rotation.has_rows
        and rotation.rotated % (2 * hopper_rotation.WIDTH) == 0
        and _has_tensor_map(rotation.tensors[0].x, problem.queries, problem.heads, problem.batch)
    )


def _is_one(extent: int) -> bool:
    """Return whether a dim is at most 1, so that its stride does not matter; False for dynamic dims."""
    return always(lambda: extent <= 1, extent)


def implementation(problem: Attention, config: HopperAttentionConfig) -> Implementation:
    """Return the launches of one config."""
    mask = problem.mask if problem.mask_kind != "none" else None
    name = f"hopper {64 * config.warpgroups}x{config.block_n}, {config.stages} stages, {config.blocks} blocks"
    before: list[Launch] = []
    scratch: list[int] = []
    flags: Value = ABSENT
    bits: Value = ABSENT
    if mask and mask.differs[2]:
        tiles = blocks.tile_count(problem, mask, config.block_n)
        scratch = [tiles, tiles * blocks.bit_bytes(config.block_n)]
        flags, bits = Pointer("scratch", 0), Pointer("scratch", 1)
        before = [blocks.launch(problem, mask, config.block_n, flags, bits)]
    if problem.dtype == "float32":
        to = Pointer("scratch", len(scratch))
        before = [*before, values.launch(problem, to)]
        scratch = [*scratch, values.scratch_bytes(problem)]
        problem = replace(problem, v=values.transposed(problem, to))
    return Implementation(name, (*before, _launch(problem, config, mask, flags, bits)), tuple(scratch))


def _launch(
    problem: Attention, config: HopperAttentionConfig, mask: ScoreTensor | None, flags: Value, bits: Value
) -> Launch:
    row_tiles = -(-problem.queries // (64 * config.warpgroups))
    shape = (
        *(problem.queries, problem.keys, problem.heads, problem.gqa_group, problem.batch),
        *(0 if problem.causal is None else problem.causal, problem.window or 0, _heads_in_l2(problem)),
    )
    flag_strides = (0, 0)  # strides of batch and head, in planes; a plane is all tiles of a head
    if mask:
        by_batch, by_head, _ = mask.differs
        flag_strides = ((problem.heads if by_head else 1) if by_batch else 0, int(by_head))
    rotation = problem.rotation if _rotates(problem) else None
    q = rotation.tensors[0].x if rotation else problem.q
    value_sizes = (problem.keys, problem.kv_heads, problem.head_dim_v, config.block_n)
    if problem.dtype == "float32":  # transposed
        columns = values.padded_keys(problem)
        value_sizes = (problem.head_dim_v, problem.kv_heads, columns, _value_columns(problem.head_dim_v))
    arguments = (
        _tensor_map(problem, q, problem.queries, problem.heads, problem.head_dim, 64),
        _tensor_map(problem, problem.k, problem.keys, problem.kv_heads, problem.head_dim, config.block_n),
        _tensor_map(problem, problem.v, *value_sizes),
        _tensor_map(problem, *_stored_by_tma(problem, q), 64, stores=True),
        Struct(int32(*shape)),
        Struct(float32(*_score_units(problem))),
        Struct(float32(*_cap(problem))),
        score_argument(mask),
        score_argument(problem.bias),
        problem.slopes.pointer if problem.slopes else ABSENT,
        Struct((flags, bits, *int32(*flag_strides))),
        hopper_rotation.argument(rotation),
        problem.lengths or ABSENT,
        problem.sinks.pointer if problem.sinks else ABSENT,
    )
    defines = _defines(problem, config, mask)
    if rotation:
        defines |= hopper_rotation.defines(rotation)
    launch = Launch(
        Kernel("attention_hopper", "attention_hopper", defines, arch_specific=True),
        (row_tiles * problem.heads * problem.batch, 1, 1),
        (config.threads, 1, 1),
        arguments,
        _shared(problem, config),
        pdl=True,
    )
    if problem.program is None:
        return launch
    defines |= {"PROGRAM_PAIRS": _program_pairs(problem.program)}
    return problem.with_program(replace(launch, kernel=replace(launch.kernel, defines=defines)))


def _stored_by_tma(problem: Attention, q: HeadTensor) -> tuple[HeadTensor, int, int, int]:
    """Return the result, its rows, heads and columns; or those of the queries, if the program stores all outputs."""
    if problem.program and problem.program.dtype != problem.dtype:
        return q, problem.queries, problem.heads, problem.head_dim
    return problem.out, problem.queries, problem.heads, problem.head_dim_v


def _program_pairs(program: EpilogueProgram) -> int:
    """Return for how many pairs of columns of a row PROGRAM_REGISTERS hold the program's operands at once."""
    of_pair = max(1, program.registers // 16)
    return max(pairs for pairs in (1, 2, 4, 8) if pairs == 1 or pairs * of_pair <= PROGRAM_REGISTERS)


def _shared(problem: Attention, config: HopperAttentionConfig) -> int:
    """Return the bytes of shared memory of a block."""
    bias = 4 * config.stages * config.block_n if _begins_with_bias(problem) else 0
    return config.shared(problem.head_dim, problem.head_dim_v, ITEM_BYTES[problem.dtype]) + bias


def _value_columns(head_dim_v: int) -> int:
    """Return the columns of the result that wgmma computes: VALUE_COLUMNS of attention_hopper_shape.cuh."""
    return 16 * math.ceil(head_dim_v / 16)


def _begins_with_bias(problem: Attention) -> bool:
    """Return whether the accumulators start from the bias (macro BIAS_FIRST), which must be equal for all rows."""
    bias = problem.bias
    if not (problem.slopes and bias):
        return False
    return _scales_in_exponent(problem) and bias.key_stride == 1 and not bias.differs[2]


def _scales_in_exponent(problem: Attention) -> bool:
    """Return whether scores keep the units of q k^T until they are exponentiated."""
    plain = problem.scale > 0 and not (problem.softcap or (problem.bias and not problem.slopes))
    divided = problem.mask is not None or problem.add_masked_score or problem.slopes is not None
    return plain and (not divided or DIVISIBLE_SCALES[0] <= problem.scale <= DIVISIBLE_SCALES[1])


def _caps_late(problem: Attention) -> bool:
    """Return whether the softcap is applied only when scores become weights: the macro LATE_CAP."""
    return (
        problem.dtype != "float32"  # whose weights below WEIGHTLESS count
        and CAPS[0] <= problem.softcap <= CAPS[1]
        and problem.bias is None
        and CAP_RATES[0] <= problem.scale / problem.softcap <= CAP_RATES[1]
    )


def _cap(problem: Attention) -> tuple[float, ...]:
    """Return the fields of the kernel's struct Cap; all but the first are 0 without LATE_CAP."""
    if not _caps_late(problem):
        return (problem.softcap or 1.0, *(0.0,) * (2 + sum(2 + len(polynomial) for _, polynomial in CAP_POLYNOMIALS)))
    cap, rate = problem.softcap, problem.scale / problem.softcap
    numbers = [cap, 2 * LOG2_E * rate, math.tanh(CAP_POLYNOMIALS[0][0]) * cap - math.log(KEPT)]
    for limit, polynomial in CAP_POLYNOMIALS:
        numbers += [limit / rate, WEIGHTLESS - math.tanh(limit) * cap]
        numbers += [LOG2_E * cap * term * rate ** (2 * i + 1) for i, term in enumerate(polynomial)]
    return tuple(numbers)


def _score_units(problem: Attention) -> tuple[float, float, float, float, float]:
    """Return the fields of the kernel's struct ScoreUnits."""
    unit = 1 / problem.scale if _scales_in_exponent(problem) else 1.0
    lowest = LOWEST / max(1.0, 1.5 / unit)  # still finite when multiplied by the scale and log2(e)
    masked, second_pass_below = problem.masked_score, problem.masked_score + NEGLIGIBLE_GAP
    if problem.mask and problem.mask_kind == "additive":
        second_pass_below = blocks.NEGLIGIBLE[problem.mask.dtype][1]
    if problem.add_masked_score:
        second_pass_below = blocks.NEGLIGIBLE[problem.dtype][1]
    in_units = masked if math.isinf(masked) else max(masked * unit, lowest)
    return unit, lowest, problem.scale, in_units, max(second_pass_below * unit, lowest)


def _defines(problem: Attention, config: HopperAttentionConfig, mask: ScoreTensor | None) -> Defines:
    additive = mask is not None and problem.mask_kind == "additive"
    finite = (problem.add_masked_score or mask is not None) and math.isfinite(problem.masked_score)
    return {
        "T": STORAGE[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "WARPGROUPS": config.warpgroups,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "BLOCKS_PER_SM": config.blocks,
        "PINGPONG": int(config.pingpong),
        "KEPT": KEPT,
        "LAZY_RESCALE": int(problem.head_dim_v > LAZY_RESCALE_FROM),
        "CAUSAL": int(problem.causal is not None),
        "SCALE_IN_EXPONENT": int(_scales_in_exponent(problem)),
        "SOFTCAP": int(problem.softcap != 0),
        "LATE_CAP": int(_caps_late(problem)),
        "ZERO_MASKED_ROWS": int(problem.zero_masked_rows),
        **blocks.mask_defines(problem),
        "ADD_MASKED_SCORE": int(problem.add_masked_score),
        "SECOND_PASS": int(additive or finite),
        "LATE_MASK": int(additive and _lacks_registers(problem, config)),
        **_score_defines("MASK", problem, mask),
        "BIAS": bias_macro(problem),
        "SLOPE_T": STORAGE[problem.slopes.dtype if problem.slopes else "float32"],
        **length_defines(problem),
        **_score_defines("BIAS", problem, problem.bias),
    }


def _score_defines(name: str, problem: Attention, scores: ScoreTensor | None) -> Defines:
    """Return the macros of a mask or bias: element type, axes along which it differs, and access in pairs."""
    if scores is None:
        return {f"{name}_T": "f16", f"{name}_KEY": 0, f"{name}_QUERY": 0, f"{name}_PAIRS": 0}
    pairs = scores.reads_pairs(2, problem.keys) if scores.dtype != "bool" else 0
    return {
        f"{name}_T": STORAGE.get(scores.dtype, "b8"),
        f"{name}_KEY": scores.key_stride,
        f"{name}_QUERY": int(scores.differs[2]),
        f"{name}_PAIRS": pairs,
    }


def _heads_in_l2(problem: Attention) -> int:
    """Return how many heads run at the same time: as many as have keys and values that fit into L2 together.

    Return 1 if no diagonal or mask makes the queries' numbers of keys differ.
    """
    if problem.causal is None and not (problem.mask and problem.mask.differs[2]):
        return 1
    key_value_bytes = 2 * problem.keys * (problem.head_dim + problem.head_dim_v) * problem.kv_heads / problem.heads
    heads: int = minimum(problem.heads * problem.batch, math.floor(L2_KEY_VALUE_BYTES / key_value_bytes))
    at_least_one: int = maximum(1, heads)
    return at_least_one


def _tensor_map(
    problem: Attention, x: HeadTensor, rows: int, heads: int, columns: int, box_rows: int, stores: bool = False
) -> TensorMap:
    sizes, item = (columns, rows, heads, problem.batch), ITEM_BYTES[problem.dtype]
    innermost_first = (x.row_stride, x.head_stride, x.batch_stride)
    strides = tuple(
        item * (columns if _is_one(extent) else stride)
        for stride, extent in zip(innermost_first, sizes[1:], strict=True)
    )
    dtype = "tfloat32" if problem.dtype == "float32" and not stores else problem.dtype
    return TensorMap(x.pointer, dtype, sizes, strides, (PANEL_BYTES // item, box_rows, 1, 1), PANEL_BYTES)
