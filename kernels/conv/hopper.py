"""The host side of conv_hopper.cu and conv_hopper_split.cu: which tiles cut up a convolution on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.problem import Conv, two
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ABSENT, Defines
from onnxfuse.runtime.plan import Argument, Device, Im2col, Scalar, TensorMap

K_BLOCKS: Final = (64, 32, 16)  # channels of a block of k
MAX_CONFIGS: Final = 6
MAX_CORNER: Final = 127  # of the walk of TMA over two spatial axes
MAX_OFFSET: Final = 254  # of a filter's tap
MAX_STRIDE: Final = 8
CONFIGS: Final = (
    *hopper.CONFIGS,
    HopperConfig(256, 32),
    HopperConfig(128, 32, pingpong=True),
    HopperConfig(128, 64, pingpong=True),
    HopperConfig(192, 64, pingpong=True),
    HopperConfig(256, 64),
    HopperConfig(128, 96, pingpong=True),
    HopperConfig(192, 96, pingpong=True),
    HopperConfig(256, 96),
    HopperConfig(128, 160, pingpong=True),
    HopperConfig(128, 160),
    HopperConfig(128, 224),
    HopperConfig(128, 128, split_k=3),
    HopperConfig(128, 160, split_k=2),
)


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the ways to run it, the expected fastest first; none for another GPU, dtype or kind of convolution."""
    if not is_supported(conv, device):
        return []
    gemm = gemm_of_blocks(conv)
    found = sorted(fitting(conv, device), key=lambda config: hopper.cycles(gemm, config, device))
    return [implementation(conv, config, device) for config in found[:MAX_CONFIGS]]


def fitting(conv: Conv, device: Device) -> list[HopperConfig]:
    """Return the configs that registers, shared memory and the convolution have room for."""
    return [config for config in CONFIGS if hopper.fits(gemm_of_blocks(conv), config, device)]


def is_supported(conv: Conv, device: Device) -> bool:
    """Return whether the kernels take a convolution."""
    if device.arch != 90 or conv.dtype not in ("float16", "bfloat16"):
        return False  # wgmma of 16-bit types is an instruction of compute capability 90 alone
    if conv.group != 1 or conv.x_nchw or conv.w_hwio or len(conv.kernel) > 2:
        return False
    if not conv.aligned or conv.c % 8 or conv.m % 8:
        return False  # TMA reads and writes pixels that begin at multiples of 16 bytes
    if not conv.pixels * conv.m * conv.c * conv.taps or max(conv.pixels, conv.c * conv.taps) >= 2**31 - 2**16:
        return False  # coordinates are ints
    reach = _reach(conv)
    corners = (*conv.pads_begin, *(abs(behind - far) for behind, far in zip(conv.pads_end, reach, strict=True)))
    return max(conv.strides) <= MAX_STRIDE and max(reach) <= MAX_OFFSET and max(corners) <= MAX_CORNER


def _reach(conv: Conv) -> list[int]:
    """Return the pixels from the first tap of the filter to the last, on each spatial axis."""
    return [(size - 1) * dilation for size, dilation in zip(conv.kernel, conv.dilations, strict=True)]


def k_block(conv: Conv) -> int:
    """Return the channels of a block of k: those that leave the fewest zeros behind the last channel."""
    return min(K_BLOCKS, key=lambda size: (-(-conv.c // size) * size, -size))


def gemm_of_blocks(conv: Conv) -> Gemm:
    """Return the product of a convolution whose channels fill whole blocks of k."""
    block = k_block(conv)
    return replace(as_gemm(conv), k=conv.taps * -(-conv.c // block) * block)


def implementation(conv: Conv, config: HopperConfig, device: Device) -> Implementation:
    """Return the one launch by that config."""
    gemm, source = gemm_of_blocks(conv), "conv_hopper_split" if config.split_k > 1 else "conv_hopper"
    launch = hopper.kernel_launch(source, gemm, config, device, defines(conv, config, device), arguments(conv, config))
    return Implementation(f"{source} {config.name}", (launch,))


def defines(conv: Conv, config: HopperConfig, device: Device) -> Defines:
    """Return the macros of gemm_hopper.cuh and conv_operands.cuh."""
    kernel, strides, pads, dilations = map(
        two, (conv.kernel, conv.strides, conv.pads_begin, conv.dilations), (1, 1, 0, 1)
    )
    return {
        **hopper.defines(gemm_of_blocks(conv), config, device), "K_BLOCK": k_block(conv), "CHANNELS": conv.c,
        "KERNEL_H": kernel[0], "KERNEL_W": kernel[1], "STRIDE_H": strides[0], "STRIDE_W": strides[1],
        "PAD_H": pads[0], "PAD_W": pads[1], "DILATION_H": dilations[0], "DILATION_W": dilations[1],
    }  # fmt: skip


def arguments(conv: Conv, config: HopperConfig) -> tuple[Argument, ...]:
    """Return the arguments of the kernel."""
    gemm, y_sizes = gemm_of_blocks(conv), two(conv.y_sizes, 1)
    maps = [pixel_map(conv, config), weight_map(conv, config)]
    if config.split_k > 1:
        results: list[Argument] = [conv.y, conv.residual or ABSENT]
    else:
        results = [hopper.result_map(gemm, config, each, conv.m) for each in (conv.y, conv.residual) if each]
    scalars = [Scalar(conv.alpha, "float32"), Scalar(conv.beta, "float32")]
    integers = (conv.pixels, conv.m, *y_sizes, hopper.group_m(gemm, config))
    vectors = (each or ABSENT for each in (conv.bias, conv.extra, conv.column_scale))
    return (*maps, *results, *vectors, *scalars, *(Scalar(value, "int32") for value in integers))


def pixel_map(conv: Conv, config: HopperConfig) -> TensorMap:
    """Return the map of x, whose loads take the pixels that one tap of the filter reads for a tile's rows."""
    (h, w), block = two(conv.sizes, 1), k_block(conv)
    kernel, dilations = two(conv.kernel, 1), two(conv.dilations, 1)
    begin, end, strides = two(conv.pads_begin, 0), two(conv.pads_end, 0), two(conv.strides, 1)
    walk = Im2col(
        (-begin[1], -begin[0]),
        (end[1] - (kernel[1] - 1) * dilations[1], end[0] - (kernel[0] - 1) * dilations[0]),
        (strides[1], strides[0]),
    )
    pitches = (2 * conv.c, 2 * conv.c * w, 2 * conv.c * w * h)
    box = (block, config.tile_m)
    return TensorMap(conv.x, _dtype(conv), (conv.c, w, h, conv.n), pitches, box, _swizzle(block), walk)


def weight_map(conv: Conv, config: HopperConfig) -> TensorMap:
    """Return the map of w: channels, taps, filters."""
    block, pitches = k_block(conv), (2 * conv.c, 2 * conv.c * conv.taps)
    sizes, box = (conv.c, conv.taps, conv.m), (block, 1, config.tile_n)
    return TensorMap(conv.w, _dtype(conv), sizes, pitches, box, _swizzle(block))


def _dtype(conv: Conv) -> Literal["float16", "bfloat16"]:
    return "float16" if conv.dtype == "float16" else "bfloat16"


def _swizzle(block: int) -> Literal[32, 64, 128]:
    return 128 if block == 64 else 64 if block == 32 else 32
