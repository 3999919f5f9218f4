"""Products of two computed tensors of integers on a GPU against exact sums."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_runs import compile_all
from matmul_cases import CASES, Case
from test_quantized_gpu import output

from onnxfuse.kernels.quantized.host import candidates
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Launch

pytestmark = pytest.mark.gpu
LARGE = [
    Case(512, 512, 64, batch=2, heads=12, x_zero=127, w_zero=130, after="mask"),
    Case(512, 64, 512, batch=2, heads=12, x_layout="bhsd", w_order="kn", w_zero=126, out_layout="packed",
         after="integers"),
    Case(1, 4096, 128, heads=8, w_heads=2, x_zero=3, w_dtype="int8", after="mask"),
    Case(384, 384, 1024, x_dtype="int8", w_dtype="int8", w_zero=-3, w_order="kn"),
]  # fmt: skip


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_every_plan(case: Case, aligned: bool) -> None:
    device, arrays = dataclasses.replace(cuda_driver.gpu(0), tf32=False), case.arrays()
    plans = candidates(case.node(), case.specs(aligned), device)
    compile_all((step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)), device)
    for plan in plans:
        y = output(plan, list(arrays.values()), aligned)
        if y.size:
            case.check(arrays, y)
            np.testing.assert_array_equal(output(plan, list(arrays.values()), aligned), y)
