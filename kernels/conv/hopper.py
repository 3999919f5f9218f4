"""The host side of convolutions by wgmma on Hopper: chooses tiles and makes the tensor maps of x and w."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import replace
from typing import Final, Literal

from onnxfuse.kernels.config_subset import few
from onnxfuse.kernels.conv import hopper_slices
from onnxfuse.kernels.conv.hopper_slices import SlicedConfig
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.problem import Conv, plain_pads, three
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Argument, Device, Im2col, TensorMap
from onnxfuse.runtime.symint import best_first, is_symbolic, maximum

K_BLOCK_BYTES: Final = (128, 64, 32)  # bytes of channels per block of k; the widest first
MAX_CONFIGS: Final = 6
MAX_SLICED: Final = 2  # configs with slices of k; epilogue.cu adds up the sums of the slices
MAX_CORNER: Final = {1: 32767, 2: 127, 3: 15}  # largest corner offset of a TMA im2col box, by number of spatial axes
MAX_OFFSET: Final = {1: 65534, 2: 254, 3: 30}  # largest offset of a filter tap in TMA, by number of spatial axes
MAX_STRIDE: Final = 8
# The fewest cycles in which TMA loads a pixel. Whole tiles of 64 filters and 192 or 256 pixels take 4.4 cycles per
# pixel on an H200.
WALK_CYCLES: Final = 4.1
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
    """Return the implementations, fastest expected first; none for another GPU, dtype or kind of convolution."""
    if not is_supported(conv, device):
        return []
    conv = plain_pads(conv)
    gemm = gemm_of_blocks(conv)
    # Sliced configs need scratch memory of a size that is known now, so they exclude dynamic sizes.
    sliced = [] if is_symbolic(conv.n, *conv.sizes) else hopper_slices.fitting(conv, gemm, device)
    best_sliced = sorted(sliced, key=lambda config: cycles(gemm, config, device))[:MAX_SLICED]
    every: list[HopperConfig | SlicedConfig] = [*fitting(conv, device), *best_sliced]
    found = best_first(every, lambda config: cycles(gemm, config, device))
    return [implementation(conv, config, device) for config in found[:MAX_CONFIGS]]


def fitting(conv: Conv, device: Device) -> list[HopperConfig]:
    """Return the configs that fit into registers and shared memory, and suit the sizes of the convolution.

    For dynamic sizes, return only a few configs; at any size, at least one of them is fast.
    """
    configs = _few(usual(conv), device) if is_symbolic(conv.n, *conv.sizes) else CONFIGS
    return [config for config in configs if hopper.fits(gemm_of_blocks(conv), config, device)]


@functools.lru_cache(maxsize=512)
def _few(problems: tuple[Conv, ...], device: Device) -> list[HopperConfig]:
    def cost(gemm: Gemm, config: HopperConfig) -> float:
        return cycles(gemm, config, device) if hopper.fits(gemm, config, device) else math.inf

    return few(CONFIGS, [gemm_of_blocks(each) for each in problems], cost, MAX_CONFIGS)


def cycles(gemm: Gemm, config: HopperConfig | SlicedConfig, device: Device) -> float:
    """Estimate the clock cycles of the convolution that is computed as the matrix product `gemm`."""
    if isinstance(config, SlicedConfig):
        return hopper_slices.cycles(gemm, config, device, WALK_CYCLES)
    return hopper.cycles(gemm, config, device, WALK_CYCLES)


def is_supported(conv: Conv, device: Device) -> bool:
    """Return whether the kernels support `conv` on this device."""
    if device.arch != 90 or (conv.dtype == "float32" and not conv.tf32 and not conv.eight_bits):
        return False  # wgmma exists only on compute capability 90, for 8-bit integers, 16-bit types and TF32
    axes = len(conv.kernel)
    if conv.group != 1 or conv.x_nchw or conv.w_hwio or axes not in MAX_CORNER:
        return False
    vector = VECTOR_BYTES // conv.item
    if not conv.aligned or conv.c % vector or (not hopper.is_by_fragments(as_gemm(conv)) and conv.m % vector):
        return False  # TMA needs pixels at multiples of 16 bytes: to read x, and to write y of 16-bit types
    if not conv.pixels * conv.m * conv.c * conv.taps or maximum(conv.pixels, conv.c * conv.taps) >= 2**31 - 2**16:
        return False  # TMA coordinates are 32-bit integers
    reach = _reach(conv)
    corners = (*conv.pads_begin, *(abs(behind - far) for behind, far in zip(conv.pads_end, reach, strict=True)))
    return max(conv.strides) <= MAX_STRIDE and max(reach) <= MAX_OFFSET[axes] and maximum(*corners) <= MAX_CORNER[axes]


def _reach(conv: Conv) -> list[int]:
    """Return the distance in pixels from the first to the last tap of the filter, for each spatial axis."""
    return [(size - 1) * dilation for size, dilation in zip(conv.kernel, conv.dilations, strict=True)]


def k_block(conv: Conv) -> int:
    """Return the channels per block of k: the size that needs the fewest zeros after the last channel."""
    blocks = (size // conv.item for size in K_BLOCK_BYTES)
    return min(blocks, key=lambda size: (-(-conv.c // size) * size, -size))


def gemm_of_blocks(conv: Conv) -> Gemm:
    """Return the matrix product of the convolution, with its channels padded to whole blocks of k."""
    block = k_block(conv)
    return replace(as_gemm(conv), k=conv.taps * -(-conv.c // block) * block)


def implementation(conv: Conv, config: HopperConfig | SlicedConfig, device: Device) -> Implementation:
    """Return the implementation of a config: one launch, or two with slices of k."""
    if isinstance(config, SlicedConfig):
        macros, maps = defines(hopper_slices.plain(conv), config.tile, device), operand_maps(conv, config.tile)
        gemm = gemm_of_blocks(conv)
        sizes = hopper_slices.pixel_sizes(conv, gemm, config.tile)
        return hopper_slices.implementation(config, gemm, device, macros, maps, sizes)
    gemm, name = gemm_of_blocks(conv), "conv_hopper_split" if config.split_k > 1 else "conv_hopper"
    source = "conv_hopper_tf32" if conv.dtype == "float32" and config.split_k == 1 else name
    launch = hopper.kernel_launch(source, gemm, config, device, defines(conv, config, device), arguments(conv, config))
    return Implementation(f"{name} {config.name}", (launch,))


def defines(conv: Conv, config: HopperConfig, device: Device) -> Defines:
    """Return the macros of gemm_hopper.cuh and conv_operands.cuh."""
    own = {"K_BLOCK": k_block(conv), "CHANNELS": conv.c, "DIMS": len(conv.kernel)}
    taps = by_axis(KERNEL=three(conv.kernel), DILATION=three(conv.dilations))
    return {**hopper.defines(gemm_of_blocks(conv), config, device), **own, **taps}


def of_filter(conv: Conv) -> Defines:
    """Return the macros of a filter: its sizes, strides, pads before x and dilations."""
    return by_axis(
        KERNEL=three(conv.kernel), STRIDE=three(conv.strides), PAD=three(conv.pads_begin, missing=0),
        DILATION=three(conv.dilations),
    )  # fmt: skip


def by_axis(**macros: tuple[int, int, int]) -> Defines:
    """Return macros with one value for each of three spatial axes: NAME_D, NAME_H and NAME_W for each NAME."""
    return {f"{name}_{axis}": each for name, of in macros.items() for axis, each in zip("DHW", of, strict=True)}


def arguments(conv: Conv, config: HopperConfig) -> tuple[Argument, ...]:
    """Return the arguments of a convolution kernel of gemm_hopper.cuh."""
    gemm = gemm_of_blocks(conv)
    by_maps = config.split_k == 1 and conv.dtype != "float32"
    maps, results = operand_maps(conv, config), list[TensorMap]()
    if by_maps:  # if y is not stored, any map will do
        results += [hopper.result_map(gemm, config, conv.y, conv.m) if gemm.stores_y else maps[0]]
        results += [hopper.result_map(gemm, config, conv.residual, conv.m)] if conv.residual else []
    return (*maps, *results, conv.epilogue_operands, hopper_slices.pixel_sizes(conv, gemm, config))


def operand_maps(conv: Conv, config: HopperConfig) -> tuple[TensorMap, TensorMap]:
    """Return the tensor maps of x and w."""
    return pixel_map(conv, config), weight_map(conv, config)


def pixel_map(conv: Conv, config: HopperConfig) -> TensorMap:
    """Return the im2col tensor map of x: a load reads the pixels that one filter tap needs for the rows of a tile."""
    inward = conv.sizes[::-1]  # the innermost axis first
    walk = Im2col(
        tuple(-before for before in reversed(conv.pads_begin)),
        tuple(behind - far for behind, far in zip(conv.pads_end, _reach(conv), strict=True))[::-1],
        conv.strides[::-1],
    )
    pitches = tuple(itertools.accumulate((conv.item * conv.c, *inward), operator.mul))
    box, swizzled = (k_block(conv), config.tile_m), swizzle(k_block(conv) * conv.item)
    return TensorMap(conv.x, _dtype(conv), (conv.c, *inward, conv.n), pitches, box, swizzled, walk)


def weight_map(conv: Conv, config: HopperConfig) -> TensorMap:
    """Return the tensor map of w, with dimensions (channels, taps, filters)."""
    pitch = conv.item * conv.c
    sizes, box = (conv.c, conv.taps, conv.m), (k_block(conv), 1, config.tile_n)
    return TensorMap(conv.w, _dtype(conv), sizes, (pitch, pitch * conv.taps), box, swizzle(k_block(conv) * conv.item))


def _dtype(conv: Conv) -> Literal["uint8", "float16", "bfloat16", "tfloat32"]:
    if conv.eight_bits:
        return "uint8"  # TMA copies bytes
    return "float16" if conv.dtype == "float16" else "bfloat16" if conv.dtype == "bfloat16" else "tfloat32"


def swizzle(row_bytes: int) -> Literal[32, 64, 128]:
    """Return the swizzle of TMA for rows of a block of k."""
    return 128 if row_bytes == 128 else 64 if row_bytes == 64 else 32
