"""The host side of conv_stem.cu: convolutions of channels-first images with few channels, of floats or integers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.conv.problem import Conv, plain_pads, two
from onnxfuse.kernels.conv.ranking import Limits, Ranking, few_configs, varied
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.problem import EightBits
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH, REGISTERS, fitting_blocks
from onnxfuse.kernels.tensors import ABSENT, EIGHT_BITS, ITEM_BYTES, VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Device, Kernel, Launch, Struct
from onnxfuse.runtime.symint import is_symbolic, maximum, minimum

MAX_CHANNELS: Final = 4
MAX_IMPLEMENTATIONS: Final = 4
MAX_FEW: Final = 5  # configs for a convolution of dynamic sizes
MAX_FEW_OF_WIDTH: Final = 3  # configs per copy size, if the width is dynamic
MAX_HELD: Final = 96  # registers per thread for weights
MIN_BLOCKS: Final = (2, 3, 4, 5)
MAX_BLOCKS_BEFORE_HOPPER: Final = 3
MAX_TILES_N: Final = 6  # mma tiles per warp, of 8 filters each
WARPS: Final = 4
TILE_BYTES: Final = 2 * 3 * 4  # bytes of shared memory for the positions of two tiles
MAX_IMAGE: Final = 2**31 - 1  # elements of an image of x, and of y
MAX_LENGTH: Final = (2**24 - 1) // (255 * 128)  # maximum number of products of integers whose sum is exact in float32
TILE_PIXELS: Final = (64, 512)  # pixels per block: the fewest and the most
TILE_COLUMNS: Final = (16, 32, 56, 64, 80, 96, 112, 128)
ROW_COLUMNS: Final = (256, 512)  # additional tile widths for images of one row


@dataclass(frozen=True)
class StemConfig:
    """The macros of conv_stem.cu that this module chooses."""

    tp: int
    tq: int
    warps_m: int
    warps_n: int
    tiles_n: int
    min_blocks: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"stem_{self.tp}x{self.tq}x{8 * self.warps_n * self.tiles_n}_{self.min_blocks}"

    @property
    def block_n(self) -> int:
        """The filters of a block."""
        return 8 * self.warps_n * self.tiles_n

    def tiles(self, conv: Conv) -> int:
        """Return the number of tiles of pixels."""
        height, width = two(conv.y_sizes)
        return conv.n * -(-height // self.tp) * -(-width // self.tq)


@dataclass(frozen=True)
class _Geometry:
    """Constants of conv_stem.cu from which shared memory sizes follow; words have 32 bits."""

    row_words: int
    words: int  # 32-bit words along k
    steps: int
    patches: int  # words of two patches as copied, of shifted copies, and of the numbers of integers


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none if conv_stem.cu does not support `conv`."""
    if not is_supported(conv, device):
        return []
    conv = plain_pads(conv)
    if is_symbolic(conv.sizes[-1]):
        chosen = RANKING.by_cost(_few_of_width(conv, device), conv, device)
    elif is_symbolic(conv.n, *conv.sizes):
        chosen = RANKING.ranked(conv, device)
    else:  # configs that differ only in the register bound are launched in the same way, and count once
        limits: Limits[StemConfig] = {
            lambda config: config.min_blocks: MAX_IMPLEMENTATIONS // 2,
            lambda config: (config.tp, config.tq, grid(conv, config, device)): 1,
        }
        chosen = varied(RANKING.ranked(conv, device), limits, MAX_IMPLEMENTATIONS)
    return [implementation(conv, config, device) for config in chosen]


def _few_of_width(conv: Conv, device: Device) -> list[StemConfig]:
    """Return a few configs for a convolution of dynamic width; at least one of them is fast at any size."""
    copy, vector, problems = _copy(conv), _vector(conv), []
    for each in usual(conv):  # its width is rounded, so that it has the same copy size as the width of `conv`
        width = -(-each.sizes[-1] // vector) * vector + copy % vector
        problems.append(replace(each, sizes=(*each.sizes[:-1], width), pads_begin=conv.pads_begin))
    return few_configs(replace(RANKING, most=MAX_FEW_OF_WIDTH), tuple(problems), device)


def is_supported(conv: Conv, device: Device) -> bool:
    """Return whether conv_stem.cu computes this convolution as precisely as required."""
    return (
        device.arch >= MMA_ARCH
        and (conv.x_nchw or conv.c == 1)
        and conv.c <= MAX_CHANNELS
        and conv.group == 1
        and len(conv.kernel) <= 2
        and set(conv.dilations) <= {1}
        and (_item(conv) == 2 or conv.tf32)
        and (conv.eight_bits is None or _is_exact(conv, conv.eight_bits))
        and conv.pixels > 0
        and maximum(conv.pixels, conv.c * math.prod(conv.sizes), conv.m * math.prod(conv.y_sizes)) <= MAX_IMAGE
    )


def _is_exact(conv: Conv, values: EightBits) -> bool:
    return values.is_symmetric and not values.are_float8 and conv.taps * conv.c <= MAX_LENGTH


def implementation(conv: Conv, config: StemConfig, device: Device) -> Implementation:
    """Return the launch of one config."""
    (kh, kw), (sh, sw) = two(conv.kernel), two(conv.strides)
    in_product = int(_bias_in_product(conv, config))
    defines = {
        **conv.epilogue_defines(), **of_eight_bits(conv),
        "HAS_BIAS": int(bool(conv.bias) and not in_product), "BIAS_IN_PRODUCT": in_product,
        "CHANNELS": conv.c, "FILTERS": conv.m, "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PAD_W": _pad_w(conv),
        "COPY": _copy(conv), "TP": config.tp, "TQ": config.tq, "WARPS_M": config.warps_m, "WARPS_N": config.warps_n,
        "TILES_N": config.tiles_n, "HELD": int(_held(conv, config)), "WIDTH": _width(conv),
        "W_HWIO": int(conv.w_hwio), "W_COPY": _width(conv) if conv.w_hwio else _vector(conv),
        "WEIGHTS_CONSTANT": int(conv.weights_constant), "MIN_BLOCKS": config.min_blocks,
    }  # fmt: skip
    kernel = Kernel("conv_stem", "conv_stem", defines)
    threads = 32 * config.warps_m * config.warps_n
    pdl = device.has_pdl
    kernel, given = with_program(kernel, (*conv.arguments, *integers(conv)), conv.program)
    launch = Launch(kernel, grid(conv, config, device), (threads, 1, 1), given, shared(conv, config), pdl=pdl)
    return Implementation(config.name, (launch,))


def of_eight_bits(conv: Conv) -> Defines:
    """Return the macros that say how x and w are stored."""
    if (values := conv.eight_bits) is None:
        return {"EIGHT_BITS": 0, "W_SCALES": 0}
    return {
        "EIGHT_BITS": 1, "OPERAND": EIGHT_BITS[values.x_dtype], "W_SCALES": int(values.w_scales > 1),
        "X_ZERO": int(values.x_zero is not None),
    }  # fmt: skip


def integers(conv: Conv) -> tuple[Struct, ...]:
    """Return the argument of kernels that multiply integers: their scales, and the zero point of x."""
    values = conv.eight_bits
    return (Struct((values.x_scale, values.w_scale, values.x_zero or ABSENT)),) if values else ()


def resident(conv: Conv, config: StemConfig, device: Device) -> int:
    """Return how many blocks can be resident on a multiprocessor."""
    return max(1, min(config.min_blocks, fitting_blocks(shared(conv, config), device)))


def grid(conv: Conv, config: StemConfig, device: Device) -> tuple[int, int, int]:
    """Return the grid: blocks with equal shares of the tiles along x, slices of filters along y."""
    slices, tiles = -(-conv.m // config.block_n), config.tiles(conv)
    blocks = max(1, device.multiprocessors * resident(conv, config, device) // slices)
    return -(-tiles // -(-tiles // blocks)), slices, 1


# ---- numbers that the kernel derives from its macros -------------------------------------------------------------


def _pad_w(conv: Conv) -> int:
    return two(conv.pads_begin, missing=0)[1]


def _item(conv: Conv) -> int:
    """Return the bytes of a number that is multiplied; integers are multiplied as float16."""
    return 2 if conv.eight_bits else ITEM_BYTES[conv.dtype]


def _vector(conv: Conv) -> int:
    """Return the elements of the widest access for which the addresses are aligned."""
    return VECTOR_BYTES // _item(conv) if conv.aligned else 1


def _copy(conv: Conv) -> int:
    """Return the elements of x per copy: a divisor of the width of x, at most 16 bytes; 1, 4 or 8 integers.

    For dynamic widths, at most three copy sizes are distinguished, because each is compiled.
    """
    copy, width = _vector(conv), conv.sizes[-1]
    while width % copy:
        copy = 2 if is_symbolic(width) and copy > 2 else copy // 2
    return 1 if conv.eight_bits and copy < 4 else copy


def _width(conv: Conv) -> int:
    """Return the elements per access to y."""
    width = _vector(conv)
    while conv.m % width:
        width //= 2
    return width


def _held(conv: Conv, config: StemConfig) -> bool:
    """Return whether the weights of a warp fit into its registers."""
    return _held_registers(conv, config) <= MAX_HELD


def _held_registers(conv: Conv, config: StemConfig) -> int:
    """Return the registers per thread for the weights of its warp."""
    return 2 * _geometry(conv, config).steps * config.tiles_n


def _bias_in_product(conv: Conv, config: StemConfig) -> bool:
    """Return whether the bias is one more weight: the last mma has room for it, and does not round it to TF32."""
    return conv.bias is not None and conv.item == 2 and _geometry(conv, config).words % 8 > 0


def _registers(conv: Conv, config: StemConfig) -> int:
    """Return an estimate of the registers per thread."""
    geometry = _geometry(conv, config)
    held = _held_registers(conv, config) if _held(conv, config) else 0
    # If a row of the filter is not a multiple of four words, each lane holds an offset and a mask per word.
    words = 0 if geometry.row_words % 4 == 0 or not held else geometry.steps * (2 if _item(conv) == 4 else 4)
    vectors = bool(conv.bias and not _bias_in_product(conv, config)) + bool(conv.extra) + bool(conv.column_scale)
    others = 24 + (8 if conv.residual else 0) + (16 if _item(conv) == 4 else 0)
    others += conv.program.registers if conv.program else 0
    return held + words + (4 + 2 * vectors) * config.tiles_n + others


def _geometry(conv: Conv, config: StemConfig) -> _Geometry:
    (kh, kw), (sh, sw), copy = two(conv.kernel), two(conv.strides), _copy(conv)
    each = 4 // _item(conv)
    lead = _pad_w(conv) % 2 if copy > 1 and each == 2 else 0
    extra = -(_pad_w(conv) + lead) % copy
    row_words = -(-(lead + kw) // each)
    shifted = each == 2 and sw % 2 == 1
    rows = (config.tp - 1) * sh + kh
    columns = -(-(extra + (config.tq - 1) * sw + row_words * each + 2 * shifted) // 8) * 8
    pitch = columns // each
    while row_words % 4 and not 12 <= pitch % 32 <= 20:
        pitch += 4
    patch = conv.c * rows * pitch
    span = 2 * ((patch + 15) // 32 * 32 + 16) if shifted else patch
    words = conv.c * kh * row_words
    patches = span + 2 * (conv.c * rows * columns // 4) if conv.eight_bits else 2 * span
    return _Geometry(row_words, words, -(-words // 8), patches)


def shared(conv: Conv, config: StemConfig) -> int:
    """Return the bytes of dynamic shared memory: the weights, two patches of x, and the position of each patch."""
    geometry = _geometry(conv, config)
    raw = config.block_n * conv.c * conv.taps * conv.item  # bytes of weights in the layout of w
    patches = 4 * geometry.patches
    if _held(conv, config):
        return raw + patches + TILE_BYTES
    return 4 * geometry.steps * config.block_n * 8 + max(patches, raw) + TILE_BYTES


# ---- configs -----------------------------------------------------------------------------------------------------


def configs(conv: Conv, device: Device) -> list[StemConfig]:
    """Return all configs that fit into registers and shared memory, to be ranked by their cost for these sizes."""
    height, width = two(conv.y_sizes)
    n_tiles = -(-conv.m // 8)
    warps_n = 1 if n_tiles <= 4 else 2
    slices = -(-n_tiles // (warps_n * MAX_TILES_N))
    tiles_n = -(-n_tiles // (warps_n * slices))
    if n_tiles == 8 * (n_tiles // 8):
        tiles_n = 4
    warps_m, found = WARPS // warps_n, []
    step = _copy(conv)  # the kernel needs tq * sw to be a multiple of this
    columns = (*TILE_COLUMNS, *(ROW_COLUMNS if height == 1 else ()))
    widths = {math.lcm(8, step), *(tq for tq in columns if tq < width + 8)}
    for tp, tq in itertools.product((1, 2, 4, 7, 8, 14, 16, 32, 64), sorted(widths)):
        least, most = TILE_PIXELS
        if tp * tq % (16 * warps_m) or not least <= tp * tq <= most or (tp > height and tp * tq > least):
            continue
        for min_blocks in MIN_BLOCKS:
            config = StemConfig(tp, tq, warps_m, warps_n, tiles_n, min_blocks)
            if min_blocks == 2 or _registers(conv, config) <= REGISTERS // (32 * WARPS * min_blocks) // 8 * 8:
                found.append(config)
    # Before Hopper, the compiler uses more registers, and would spill.
    most_blocks = max(MIN_BLOCKS) if device.has_pdl else MAX_BLOCKS_BEFORE_HOPPER
    return [c for c in found if c.min_blocks <= most_blocks and shared(conv, c) <= device.shared_per_block]


def cost(conv: Conv, config: StemConfig, device: Device) -> float:
    """Return a relative cost: the pixels of the busiest multiprocessor, weighted by the cost of their patches."""
    (kh, kw), (sh, sw) = two(conv.kernel), two(conv.strides)
    blocks, slices, _ = grid(conv, config, device)
    shares, busiest = -(-config.tiles(conv) // blocks), -(-blocks * slices // device.multiprocessors)
    patch = ((config.tp - 1) * sh + kh) * ((config.tq - 1) * sw + kw) * conv.c
    weight = config.tp * config.tq * (conv.m + 24) + patch + 1000
    # The last factor is lower for more resident blocks: on an H200, a 7x7 filter of stride 2 from 32x3x224x224 to 64
    # channels took 9 % longer with two resident blocks than with three.
    found: float = shares * busiest * weight * (1 + 1 / minimum(busiest, resident(conv, config, device)))
    return found


RANKING: Final = Ranking(configs, cost, MAX_FEW)
