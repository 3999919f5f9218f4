"""Float products that norms have joined, without a GPU: what the host plans, and that the kernels compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import DEVICES, H200, T4, check_compiles
from normalized_cases import CASES, FEW_ROWS, OTHERS, Case
from sampling import sampled
from template_checks import check_template

from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.kernels.gemm.host import candidates, supports
from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.usefixtures("no_cublaslt")
NORMS = ("rms_norm", "add_rms_norm")


def plans_of(case: Case, device: Device, aligned: bool = True) -> list[list[Launch]]:
    """Return the launches of each plan, whose outputs are those of the case."""
    specs = case.specs(aligned)
    assert supports(case.node(), [spec.dtype for spec in specs], device) is None
    plans = candidates(case.node(), specs, device)
    shapes = [(case.m, n) for n in case.n] + [(case.m, case.k)] * case.adds
    assert plans and all([y.shape for y in plan.outputs] == shapes for plan in plans)
    return [[step for step in plan.steps if isinstance(step, Launch)] for plan in plans]


def normalizes(launches: list[Launch]) -> bool:
    """Return whether one launch computes norm and product."""
    return [step.kernel.source for step in launches] == ["gemm_stream"] and launches[0].kernel.defines["NORM"] == 1


@pytest.mark.parametrize("case", sampled(FEW_ROWS, 4), ids=str)
def test_few_rows_are_one_launch_without_spills(case: Case) -> None:
    plans = plans_of(case, H200)
    assert normalizes(plans[0]) and any(plan[0].kernel.source in NORMS for plan in plans), "a plan to compare with"
    for (launch,) in filter(normalizes, plans):
        assert launch.shared <= H200.shared_per_block and launch.pdl
        check_compiles(launch.kernel, H200)


@pytest.mark.parametrize(("case", "aligned"), [*((case, True) for case in OTHERS if case.m), (FEW_ROWS[0], False)])
def test_other_products_follow_the_kernel_of_the_norm(case: Case, aligned: bool) -> None:
    """Too many rows, rows that are too long for registers, and rows that TMA cannot copy."""
    assert all(plan[0].kernel.source in NORMS and len(plan) >= 2 for plan in plans_of(case, H200, aligned))


def test_blocks_that_wait_for_others_do_not_normalize() -> None:
    assert normalizes(plans_of(Case(1, (8192,), 2048, gate="silu"), H200)[0])
    assert not any(map(normalizes, plans_of(Case(1, (128256,), 2048), H200)))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_gpu_has_plans(device: Device) -> None:
    for case in CASES:
        if (case.m > 8 and device is T4) or (device.arch < 80 and case.dtype == "bfloat16"):
            continue  # products of many rows then need cuBLASLt, or bfloat16 has no mma
        plans = plans_of(case, device)
        if case in FEW_ROWS and device.shared_per_block == H200.shared_per_block:
            assert normalizes(plans[0])
        elif case in OTHERS or device.arch < 90:
            assert not any(map(normalizes, plans))
        if device.arch >= 90 and case is FEW_ROWS[6]:
            check_compiles(plans[0][0].kernel, device)


@pytest.mark.parametrize("case", [FEW_ROWS[0], FEW_ROWS[5], FEW_ROWS[8], OTHERS[0]], ids=str)
def test_a_template_says_what_its_host_says(case: Case) -> None:
    specs = [replace(s, shape=(-1, case.k)) if s.shape == (case.m, case.k) else s for s in case.specs()]
    check_template(case.node(), specs, H200, max_kernels=40)


def test_the_sum_is_written_if_no_product_has_columns() -> None:
    (plan, *_) = candidates(Case(3, (0,), 64).node(), Case(3, (0,), 64).specs(), H200)
    assert isinstance(plan, Plan) and [step.kernel.source for step in plan.steps if isinstance(step, Launch)] == [
        "add_rms_norm"
    ]


def test_what_no_kernel_runs_is_refused() -> None:
    node, dtypes = FEW_ROWS[0].node(), [spec.dtype for spec in FEW_ROWS[0].specs()]
    for attributes, given, reason in (
        ({PROLOGUE: "{}"}, dtypes, "its norm cannot be read: KeyError: 'fusion'"),
        ({"program": "{}"}, dtypes, "its program cannot be read: KeyError: 'dtypes'"),
        ({}, ["float64", *dtypes[1:]], "float64"),
        ({}, [*dtypes[:-1], "float32"], "float32"),
    ):
        changed = replace(node, attributes={**node.attributes, **attributes})
        assert reason in (supports(changed, given, H200) or "")
    several = replace(node, attributes={**node.attributes, "program": "{}"}, output_dtypes=("float16",) * 3)
    assert "operators with several results" in (supports(several, dtypes, H200) or "")
