"""The host side of quantized_gemm.cu and quantized_conv.cu: products of integers by wgmma on a Hopper GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.conv import hopper as conv_hopper
from onnxfuse.kernels.conv.problem import Conv, plain_pads, three
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm, Integers
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ABSENT, VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap
from onnxfuse.runtime.symint import best_first

WGMMA_ARCH: Final = 90
# Consumers that take turns are faster than ones that share a tile, except with few tiles. On an H200, a shared 128x256
# takes 124, 805 and 938 us for 4096x4096x4096, 4096x7168x16384 and 8192x8192x8192, and 128x128 in turns 106, 677 and
# 734; but a shared 128x192 takes 18.0 for 4096x768x3072, less than three others.
CONFIGS: Final = (*(each for each in hopper.CONFIGS if each.pingpong), HopperConfig(128, 192))
OPERAND: Final = {"int8": "s8", "uint8": "u8"}  # the macro, by the dtype of x
ZEROS: Final = Pointer("scratch", 0)  # where quantized_zeros.cu writes
MAX_WIDTH: Final = 8  # columns of y that a thread finishes together
COLUMNS_OF_ZEROS: Final = 8  # columns of y per block of quantized_zeros.cu
MAX_TAPS: Final = 64  # the most taps of a filter that may lie outside x: a thread holds a bit for each
MAX_LENGTH: Final = 2**31 // (255 * 128)  # the most products of x and w whose sum int32 surely holds


def products(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a matrix product of integers, the expected fastest first; none if unsupported."""
    if not _is_supported(gemm, device):
        return []
    fitting = [config for config in CONFIGS if hopper.fits(gemm, config, device)]
    ordered = best_first(fitting, lambda config: hopper.cycles(gemm, config, device))
    return [_product(gemm, config, device) for config in ordered[: hopper.MAX_CONFIGS]]


def _is_supported(gemm: Gemm, device: Device) -> bool:
    sizes = (gemm.m, gemm.n, gemm.k)
    return (
        device.arch == WGMMA_ARCH
        and of_integers(gemm).is_symmetric
        and gemm.transposed
        and gemm.aligned
        and gemm.k % VECTOR_BYTES == 0  # rows that TMA reads begin at multiples of 16 bytes
        and gemm.k <= MAX_LENGTH
        and all(0 < size < 2**31 - 2**16 for size in sizes)
    )


def _product(gemm: Gemm, config: HopperConfig, device: Device) -> Implementation:
    maps = (_matrix(gemm.x, gemm.m, gemm.k, config.tile_m), _matrix(gemm.w, gemm.n, gemm.k, config.tile_n))
    integers = (gemm.m, gemm.n, gemm.k, hopper.group_m(gemm, config))
    defines = {**hopper.defines(gemm, config, device), **_defines(gemm, has_edges=False)}
    given = (*maps, *_pointers(gemm), *(Scalar(value, "int32") for value in integers))
    launch = hopper.kernel_launch("quantized_gemm", gemm, config, device, defines, given)
    return _after_zeros(f"quantized_gemm {config.name}", launch, gemm, taps=1, has_edges=False)


def convolutions(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations of a convolution of integers, the expected fastest first; none if unsupported."""
    conv = plain_pads(conv)
    integers = of_integers(conv)
    has_edges = integers.x_zero is not None and _has_pads(conv)
    if not conv_hopper.is_supported(conv, device) or not integers.is_symmetric or conv.taps * conv.c > MAX_LENGTH:
        return []
    if has_edges and conv.taps > MAX_TAPS:
        return []
    gemm = conv_hopper.gemm_of_blocks(conv)
    ordered = best_first(conv_hopper.fitting(conv, device), lambda config: conv_hopper.cycles(gemm, config, device))
    return [_convolution(conv, config, device, has_edges) for config in ordered[: conv_hopper.MAX_CONFIGS]]


def _has_pads(conv: Conv) -> bool:
    """Return whether some tap may lie outside x."""
    return not all(pad == 0 for pad in (*conv.pads_begin, *conv.pads_end))


def _convolution(conv: Conv, config: HopperConfig, device: Device, has_edges: bool) -> Implementation:
    gemm = conv_hopper.gemm_of_blocks(conv)
    y_sizes, x_sizes = three(conv.y_sizes), three(conv.sizes)
    integers = (conv.pixels, conv.m, *y_sizes, hopper.group_m(gemm, config), *x_sizes)
    defines = {**conv_hopper.defines(conv, config, device), **_defines(gemm, has_edges)}
    maps = conv_hopper.operand_maps(conv, config)
    given = (*maps, *_pointers(gemm), *(Scalar(value, "int32") for value in integers))
    launch = hopper.kernel_launch("quantized_conv", gemm, config, device, defines, given)
    name = f"quantized_conv {config.name}"
    return _after_zeros(name, launch, replace(gemm, k=conv.c), conv.taps, has_edges)


def of_integers(problem: Gemm | Conv) -> Integers:
    """Return what the operands of a problem of integers stand for."""
    assert problem.integers is not None
    return problem.integers


def _defines(gemm: Gemm, has_edges: bool) -> Defines:
    """Return the macros of gemm_hopper_integers.cuh."""
    integers = of_integers(gemm)
    return {
        "OPERAND": OPERAND[integers.x_dtype], "W_SCALES": int(integers.w_scales > 1),
        "WIDTH": math.gcd(MAX_WIDTH, gemm.n) if gemm.aligned else 1,
        "X_ZERO": int(integers.x_zero is not None), "EDGES": int(has_edges),
        "BARRIER_BYTES": hopper.BARRIER_BYTES, "EXCHANGE_PITCH": hopper.EXCHANGE_PITCH,
    }  # fmt: skip


def _pointers(gemm: Gemm) -> tuple[Argument, ...]:
    integers = of_integers(gemm)
    return (
        gemm.y, gemm.bias or ABSENT, gemm.residual or ABSENT, integers.x_scale, integers.w_scale,
        ZEROS if integers.x_zero else ABSENT,
    )  # fmt: skip


def _matrix(pointer: Pointer, rows: int, columns: int, height: int) -> TensorMap:
    """Return the tensor map of a row-major matrix of bytes, in boxes of `height` rows."""
    return TensorMap(pointer, "uint8", (columns, rows), (columns,), (hopper.ROW_BYTES, height), 128)


def _after_zeros(name: str, launch: Launch, gemm: Gemm, taps: int, has_edges: bool) -> Implementation:
    """Return a launch, after the one that writes what it subtracts for x_zero, if there is one."""
    integers = of_integers(gemm)
    if integers.x_zero is None:
        return Implementation(name, (launch,))
    defines: Defines = {
        "TAPS": taps, "EDGES": int(has_edges), "OPERAND": OPERAND[integers.x_dtype], "COLUMNS": COLUMNS_OF_ZEROS,
    }  # fmt: skip
    kernel = Kernel("quantized_zeros", "quantized_zeros", defines)
    given = (gemm.w, integers.x_zero, ZEROS, Scalar(gemm.n, "int32"), Scalar(gemm.k, "int32"))
    grid = (-(-gemm.n // COLUMNS_OF_ZEROS), 1, 1)
    zeros = Launch(kernel, grid, (32 * COLUMNS_OF_ZEROS, 1, 1), given, pdl=True)
    return Implementation(name, (zeros, launch), (4 * gemm.n * (1 + taps * has_edges),))
