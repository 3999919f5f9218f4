"""Plans of templates of rows, elements and pixels at sizes of all kinds, launched on a GPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import NUMPY, check, compile_all, launch, result, small_gpu, upload
from row_template_cases import TemplateCase, all_cases, sizes_by_variant
from template_checks import concrete_plan

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.template import Template, Variant

pytestmark = pytest.mark.gpu

ELEMENTS = 1 << 21  # of a tensor, at most
LARGE = 1 << 24  # of a tensor, where a variant is for no fewer elements


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_plans_of_any_size(case: TemplateCase, aligned: bool, dtype: str) -> None:
    for device in (gpu(0), small_gpu()):
        judge(case, aligned, dtype, device)


def judge(case: TemplateCase, aligned: bool, dtype: str, device: Device) -> None:
    template = case.template(dtype, device, aligned)
    compile_all(template.kernels, device)
    found = set()
    for variant, sizes in sizes_by_variant(case, template, ELEMENTS, 2):
        judge_sizes(case, variant, sizes, aligned, dtype, template)
        found.add(id(variant))
    assert found, "no variant takes so few elements"
    if aligned and dtype == "float16":
        for variant, sizes in sizes_by_variant(case, template, LARGE, 1):
            if id(variant) not in found:
                judge_sizes(case, variant, sizes, aligned, dtype, template)


def judge_sizes(
    case: TemplateCase, variant: Variant, sizes: list[int], aligned: bool, dtype: str, template: Template
) -> None:
    arrays, plan = case.arrays(dtype, sizes), concrete_plan(template, variant, sizes)
    read = [upload(array, aligned) for array in arrays.values()]
    written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    launch(plan, read, written)
    for buffer, spec, expected in zip(written, plan.outputs, case.expected(arrays), strict=True):
        check(result(buffer, spec, aligned), expected, slack=2.0)
