"""The convolutions of conv_mma.cu on a CPU: their own source and plans, with emulated instructions.

It cannot show how fast they are; it does show wrong addresses, swizzles and fragments, accesses outside the operands,
and stages that are read before they have arrived or overwritten while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from architectures import H200, T4
from conv_cases import WITH_VECTORS_OF_ANY, ConvCase
from conv_mma_emulation import check_emulated
from sampling import sampled

from onnxfuse.kernels.conv import mma
from onnxfuse.kernels.conv.mma import ConvConfig
from onnxfuse.kernels.gemm.mma import MmaConfig
from onnxfuse.runtime.plan import Device

SMALL = MmaConfig(64, 32, 64, 3, 2, 1)
WIDE = MmaConfig(64, 64, 128, 3, 2, 2)
TALL = MmaConfig(128, 32, 64, 4, 4, 1)
ONE_WARP = MmaConfig(64, 32, 64, 3, 1, 1)  # of 64 x 32, as the exact kernel needs them
TWO_WARPS = MmaConfig(64, 64, 64, 4, 1, 2)
BOTH = ("bias", "residual")
EVERY = 36  # of the runs, in a plain run of the tests


@dataclass(frozen=True)
class Run:
    """A convolution, the tile and the slices of k that compute it, and the GPU whose instructions are emulated."""

    case: ConvCase
    tile: MmaConfig = SMALL
    slices: int = 1
    device: Device = H200

    def __str__(self) -> str:
        kind = ConvConfig(self.tile, self.slices).name(self.case.problem(), self.device)
        return f"{self.case} {kind} sm_{self.device.arch}"


def runs() -> Iterator[Run]:
    # Vectors of 16, 8, 4 and 2 bytes; several tiles of both; strides, dilations and pads that differ by axis and side.
    for c, m in ((64, 64), (16, 72), (20, 36), (6, 34), (5, 33), (1, 1)):
        for dtype in ("float16", "bfloat16"):
            yield Run(ConvCase(2, c, m, (9, 7), (3, 3), (1, 1), (1, 1, 1, 1), dtype=dtype, extra=BOTH))
    for i, strides in enumerate(((1, 2), (2, 1), (3, 2), (2, 3))):
        dilations = ((1, 1), (2, 1), (1, 2), (2, 2))[i]
        yield Run(ConvCase(2, 8, 40, (11, 13), (3, 2), strides, (0, 1, 2, 3), dilations), (SMALL, WIDE, TALL, SMALL)[i])
    yield Run(ConvCase(1, 32, 64, (12, 12), (3, 3), (), (1, 1, 1, 1), extra=BOTH, residual_first=False), WIDE)
    yield Run(ConvCase(1, 24, 100, (12, 12), (3, 3), (), (1, 1, 1, 1), extra=()), TALL)
    yield Run(ConvCase(3, 16, 32, (1, 1), (3, 3), (), (1, 1, 1, 1)))  # taps outside alone
    yield Run(ConvCase(2, 16, 32, (3, 3), (2, 2), (), (4, 5, 3, 4)))  # pixels of padding alone
    yield Run(ConvCase(2, 16, 40, (40,), (5,), (2,), (2, 1)))
    yield Run(ConvCase(2, 12, 20, (5, 6, 7), (3, 2, 3), (1, 2, 1), (1, 0, 1, 1, 1, 0), (1, 1, 2)))
    yield Run(ConvCase(2, 16, 32, (9, 9), (1, 1), (2, 2)))
    yield Run(ConvCase(1, 96, 96, (40,), (24,), (), (12, 12), group=2, activation="gelu"))
    yield Run(ConvCase(2, 32, 64, (3, 5, 6), (3, 3, 3), (), (1,) * 6, group=2, extra=BOTH))
    # Groups of few and of many channels, and of a number of filters that is not a multiple of a tile.
    yield Run(ConvCase(2, 24, 48, (6, 7), (3, 3), (), (1, 1, 1, 1), group=3, extra=BOTH))
    yield Run(ConvCase(1, 80, 160, (6, 7), (3, 3), (), (1, 1, 1, 1), group=2), WIDE)
    yield Run(ConvCase(1, 9, 15, (6, 7), (3, 3), (), (1, 1, 1, 1), group=3))
    # Weights as a depthwise convolution has them, channels-first x, operands between vectors, large values.
    for dtype in ("float16", "float32"):
        for tf32 in (False, True)[: 1 + (dtype == "float32")]:
            tile = SMALL if dtype == "float16" or tf32 else ONE_WARP
            given = {"dtype": dtype, "tf32": tf32}
            yield Run(ConvCase(1, 6, 12, (7, 7), (3, 3), (), (1, 1, 1, 1), group=6, w_hwio=True, **given), tile)
            yield Run(ConvCase(1, 16, 40, (7, 7), (3, 3), (), (1, 1, 1, 1), w_hwio=True, **given), tile)
            yield Run(ConvCase(2, 3, 32, (15, 14), (7, 7), (2, 2), (3, 3, 3, 3), x_nchw=True, **given), tile)
            yield Run(ConvCase(1, 6, 8, (9, 10), (3, 3), (), (1, 1, 1, 1), group=2, x_nchw=True, **given), tile)
            yield Run(ConvCase(2, 16, 40, (7, 7), (3, 3), (), (1, 1, 1, 1), aligned=False, extra=BOTH, **given), tile)
            yield Run(ConvCase(2, 16, 40, (7, 7), (3, 3), (), (1, 1, 1, 1), scale=1e3, **given), tile)
    for c in (32, 6, 5):
        yield Run(ConvCase(2, c, 68, (9, 7), (3, 3), (), (1, 1, 1, 1), dtype="float32", extra=BOTH), TWO_WARPS)
        tf32 = ConvCase(2, c, 68, (9, 7), (3, 3), (), (1, 1, 1, 1), dtype="float32", extra=BOTH, tf32=True)
        yield Run(tf32, MmaConfig(64, 64, 64, 4, 2, 2))
    # Slices of k that are not equal, whose sums a second launch adds up.
    for dtype, tile in (("float16", SMALL), ("float32", ONE_WARP)):
        for c, m, group in ((40, 40, 1), (24, 26, 2)):
            case = ConvCase(1, c, m, (7, 7), (3, 3), (), (1, 1, 1, 1), dtype=dtype, extra=BOTH, group=group)
            yield Run(replace(case, residual_first=group == 1), tile, 3)
    # Without cp.async: two stages, through registers.
    for c, dtype in (
        (16, "float16"),
        (6, "float16"),
        (5, "float16"),
        (16, "float32"),
        (5, "float32"),
        (16, "bfloat16"),
    ):
        tile = replace(SMALL if dtype == "float16" else ONE_WARP, stages=2)
        yield Run(ConvCase(2, c, 40, (7, 7), (3, 3), (), (1, 1, 1, 1), dtype=dtype, extra=BOTH), tile, device=T4)
    yield Run(ConvCase(1, 5, 6, (7, 7), (3, 3), x_nchw=True, w_hwio=True), replace(SMALL, stages=2), device=T4)
    yield Run(ConvCase(1, 8, 9, (7, 7), (3, 3), w_hwio=True, dtype="bfloat16"), replace(ONE_WARP, stages=2), device=T4)


def epilogues() -> Iterator[Run]:
    """Yield the vectors of channels that an epilogue may read, with one launch and with slices of k."""
    for i, case in enumerate(WITH_VECTORS_OF_ANY):
        yield Run(case, SMALL, 1 + 2 * (i % 3 == 1))


@pytest.mark.parametrize(("index", "run"), [*sampled(enumerate(runs()), EVERY), *enumerate(epilogues())], ids=str)
def test_matches_float64(index: int, run: Run, tmp_path: Path) -> None:
    at_once = index % 2 == 1  # copies happen as early or as late as they may
    conv = run.case.problem()
    way = mma.implementation(conv, ConvConfig(run.tile, run.slices), run.device)
    assert len(way.steps) == (2 if run.slices > 1 else 1)
    exact = mma.is_exact(conv, run.device)
    check_emulated(run.case, way, run.device, exact=exact, at_once=at_once, folder=tmp_path)
