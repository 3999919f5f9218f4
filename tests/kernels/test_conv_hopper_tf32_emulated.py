"""The Hopper convolution of float32 in TF32 on a CPU: its own source and plans, with emulated instructions.

It shows wrong addresses, stages, phases and stores, and that both operands are rounded; what TMA rounds to, a test on a
GPU shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from conv_cases import BOTH, ConvCase, with_vectors
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.conv import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.runtime.plan import Launch, Pointer

SAME = (1, 1, 1, 1)


def tf32(*given: object, **named: object) -> ConvCase:
    return ConvCase(*given, dtype="float32", tf32=True, **named)  # type: ignore[arg-type]


# Consumers that take turns, that share a tile, and blocks that share one; pixels, filters and channels that end inside
# tiles and stages; odd filters, which threads store one by one; more tiles than blocks.
PINGPONG = HopperConfig(128, 64, pingpong=True)
CASES = [
    (tf32(2, 32, 72, (9, 11), (3, 3), (), SAME, extra=BOTH), HopperConfig(64, 64, pingpong=True)),
    (tf32(1, 96, 40, (12, 20), (3, 3), (), (0, 1, 2, 1), (2, 1), extra=BOTH, residual_first=False), PINGPONG),
    (tf32(2, 64, 35, (9, 11), (3, 3), (), SAME, extra=BOTH), HopperConfig(128, 32, pingpong=True)),
    (tf32(2, 32, 136, (9, 11), (2, 3), (), SAME), HopperConfig(128, 160)),
    (tf32(3, 32, 200, (9, 9), (1, 1), (), SAME, extra=()), HopperConfig(192, 192)),
    (tf32(1, 64, 24, (11, 9), (3, 3), (), SAME, extra=BOTH), HopperConfig(128, 64, split_k=3)),
    (tf32(1, 64, 131, (11, 9), (3, 3), (), SAME, extra=BOTH), HopperConfig(128, 128, split_k=2)),
]
VECTORS = [(case, PINGPONG) for case in with_vectors(tf32(1, 32, 40, (9, 7), (3, 3), (), SAME))]


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the nearest TF32 numbers."""
    return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


@pytest.mark.parametrize(("case", "config"), [*sampled(CASES, 4), *sampled(VECTORS, 4)], ids=str)
def test_matches_float64_of_rounded_operands(case: ConvCase, config: HopperConfig, tmp_path: Path) -> None:
    conv = case.problem()
    assert hopper.is_supported(conv, H200)
    (step,) = hopper.implementation(conv, config, replace(H200, multiprocessors=3)).steps
    assert isinstance(step, Launch)
    arrays = case.arrays()
    whole = np.full((case.n + 1, *case.y_sizes, case.m), np.nan, np.float32)  # one image more than y has
    addresses = {Pointer("input", i): each.ctypes.data for i, each in enumerate(arrays.values())}
    addresses[Pointer("output", 0)] = whole.ctypes.data
    run(step, addresses, tmp_path)
    expected, magnitude = case.expect({**arrays, "x": rounded(arrays["x"]), "w": rounded(arrays["w"])})
    y = whole[: case.n].astype(np.float64)
    excess = np.abs(y - expected) - 2e-6 * (magnitude + 1)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
    assert np.isnan(whole[case.n]).all(), "written beyond the end"
