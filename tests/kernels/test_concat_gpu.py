"""concat and split on a GPU: every element arrives, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from concat_cases import LARGE, SMALL, Case, bits, whole
from kernel_hosts import host_of, require_support
from kernel_runs import DTYPES, NUMPY, launch, result, small_gpu, upload

from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


def check(case: Case, dtype: str, device: Device, aligned: bool = True) -> None:
    parts = case.parts(dtype)
    for fusion, read, expected in (("concat", parts, [whole(parts)]), ("split", [whole(parts)], parts)):
        host, node, specs = host_of(fusion), case.node(fusion, dtype), case.specs(fusion, dtype, aligned)
        require_support(host, node, [spec.dtype for spec in specs], device)
        for plan in host.candidates(node, specs, device):
            given = [upload(each, aligned) for each in read]
            written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
            launch(plan, given, written)
            for buffer, spec, value in zip(written, plan.outputs, expected, strict=True):
                np.testing.assert_array_equal(bits(result(buffer, spec, aligned)), bits(value))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tensors(device: Device, dtype: str, case: Case, aligned: bool) -> None:
    for gpu in (device, small_gpu()):  # with few multiprocessors, threads have several vectors
        check(case, dtype, gpu, aligned)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_sizes_of_models(device: Device, case: Case) -> None:
    check(case, "float16", device)


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_norms_of_parts(device: Device, case: Case) -> None:
    results = []
    for node, specs, inputs in zip(*case.norms("float16"), case.norm_inputs("float16"), strict=True):
        (plan,) = host_of(node.fusion).candidates(node, specs, device)
        written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype])) for spec in plan.outputs]
        launch(plan, [upload(each) for each in inputs], written)
        results.append(result(written[0], plan.outputs[0], aligned=True))
    assert results[1].any() or not results[1].size
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))
