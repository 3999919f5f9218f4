"""The host side of conv_depthwise_sliding.cu: depthwise convolutions by threads that slide down the rows of x."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.config_subset import covering_subset_of_each, few
from onnxfuse.kernels.conv import depthwise
from onnxfuse.kernels.conv.problem import Conv, two
from onnxfuse.kernels.conv.ranking import varied
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.conv.stem import integers, of_eight_bits
from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import REGISTERS, bytes_of_block
from onnxfuse.kernels.tensors import ITEM_BYTES, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import best_first, estimate, is_symbolic, maximum, minimum, without_soft_guards

MAX_IMPLEMENTATIONS: Final = 3
MAX_REGISTERS: Final = 184  # registers per thread, as estimated by `registers`
THREADS: Final = 128  # approximate threads per block; blocks are small, so that several fit despite many registers
STRIP_COLUMNS: Final = (2, 4, 5, 7, 8, 14)
MAX_VEC: Final = 4
MAX_EXACT_TAPS: Final = 2**24 // (255 * 128)  # with which sums of integers are exact in fp32
MAX_STRIPS: Final = 16  # strips along the height of an image

# Costs and rates of one multiprocessor of an H200; they order configs well enough on other GPUs.
WARP_INSTRUCTIONS: Final = 0.8  # warp instructions issued per cycle by each scheduler (a quarter of a multiprocessor)
START_CYCLES: Final = 3000  # cycles from the launch until weights and the first row of x arrive
LOAD_CYCLES: Final = 700  # cycles until a row of x arrives
ROW_INSTRUCTIONS: Final = 16  # instructions per row of x in addition to products and loads
RESIDENT_WARPS: Final = 64  # warps per multiprocessor, if registers suffice

MAX_SHARE: Final = 8  # maximum blocks per multiprocessor for which `unused_shared` spreads blocks evenly
SHARES: Final = (1, 2, 4)  # plans for dynamic sizes distinguish these numbers of blocks per multiprocessor
WIDTHS: Final = (4, 8, 16)  # plans for dynamic sizes distinguish these widths of y: a strip must not be wider than y
MAX_FEW_KERNELS: Final = 5  # maximum number of kernels for dynamic sizes
MAX_FEW: Final = 8  # maximum number of configs for dynamic sizes; configs that differ in `rows` alone share a kernel
SHARED_UNIT: Final = 128  # bytes: the allocation unit of a block's shared memory


@dataclass(frozen=True)
class SlidingConfig:
    """The macros of conv_depthwise_sliding.cu that this module chooses, and the rows of a strip."""

    vec: int
    tw: int
    rows: int  # largest number of rows per strip
    ahead: int
    bx: int
    bw: int
    bh: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"depthwise_sliding_{self.vec}x{self.tw}x{self.rows}_{self.ahead}_{self.bx}x{self.bw}x{self.bh}"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.bx * self.bw * self.bh

    def slices(self, conv: Conv) -> int:
        """Return the number of slices of channels; each slice has its own blocks."""
        return -(-conv.c // (self.vec * self.bx))

    def patches(self, conv: Conv) -> int:
        """Return the number of blocks per slice of channels."""
        height, width = two(conv.y_sizes)
        return conv.n * -(-height // (self.strip_rows(conv) * self.bh)) * -(-width // (self.tw * self.bw))

    def strip_rows(self, conv: Conv) -> int:
        """Return the rows per strip: equal shares of the height of y, of at most `rows` and at least `_least_rows`."""
        height = two(conv.y_sizes)[0]
        rows: int = maximum(_least_rows(conv), -(-height // -(-height // self.rows)))
        return rows


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none if conv_depthwise_sliding.cu does not support `conv`."""
    if not is_supported(conv):
        return []
    found = best_first(_given(conv, device), lambda config: cost(conv, config, device))
    chosen = varied(found, {lambda config: (config.vec, config.tw): 1}, MAX_IMPLEMENTATIONS)
    first = [implementation(conv, config, device) for config in chosen[:1]]
    # Only the first config adds soft guards: conditions on the number of blocks under which it is expected to be fast.
    with without_soft_guards(conv.n, *conv.sizes):
        return first + [implementation(conv, config, device) for config in chosen[1:]]


def is_supported(conv: Conv) -> bool:
    """Return whether the kernel can compute this convolution; whether registers hold its weights is not checked."""
    (kh, _), (sh, _), (dh, _) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    one_step = len(conv.kernel) <= 2 and sh == dh == 1 and kh > 1
    values = conv.eight_bits
    if values and (values.are_float8 or not values.is_symmetric or conv.taps > MAX_EXACT_TAPS):
        return False
    return one_step and depthwise.is_supported(conv) and two(conv.y_sizes)[0] >= _least_rows(conv)


def _least_rows(conv: Conv) -> int:
    """Return the least number of rows per strip."""
    return max(1, two(conv.kernel)[0] - 1)


def _given(conv: Conv, device: Device) -> list[SlidingConfig]:
    """Return the configs to rank by cost; for dynamic sizes only a few: at any size, at least one is fast."""
    if not is_symbolic(conv.n, *conv.sizes):
        return configs(conv)
    width = two(conv.y_sizes)[1]
    if is_symbolic(width):  # few ranges of widths are distinguished, because each of them adds plans
        width = next((least for least in reversed(WIDTHS) if width >= least), 0)
    return [config for config in _few(usual(conv), device) if width >= config.tw]


@functools.lru_cache(maxsize=512)
def _few(problems: tuple[Conv, ...], device: Device) -> list[SlidingConfig]:
    def cost_if_taken(conv: Conv, config: SlidingConfig) -> float:
        height, width = two(conv.y_sizes)
        return cost(conv, config, device) if height >= _least_rows(conv) and width >= config.tw else math.inf

    kernels = covering_subset_of_each(problems, configs, cost_if_taken, MAX_FEW_KERNELS)
    rows = sorted({config.rows for config in kernels} | {-(-two(conv.y_sizes)[0] // 2) for conv in problems[:1]})
    every = [replace(config, rows=each) for config in kernels for each in rows]  # `rows` is an argument of the kernel
    return few(list(dict.fromkeys(every)), problems, cost_if_taken, MAX_FEW)


def implementation(conv: Conv, config: SlidingConfig, device: Device) -> Implementation:
    """Return the launch of one config."""
    (kh, kw), (_, sw), (_, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    defines = {
        **conv.epilogue_defines(),
        "CHANNELS": conv.c, "VEC": config.vec, "TW": config.tw, "AHEAD": config.ahead,
        "BX": config.bx, "BW": config.bw, "BH": config.bh, "KH": kh, "KW": kw, "SW": sw, "DW": dw,
        "W_HWIO": int(conv.w_hwio), "WEIGHTS_CONSTANT": int(conv.weights_constant), "MIN_BLOCKS": 1,
    }  # fmt: skip
    if conv.eight_bits:
        defines |= of_eight_bits(conv)
    kernel = Kernel("conv_depthwise_sliding", "conv_depthwise_sliding", defines)
    given = (*conv.arguments, *int32(config.strip_rows(conv)), *integers(conv))
    kernel, arguments = with_program(kernel, given, conv.program)
    grid = (config.patches(conv), config.slices(conv), 1)
    shared = unused_shared(conv, config, device)
    launch = Launch(kernel, grid, (config.threads, 1, 1), arguments, shared, pdl=device.has_pdl)
    return Implementation(config.name, (launch,))


def unused_shared(conv: Conv, config: SlidingConfig, device: Device) -> int:
    """Return the bytes of unused shared memory to request, so that blocks spread evenly over multiprocessors.

    The kernel does not access them.  If all blocks fit on the GPU at once, the multiprocessors that the previous kernel
    frees first would otherwise take as many blocks as fit, and others none.  On an H200, 192 blocks of two warps took
    12.3 us that way, and 6.2 us with even shares.
    """
    blocks = math.ceil(config.patches(conv) * config.slices(conv) / device.multiprocessors)
    shares = SHARES if is_symbolic(blocks) else range(1, MAX_SHARE + 1)
    share = next((each for each in shares if estimate(blocks) <= each), MAX_SHARE + 1)
    if share > min(MAX_SHARE, _resident(conv, config)):
        return 0
    return bytes_of_block(share + 1, device) // SHARED_UNIT * SHARED_UNIT + SHARED_UNIT


def configs(conv: Conv) -> list[SlidingConfig]:
    """Return all configs to rank by cost for these sizes."""
    height, width = two(conv.y_sizes)
    least, counts = _least_rows(conv), range(1, MAX_STRIPS + 1)
    rows = sorted({rows for count in counts if least <= (rows := -(-height // count)) <= height})
    return [
        SlidingConfig(vec, tw, each, ahead, *depthwise.block(conv, vec, tw, each, THREADS))
        for vec in depthwise.access_sizes(conv)
        for tw in sorted({min(tw, width) for tw in STRIP_COLUMNS})
        for ahead in (1, 2)
        if vec <= MAX_VEC and _columns(conv, tw) <= depthwise.MAX_COLUMNS
        if registers(conv, vec, tw, ahead) <= MAX_REGISTERS
        for each in rows
    ]


def _columns(conv: Conv, tw: int) -> int:
    """Return how many columns of x a strip of `tw` columns spans."""
    (_, kw), (_, sw), (_, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    return (tw - 1) * sw + (kw - 1) * dw + 1


def registers(conv: Conv, vec: int, tw: int, ahead: int) -> int:
    """Estimate the registers per thread: weights, sums, a row of x in fp32, and the rows loaded ahead as stored."""
    kh, _ = two(conv.kernel)
    row = _columns(conv, tw) * (vec + ahead * -(-vec * ITEM_BYTES[conv.dtype] // 4))
    return (kh * tw + conv.taps) * vec + row + 24


def _resident(conv: Conv, config: SlidingConfig) -> int:
    """Return how many blocks can be resident on a multiprocessor, limited by registers."""
    held = -(-registers(conv, config.vec, config.tw, config.ahead) // 8) * 8
    return max(1, min(RESIDENT_WARPS, REGISTERS // (32 * held)) // -(-config.threads // 32))


def cost(conv: Conv, config: SlidingConfig, device: Device) -> float:
    """Estimate the clock cycles of a launch: for each row of x, its instructions or its load, whichever takes longer.

    If memory traffic takes longer than all rows, the time of this traffic counts instead.
    """
    kh, _ = two(conv.kernel)
    item, columns = ITEM_BYTES[conv.dtype], _columns(conv, config.tw)
    rows = config.strip_rows(conv)
    x_rows = rows + kh - 1
    instructions = rows * conv.taps * config.tw * config.vec + conv.taps * (config.vec + 1)
    instructions += x_rows * (columns * (2 + (config.vec if item == 2 else 0)) + ROW_INSTRUCTIONS)
    instructions += rows * config.tw * (2 + 3 * config.vec)
    warps, resident = -(-config.threads // 32), _resident(conv, config)
    share = config.patches(conv) * config.slices(conv) / device.multiprocessors  # blocks per multiprocessor
    waves = math.ceil(share / resident)
    at_a_time = minimum(resident, math.ceil(share))
    several = minimum(1, waves - 1)  # 0 for one wave, 1 for two or more
    rounds = (1 - several) * 1.0 + several * (share + 0.5 * (waves * resident - share)) / at_a_time
    # Warps per scheduler; a multiprocessor has four schedulers. Blocks of fewer than four warps can all use the same
    # schedulers: the estimate is the mean of this case and an even distribution. On an H200, 192 blocks of two warps
    # take 8.6 us, and 384 blocks of four warps with as much work take 5.5.
    busy = (math.ceil(at_a_time * warps / 4) + at_a_time * math.ceil(warps / 4)) / 2
    row = maximum(LOAD_CYCLES / config.ahead, busy * instructions / x_rows / WARP_INSTRUCTIONS)
    operands = item * conv.c * (conv.n * math.prod(conv.sizes) + conv.pixels * (2 if conv.residual else 1))
    narrow = depthwise.NARROW_ACCESS.get(config.vec * item, 1.0)
    memory = operands * narrow / (depthwise.MEMORY_BYTES * device.multiprocessors)
    slowest: float = ((rounds * x_rows * row) ** 4 + memory**4) ** 0.25
    return START_CYCLES + slowest
