"""The host side of conv_depthwise_mma.cu: depthwise convolutions of fp16 and bf16 on tensor cores."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.conv import depthwise
from onnxfuse.kernels.conv.problem import Conv, two
from onnxfuse.kernels.conv.ranking import Limits, Ranking, varied
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH, REGISTERS, fitting_blocks
from onnxfuse.kernels.tensors import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import maximum, minimum

MAX_IMPLEMENTATIONS: Final = 4
MAX_FEW: Final = 7  # configs offered for a convolution of dynamic sizes
MAX_OF_BUFFERS: Final = 3  # maximum number of implementations with equally many buffers
MAX_PAIRS: Final = 28  # pairs of taps; each takes two registers per lane for its weights
MAX_REGISTERS: Final = 160  # registers per thread, as estimated by `registers`
CHANNELS: Final = 8  # channels per warp
WARPS: Final = (4, 16)  # least and largest number of warps per block; a block with less work has fewer warps
STRIP_ROWS: Final = (1, 2, 4, 7, 8, 14)
MAX_GROUPS_OF_FEW: Final = 3  # values of `groups` that are tried for convolutions of dynamic sizes
MIN_STRIP_ROWS: Final = 2  # minimum rows of y per strip, which share fragments of x; images of one row are an exception
GROUPS: Final = (1, 2, 3, 4, 5, 6, 8)
TILE_COLUMNS: Final = (8, 16, 32, 56)
ROW_COLUMNS: Final = (112, 224, 448)  # additional tile widths for images of one row: their filters are long
MAX_IDLE: Final = 1.2  # largest ratio of computed to existing rows, columns or groups
MAX_BLOCKS: Final = 65535  # blocks on the second axis of a grid
RESIDENT: Final = (1536, 16)  # (threads, blocks) that a multiprocessor of every GPU from sm_80 on can hold

# Costs and rates of one multiprocessor of an H200; they order configs well enough on other GPUs.
PRODUCT_CYCLES: Final = 1.65  # cycles per mma.m16n8k16
WARP_INSTRUCTIONS: Final = 3.0  # warp instructions issued per cycle; the hardware limit is 4
L2_BYTES: Final = 26.0
MEMORY_BYTES: Final = 17.0
SECTOR_BYTES: Final = 32  # smallest unit of a memory access
MIN_WARPS: Final = 10  # warps per multiprocessor that suffice to hide latencies
LOAD_CYCLES: Final = 1500  # cycles until a patch arrives, if memory is idle otherwise
LONE_PRODUCT_CYCLES: Final = 9.0  # cycles per mma, if only one warp is resident
LONE_COPY_CYCLES: Final = 50.0  # cycles per 16-byte access to shared memory, if only one warp is resident
JOB_CYCLES: Final = 200  # cycles per epilogue of two strips
TILE_CYCLES: Final = 600  # cycles per tile for two barriers, and the latencies of epilogue and stores


@dataclass(frozen=True)
class DepthwiseMmaConfig:
    """The macros of conv_depthwise_mma.cu that this module chooses."""

    groups: int
    warps_m: int
    tp: int
    tq: int
    th: int
    buffers: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        return f"depthwise_mma_{self.tp}x{self.tq}x{8 * self.groups}_{self.th}x{self.warps_m}_{self.buffers}"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.groups * self.warps_m

    @property
    def jobs(self) -> int:
        """The number of pairs of strips per tile and group of channels."""
        return (self.tp // self.th * -(-self.tq // 8) + 1) // 2

    def slices(self, conv: Conv) -> int:
        """Return the number of slices of channels; each slice has its own blocks."""
        return -(-conv.c // (CHANNELS * self.groups))

    def tiles(self, conv: Conv) -> int:
        """Return the number of tiles in all images."""
        height, width = two(conv.y_sizes)
        return conv.n * -(-height // self.tp) * -(-width // self.tq)

    def rows_columns(self, conv: Conv) -> tuple[int, int]:
        """Return the rows and columns of x that a tile reads."""
        (kh, kw), (sh, sw), (dh, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
        return (self.tp - 1) * sh + (kh - 1) * dh + 1, (self.tq - 1) * sw + (kw - 1) * dw + 1

    def shared(self, conv: Conv) -> int:
        """Return the bytes of dynamic shared memory per block: one or two patches, and the results of a tile."""
        rows, columns = self.rows_columns(conv)
        stride = two(conv.strides)[1]
        patch = self._plane(rows * -(-columns // stride) * stride)
        return VECTOR_BYTES * self.groups * (self.buffers * patch + self._plane(self.tp * self.tq))

    def _plane(self, pixels: int) -> int:
        """Return the distance, in chunks of 16 bytes, from one plane (8 channels of `pixels` pixels) to the next.

        The function plane_chunks of conv_depthwise_mma.cu computes the same number.
        """
        step = -(-8 // self.groups)
        return pixels + (step - pixels) % 8

    def resident(self, conv: Conv, device: Device) -> int:
        """Return how many blocks run on a multiprocessor at a time."""
        by_shared = fitting_blocks(self.shared(conv), device)
        by_registers = most_warps(conv, self.th) // (self.threads // 32)
        most_threads, most_blocks = RESIDENT
        return max(1, min(by_shared, by_registers, most_threads // self.threads, most_blocks))

    def blocks(self, conv: Conv, device: Device) -> int:
        """Return the number of blocks per slice of channels; each block loops over its tiles."""
        tiles: int = minimum(self.tiles(conv), MAX_BLOCKS)
        if self.buffers == 1:
            return tiles
        most = max(1, device.multiprocessors * self.resident(conv, device) // self.slices(conv))
        return -(-tiles // -(-tiles // most))  # all blocks get about equally many tiles


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none if conv_depthwise_mma.cu does not support `conv`."""
    if not is_supported(conv, device):
        return []
    limits: Limits[DepthwiseMmaConfig] = {
        lambda config: config.buffers: MAX_OF_BUFFERS,
        lambda config: (config.buffers, config.th): 1,
        lambda config: (config.buffers, config.tp, config.tq, config.groups): 1,
    }
    chosen = varied(RANKING.ranked(conv, device), limits, MAX_IMPLEMENTATIONS)
    return [implementation(conv, config, device) for config in chosen]


def is_supported(conv: Conv, device: Device) -> bool:
    """Return whether conv_depthwise_mma.cu computes this convolution on this device."""
    return (
        device.arch >= MMA_ARCH
        and depthwise.is_supported(conv)
        and conv.dtype in ("float16", "bfloat16")
        and conv.aligned
        and conv.c % CHANNELS == 0
        and len(conv.kernel) <= 2
        and pairs(conv) <= MAX_PAIRS
    )


def pairs(conv: Conv) -> int:
    """Return the number of pairs of taps: along each row of the filter, and along an odd last column."""
    kh, kw = two(conv.kernel)
    return kh * (kw // 2) + (kh + 1) // 2 * (kw % 2)


def registers(conv: Conv, th: int) -> int:
    """Return an estimate of the registers per thread, a multiple of 8: for weights, sums and x."""
    return -(-(2 * pairs(conv) + 6 * th + (36 if conv.residual else 30)) // 8) * 8


def most_warps(conv: Conv, th: int) -> int:
    """Return how many warps the registers of a multiprocessor allow; each scheduler has a quarter of the registers."""
    return 4 * (REGISTERS // (4 * 32 * registers(conv, th)))


def implementation(conv: Conv, config: DepthwiseMmaConfig, device: Device) -> Implementation:
    """Return the launch of one config."""
    (kh, kw), (sh, sw), (dh, dw) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    defines = {
        **conv.epilogue_defines(),
        "CHANNELS": conv.c, "KH": kh, "KW": kw, "SH": sh, "SW": sw, "DH": dh, "DW": dw,
        "BLOCK_GROUPS": config.groups, "WARPS_M": config.warps_m, "TP": config.tp, "TQ": config.tq, "TH": config.th,
        "BUFFERS": config.buffers, "W_HWIO": int(conv.w_hwio), "WEIGHTS_CONSTANT": int(conv.weights_constant),
        "MIN_BLOCKS": config.resident(conv, device),
    }  # fmt: skip
    kernel = Kernel("conv_depthwise_mma", "conv_depthwise_mma", defines)
    grid = (config.slices(conv), config.blocks(conv, device), 1)
    pdl = device.has_pdl
    launch = Launch(kernel, grid, (config.threads, 1, 1), conv.arguments, config.shared(conv), pdl=pdl)
    return Implementation(config.name, (launch,))


# ---- configs -----------------------------------------------------------------------------------------------------


def configs(conv: Conv, device: Device, thorough: bool = True) -> list[DepthwiseMmaConfig]:
    """Return the configs to rank by cost for these sizes; without `thorough`, fewer configs in less time."""
    height, width = two(conv.y_sizes)
    all_groups = conv.c // CHANNELS
    groups = [
        count for count in GROUPS if count == 1 or -(-all_groups // count) * count <= min(2, MAX_IDLE) * all_groups
    ]
    if not thorough:
        groups = sorted(groups, key=lambda count: (-(-all_groups // count) * count, -count))[:MAX_GROUPS_OF_FEW]
    found = []
    for th in (rows for rows in STRIP_ROWS if registers(conv, rows) <= MAX_REGISTERS and _fits(rows, height)):
        heights = sorted({th * min(count, -(-height // th)) for count in (1, 2, 4, 8)})
        columns = (*TILE_COLUMNS, *(ROW_COLUMNS if height == 1 else ()), *_shares(width))
        widths = sorted({min(width, each) for each in columns})
        for tp, tq, count, buffers in itertools.product(heights, widths, groups, (1, 2)):
            if not _fits(tp, height):
                continue
            jobs = (tp // th * -(-tq // 8) + 1) // 2
            rounds = sorted({-(-jobs // each) for each in ((1, 2, 3, 4, 8) if thorough else (1, 2, 4))})
            least = min(WARPS[0], jobs * count)
            found += [
                DepthwiseMmaConfig(count, warps_m, tp, tq, th, buffers)
                for warps_m in rounds
                if least <= warps_m * count <= min(WARPS[1], most_warps(conv, th))
            ]
    return [config for config in found if config.shared(conv) <= device.shared_per_block]


def _fits(rows: int, height: int) -> bool:
    """Return whether strips of `rows` rows cover `height` with few idle rows; always True for the smallest strips."""
    least = min(height, MIN_STRIP_ROWS)
    return rows == least or (rows > least and -(-height // rows) * rows <= MAX_IDLE * height)


def _shares(width: int) -> tuple[int, ...]:
    """Return those of width / 2 and width / 3 that are integers and nearly fill their last strip of 8 columns."""
    return tuple(width // count for count in (2, 3) if width % count == 0 and width // count % 8 in (0, 6, 7))


def cost(conv: Conv, config: DepthwiseMmaConfig, device: Device) -> float:
    """Estimate the clock cycles of a launch on the multiprocessor with the most work."""
    compute, load = _tile_cycles(conv, config)
    rows, columns = config.rows_columns(conv)
    copies = config.groups * (rows * columns + config.tp * config.tq) / config.threads  # copies per thread
    blocks, tiles = config.blocks(conv, device) * config.slices(conv), config.tiles(conv) * config.slices(conv)
    resident = config.resident(conv, device)
    busy = maximum(1, minimum(resident, -(-blocks // device.multiprocessors)))  # blocks per multiprocessor
    several = minimum(1, busy - 1)  # 0 for one block, 1 for more
    alone = -(-config.jobs // config.warps_m) * (config.th * pairs(conv) * LONE_PRODUCT_CYCLES + JOB_CYCLES)
    alone += copies * LONE_COPY_CYCLES + TILE_CYCLES
    idle = -(-config.jobs // config.warps_m) * config.warps_m / config.jobs  # above 1 if warps idle in the last round
    compute = compute * (several + (1 - several) * idle)
    compute = compute * maximum(1.0, MIN_WARPS / (busy * config.threads / 32))
    both = (compute**3 + load**3) ** (1 / 3)
    if config.buffers == 1:  # blocks load at the same time, or one by one: take the mean of both estimates
        share = -(-tiles // device.multiprocessors)
        in_step = -(-share // busy) * (LOAD_CYCLES + busy * load + maximum(alone, busy * compute))
        apart = (in_step + LOAD_CYCLES + maximum(alone, share * both)) / 2
        found: float = several * apart + (1 - several) * in_step
    else:
        rounds = -(-config.tiles(conv) // config.blocks(conv, device))
        more = minimum(1, rounds - 1)  # 0 for one round, 1 for more
        waiting, working = more * (LOAD_CYCLES + busy * load), busy * (more * both + (1 - more) * compute)
        found = LOAD_CYCLES + busy * load + rounds * maximum(alone, working, waiting)
    return found


def _tile_cycles(conv: Conv, config: DepthwiseMmaConfig) -> tuple[float, float]:
    """Return (cycles per tile on a busy multiprocessor, cycles of the tile's copies).

    The first number combines the cycles of products, of shared memory and of instructions: the slowest of the three
    dominates, and the two others add a part of their cycles.
    """
    (kh, kw), (sh, _), (dh, _) = two(conv.kernel), two(conv.strides), two(conv.dilations)
    strips, pixels = config.groups * config.jobs, config.groups * config.tp * config.tq
    rows, columns = config.rows_columns(conv)
    fragments = ((config.th - 1) * sh + (kh - 1) * dh + 1) * -(-kw // 2)
    chunks = config.groups * rows * columns
    products = strips * config.th * pairs(conv)
    shared = strips * (4 * fragments + 2 * config.th) + (chunks + pixels) / 8
    issued = products + strips * (fragments + config.th * 22 + 60) + chunks / 32 * 20 + pixels / 32 * 16
    height, width = two(conv.sizes)
    read = config.groups * minimum(rows, height) * minimum(columns, width)
    narrow = max(1.0, SECTOR_BYTES / (config.groups * CHANNELS * ITEM_BYTES[conv.dtype]))
    moved = (read + pixels * (2 if conv.residual else 1)) * VECTOR_BYTES * narrow
    parts = (products * PRODUCT_CYCLES, shared, issued / WARP_INSTRUCTIONS)
    operands = conv.c * ITEM_BYTES[conv.dtype] * (conv.n * height * width + conv.pixels * (2 if conv.residual else 1))
    from_memory = operands / (config.tiles(conv) * config.slices(conv))
    return float(sum(part**3 for part in parts) ** (1 / 3)), maximum(moved / L2_BYTES, from_memory / MEMORY_BYTES)


RANKING: Final = Ranking(configs, cost, MAX_FEW, functools.partial(configs, thorough=False))
