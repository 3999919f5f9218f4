"""Products whose rows end in an ArgMax or ArgMin, without a GPU: what the hosts plan, and that the kernels compile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from architectures import A100, H200, T4, check_compiles
from selection_cases import FLOATS, MANY_ROWS, QUANTIZED, Case
from template_checks import check_template
from test_selection_emulated import plans_of

from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.usefixtures("no_cublaslt")
LM_HEAD = Case((1, 1), 128256, 2048)
LM_HEADS = [
    LM_HEAD, replace(LM_HEAD, layout="nk", dtype="bfloat16", cast=True), replace(LM_HEAD, lead=(8,), last=1),
    replace(LM_HEAD, layout="nbits", bits=8), replace(LM_HEAD, layout="nbits", bits=4, lead=(4,)),
    replace(LM_HEAD, dtype="float32"),
]  # fmt: skip


def sources(plan: Plan) -> list[str]:
    return [step.kernel.source for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("device", [T4, A100, H200], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("case", [*LM_HEADS, FLOATS[0], FLOATS[-2], QUANTIZED[-1]], ids=str)
def test_few_rows_store_no_logits(case: Case, device: Device) -> None:
    """Accumulators take less memory than logits, and the first plan compiles without spills."""
    if device is A100 and not case.bits and math.prod(case.lead) > 1:
        pytest.skip("gemm_mma, which stores the logits, is expected to be faster")
    for plan in plans_of(case, device)[:1]:
        *_, last = sources(plan)
        assert last == "select_index" and len(plan.steps) == 2
        for step in plan.steps:
            assert isinstance(step, Launch) and step.shared <= device.shared_per_block
            check_compiles(step.kernel, device)


def test_tiles_of_many_columns_have_one_accumulator() -> None:
    """The rows of an lm_head in float16 have a thousand accumulators, and 4,008 to 8,016 with quantized weights."""
    for case, most in ((LM_HEAD, 4008), (LM_HEADS[3], 8016)):
        (scratch,) = plans_of(case, H200)[0].scratch
        assert scratch <= 8 * most


def test_a_norm_is_in_the_kernel_of_quantized_weights_alone() -> None:
    """Blocks of an lm_head in float16 wait for others, and each would normalize the rows again."""
    for case, first in ((LM_HEAD, ["rms_norm", "gemm_stream"]), (LM_HEADS[3], ["nbits_mma"])):
        assert sources(plans_of(replace(case, lead=(1,), norm=True), H200)[0]) == [*first, "select_index"]


@pytest.mark.parametrize(
    "case", [*MANY_ROWS, Case((1,), 50257, 768), Case((48,), 40, 96, layout="nbits", bits=8)], ids=str
)
def test_rows_of_the_fastest_product_are_reduced_in_a_launch_of_their_own(case: Case) -> None:
    """Products of many rows, and of columns that gemm_stream cannot copy."""
    for plan in plans_of(case, H200):
        assert sources(plan)[-1] == "region" and len(plan.steps) >= 2


@pytest.mark.parametrize("case", [FLOATS[0], replace(QUANTIZED[0], lead=(1,))], ids=str)
def test_a_template_says_what_its_host_says(case: Case) -> None:
    x, *others = case.specs()
    check_template(case.node(), [replace(x, shape=(-1, case.k)), *others], H200, max_kernels=60)
