"""Disentangled attention on a GPU: every plan against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_cases import FLOATS, NUMPY, TF32
from disentangled_cases import CASES, Case, formula
from kernel_hosts import require_support
from kernel_runs import compile_all, launch, result, upload

from onnxfuse.kernels.attention import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.gpu
SIZES = CASES | {
    "a_model": Case(128, 128, batch=8, heads=12, count=256),
    "long": Case(513, 700, batch=2, heads=3, count=256, index_dtype="int32"),
    "long_and_wide": Case(300, 200, heads=3, size=128, value_size=128, count=64),
    "widest": Case(50, 90, size=256, value_size=256, mask="none"),
    "a_model_of_float32": Case(128, 128, batch=2, heads=12, count=256, dtype="float32"),
}


@pytest.fixture(scope="module")
def device() -> Device:
    gpu = cuda_driver.gpu(0)
    found = [plan for case in SIZES.values() for tf32 in (False, True) for plan in plans(case, gpu, tf32)]
    compile_all((step.kernel for plan in found for step in plan.steps if isinstance(step, Launch)), gpu)
    return gpu


def plans(case: Case, gpu: Device, tf32: bool) -> list[Plan]:
    here = dataclasses.replace(gpu, tf32=tf32)
    require_support(host, case.node(), [spec.dtype for spec in case.specs()], here)
    return host.candidates(case.node(), case.specs(), here)


@pytest.mark.parametrize("tf32", [False, True], ids=["exact", "tf32"])
@pytest.mark.parametrize("name", SIZES)
def test_plans(device: Device, name: str, tf32: bool) -> None:
    case = SIZES[name]
    if tf32 and case.dtype != "float32":
        pytest.skip("TF32 changes float32 alone")
    inputs = case.inputs()
    expected, tolerance = formula(case, inputs)
    if tf32:
        tolerance = tolerance + TF32 * 40 * np.abs(inputs["v"]).max()  # of scores up to 20
    read = [upload(value, case.aligned) for value in inputs.values()]
    for plan in plans(case, device, tf32):
        (spec,) = plan.outputs
        written = upload(np.full(spec.shape, 123.0, NUMPY[spec.dtype]), case.aligned)
        launch(plan, read, [written])
        found = result(written, spec, case.aligned).astype(FLOATS)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert np.nan_to_num(np.abs(found - expected) - tolerance, nan=-1.0).max() <= 0
