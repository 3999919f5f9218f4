"""The kernels of depthwise, grouped and stem convolutions on a CPU: their own sources, with emulated instructions.

It cannot show how fast they are, nor a missing barrier of threads of different warps in every case; it does show wrong
addresses, accesses outside the operands, misaligned ones, and what is read before it has arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from architectures import H200
from conv_cases import (
    DEPTHWISE,
    DEPTHWISE_MMA,
    DEPTHWISE_SLIDING,
    GROUPED,
    NOT_FINITE,
    STEMS,
    WITH_VECTORS,
    ConvCase,
    not_finite,
)
from conv_emulation import run_emulated
from sampling import by_parts, sampled

from onnxfuse.kernels.conv import depthwise, depthwise_mma, depthwise_sliding, grouped, stem
from onnxfuse.runtime.plan import Device

HOSTS = {
    "depthwise": depthwise,
    "depthwise_mma": depthwise_mma,
    "depthwise_sliding": depthwise_sliding,
    "grouped": grouped,
    "stem": stem,
}
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

ONE_MULTIPROCESSOR = dataclasses.replace(H200, multiprocessors=1)

EVERY = 18  # of the convolutions, in a plain run of the tests
PARTS = 2  # of the configs


def check(case: ConvCase, arrays: dict[str, np.ndarray], y: np.ndarray) -> None:
    expected, magnitude = case.expect(arrays)
    slack = (2.0**-10 if case.tf32 else 1e-6) * magnitude + 1e-6 * np.abs(expected)
    error = np.abs(y.astype(np.float64) - expected)
    excess = error - (slack + 1.02 * ROUNDING[case.dtype] * np.abs(expected) + 1e-7)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"


Arrays = dict[str, np.ndarray]


def outputs(
    case: ConvCase, kind: ModuleType, configs: Sequence[Any], device: Device, arrays: Arrays, folder: Path
) -> Iterator[np.ndarray]:
    """Yield y of each config of a kind of kernel."""
    conv = case.problem()
    assert configs and kind.implementations(conv, H200)
    for i, config in enumerate(configs):
        built = folder / str(i)
        built.mkdir()
        yield run_emulated(case, kind.implementation(conv, config, device), arrays, built)


def check_all(case: ConvCase, kind: ModuleType, configs: Sequence[Any], device: Device, folder: Path) -> None:
    arrays = case.arrays()
    for y in outputs(case, kind, configs, device, arrays, folder):
        check(case, arrays, y)


@by_parts(PARTS)
@pytest.mark.parametrize("case", sampled(DEPTHWISE, EVERY), ids=str)
def test_depthwise(case: ConvCase, part: int, tmp_path: Path) -> None:
    found = depthwise.configs(case.problem(), H200)
    check_all(case, depthwise, found[:: max(1, len(found) // 3)][:4][part::PARTS], H200, tmp_path)


def mma_configs(case: ConvCase, part: int) -> list[depthwise_mma.DepthwiseMmaConfig]:
    """Return a config with one buffer and one with two, others in each part."""
    found = depthwise_mma.configs(case.problem(), H200)
    single, double = ([config for config in found if config.buffers == count] for count in (1, 2))
    return [single[0], double[-1]] if part else [single[len(single) * 2 // 3], double[len(double) // 3]]


@by_parts(2)
@pytest.mark.parametrize("case", sampled(DEPTHWISE_MMA, EVERY), ids=str)
def test_depthwise_mma(case: ConvCase, part: int, tmp_path: Path) -> None:
    check_all(case, depthwise_mma, mma_configs(case, part), ONE_MULTIPROCESSOR, tmp_path)


@by_parts(2)
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_depthwise_mma_keeps_channels_apart(case: ConvCase, part: int, tmp_path: Path) -> None:
    """An infinity or NaN of one channel, also in x at a weight of zero, leaves the channels beside it as they are."""
    arrays = not_finite(case)
    expected, _ = case.expect(arrays)
    assert 0 < np.isnan(expected).sum() < expected.size / 2 and np.isinf(expected).any()
    finite = np.isfinite(expected)
    for y in outputs(case, depthwise_mma, mma_configs(case, part), ONE_MULTIPROCESSOR, arrays, tmp_path):
        values = y.astype(np.float64)
        np.testing.assert_array_equal(values[~finite], expected[~finite])
        np.testing.assert_allclose(values[finite], expected[finite], rtol=1.1 * ROUNDING[case.dtype], atol=1e-5)


@by_parts(2)
@pytest.mark.parametrize(("index", "case"), list(enumerate(DEPTHWISE_SLIDING)), ids=str)
def test_depthwise_sliding(index: int, case: ConvCase, part: int, tmp_path: Path) -> None:
    """The first config of every other case and the last one of the others, by turns of the parts."""
    found = depthwise_sliding.configs(case.problem())
    check_all(case, depthwise_sliding, [found[-((index + part) % 2)]], H200, tmp_path)


@pytest.mark.parametrize("case", sampled(STEMS, EVERY), ids=str)
def test_stem(case: ConvCase, tmp_path: Path) -> None:
    found = stem.configs(case.problem(), H200)
    two = dataclasses.replace(H200, multiprocessors=2)
    check_all(case, stem, found[:: max(1, len(found) - 1)], two, tmp_path)


@pytest.mark.parametrize("case", sampled(GROUPED, EVERY), ids=str)
def test_grouped(case: ConvCase, tmp_path: Path) -> None:
    found = grouped.configs(case.problem(), H200)
    check_all(case, grouped, found[:: max(1, len(found) - 1)], ONE_MULTIPROCESSOR, tmp_path)


@pytest.mark.parametrize(
    ("kind", "case"), sampled([(kind, case) for kind, cases in WITH_VECTORS.items() for case in cases], EVERY), ids=str
)
def test_vectors_of_the_epilogue(kind: str, case: ConvCase, tmp_path: Path) -> None:
    """The slopes of a PRelu, and what scales and shifts channels behind an activation."""
    host = HOSTS[kind]
    arrays = case.arrays()
    way = host.implementations(case.problem(), dataclasses.replace(H200, multiprocessors=1))[0]
    check(case, arrays, run_emulated(case, way, arrays, tmp_path))
