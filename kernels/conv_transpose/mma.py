"""The host side of conv_transpose_mma.cu: transposed convolutions of every shape and on every GPU.

A phase is the set of all pixels of y whose positions have the same remainders modulo the strides.
"""

from __future__ import annotations

import math
from dataclasses import replace

from onnxfuse.kernels.conv import mma
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.mma import MAX_CONFIGS, ConvConfig
from onnxfuse.kernels.conv.problem import Conv, three
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.epilogue_program import with_program
from onnxfuse.kernels.gemm.cublaslt import epilogue
from onnxfuse.kernels.gemm.mma import GROUP_M, MmaConfig
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer
from onnxfuse.runtime.symint import best_first, is_symbolic, maximum


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first.

    The list is empty if y is empty, if weights are in layout hwoi, or if pixel indices exceed 32 bits.
    """
    too_many = maximum(conv.pixels, positions(conv) * phases(conv)) >= 2**31 - 2**16
    if not conv.pixels * conv.m * conv.c * conv.taps or conv.w_hwio or too_many:
        return []
    equal = equivalent(conv)
    chosen = best_first(configs(conv, device), lambda config: mma.cycles(equal, config, device))
    return [implementation(conv, config, device) for config in chosen[:MAX_CONFIGS]]


def configs(conv: Conv, device: Device) -> list[ConvConfig]:
    """Return, for each tile that fits the device, a config without slices of k and one with the best number of slices.

    If sizes are dynamic, only a few configs are returned; at any size, at least one of them is fast.
    """
    if is_symbolic(conv.n, *conv.sizes):
        found = mma.few_configs(tuple(equivalent(each) for each in usual(conv)), device)
    else:
        found = mma.configs(equivalent(conv), device)
    return [config for config in found if shared(config.tile) <= device.shared_per_block]


def implementation(conv: Conv, config: ConvConfig, device: Device) -> Implementation:
    """Return the implementation of a config: one launch, or two launches with slices of k.

    The first of two launches writes the slices' sums to scratch memory, and the second adds them up.
    """
    tile, equal = config.tile, equivalent(conv)
    kernel = Kernel("conv_transpose_mma", "conv_transpose_mma", defines(conv, config, device))
    grid, threads = (tile_count(conv, tile), 1, config.slices), (32 * tile.warps_m * tile.warps_n, 1, 1)
    partial = ABSENT if config.slices == 1 else Pointer("scratch", 0)
    kernel, arguments = with_program(kernel, (*conv.arguments, partial), conv.program)
    launch = Launch(kernel, grid, threads, arguments, shared(tile), pdl=device.has_pdl)
    name = config.name(equal, device).replace("conv", "conv_transpose", 1)
    if config.slices == 1:
        return Implementation(name, (launch,))
    sums = 4 * config.slices * conv.pixels * conv.m
    return Implementation(name, (launch, epilogue(as_gemm(conv), device, config.slices)), (sums,))


# ---- sizes ------------------------------------------------------------------------------------------------------


def is_shuffled(conv: Conv) -> bool:
    """Return whether each pixel of y reads one pixel of x, so that one matrix product computes all pixels.

    The phases (sets of pixels of y with the same remainders modulo the strides) are then columns of this product.
    """
    unpadded = not any(conv.pads_begin) and conv.y_sizes == tuple(
        size * stride for size, stride in zip(conv.sizes, conv.strides, strict=True)
    )
    return conv.kernel == conv.strides and set(conv.dilations) == {1} and unpadded and conv.group == 1


def phases(conv: Conv) -> int:
    """Return the number of matrix products: one per phase, or one for all phases if `is_shuffled`."""
    return 1 if is_shuffled(conv) else math.prod(conv.strides)


def positions(conv: Conv) -> int:
    """Return the number of rows of the product of one phase (pixels of y with equal remainders modulo the strides)."""
    return conv.n * math.prod(-(-size // stride) for size, stride in zip(conv.y_sizes, conv.strides, strict=True))


def columns(conv: Conv) -> int:
    """Return the number of columns of the product of one group."""
    return conv.m // conv.group * (conv.taps if is_shuffled(conv) else 1)


def equivalent(conv: Conv) -> Conv:
    """Return an ordinary convolution that takes about the same time as the products of all phases together.

    A phase is the set of all pixels of y whose positions have the same remainders modulo the strides.  All phases count
    as having equally many taps, although some phases have no taps if strides and dilations have a common divisor.
    """
    count = phases(conv)
    taps = 1 if is_shuffled(conv) else max(1, round(conv.taps / count))
    return replace(
        conv, n=1, sizes=(positions(conv) * count,), y_sizes=(positions(conv) * count,), kernel=(taps,), strides=(1,),
        dilations=(1,), pads_begin=(0,), pads_end=(0,), m=columns(conv) * conv.group, w_hwio=True, transposed=False,
    )  # fmt: skip


def tile_count(conv: Conv, tile: MmaConfig) -> int:
    """Return the number of tiles in all groups and phases."""
    rows, across = -(-positions(conv) // tile.tile_m), -(-columns(conv) // tile.tile_n)
    return rows * across * conv.group * phases(conv)


def shared(tile: MmaConfig) -> int:
    """Return the bytes of dynamic shared memory: for the stages, and later for the sums and one pixel index per row."""
    sums = replace(tile, stages=0).shared(1)
    return max(tile.shared(1), sums + 4 * tile.tile_m)


# ---- the launch ---------------------------------------------------------------------------------------------------


def geometry_defines(conv: Conv) -> Defines:
    """Return the macros for filter size, stride and dilation along each axis."""
    given = {"KERNEL": conv.kernel, "STRIDE": conv.strides, "DILATION": conv.dilations}
    return {
        f"{name}_{axis}": value
        for name, values in given.items()
        for axis, value in zip("DHW", three(values), strict=True)
    }


def defines(conv: Conv, config: ConvConfig, device: Device) -> Defines:
    """Return the macros of conv_transpose_mma.cu."""
    tile, equal, shuffled = config.tile, equivalent(conv), is_shuffled(conv)
    x_copy, w_copy = mma.copy_bytes(equal)
    filters, item = conv.m // conv.group, ITEM_BYTES[conv.dtype]
    # The number of contiguous elements of y within which an access must stay.
    row = filters * conv.kernel[-1] if shuffled and not conv.program else filters
    vectors = min(x_copy, w_copy) == VECTOR_BYTES and device.arch >= MMA_ARCH
    return {
        **conv.epilogue_defines(), **geometry_defines(conv), "DIMS": len(conv.kernel),
        "GROUPS": conv.group, "CHANNELS": conv.c // conv.group, "FILTERS": filters, "SHUFFLED": int(shuffled),
        "X_NCHW": 0, "TRANSPOSED": 0, "EXACT": int(mma.is_exact(conv, device)), "SPLIT": int(config.slices > 1),
        "WIDTH": math.gcd(row * item, VECTOR_BYTES) // item if conv.aligned else 1,
        "TILE_M": tile.tile_m, "TILE_N": tile.tile_n, "TILE_K_BYTES": tile.tile_k_bytes, "STAGES": tile.stages,
        "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "X_COPY": x_copy, "W_COPY": w_copy, "GROUP_M": GROUP_M,
        # A thread that copies narrow pieces needs more registers than a thread has if several blocks must fit.
        "MIN_BLOCKS": mma.resident_blocks(tile, shared(tile), device) if vectors else 1,
    }  # fmt: skip
