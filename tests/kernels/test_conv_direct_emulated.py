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
from conv_cases import DEPTHWISE, GROUPED, STEMS, ConvCase
from conv_emulation import run_emulated

from onnxfuse.kernels.conv import depthwise, grouped, stem

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def check(case: ConvCase, arrays: dict[str, np.ndarray], y: np.ndarray) -> None:
    expected, magnitude = case.expect(arrays)
    slack = (2.0**-10 if case.tf32 else 1e-6) * magnitude + 1e-6 * np.abs(expected)
    error = np.abs(y.astype(np.float64) - expected)
    excess = error - (slack + 1.02 * ROUNDING[case.dtype] * np.abs(expected) + 1e-7)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"


@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise(case: ConvCase, tmp_path: Path) -> None:
    arrays = case.arrays()
    conv = case.problem()
    found = depthwise.configs(conv)
    assert depthwise.implementations(conv, H200)
    for i, config in enumerate(found[:: max(1, len(found) // 3)][:4]):
        way = depthwise.implementation(conv, config, H200)
        folder = tmp_path / str(i)
        folder.mkdir()
        check(case, arrays, run_emulated(case, way, arrays, folder))


@pytest.mark.parametrize("case", STEMS, ids=str)
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


@pytest.mark.parametrize("case", GROUPED, ids=str)
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
