"""Products of two computed tensors of integers: all cases compile without a GPU, and one plan serves all sizes."""

from __future__ import annotations

import dataclasses

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles
from matmul_cases import CASES, Case
from sampling import sampled
from template_checks import check_template

from onnxfuse.kernels.quantized.host import candidates, supports
from onnxfuse.runtime.plan import Device, Launch, TensorSpec

WITH_ROWS = [case for case in CASES if case.m]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled(WITH_ROWS, 3), ids=str)
def test_all_plans_compile(case: Case, aligned: bool) -> None:
    for plan in candidates(case.node(), case.specs(aligned), H200):
        for step in plan.steps:
            assert isinstance(step, Launch)
            check_compiles(step.kernel, H200)


@pytest.mark.parametrize("device", [each for each in DEVICES if each is not T4], ids=lambda each: f"sm_{each.arch}")
def test_plans_compile_for_every_gpu(device: Device) -> None:
    (step,) = candidates(CASES[0].node(), CASES[0].specs(), device)[0].steps
    assert isinstance(step, Launch)
    check_compiles(step.kernel, device)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[4]], ids=str)
def test_one_kernel_serves_every_batch_and_length(case: Case) -> None:
    """The batch, the rows, and the keys, which are n of the scores and k of the values."""
    longer = "n" if case.w_order == "nk" else "k"
    sizes = {"batch": (3, -1), "m": (151, -2), longer: (353, -3)}
    one = dataclasses.replace(case, **{name: size for name, (size, _) in sizes.items()})
    dynamic = dict(sizes.values())
    specs = [TensorSpec(tuple(dynamic.get(n, n) for n in each.shape), each.dtype) for each in one.specs()]
    # The code of a quantizer has sizes as numbers or as arguments, so that its kernels differ.
    template = check_template(one.node(), specs, A100, max_kernels=8, own_tilings=bool(case.after))
    assert (
        sum(kernel.source == "quantized_matmul" for kernel in template.kernels) <= 4
    )  # of two tiles, with a program and without


def test_older_gpus_run_the_body() -> None:
    case = CASES[0]
    assert "the kernel needs 8.0" in (supports(case.node(), [each.dtype for each in case.specs()], T4) or "")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [({"w_scale": "float16"}, "w_scale is float16; required float32"), ({"x": "int16"}, "x is int16; required int8"),
     ({"x_zero_point": "int8"}, "x_zero_point is int8; required uint8")],
)  # fmt: skip
def test_what_no_kernel_runs(changed: dict[str, str], sentence: str) -> None:
    dtypes = {name: each.dtype.name for name, each in CASES[0].arrays().items()} | changed
    assert sentence in (supports(CASES[0].node(), list(dtypes.values()), A100) or "")


def test_operands_that_do_not_fit_are_an_error() -> None:
    case = CASES[0]
    specs = case.specs()
    specs[3] = TensorSpec((2, 144, 2, 63), "uint8")
    with pytest.raises(ValueError, match=r"x has shape \[2, 130, 2, 64\] and w \[2, 144, 2, 63\]"):
        candidates(case.node(), specs, H200)
