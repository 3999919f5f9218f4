"""Scans on a GPU: their generated kernels against Loops of onnxruntime in float64, and sessions with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
from kernel_runs import launch, result, upload
from scan_cases import CASES, GATED_DELTA, SELECTIVE, SIZES, ScanCase, expected, fused, specs_of

from onnxfuse import InferenceSession, optimize
from onnxfuse.kernels.scan.host import candidates
from onnxfuse.runtime import cuda_driver

pytestmark = pytest.mark.gpu


def check(case: ScanCase, sizes: Mapping[str, int], rounding: float, every: bool = False) -> None:
    """Compare plans with float64; an error may be four times that of the Loop, which grows with the steps."""
    arrays = case.arrays(sizes)
    call = fused(case.model({"n": sizes["n"]}))
    exact = "int64" if case.dtype == "int64" else "double"
    wanted = expected(case.model(dtype=exact), {name: each.astype(exact) for name, each in arrays.items()})
    usual = expected(case.model(), arrays)
    inputs = [arrays[name] for name in call.proto.input]
    for plan in candidates(call.node, specs_of(call, arrays), cuda_driver.gpu(0))[: None if every else 1]:
        read = [upload(each) for each in inputs]
        written = [upload(np.ones(spec.shape, spec.dtype)) for spec in plan.outputs]
        launch(plan, read, written)
        for name, buffer, spec in zip(call.proto.output, written, plan.outputs, strict=True):
            own, reference = result(buffer, spec, True), wanted[name]
            allowed = rounding * np.abs(reference).max(initial=1) + 4 * np.abs(usual[name] - reference).max(initial=0)
            np.testing.assert_allclose(own, reference, rounding, allowed, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    check(CASES[name], {**SIZES, "t": 37}, 3e-6)


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("states", [1, 3, 16, 64, 256])
def test_sizes(states: int, steps: int) -> None:
    check(SELECTIVE, {**SIZES, "n": states, "t": steps}, 5e-6, every=True)


@pytest.mark.parametrize("states", [16, 64, 128])
def test_states_that_are_matrices(states: int) -> None:
    case = replace(GATED_DELTA, scale=0.1)
    check(case, {**SIZES, "n": states, "v": 64, "t": 100}, 2e-5, every=True)


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2e-3), ("double", 1e-13)])
def test_dtypes(dtype: str, rounding: float) -> None:
    first = (
        "selective" if dtype == "double" else "selective with operators around it"
    )  # Sigmoid has no kernel for double
    for case in (CASES[name] for name in (first, "gated delta", "elementwise")):
        given = replace(case, dtype=dtype)
        check(given, {**SIZES, "n": 16}, rounding)


def test_a_session_runs_the_kernel_at_all_lengths() -> None:
    model, report = optimize(SELECTIVE.model({"n": 16}), verify=False)
    assert report.counts == {"scan": 1}
    session = InferenceSession(model.SerializeToString())
    original = ort.InferenceSession(SELECTIVE.model({"n": 16}).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in original.get_outputs()]
    for steps in (0, 1, 13, 64):
        arrays = SELECTIVE.arrays({**SIZES, "n": 16, "t": steps})
        own, wanted = session.run(names, arrays), original.run(names, arrays)
        np.testing.assert_allclose(own[0], wanted[0], 1e-5, 1e-5)
        assert own[1].size == wanted[1].size
        if steps:
            np.testing.assert_allclose(own[1], wanted[1], 1e-5, 1e-5)
