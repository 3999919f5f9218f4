"""The host side of conv_depthwise.cu: convolutions in which each channel of y reads one channel of x."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.conv.problem import Conv, three
from onnxfuse.kernels.conv.ranking import Limits, Ranking, varied
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import REGISTERS
from onnxfuse.kernels.tensors import ITEM_BYTES, VECTOR_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch
from onnxfuse.runtime.symint import maximum, minimum

MAX_IMPLEMENTATIONS: Final = 6
MAX_FEW: Final = 7  # configs offered for a convolution of dynamic sizes
MAX_RESEMBLING: Final = 2  # maximum number of implementations that differ only in the sizes of strips and blocks
MAX_COLUMNS: Final = 32  # columns of x that a thread holds; each has a bit in a 32-bit mask
MAX_PIECE: Final = 8  # largest number of taps per step of the loop over a filter's row
MAX_UNROLLED: Final = 3200  # multiplications per thread with unrolled rows: 50 KB of code
MAX_REGISTERS: Final = 168  # registers per thread, as estimated by `registers`
THREADS: Final = 256  # approximate threads per block
BLOCK_SHARED: Final = 32 << 10  # bytes of weights; a block with more gets fewer vectors of channels, but at least one

# Rates of an H200 per multiprocessor and clock cycle; they order configs well enough on other GPUs.
WARP_INSTRUCTIONS: Final = 3.4  # warp instructions issued per cycle; the hardware limit is 4
L1_BYTES: Final = 110.0
L2_BYTES: Final = 26.0
MEMORY_BYTES: Final = 17.0
NARROW_ACCESS: Final = {2: 1.25, 4: 1.05}  # factor on the time of memory accesses, by bytes per access
MIN_WARPS: Final = 12  # warps per multiprocessor that suffice to hide latencies


@dataclass(frozen=True)
class DepthwiseConfig:
    """The macros of conv_depthwise.cu that this module chooses."""

    vec: int
    tw: int
    th: int
    rolled: bool
    ahead: int
    piece: int
    bx: int
    bw: int
    bh: int

    @property
    def name(self) -> str:
        """The config's name in reports."""
        block = f"{self.bx}x{self.bw}x{self.bh}"
        return f"depthwise_{self.vec}x{self.tw}x{self.th}{'_rolled' if self.rolled else ''}_{block}"

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return self.bx * self.bw * self.bh

    def padded_taps(self, conv: Conv) -> int:
        """Return the number of taps when each row of the filter is padded to a multiple of `piece` taps."""
        _, _, kw = three(conv.kernel)
        return conv.taps // kw * -(-kw // self.piece) * self.piece

    def shared(self, conv: Conv) -> int:
        """Return the bytes of dynamic shared memory: the weights of the block's channels in fp32."""
        return 4 * self.padded_taps(conv) * self.bx * self.vec

    def patches(self, conv: Conv) -> int:
        """Return the number of patches of y; for each slice of channels, one block computes a patch."""
        depth, height, width = three(conv.y_sizes)
        return conv.n * depth * -(-height // (self.th * self.bh)) * -(-width // (self.tw * self.bw))


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return the implementations, fastest expected first; none if the convolution is not depthwise.

    The list is also empty if the weights of one channel exceed a block's shared memory.
    """
    if not is_supported(conv):
        return []
    limits: Limits[DepthwiseConfig] = {lambda config: (config.vec, config.rolled): MAX_RESEMBLING}
    chosen = varied(RANKING.ranked(conv, device), limits, MAX_IMPLEMENTATIONS)
    return [implementation(conv, config, device) for config in chosen]


def is_supported(conv: Conv) -> bool:
    """Return whether conv_depthwise.cu computes this convolution: one filter for each channel, channels last."""
    return conv.depthwise and conv.m == conv.c and len(conv.kernel) <= 3 and not conv.x_nchw and conv.pixels > 0


def implementation(conv: Conv, config: DepthwiseConfig, device: Device) -> Implementation:
    """Return the launch of one config."""
    (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = three(conv.kernel), three(conv.strides), three(conv.dilations)
    defines = {
        **conv.epilogue_defines(),
        "CHANNELS": conv.c, "VEC": config.vec, "TW": config.tw, "TH": config.th, "AHEAD": config.ahead,
        "PIECE": config.piece, "ROLLED": int(config.rolled), "BX": config.bx, "BW": config.bw, "BH": config.bh,
        "KD": kd, "KH": kh, "KW": kw, "SD": sd, "SH": sh, "SW": sw, "DD": dd, "DH": dh, "DW": dw,
        "W_HWIO": int(conv.w_hwio), "WEIGHTS_CONSTANT": int(conv.weights_constant), "MIN_BLOCKS": 1,
    }  # fmt: skip
    kernel = Kernel("conv_depthwise", "conv_depthwise", defines)
    grid = (config.patches(conv), -(-conv.c // (config.vec * config.bx)), 1)
    pdl = device.has_pdl
    launch = Launch(kernel, grid, (config.threads, 1, 1), conv.arguments, config.shared(conv), pdl=pdl)
    return Implementation(config.name, (launch,))


# ---- configs -----------------------------------------------------------------------------------------------------


def configs(conv: Conv, device: Device) -> list[DepthwiseConfig]:
    """Return all configs that fit the device, to be ranked by their cost for these sizes."""
    _, height, width = three(conv.y_sizes)
    found = []
    for vec in access_sizes(conv):
        for tw in sorted({min(tw, width) for tw in (1, 2, 4, 7, 8, 14, 16)}):
            for th in sorted({min(th, height) for th in (1, 2, 4)}):
                found += [config for config in _strips(conv, vec, tw, th) if config.shared(conv) <= 2 * BLOCK_SHARED]
    return [config for config in found or _strips(conv, 1, 1, 1) if config.shared(conv) <= device.shared_per_block]


def access_sizes(conv: Conv) -> Iterator[int]:
    """Yield the access widths, in elements, that divide the channels: at most 16 bytes, and only 1 if misaligned."""
    vec = VECTOR_BYTES // ITEM_BYTES[conv.dtype]
    while vec > 1:
        if conv.aligned and conv.c % vec == 0:
            yield vec
        vec //= 2
    yield 1


def _strips(conv: Conv, vec: int, tw: int, th: int) -> Iterator[DepthwiseConfig]:
    """Yield at most one config with a loop over rows and one without; a thread has th x tw x `vec` elements of y."""
    (kd, kh, kw), (_, sh, _), (_, dh, _) = three(conv.kernel), three(conv.strides), three(conv.dilations)
    rows = (th - 1) * sh + (kh - 1) * dh + 1
    ways = []
    if (
        kd == 1 and kw <= MAX_PIECE and rows <= 16 and _columns(conv, tw, kw) <= MAX_COLUMNS
        and th * tw * conv.taps * vec <= MAX_UNROLLED
    ):  # fmt: skip
        ways.append((False, min(rows, 3) if conv.taps <= 9 else 1, kw))
    if th == 1 and (conv.taps > 9 or not ways):
        piece = -(-kw // -(-kw // MAX_PIECE))
        while piece > 1 and _columns(conv, tw, piece) > MAX_COLUMNS:
            piece -= 1
        ways.append((True, 1, piece))
    for rolled, ahead, piece in ways:
        bx, bw, bh = block(conv, vec, tw, th)
        config = DepthwiseConfig(vec, tw, th, rolled, ahead, piece, bx, bw, bh)
        while config.shared(conv) > BLOCK_SHARED and bx > 1:
            bx = -(-bx // 2)
            config = DepthwiseConfig(vec, tw, th, rolled, ahead, piece, bx, bw, bh)
        smallest = vec == tw == th == 1
        if smallest or (_columns(conv, tw, piece) <= MAX_COLUMNS and registers(conv, config) <= MAX_REGISTERS):
            yield config


def _columns(conv: Conv, tw: int, piece: int) -> int:
    """Return the width of the part of x that `tw` neighbouring positions of y read by `piece` taps of a filter row."""
    (_, _, sw), (_, _, dw) = three(conv.strides), three(conv.dilations)
    return (tw - 1) * sw + (piece - 1) * dw + 1


def _used_columns(conv: Conv, tw: int, piece: int) -> int:
    """Return how many of the columns that `_columns` counts are read; strides and dilations can skip some."""
    (_, _, sw), (_, _, dw) = three(conv.strides), three(conv.dilations)
    return len({t * sw + s * dw for t in range(tw) for s in range(piece)})


def _used_rows(conv: Conv, th: int) -> int:
    """Return how many rows of x `th` neighbouring rows of y read, summed over the filter's depths."""
    (kd, kh, _), (_, sh, _), (_, dh, _) = three(conv.kernel), three(conv.strides), three(conv.dilations)
    return kd * len({t * sh + r * dh for t in range(th) for r in range(kh)})


def block(conv: Conv, vec: int, tw: int, th: int, threads: int = THREADS) -> tuple[int, int, int]:
    """Return a block's threads along channels, width and height, chosen for few idle lanes and a compact patch."""
    vectors = conv.c // vec
    bx = min(range(min(vectors, 8), min(vectors, 32) + 1), key=lambda lanes: (-(-vectors // lanes) * lanes, -lanes))
    _, height, width = three(conv.y_sizes)
    strips_w, strips_h = -(-width // tw), -(-height // th)
    best, least = (1, 1), math.inf
    for bw in range(1, min(strips_w, threads // bx) + 1):
        bh = min(strips_h, threads // bx // bw)
        covered = -(-strips_w // bw) * bw * -(-strips_h // bh) * bh / (strips_w * strips_h)
        idle = -(-bx * bw * bh // 32) * 32 / (bx * bw * bh)
        small = max(1.0, 96 / (bx * bw * bh))  # penalty: below 96 threads, a multiprocessor is underused
        read = _patch_bytes(conv, tw * bw, th * bh) / (tw * bw * th * bh)
        value = covered * idle * small * (read + conv.taps)
        if value < least:
            best, least = (bw, bh), value
    return bx, *best


def _patch_bytes(conv: Conv, wide: int, high: int) -> float:
    """Return the size of a patch, not in bytes: the positions of x that `high` x `wide` positions of y read."""
    (kd, kh, kw), (_, sh, sw), (_, dh, dw) = three(conv.kernel), three(conv.strides), three(conv.dilations)
    rows, columns = (high - 1) * sh + (kh - 1) * dh + 1, (wide - 1) * sw + (kw - 1) * dw + 1
    return float(kd * min(rows, high * kh) * min(columns, wide * kw))


def registers(conv: Conv, config: DepthwiseConfig) -> int:
    """Return an estimate of the registers per thread."""
    words = ITEM_BYTES[conv.dtype] / 4
    columns = _used_columns(conv, config.tw, config.piece)
    held = conv.taps * config.vec if not config.rolled and conv.taps * config.vec <= 36 else config.vec
    rows = columns * config.vec * (1 + config.ahead * words)
    return int(config.th * config.tw * config.vec + rows + held) + 44


def cost(conv: Conv, config: DepthwiseConfig, device: Device) -> float:
    """Estimate a launch's clock cycles from the times of instructions, L1, L2 and memory; the longest dominates."""
    item = ITEM_BYTES[conv.dtype]
    blocks = config.patches(conv) * -(-conv.c // (config.vec * config.bx))
    warps = blocks * -(-config.threads // 32)
    rows, columns = _used_rows(conv, config.th), _used_columns(conv, config.tw, config.piece)
    reads = rows * columns * -(-three(conv.kernel)[2] // config.piece)
    products = config.th * config.tw * config.padded_taps(conv) * config.vec
    taps = config.th * config.padded_taps(conv)
    if not config.rolled and conv.taps * config.vec <= 36:
        taps = conv.taps
    widened = reads * config.vec if item == 2 else 0
    instructions = products + 1.3 * reads + widened + taps * max(1, config.vec // 4) + 100
    instructions += 3 * config.th * config.tw * config.vec
    fitting = min(2048 // config.threads, REGISTERS // (registers(conv, config) * config.threads))
    resident = fitting * config.threads / 32
    per_chip = max(1.0, resident) * device.multiprocessors
    waves = warps / per_chip
    several = minimum(1, math.floor(waves))  # 0 for less than one wave, 1 otherwise
    waves = maximum(1, waves + 0.3 * (math.ceil(waves) - waves))
    busy = min(1.0, max(1.0, resident) / MIN_WARPS)
    share = maximum(math.ceil(blocks / device.multiprocessors) * -(-config.threads // 32), MIN_WARPS / 2)
    issue = several * (waves * max(1.0, resident) * instructions / WARP_INSTRUCTIONS / busy)
    issue += (1 - several) * (share * instructions / WARP_INSTRUCTIONS)
    threads = warps * 32 / device.multiprocessors
    l1 = threads * (reads * max(4, config.vec * item) + taps * config.vec * 4) / L1_BYTES
    patch = _patch_bytes(conv, config.tw * config.bw, config.th * config.bh)
    l2 = blocks * config.bx * config.vec * item * patch / L2_BYTES / device.multiprocessors
    memory: float = item * conv.c * (conv.n * math.prod(conv.sizes) + conv.pixels * (2 if conv.residual else 1))
    memory = memory * (NARROW_ACCESS.get(config.vec * item, 1.0) / (MEMORY_BYTES * device.multiprocessors))
    whole: float = sum(part**4 for part in (issue, l1, l2, memory)) ** 0.25
    return whole


RANKING: Final = Ranking(configs, cost, MAX_FEW)
