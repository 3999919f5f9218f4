"""The host side of quantized_gemm.cu and quantized_conv.cu: products of 8-bit values by wgmma on a Hopper GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxfuse.algebra.filter_edges import MAX_ROWS, Beyond, most_taps_beyond, row_count
from onnxfuse.kernels.conv import hopper as conv_hopper
from onnxfuse.kernels.conv.hopper_slices import pixel_sizes
from onnxfuse.kernels.conv.problem import Conv, plain_pads, three
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import EightBits, Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ABSENT, EIGHT_BITS, VECTOR_BYTES, Defines, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, Struct, TensorMap
from onnxfuse.runtime.symint import best_first, is_symbolic

WGMMA_ARCH: Final = 90
# Consumer warpgroups with tiles of their own (pingpong) are faster than consumers that share a tile, unless tiles are
# few. On an H200, 4096x4096x4096, 4096x7168x16384 and 8192x8192x8192 take 106, 677 and 734 us with own tiles of
# 128x128, and 124, 805 and 938 us with a shared tile of 128x256. But 4096x768x3072 takes 18.0 us with a shared tile of
# 128x192, and longer with three other configs.
# 100352x64x64 takes 7.7 us with own tiles of 192x64, and 10.9 with 64x64.
CONFIGS: Final = (
    *(each for each in hopper.CONFIGS if each.pingpong),
    HopperConfig(192, 64, pingpong=True),
    HopperConfig(128, 96, pingpong=True),
    HopperConfig(128, 192),
    HopperConfig(256, 128),
)
# For float8, consumers share tiles: while one adds the sums of a stage, wgmmas of the others are in flight. These sums
# take as many registers as the accumulators.
FLOAT8_CONFIGS: Final = (
    HopperConfig(128, 128), HopperConfig(128, 160), HopperConfig(128, 192), HopperConfig(192, 128),
    HopperConfig(64, 128, pingpong=True), HopperConfig(64, 64, pingpong=True),
)  # fmt: skip
SUMS: Final = Pointer("scratch", 0)  # the sums that quantized_sums.cu writes
MAX_WIDTH: Final = 8  # columns of y to which a thread applies the epilogue together
COLUMNS_OF_SUMS: Final = 8  # columns of y per block of quantized_sums.cu
MAX_TAPS: Final = 1024  # maximum taps of a filter: quantized_sums.cu holds their sums in shared memory
ONE_TAP: Final[Defines] = {  # the macros of conv_edges.cuh for a product of matrices
    f"{name}_{axis}": value
    for name, value in (("KERNEL", 1), ("STRIDE", 1), ("PAD", 0), ("DILATION", 1), ("BEGIN", 0), ("END", 0))
    for axis in "DHW"
}
MAX_LENGTH: Final = 2**31 // (255 * 128)  # maximum number of products of integers whose sum always fits int32


def products(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a matrix product, the expected fastest first; none if unsupported."""
    if not _is_supported(gemm, device):
        return []
    configs = FLOAT8_CONFIGS if of_eight_bits(gemm).are_float8 else CONFIGS
    fitting = [config for config in configs if hopper.fits(gemm, config, device)]
    ordered = best_first(fitting, lambda config: hopper.cycles(gemm, config, device))
    return [_product(gemm, config, device) for config in ordered[: hopper.MAX_CONFIGS]]


def _is_supported(gemm: Gemm, device: Device) -> bool:
    sizes = (gemm.m, gemm.n, gemm.k)
    return (
        device.arch == WGMMA_ARCH
        and of_eight_bits(gemm).is_symmetric
        and gemm.transposed
        and gemm.aligned
        and gemm.k % VECTOR_BYTES == 0  # rows that TMA reads begin at multiples of 16 bytes
        and (gemm.k <= MAX_LENGTH or of_eight_bits(gemm).are_float8)
        and all(0 < size < 2**31 - 2**16 for size in sizes)
    )


def _product(gemm: Gemm, config: HopperConfig, device: Device) -> Implementation:
    x = TensorMap(gemm.x, "uint8", (gemm.k, gemm.m), (gemm.k,), (hopper.ROW_BYTES, config.tile_m), 128)
    maps = (x, _weight_map(gemm, gemm.k, config, hopper.ROW_BYTES))
    defines = {**hopper.defines(gemm, config, device), **_defines(gemm, edge_rows=1)}
    given = (*maps, gemm.epilogue_operands, _value_operands(gemm), hopper.product_sizes(gemm, config))
    launch = hopper.kernel_launch("quantized_gemm", gemm, config, device, defines, given)
    return _after_sums(f"quantized_gemm {config.name}", launch, gemm, ONE_TAP, edge_rows=1)


def convolutions(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a convolution of 8-bit values, the expected fastest first; none if unsupported."""
    conv = plain_pads(conv)
    values = of_eight_bits(conv)
    if not conv_hopper.is_supported(conv, device) or not values.is_symmetric:
        return []
    if conv.taps * conv.c > MAX_LENGTH and not values.are_float8:
        return []
    if values.x_zero is not None and (conv.taps > MAX_TAPS or row_count(taps_beyond(conv)) > MAX_ROWS):
        return []
    gemm = conv_hopper.gemm_of_blocks(conv)
    ordered = best_first(conv_hopper.fitting(conv, device), lambda config: conv_hopper.cycles(gemm, config, device))
    return [_convolution(conv, config, device) for config in ordered[: conv_hopper.MAX_CONFIGS]]


def _convolution(conv: Conv, config: HopperConfig, device: Device) -> Implementation:
    gemm = conv_hopper.gemm_of_blocks(conv)
    beyond = taps_beyond(conv)
    begins, ends = (three(taps, missing=0) for taps in zip(*beyond, strict=True))
    of_filter = {**conv_hopper.of_filter(conv), **conv_hopper.by_axis(BEGIN=begins, END=ends)}
    defines = {**conv_hopper.defines(conv, config, device), **of_filter, **_defines(gemm, row_count(beyond))}
    given = (
        conv_hopper.pixel_map(conv, config), _weight_map(gemm, conv.taps * conv.c, config, conv_hopper.k_block(conv)),
        gemm.epilogue_operands, _value_operands(gemm), pixel_sizes(conv, gemm, config),
        Struct(int32(*three(conv.sizes))),
    )  # fmt: skip
    launch = hopper.kernel_launch("quantized_conv", gemm, config, device, defines, given)
    return _after_sums(f"quantized_conv {config.name}", launch, replace(gemm, k=conv.c), of_filter, row_count(beyond))


def taps_beyond(conv: Conv) -> Beyond:
    """Return for each axis the largest number of taps before x, and after x.

    If auto_pad and dynamic sizes leave the padding after x unknown, all taps but one count as possibly after x.
    """
    reach = [(taps - 1) * dilation for taps, dilation in zip(conv.kernel, conv.dilations, strict=True)]
    ends = [far if is_symbolic(pad) else pad for pad, far in zip(conv.pads_end, reach, strict=True)]
    return most_taps_beyond(conv.kernel, conv.dilations, conv.pads_begin, ends)


def of_eight_bits(problem: Gemm | Conv) -> EightBits:
    """Return the scales and zero points of a problem whose x and w have 8 bits."""
    assert problem.eight_bits is not None
    return problem.eight_bits


def _defines(gemm: Gemm, edge_rows: int) -> Defines:
    """Return the macros of gemm_hopper_eight_bits.cuh."""
    values = of_eight_bits(gemm)
    return {
        "OPERAND": EIGHT_BITS[values.x_dtype], "W_SCALES": int(values.w_scales > 1),
        "WIDTH": _width(gemm),
        "X_ZERO": int(values.x_zero is not None), "EDGES": int(values.x_zero is not None and edge_rows > 1),
    }  # fmt: skip


def _value_operands(gemm: Gemm) -> Struct:
    """Return the struct EightBitOperands of gemm_hopper_eight_bits.cuh."""
    values = of_eight_bits(gemm)
    sums = values.w_sums or (SUMS if values.x_zero else ABSENT)
    return Struct((values.x_scale, values.w_scale, values.x_zero or ABSENT, sums))


def _width(gemm: Gemm) -> int:
    """Return the columns of y to which a thread applies the epilogue together: WIDTH of gemm_hopper_eight_bits.cuh.

    If y is float32, a thread stores the 16 bytes of four columns at once, so that stores write whole sectors of L2:
    4096x2304x768 takes 20.6 us on an H200, and 25.7 with eight columns. If a program follows, eight columns hide more
    of its latency: 4096x3072x768 with a Gelu takes 34.0 us, and 35.9 with four.
    """
    is_wide = gemm.dtype == "float32" and gemm.program is None
    return math.gcd(gemm.n, MAX_WIDTH // 2 if is_wide else MAX_WIDTH)


def _weight_map(gemm: Gemm, k: int, config: HopperConfig, k_block: int) -> TensorMap:
    """Return the tensor map of a weight of n rows of k bytes, in the order of gemm_hopper_eight_bits.cuh."""
    swizzle = conv_hopper.swizzle(k_block)
    width = _width(gemm)
    if width <= 2:
        return TensorMap(gemm.w, "uint8", (k, gemm.n), (k,), (k_block, config.tile_n), swizzle)
    sizes = (k, 2, gemm.n // width, width // 2)  # a box has width / 2 pairs of neighbours for each of four lanes
    return TensorMap(gemm.w, "uint8", sizes, (k, width * k, 2 * k), (k_block, 2, 4, width // 2), swizzle)


def _after_sums(name: str, launch: Launch, gemm: Gemm, of_filter: Defines, edge_rows: int) -> Implementation:
    """Return the launch; if it needs sums of weights that no operand holds, quantized_sums.cu runs first."""
    values = of_eight_bits(gemm)
    if values.x_zero is None or values.w_sums:
        return Implementation(name, (launch,))
    defines = {**of_filter, "COLUMNS": COLUMNS_OF_SUMS, "WEIGHTS_CONSTANT": int(gemm.weights_constant)}
    kernel = Kernel("quantized_sums", "quantized_sums", defines)
    grid = (-(-gemm.n // COLUMNS_OF_SUMS), 1, 1)
    block = (32 * COLUMNS_OF_SUMS, 1, 1)
    sums = Launch(kernel, grid, block, (gemm.w, SUMS, *int32(gemm.n, gemm.k)), pdl=True)
    return Implementation(name, (sums, launch), (4 * gemm.n * edge_rows,))
