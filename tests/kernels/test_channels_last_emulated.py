"""Gates, batch norms and blocks of pixels on a CPU, emulated, against float64; and the tests' own pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from channels_last_cases import SMALL, Case
from kernel_hosts import host_of
from sampling import by_parts
from test_pooling_emulated import onnxruntime

from onnxfuse.testing.emulated_launches import emulate

MOVED = ("depth_to_space", "space_to_depth")
ELEMENTWISE = [case for case in SMALL if case.fusion in ("channel_scale", "batch_norm_activation", *MOVED)]
POOLS = [case for case in SMALL if case.fusion in ("max_pool", "average_pool") and case.shape[0]]


@by_parts(2)
@pytest.mark.parametrize(("index", "case"), list(enumerate(ELEMENTWISE)), ids=str)
def test_channels(index: int, case: Case, part: int, tmp_path: Path) -> None:
    """float32 for every other case and float16 for the others, by turns of the parts."""
    dtype = ("float32", "float16")[(index + part) % 2]
    aligned = dtype == "float32" or len(case.shape) == 4
    inputs = case.inputs(dtype)
    (plan,) = host_of(case.fusion).candidates(case.node(dtype), case.specs(dtype, aligned), H200)
    (y,) = emulate(plan, list(inputs.values()), tmp_path, aligned)
    tolerance = {"float32": 1e-5, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(y.astype(np.float64), case.expected(inputs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_the_reference_pools_like_onnxruntime(case: Case) -> None:
    inputs = case.inputs("float32")
    expected = onnxruntime(case.fusion, inputs["x"], dict(case.attributes))
    np.testing.assert_allclose(case.expected(inputs), expected, rtol=1e-5, atol=1e-6)
