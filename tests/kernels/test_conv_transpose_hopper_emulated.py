"""The Hopper transposed convolution on a CPU: its own source and plans, with emulated instructions.

It cannot show how fast it is, nor a missing fence; it does show wrong walks, boxes, taps and phases, and what is reused
or read too soon.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from conv_cases import NUMPY
from conv_transpose_cases import HOPPER, WITH_VECTORS, ConvTransposeCase
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.conv_transpose import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.runtime.plan import Launch, Pointer

PINGPONG = HopperConfig(128, 64, pingpong=True)
CONFIGS = (
    PINGPONG, HopperConfig(128, 128), HopperConfig(256, 128), HopperConfig(192, 192), PINGPONG, PINGPONG, PINGPONG,
    HopperConfig(64, 64, pingpong=True), PINGPONG, PINGPONG,
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *sampled(zip(HOPPER, CONFIGS, strict=True), 3),
        *sampled([(case, PINGPONG) for case in WITH_VECTORS["hopper"]], 4),
    ],
    ids=str,
)
def test_matches_float64(case: ConvTransposeCase, config: HopperConfig, tmp_path: Path) -> None:
    conv = case.problem()
    assert hopper.why_not(conv, H200) is None
    (step,) = hopper.implementation(conv, config, replace(H200, multiprocessors=3)).steps
    assert isinstance(step, Launch)
    arrays = case.arrays()
    whole = np.full((case.n + 1, *case.y_sizes, case.m), np.nan, NUMPY[case.dtype])  # one image more than y has
    addresses = {Pointer("input", i): each.ctypes.data for i, each in enumerate(arrays.values())}
    addresses[Pointer("output", 0)] = whole.ctypes.data
    run(step, addresses, tmp_path)
    expected, magnitude = case.expect(arrays)
    rounding = {"float16": 2**-11, "bfloat16": 2**-8}[case.dtype]
    y = whole[: case.n].astype(np.float64)
    excess = np.abs(y - expected) - (2e-6 * magnitude + 1.02 * rounding * np.abs(expected) + 1e-7)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
    assert np.isnan(whole[case.n].astype(np.float64)).all(), "written beyond the end"
