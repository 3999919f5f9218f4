"""The transposed convolutions on a CPU: their own sources and plans, with emulated instructions.

It cannot show how fast they are; it does show wrong phases, addresses and fragments, accesses outside the operands, and
stages that are read before they have arrived or overwritten while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from architectures import H200, T4
from conv_mma_emulation import check_emulated
from conv_transpose_cases import DEPTHWISE, WITH_VECTORS, ConvTransposeCase, products, shapes, shuffled, widths
from sampling import sampled

from onnxfuse.kernels.conv.mma import ConvConfig, is_exact
from onnxfuse.kernels.conv_transpose import depthwise, mma
from onnxfuse.kernels.gemm.mma import MmaConfig
from onnxfuse.runtime.plan import Device

SMALL = MmaConfig(64, 32, 64, 3, 2, 1)
WIDE = MmaConfig(64, 64, 128, 3, 2, 2)
TALL = MmaConfig(128, 32, 64, 4, 4, 1)
ONE_WARP = MmaConfig(64, 32, 64, 3, 1, 1)  # of 64 x 32, as the exact kernel needs them
EVERY = 36  # of the runs, in a plain run of the tests

Run = tuple[ConvTransposeCase, ConvConfig, Device]


def runs() -> Iterator[Run]:
    for i, case in enumerate((*shapes(), *widths(), *products())):
        exact = case.dtype == "float32" and not case.tf32
        tile = ONE_WARP if exact else (SMALL, WIDE, TALL)[i % 3]
        yield case, ConvConfig(tile), H200
    # Slices of k that are not equal, of phases with more and with fewer blocks of k than slices.
    for case in (
        ConvTransposeCase(1, 40, 40, (5, 4), (3, 3), (2, 2), (1, 1, 1, 1), extra=("bias", "residual")),
        ConvTransposeCase(1, 24, 26, (5, 4), (4, 4), (2, 3), (1, 1, 0, 1), dtype="bfloat16", group=2),
        shuffled(1, 200, 12, (5, 4), (2, 2), extra=("bias", "residual"), residual_first=False),
    ):
        yield case, ConvConfig(SMALL, 3), H200
    # Without cp.async: two stages, through registers.
    for dtype, tile in (("float16", SMALL), ("float32", ONE_WARP)):
        for c in (16, 6, 5):
            case = ConvTransposeCase(2, c, 36, (4, 5), (3, 3), (2, 2), (1, 0, 1, 1), dtype=dtype)
            yield case, ConvConfig(replace(tile, stages=2)), T4
        yield shuffled(1, 6, 7, (4, 5), (2, 2), dtype=dtype), ConvConfig(replace(tile, stages=2)), T4


def epilogues() -> Iterator[Run]:
    """Yield the vectors of channels that an epilogue may read, with one launch and with slices of k."""
    for i, case in enumerate(WITH_VECTORS["mma"]):
        yield case, ConvConfig(SMALL, 1 + 2 * (i % 3 == 1)), H200


def name(run: Run) -> str:
    case, config, device = run
    return f"{case} {config.name(case.problem(), device)} sm_{device.arch}"


@pytest.mark.parametrize(
    ("index", "run"),
    [*sampled(enumerate(runs()), EVERY), *sampled(enumerate(epilogues()), 2)],
    ids=lambda v: name(v) if isinstance(v, tuple) else str(v),
)
def test_products_of_phases(index: int, run: Run, tmp_path: Path) -> None:
    case, config, device = run
    conv = case.problem()
    way = mma.implementation(conv, config, device)
    assert len(way.steps) == (2 if config.slices > 1 else 1)
    exact = is_exact(conv, device)
    check_emulated(case, way, device, exact=exact, at_once=index % 2 == 1, folder=tmp_path)


@pytest.mark.parametrize(
    ("index", "case"), [*sampled(enumerate(DEPTHWISE), 2), *sampled(enumerate(WITH_VECTORS["depthwise"]), 3)], ids=str
)
def test_depthwise(index: int, case: ConvTransposeCase, tmp_path: Path) -> None:
    """The cases take the widest and the narrowest vectors in turns."""
    conv = case.problem()
    assert depthwise.implementations(conv, H200)
    way = depthwise.implementation(conv, depthwise.widths(conv)[-(index % 2)], H200)
    check_emulated(case, way, H200, exact=True, at_once=True, folder=tmp_path)
