"""Products and convolutions of integers against exact sums: every plan, aligned and not, and what follows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from kernel_runs import compile_all, launch, upload
from quantized_cases import CASES, NUMPY, Case

from onnxfuse.kernels.quantized.host import candidates, supports
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.gpu
OF_INTEGERS = ("quantized_gemm", "quantized_conv")


@pytest.fixture(scope="module")
def gpu() -> Device:
    return dataclasses.replace(cuda_driver.gpu(0), tf32=False)  # numbers of float32 keep their precision


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan(gpu: Device, case: Case, aligned: bool) -> None:
    node, specs, arrays = case.node(), case.specs(aligned), case.arrays()
    assert supports(node, [spec.dtype for spec in specs], gpu) is None
    plans = candidates(node, specs, gpu)
    compile_all((step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)), gpu)
    for plan in plans:
        of_integers = any(isinstance(step, Launch) and step.kernel.source in OF_INTEGERS for step in plan.steps)
        y = output(plan, list(arrays.values()), aligned)
        if y.size:
            case.check(arrays, y, exact=of_integers)


@pytest.mark.parametrize("case", [each for each in CASES if each.m and each.m * each.k < 1 << 14][:12], ids=str)
def test_small_gpus_take_several_tiles_a_block(gpu: Device, case: Case) -> None:
    node, specs, arrays = case.node(), case.specs(), case.arrays()
    for plan in candidates(node, specs, dataclasses.replace(gpu, multiprocessors=2))[:4]:
        case.check(arrays, output(plan, list(arrays.values()), True), exact=len(plan.scratch) < 2)


def output(plan: Plan, arrays: Sequence[np.ndarray], aligned: bool) -> np.ndarray:
    (spec,) = plan.outputs
    read = [upload(np.asarray(array), aligned) for array in arrays]
    written = upload(np.zeros(spec.shape, NUMPY[spec.dtype]), aligned)
    written[:] = 0x55
    launch(plan, read, [written])
    after = written.base[written.data.ptr - written.base.data.ptr + written.nbytes :].get()
    assert (after == 0xFF).all(), "written beyond the end"
    return np.asarray(written.get().view(NUMPY[spec.dtype]).reshape(spec.shape))
