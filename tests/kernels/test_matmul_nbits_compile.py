"""Products with quantized weights: all plans of all cases compile, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import DEVICES, H200, check_compiles
from nbits_cases import CASES, GATED, PARALLEL, Case
from sampling import sampled

from onnxfuse.kernels.matmul_nbits.host import candidates, supports
from onnxfuse.runtime.plan import Device, Launch

ONE_OF_EACH = [Case(4, 64, 512, zeros="packed", bias=True), GATED[0], PARALLEL[1]]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled(CASES, 6), ids=str)
def test_all_plans_compile(case: Case, aligned: bool) -> None:
    check_plans(case, H200, aligned)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_plans_compile_for_every_gpu(case: Case, device: Device) -> None:
    check_plans(case, device)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_few_rows_are_one_launch(case: Case) -> None:
    """All weights of a node are read by one launch; without a zero point kind in common they are not."""
    plans = candidates(case.node(), case.specs(), H200)
    assert len(plans[0].steps) == 1
    assert len(plans[-1].steps) >= 1 + len(case.weights)


def test_what_no_kernel_runs_is_refused() -> None:
    case = Case(4, 64, 512, zeros="packed")
    node, dtypes = case.node(), [spec.dtype for spec in case.specs()]
    for attributes, given, reason in (
        ({"bits": 5}, dtypes, "have 5 bits"),
        ({"block_size": 8}, dtypes, "blocks have 8 elements"),
        ({}, ["float64", *dtypes[1:]], "x is float64"),
        ({}, [*dtypes[:3], "int8"], "zero points of w are int8"),
        ({"weight_layout": "kn"}, ["float16", "int32", *dtypes[2:]], "w is int32"),
    ):
        changed = replace(node, attributes={**node.attributes, **attributes})
        assert reason in (supports(changed, given, H200) or "")


def check_plans(case: Case, device: Device, aligned: bool = True) -> None:
    node, specs = case.node(), case.specs(aligned)
    assert supports(node, [spec.dtype for spec in specs], device) is None
    plans = candidates(node, specs, device)
    assert plans
    for plan in plans:
        assert [spec.shape for spec in plan.outputs] == [
            (case.m, n) for name, n in case.weights.items() if name != "up"
        ]
        for step in plan.steps:
            if isinstance(step, Launch) and step.kernel.source.startswith("nbits"):
                check_compiles(step.kernel, device)
