"""The host side of conv_transpose_hopper.cu: transposed convolutions by wgmma and TMA on a Hopper GPU.

A phase is the set of all pixels of y whose positions have the same remainders modulo the strides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from onnxfuse.kernels.config_subset import few
from onnxfuse.kernels.conv.hopper import CONFIGS, MAX_CONFIGS
from onnxfuse.kernels.conv.hopper import MAX_CORNER as CORNERS
from onnxfuse.kernels.conv.hopper import MAX_OFFSET as OFFSETS
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.problem import Conv, two
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.conv_transpose.mma import geometry_defines
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import SUBTILE, TILE_K, HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import Defines, int32
from onnxfuse.runtime.plan import Argument, Device, Im2col, Pointer, Struct, TensorMap
from onnxfuse.runtime.symint import best_first, is_symbolic, maximum

MAX_CORNER: Final = CORNERS[2]  # largest corner offset of TMA; 1-D convolutions run as 2-D ones with one row
MAX_OFFSET: Final = OFFSETS[2]
MAX_FEW: Final = 4  # configs offered for a convolution of dynamic sizes
MIN_BOX: Final = 8  # positions per box: TMA's swizzle pattern repeats after 8 rows


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none for another GPU, dtype or kind of convolution."""
    if why_not(conv, device):
        return []
    gemm = gemm_of_phases(widened(conv))
    found = best_first(fitting(conv, device), lambda config: hopper.cycles(gemm, config, device))
    return [implementation(conv, config, device) for config in found[:MAX_CONFIGS]]


def fitting(conv: Conv, device: Device) -> list[HopperConfig]:
    """Return the configs that fit into registers and shared memory and have no tile that spans several phases.

    If sizes are dynamic, only a few configs are returned; at any size, at least one of them is fast.
    """
    return _few(usual(conv), device) if is_symbolic(conv.n, *conv.sizes) else _fitting(conv, device)


@functools.lru_cache(maxsize=512)
def _few(problems: tuple[Conv, ...], device: Device) -> list[HopperConfig]:
    gemms = [gemm_of_phases(widened(each)) for each in problems]
    return few(_fitting(problems[0], device), gemms, lambda gemm, config: hopper.cycles(gemm, config, device), MAX_FEW)


def _fitting(conv: Conv, device: Device) -> list[HopperConfig]:
    conv = widened(conv)
    gemm = gemm_of_phases(conv)
    whole = (config for config in CONFIGS if config.split_k == 1 and conv.m % config.tile_n == 0)
    return [config for config in whole if config.tile_n % SUBTILE == 0 and hopper.fits(gemm, config, device)]


def why_not(conv: Conv, device: Device) -> str | None:
    """Return why the kernel does not support a transposed convolution; None if it does."""
    period, conv = conv.m, widened(conv)
    if device.arch != 90 or conv.dtype not in ("float16", "bfloat16"):
        return "wgmma multiplies 16-bit types on compute capability 90"
    if conv.group != 1 or conv.w_hwio or len(conv.kernel) > 2:
        return "TMA walks over channels-last images of one group"
    if not conv.aligned or conv.c % 8 or conv.m % SUBTILE or period % 2:
        return f"TMA moves pixels that begin at multiples of 16 bytes, and tiles of {SUBTILE} filters"
    if not conv.pixels * conv.m * conv.c * conv.taps or maximum(conv.pixels, conv.c * conv.taps) >= 2**31 - 2**16:
        return "coordinates are ints"
    axes = list(zip(conv.kernel, conv.strides, conv.dilations, conv.y_sizes, strict=True))
    if any(taps % stride or dilation > 1 or size % stride for taps, stride, dilation, size in axes):
        return "phases have equally many taps and positions"
    if box(conv) < MIN_BOX:
        return f"a box has at least {MIN_BOX} positions of a row, or of several whole rows"
    if is_symbolic(*conv.pads_begin):
        return "the number of elements that pads cut off before y is a constant of the kernel"
    if any(maximum(-begin, begin, -end, end) > MAX_CORNER or reach > MAX_OFFSET for begin, end, reach in _walk(conv)):
        return f"a walk begins and ends within {MAX_CORNER} pixels of the image, and offsets are at most {MAX_OFFSET}"
    return None


def widened(conv: Conv) -> Conv:
    """Return an equal convolution with stride 1 along the width, or `conv` if that is not possible.

    It is possible if each pixel of y reads only one pixel of x along the width.  The neighbouring pixels of y that read
    the same pixel of x then count as one pixel with the filters of all of them, which are contiguous in memory.  In the
    same way, the taps of w along the width count as one tap.
    """
    stride = conv.strides[-1]
    is_whole = conv.kernel[-1] == stride and not conv.pads_begin[-1] and conv.y_sizes[-1] == conv.sizes[-1] * stride
    if conv.group > 1 or not is_whole or conv.dilations[-1] > 1:
        return conv
    kernel, strides = (*conv.kernel[:-1], 1), (*conv.strides[:-1], 1)
    y_sizes = *conv.y_sizes[:-1], conv.sizes[-1]
    return replace(conv, m=conv.m * stride, kernel=kernel, strides=strides, y_sizes=y_sizes)


def counts(conv: Conv) -> tuple[int, int]:
    """Return how many positions a phase has along the height, and how many along the width."""
    (height, width), (down, right) = two(conv.y_sizes), two(conv.strides)
    return height // down, width // right


def box(conv: Conv) -> int:
    """Return the positions per TMA box: part of one row, or several whole rows."""
    row = counts(conv)[1]
    if is_symbolic(row):  # the sizes of a box must be plain integers
        return next((size for size in (64, 32, 16, 8) if row % size == 0), 1)
    return SUBTILE if SUBTILE % row == 0 and row >= MIN_BOX else math.gcd(SUBTILE, row)


def _walk(conv: Conv) -> Iterator[tuple[int, int, int]]:
    """Yield, for each axis, (begin, end, largest offset of a tap) of the walk in which TMA visits the pixels of x.

    `begin` is relative to the first pixel of x along the axis, and `end` to the last one.
    """
    given = zip(
        *map(two, (conv.kernel, conv.strides, conv.sizes, conv.y_sizes)), two(conv.pads_begin, missing=0), strict=True
    )
    for taps, stride, size, y_size, pad in given:
        begin = pad // stride - (taps // stride - 1)
        yield begin, y_size // stride - size + begin, (stride - 1 + pad) // stride - begin


def gemm_of_phases(conv: Conv) -> Gemm:
    """Return the matrix product: positions are rows, filters of all phases are columns, and k is padded to blocks."""
    phases = math.prod(conv.strides)
    rows, k = conv.n * math.prod(counts(conv)), conv.taps // phases * -(-conv.c // TILE_K) * TILE_K
    return replace(as_gemm(conv), m=rows, n=phases * conv.m, k=k, transposed=False)


def implementation(conv: Conv, config: HopperConfig, device: Device) -> Implementation:
    """Return the implementation of a config: one launch."""
    period, conv = conv.m, widened(conv)
    gemm, source = gemm_of_phases(conv), "conv_transpose_hopper"
    macros = {**defines(conv, config, device), "PERIOD": period}
    launch = hopper.kernel_launch(source, gemm, config, device, macros, arguments(conv, config))
    return Implementation(f"{source} {config.name}", (launch,))


def defines(conv: Conv, config: HopperConfig, device: Device) -> Defines:
    """Return the macros of gemm_hopper.cuh and conv_transpose_operands.cuh, except PERIOD."""
    pads = two(conv.pads_begin, missing=0)
    geometry = {name: value for name, value in geometry_defines(conv).items() if "DILATION" not in name}
    return {
        **hopper.defines(gemm_of_phases(conv), config, device), **geometry, "CHANNELS": conv.c, "FILTERS": conv.m,
        "PAD_H": pads[0], "PAD_W": pads[1],
    }  # fmt: skip


def arguments(conv: Conv, config: HopperConfig) -> tuple[Argument, ...]:
    """Return the arguments of conv_transpose_hopper.cu."""
    gemm = gemm_of_phases(conv)
    results = [result_map(conv, each) for each in (conv.y, conv.residual) if each]
    sizes = Struct(int32(gemm.m, gemm.n, *counts(conv), box(conv), hopper.group_m(gemm, config)))
    maps = (pixel_map(conv, config), weight_map(conv), *results)
    return (*maps, conv.epilogue_operands, sizes)


def pixel_map(conv: Conv, config: HopperConfig) -> TensorMap:
    """Return the im2col tensor map of x: a load takes the pixels that one tap reads for the rows of a tile."""
    h, w = two(conv.sizes)
    down, right = _walk(conv)
    walk = Im2col((right[0], down[0]), (right[1], down[1]), (1, 1))
    pitches = (2 * conv.c, 2 * conv.c * w, 2 * conv.c * w * h)
    return TensorMap(conv.x, _dtype(conv), (conv.c, w, h, conv.n), pitches, (TILE_K, config.tile_m), 128, walk)


def weight_map(conv: Conv) -> TensorMap:
    """Return the tensor map of w, with dimensions (filters, taps, channels)."""
    pitches = (2 * conv.m, 2 * conv.m * conv.taps)
    return TensorMap(conv.w, _dtype(conv), (conv.m, conv.taps, conv.c), pitches, (SUBTILE, 1, TILE_K), 128)


def result_map(conv: Conv, pointer: Pointer) -> TensorMap:
    """Return the tensor map of y or residual.

    Its dimensions, innermost first, are the phases along the width with their filters, the positions along the width,
    the phases along the height, and the positions along the height of all images.
    """
    (down, right), (rows, row) = two(conv.strides), counts(conv)
    pixels = 2 * conv.m * two(conv.y_sizes)[1]  # bytes of a row of y
    sizes, pitches = (right * conv.m, row, down, conv.n * rows), (2 * conv.m * right, pixels, pixels * down)
    positions = box(conv)
    width = positions if is_symbolic(row) else min(positions, row)
    return TensorMap(pointer, _dtype(conv), sizes, pitches, (SUBTILE, width, 1, positions // width), 128)


def _dtype(conv: Conv) -> Literal["float16", "bfloat16"]:
    return "float16" if conv.dtype == "float16" else "bfloat16"
