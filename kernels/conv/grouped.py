"""The host side of conv_grouped.cu: grouped convolutions of channels-last tensors with few channels per group."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.conv.problem import Conv, two
from onnxfuse.kernels.conv.ranking import Limits, Ranking, varied
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH, REGISTERS, fitting_blocks
from onnxfuse.kernels.tensors import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import maximum, minimum

MAX_CHANNELS: Final = 64  # channels and filters per group; larger groups run as separate matrix products
MAX_IMPLEMENTATIONS: Final = 4
MAX_FEW: Final = 5  # configs for a convolution of dynamic sizes
MAX_HELD: Final = 80  # registers per thread for weights
MAX_SUMS: Final = 64  # registers per thread for sums
WARPS: Final = (4, 8)  # warps per block
M_TILES: Final = 2  # M_TILES of conv_grouped.cu: mma tiles of 16 pixels that a warp computes at a time
TILE_ROWS: Final = (1, 2, 4, 7, 8, 14, 16)
TILE_COLUMNS: Final = (7, 14, 16, 28, 32, 56)
ROW_COLUMNS: Final = (112, 256, 512)  # additional tile widths for images of one row
MAX_RESEMBLING: Final = 2  # maximum number of implementations that divide groups in the same way

# Costs and rates of one multiprocessor of an H200.
L2_BYTES: Final = 26.0  # bytes from L2 per clock cycle
SECTOR_BYTES: Final = 32  # smallest unit of a memory access
MIN_WARPS: Final = 12  # warps per multiprocessor that suffice to hide latencies
FIRST_CYCLES: Final = 2500  # cycles until the first patch arrives


@dataclass(frozen=True)
class GroupedConfig:
    """The macros of conv_grouped.cu that this module chooses."""

    merged: int
    block_groups: int
    warp_groups: int
    warps_m: int
    tp: int
    tq: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"grouped_{self.tp}x{self.tq}x{self.block_groups}g_{self.warp_groups}x{self.warps_m}"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps_m * (self.block_groups // self.warp_groups)

    def slices(self, conv: Conv) -> int:
        """Return the number of slices of groups; each slice has its own blocks."""
        return conv.group // (self.merged * self.block_groups)

    def tiles(self, conv: Conv) -> int:
        """Return the number of tiles of pixels."""
        height, width = two(conv.y_sizes)
        return conv.n * -(-height // self.tp) * -(-width // self.tq)

    def steps(self, conv: Conv) -> int:
        """Return the number of mma steps along k."""
        return -(-conv.taps * self._group_bytes(conv) // (2 * VECTOR_BYTES))

    def filter_tiles(self, conv: Conv) -> int:
        """Return the number of mma tiles, of 8 filters each, per merged group."""
        return conv.m // conv.group * self.merged // 8

    def held(self, conv: Conv) -> bool:
        """Return whether the weights of a warp fit into its registers."""
        return 2 * self.steps(conv) * self.filter_tiles(conv) * self.warp_groups <= MAX_HELD

    def patch(self, conv: Conv) -> int:
        """Return the bytes of shared memory per patch: the part of x that a tile reads."""
        (kh, kw), (sh, sw), (dh, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
        rows, columns = (self.tp - 1) * sh + (kh - 1) * dh + 1, (self.tq - 1) * sw + (kw - 1) * dw + 1
        chunks = self.block_groups * self._group_bytes(conv) // VECTOR_BYTES
        return rows * columns * (chunks | 1) * VECTOR_BYTES

    def shared(self, conv: Conv) -> int:
        """Return the bytes of dynamic shared memory: weights, two patches, and the results of each warp."""
        filter_tiles = self.filter_tiles(conv)
        weights = 4 * self.block_groups * self.steps(conv) * filter_tiles * 64
        stage = 16 * (self.warp_groups * filter_tiles * 8 * ITEM_BYTES[conv.dtype] + 16)
        return weights + 2 * self.patch(conv) + self.threads // 32 * stage

    def resident(self, conv: Conv, device: Device) -> int:
        """Return how many blocks run on a multiprocessor at a time."""
        by_shared = fitting_blocks(self.shared(conv), device)
        return max(1, min(by_shared, REGISTERS // (self.threads * self.registers(conv))))

    def registers(self, conv: Conv) -> int:
        """Return an estimate of the registers per thread."""
        filter_tiles = self.warp_groups * self.filter_tiles(conv)
        held = 2 * self.steps(conv) * filter_tiles if self.held(conv) else 0
        return held + (4 * M_TILES + 2) * filter_tiles + 84

    def _group_bytes(self, conv: Conv) -> int:
        """Return the bytes of the channels of a merged group."""
        return conv.c // conv.group * self.merged * ITEM_BYTES[conv.dtype]


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none if conv_grouped.cu does not support `conv`."""
    if not is_supported(conv, device):
        return []
    limits: Limits[GroupedConfig] = {lambda config: (config.block_groups, config.warp_groups): MAX_RESEMBLING}
    chosen = varied(RANKING.ranked(conv, device), limits, MAX_IMPLEMENTATIONS)
    return [implementation(conv, config, device) for config in chosen]


def is_supported(conv: Conv, device: Device) -> bool:
    """Return whether conv_grouped.cu computes this convolution as precisely as required."""
    return (
        device.arch >= MMA_ARCH
        and conv.group > 1
        and conv.aligned
        and not conv.x_nchw
        and len(conv.kernel) <= 2
        and (conv.dtype != "float32" or conv.tf32)
        and conv.pixels > 0
        and merged_groups(conv) is not None
    )


def merged_groups(conv: Conv) -> int | None:
    """Return how many groups to merge into one with whole 16-byte chunks of channels and a multiple of 8 filters.

    Return None if that number does not divide the groups, or merged groups would be too large.
    """
    channels, filters = conv.c // conv.group, conv.m // conv.group
    chunk = VECTOR_BYTES // ITEM_BYTES[conv.dtype]
    merged = math.lcm(chunk // math.gcd(channels, chunk), 8 // math.gcd(filters, 8))
    fits = conv.group % merged == 0 and max(channels, filters) * merged <= MAX_CHANNELS
    return merged if fits else None


def implementation(conv: Conv, config: GroupedConfig, device: Device) -> Implementation:
    """Return the launch of one config."""
    (kh, kw), (sh, sw), (dh, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    width = VECTOR_BYTES // ITEM_BYTES[conv.dtype]
    defines = {
        **conv.epilogue_defines(),
        "CHANNELS": conv.c, "FILTERS": conv.m, "GROUP_CHANNELS": conv.c // conv.group,
        "GROUP_FILTERS": conv.m // conv.group, "MERGED": config.merged,
        "KH": kh, "KW": kw, "SH": sh, "SW": sw, "DH": dh, "DW": dw,
        "BLOCK_GROUPS": config.block_groups, "WARP_GROUPS": config.warp_groups, "WARPS_M": config.warps_m,
        "TP": config.tp, "TQ": config.tq, "HELD": int(config.held(conv)), "WIDTH": width,
        "W_HWIO": int(conv.w_hwio), "WEIGHTS_CONSTANT": int(conv.weights_constant),
        "MIN_BLOCKS": config.resident(conv, device),
    }  # fmt: skip
    kernel = Kernel("conv_grouped", "conv_grouped", defines)
    blocks = max(1, device.multiprocessors * config.resident(conv, device) // config.slices(conv))
    tiles = config.tiles(conv)
    grid = (-(-tiles // -(-tiles // blocks)), config.slices(conv), 1)  # blocks get equal shares
    pdl = device.has_pdl
    launch = Launch(kernel, grid, (config.threads, 1, 1), conv.arguments, config.shared(conv), pdl=pdl)
    return Implementation(config.name, (launch,))


def configs(conv: Conv, device: Device, thorough: bool = True) -> list[GroupedConfig]:
    """Return the configs to rank by cost for these sizes; without `thorough`, fewer configs in less time."""
    merged = merged_groups(conv)
    if merged is None:
        return []
    groups, filters = conv.group // merged, conv.m // conv.group * merged
    height, width = two(conv.y_sizes)
    found = []
    for warp_groups in (count for count in (1, 2, 4) if count == 1 or (count * filters <= 32 and groups % count == 0)):
        if 4 * M_TILES * warp_groups * filters // 8 > MAX_SUMS:
            continue
        for warps, warps_g in itertools.product(WARPS if thorough else WARPS[:1], (1, 2, 4)):
            if groups % (warps_g * warp_groups):
                continue
            columns = (*TILE_COLUMNS, *(ROW_COLUMNS if height == 1 else ()))
            for tq in sorted({min(width, tq) for tq in columns}):
                for tp in sorted({min(height, tp) for tp in TILE_ROWS}):
                    wanted = thorough or tp * tq >= 16 * M_TILES
                    if wanted and tp * tq <= 16 * M_TILES * 16:
                        shape = (warps_g * warp_groups, warp_groups, warps // warps_g, tp, tq)
                        found.append(GroupedConfig(merged, *shape))
    return [config for config in found if config.shared(conv) <= device.shared_per_block]


def cost(conv: Conv, config: GroupedConfig, device: Device) -> float:
    """Estimate the clock cycles of a multiprocessor, accurately enough to order configs."""
    blocks = max(1, device.multiprocessors * config.resident(conv, device) // config.slices(conv))
    rounds = -(-config.tiles(conv) // blocks)
    busy = minimum(blocks, config.tiles(conv)) * config.slices(conv) / device.multiprocessors
    resident = maximum(1.0, busy)
    warps_pixels = -(-config.tp * config.tq // (16 * M_TILES * config.warps_m)) * config.warps_m
    warps_g = config.block_groups // config.warp_groups
    steps, filter_tiles = config.steps(conv), config.filter_tiles(conv)
    reads = 4 * M_TILES + (0 if config.held(conv) else 2 * filter_tiles)  # shared-memory cycles per step
    products = 1.6 * M_TILES * filter_tiles
    narrow = max(1.0, SECTOR_BYTES / (config.warp_groups * filter_tiles * 8 * ITEM_BYTES[conv.dtype]))
    stores = 12 * M_TILES * filter_tiles * narrow
    work = warps_pixels * warps_g * config.warp_groups * (steps * max(reads, products) + stores)
    run = config.block_groups * conv.c // conv.group * config.merged * ITEM_BYTES[conv.dtype]
    moved = config.patch(conv) / L2_BYTES * max(1.0, 2 * SECTOR_BYTES / run)
    work = work * maximum(1.0, MIN_WARPS / (resident * config.threads / 32))
    alone = 800 + steps * config.warp_groups * 40 * warps_pixels / config.warps_m
    busiest: float = maximum(resident * work, resident * moved, alone)
    whole: float = FIRST_CYCLES + resident * moved + rounds * busiest
    return whole


RANKING: Final = Ranking(configs, cost, MAX_FEW, functools.partial(configs, thorough=False))
