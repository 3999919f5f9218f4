"""The host side of conv_hopper_slices.cu: convolutions with few tiles on Hopper; each block sums over a slice of k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels.conv.problem import Conv, three
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.cublaslt import epilogue
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ITEM_BYTES, Defines, int32
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Pointer, Struct

TILES: Final = (HopperConfig(128, 64), HopperConfig(128, 128), HopperConfig(128, 160), HopperConfig(256, 128))
MAX_SLICES: Final = 16
MIN_STEPS: Final = 4  # minimum stages of k per slice

# Costs in clock cycles of a multiprocessor of an H200.
START_CYCLES: Final = 1500  # cycles until the first stage arrives
SECOND_LAUNCH_CYCLES: Final = 15000  # chosen so that slices and clusters rank as tests/kernels/test_first_plans.py says
SUM_BYTES: Final = 24  # bytes per cycle for sums and for the operands of epilogue.cu


@dataclass(frozen=True)
class SlicedConfig:
    """The tile of a block, and the number of slices of k; each slice has its own block."""

    tile: HopperConfig
    slices: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"{self.tile.name} in {self.slices} slices"


def fitting(conv: Conv, gemm: Gemm, device: Device) -> list[SlicedConfig]:
    """Return the configs of at least two slices whose blocks all run at once; `gemm` is the product of `conv`.

    The list is empty for an odd number of channels of y, because two columns of sums are stored at a time.
    """
    if conv.program or conv.m % 2:
        return []
    steps = -(-gemm.k // hopper.stage_k(gemm))
    found = []
    for tile in TILES:
        most = min(MAX_SLICES, steps // MIN_STEPS, device.multiprocessors // hopper.tile_count(gemm, tile))
        if tile.tile_n <= 64 * -(-conv.m // 64):
            found += [SlicedConfig(tile, slices) for slices in range(2, most + 1)]
    return found


def cycles(gemm: Gemm, config: SlicedConfig, device: Device, row_cycles: float) -> float:
    """Estimate the clock cycles of both launches, comparable to the estimates for other Hopper configs."""
    tile, slices = config.tile, config.slices
    steps = -(-gemm.k // (hopper.stage_k(gemm) * slices))
    stored = 4 * tile.tile_m * tile.tile_n
    moved = gemm.m * gemm.n * (4 * slices + ITEM_BYTES[gemm.dtype] * (1 + bool(gemm.residual))) / device.multiprocessors
    kernels = START_CYCLES + steps * hopper.step_cycles(tile, row_cycles) + SECOND_LAUNCH_CYCLES
    return kernels + (stored + moved) / SUM_BYTES


def pixel_sizes(conv: Conv, gemm: Gemm, config: HopperConfig) -> Struct:
    """Return the struct PixelSizes of conv_operands.cuh; `gemm` is the product of `conv`."""
    pads = three(conv.pads_begin, missing=0)
    sizes = gemm.m, gemm.n, *three(conv.y_sizes), *three(conv.strides), *pads, hopper.group_m(gemm, config)
    return Struct(int32(*sizes))


def plain(conv: Conv) -> Conv:
    """Return the convolution without its epilogue, which epilogue.cu applies."""
    return replace(
        conv, bias=None, slope=None, column_scale=None, column_shift=None, residual=None, activation="none",
        alpha=0.0, beta=0.0,
    )  # fmt: skip


def implementation(
    config: SlicedConfig,
    gemm: Gemm,
    device: Device,
    defines: Defines,
    operands: tuple[Argument, ...],
    sizes: Struct,
) -> Implementation:
    """Return the implementation of two launches: conv_hopper_slices.cu, and epilogue.cu after it.

    gemm      the product of the convolution, with its epilogue
    defines   the macros of the convolution without its epilogue
    operands  the tensor maps of x and w
    sizes     the struct PixelSizes of conv_operands.cuh
    """
    tile, slices = config.tile, config.slices
    stages = min(hopper.MAX_STAGES, (device.shared_per_block - hopper.BARRIER_BYTES) // hopper.stage_bytes(tile))
    kernel = Kernel("conv_hopper_slices", "conv_hopper_slices", {**defines, "STAGES": stages}, arch_specific=True)
    launch = Launch(
        kernel,
        (hopper.tile_count(gemm, tile), 1, slices),
        (128 * (1 + tile.consumers), 1, 1),
        (*operands, Pointer("scratch", 0), sizes),
        shared=stages * hopper.stage_bytes(tile) + hopper.BARRIER_BYTES,
        pdl=True,
    )
    sums = 4 * slices * gemm.m * gemm.n
    return Implementation(f"conv_hopper_slices {config.name}", (launch, epilogue(gemm, device, slices)), (sums,))
