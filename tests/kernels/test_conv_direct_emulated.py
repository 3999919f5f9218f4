"""The kernels of depthwise, grouped and stem convolutions on a CPU: their own sources, with emulated instructions.

It cannot show how fast they are, nor a missing barrier of threads of different warps in every case; it does show wrong
addresses, accesses outside the operands, misaligned ones, and what is read before it has arrived.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from conv_cases import DEPTHWISE, DEPTHWISE_MMA, GROUPED, NOT_FINITE, STEMS, WITH_VECTORS, ConvCase, not_finite
from conv_emulation import run_emulated

from onnxfuse.kernels.conv import depthwise, depthwise_mma, grouped, stem

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

EVERY = 2  # of the convolutions, to save time; a GPU runs all


def check(case: ConvCase, arrays: dict[str, np.ndarray], y: np.ndarray) -> None:
    expected, magnitude = case.expect(arrays)
    slack = (2.0**-10 if case.tf32 else 1e-6) * magnitude + 1e-6 * np.abs(expected)
    error = np.abs(y.astype(np.float64) - expected)
    excess = error - (slack + 1.02 * ROUNDING[case.dtype] * np.abs(expected) + 1e-7)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"


@pytest.mark.parametrize("case", DEPTHWISE[::EVERY], ids=str)
def test_depthwise(case: ConvCase, tmp_path: Path) -> None:
    arrays = case.arrays()
    conv = case.problem()
    found = depthwise.configs(conv)
    assert depthwise.implementations(conv, H200)
    for i, config in enumerate(found[:: max(1, len(found) // 2)][:2]):
        way = depthwise.implementation(conv, config, H200)
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, arrays, run_emulated(case, way, arrays, folder))


def mma_configs(case: ConvCase) -> list[depthwise_mma.DepthwiseMmaConfig]:
    """Return a config with one buffer and one with two."""
    conv = case.problem()
    assert depthwise_mma.implementations(conv, H200)
    found = [config for config in depthwise_mma.configs(conv) if config.shared(conv) <= H200.shared_per_block]
    single, double = ([config for config in found if config.buffers == count] for count in (1, 2))
    return [single[len(single) * 2 // 3], double[len(double) // 3]]


@pytest.mark.parametrize("case", DEPTHWISE_MMA[::EVERY], ids=str)
def test_depthwise_mma(case: ConvCase, tmp_path: Path) -> None:
    arrays = case.arrays()
    for i, config in enumerate(mma_configs(case)):
        way = depthwise_mma.implementation(case.problem(), config, dataclasses.replace(H200, multiprocessors=1))
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, arrays, run_emulated(case, way, arrays, folder))


@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_depthwise_mma_keeps_channels_apart(case: ConvCase, tmp_path: Path) -> None:
    """An infinity or NaN of one channel, also in x at a weight of zero, leaves the channels beside it as they are."""
    arrays = not_finite(case)
    expected, _ = case.expect(arrays)
    assert 0 < np.isnan(expected).sum() < expected.size / 2 and np.isinf(expected).any()
    for i, config in enumerate(mma_configs(case)[1:3]):
        way = depthwise_mma.implementation(case.problem(), config, dataclasses.replace(H200, multiprocessors=1))
        folder = tmp_path / str(i)
        folder.mkdir()
        y = run_emulated(case, way, arrays, folder).astype(np.float64)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(y[~finite], expected[~finite])
        np.testing.assert_allclose(y[finite], expected[finite], rtol=1.1 * ROUNDING[case.dtype], atol=1e-5)


@pytest.mark.parametrize("case", STEMS[::EVERY], ids=str)
def test_stem(case: ConvCase, tmp_path: Path) -> None:
    arrays = case.arrays()
    conv = case.problem()
    assert stem.implementations(conv, H200)
    found = stem.configs(conv)
    for i, config in enumerate(found[:: max(1, len(found) - 1)]):
        way = stem.implementation(conv, config, dataclasses.replace(H200, multiprocessors=2))
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, arrays, run_emulated(case, way, arrays, folder))


@pytest.mark.parametrize("case", GROUPED[::EVERY], ids=str)
def test_grouped(case: ConvCase, tmp_path: Path) -> None:
    arrays = case.arrays()
    conv = case.problem()
    assert grouped.implementations(conv, H200)
    found = grouped.configs(conv)
    for i, config in enumerate(found[:: max(1, len(found) - 1)]):
        way = grouped.implementation(conv, config, dataclasses.replace(H200, multiprocessors=1))
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, arrays, run_emulated(case, way, arrays, folder))


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, cases in WITH_VECTORS.items() for case in cases[::EVERY]], ids=str
)
def test_vectors_of_the_epilogue(kind: str, case: ConvCase, tmp_path: Path) -> None:
    """The slopes of a PRelu, and what scales and shifts channels behind an activation."""
    host = {"depthwise": depthwise, "depthwise_mma": depthwise_mma, "grouped": grouped, "stem": stem}[kind]
    arrays = case.arrays()
    way = host.implementations(case.problem(), dataclasses.replace(H200, multiprocessors=1))[0]
    check(case, arrays, run_emulated(case, way, arrays, tmp_path))
