"""Products and convolutions of integers: all plans of all cases compile, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, covering
from quantized_cases import AFTER, CASES, CONVS, DEQUANTIZED, GEMMS, OF_FLOAT8, Case
from sampling import by_parts

from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.quantized import columns, hopper
from onnxfuse.kernels.quantized.host import candidates, supports
from onnxfuse.kernels.region import host as region
from onnxfuse.kernels.tensors import ITEM_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorMap
from onnxfuse.runtime.symint import only_first_plans

IN_INTEGERS = [case for case in CASES if case.k % 16 == 0 and case.m and case.layout == "nk"]
IN_INTEGERS = [case for case in IN_INTEGERS if case.group == 1 and case.w_zero is None and case not in DEQUANTIZED]
PARTS = 8  # of the kernels of all plans


def plans_of(case: Case, device: Device, aligned: bool = True) -> list[Plan]:
    node, specs = case.node(), case.specs(aligned)
    assert supports(node, [spec.dtype for spec in specs], device) is None
    return candidates(node, specs, device)


def kernels_of(plans: list[Plan]) -> list[Kernel]:
    """Return the kernels of plans except those of regions, which have tests of their own."""
    kernels = [step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)]
    return [kernel for kernel in kernels if kernel.source != "region"]


@by_parts(PARTS)
def test_all_plans_compile(part: int) -> None:
    plans = [plan for case in CASES for aligned in (True, False) for plan in plans_of(case, H200, aligned)]
    for kernel in covering(kernels_of(plans), part, PARTS):
        check_compiles(kernel, H200, spills=128)


@pytest.mark.parametrize("n", [254, 255])
@pytest.mark.parametrize("config", [each for each in hopper.CONFIGS if not each.pingpong], ids=lambda each: each.name)
def test_operands_of_narrow_vectors_are_not_loaded_beyond_registers(
    config: HopperConfig, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "CONFIGS", (config,))
    kernels = [
        each for each in kernels_of(plans_of(Case(12544, n, 64, after="residual"), H200)) if "WIDTH" in each.defines
    ]
    assert kernels
    for kernel in kernels:
        check_compiles(kernel, H200)


@by_parts(2)
@pytest.mark.parametrize("device", [each for each in DEVICES if each is not T4], ids=lambda each: f"sm_{each.arch}")
def test_plans_compile_for_every_gpu(device: Device, part: int) -> None:
    cases = [replace(GEMMS[3], dtype="float16"), CONVS[1], AFTER[-3], OF_FLOAT8[-1]]
    plans = [plan for case in cases for plan in plans_of(case, device)[:2]]
    for kernel in covering(kernels_of(plans), part, 2):
        check_compiles(kernel, device, spills=None)


@pytest.mark.parametrize("case", IN_INTEGERS, ids=str)
def test_hopper_multiplies_integers_in_one_launch_after_the_sums(case: Case) -> None:
    sources = [step.kernel.source for step in plans_of(case, H200)[0].steps if isinstance(step, Launch)]
    assert sources[-1] in ("quantized_gemm", "quantized_conv")
    assert sources[:-1] == (["quantized_sums"] if case.x_zero is not None and not case.sums else [])


@pytest.mark.parametrize(
    ("case", "width"),
    [(GEMMS[0], 4), (replace(GEMMS[0], dtype="float16"), 8), (replace(GEMMS[0], after="relu"), 8),
     (replace(GEMMS[0], n=254), 2), (replace(GEMMS[0], n=100, after="relu"), 4)],
    ids=str,
)  # fmt: skip
def test_a_thread_stores_as_many_columns_as_divide_a_row(case: Case, width: int) -> None:
    (step,) = plans_of(case, H200)[0].steps
    assert isinstance(step, Launch) and step.kernel.defines["WIDTH"] == width
    (_, weights) = (each for each in step.arguments if isinstance(each, TensorMap))
    assert len(weights.sizes) == (4 if width > 2 else 2)


(STEM,) = (case for case in CONVS if case.k == 3 and not case.first)


@pytest.mark.parametrize("sums", [False, True])
def test_hopper_multiplies_integers_of_few_channels_as_columns(sums: bool) -> None:
    kernels = [step.kernel for step in plans_of(replace(STEM, sums=sums), H200)[0].steps if isinstance(step, Launch)]
    added = [] if sums else ["quantized_sums"]
    assert [kernel.source for kernel in kernels] == ["quantized_columns", *added, "quantized_gemm"]
    assert not any(kernel.defines["WEIGHTS_CONSTANT"] for kernel in kernels[1:])  # the first launch writes them


@pytest.mark.parametrize("case", [case for case in CONVS if case.first], ids=str)
def test_integers_of_images_with_their_channels_first_are_multiplied_in_one_launch(case: Case) -> None:
    for device in (A100, H200):
        (step,) = plans_of(case, device)[0].steps
        assert isinstance(step, Launch) and step.kernel.defines["EIGHT_BITS"]


def test_sums_of_images_with_their_channels_first_are_exact() -> None:
    longest = replace(STEM, k=4, kernel=(11, 11), first=True)  # 484 products
    assert "'EIGHT_BITS': 1" in str(plans_of(longest, H200)[0])
    assert "'EIGHT_BITS': 1" not in str(plans_of(replace(longest, kernel=(11, 12)), H200))


def test_rows_of_taps_fit_into_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = replace(STEM, k=83, kernel=(3, 3))  # a row of 747 bytes
    step = plans_of(longest, H200)[0].steps[0]
    assert isinstance(step, Launch) and step.kernel.source == "quantized_columns"
    check_compiles(step.kernel, H200, spills=None)
    assert "quantized_columns" not in str(plans_of(replace(longest, k=84), H200))  # a row of 756 bytes
    monkeypatch.setattr(columns, "MAX_BYTES", 1 << 15)
    assert "quantized_columns" not in str(plans_of(STEM, H200))


@pytest.mark.parametrize("case", [GEMMS[3], CONVS[1], AFTER[-3]], ids=str)
def test_where_the_first_plan_suffices_no_other_is_made(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others dequantize x and w, or run the operators after the product, by kernels that are generated slowly."""
    first = plans_of(case, H200)[0]
    monkeypatch.setattr(region, "candidates", lambda *_: pytest.fail("a kernel was generated"))
    with only_first_plans():
        assert plans_of(case, H200)[0] == first


@pytest.mark.parametrize("after", ["relu", "residual"])
@pytest.mark.parametrize("case", [replace(GEMMS[3], dtype="float16"), CONVS[-2], OF_FLOAT8[6]], ids=str)
def test_maps_of_results_end_with_these(case: Case, after: str) -> None:
    """Kernels of float16 numbers, whose programs alone store y in 8 bits."""
    case = replace(case, after=after)
    for plan in plans_of(case, H200):
        for map_ in (each for step in plan.steps if isinstance(step, Launch) for each in step.arguments):
            if isinstance(map_, TensorMap) and map_.pointer.kind == "output":
                assert map_.sizes[0] * ITEM_BYTES[map_.dtype] == plan.outputs[0].shape[-1]


@pytest.mark.parametrize("case", OF_FLOAT8[:4], ids=str)
def test_threads_have_registers_for_two_sets_of_float8_sums(case: Case) -> None:
    """One of the sums of a stage, and one of all stages; a tile of 192x128, whose threads have 160, spills one."""
    for plan in plans_of(case, H200):
        for step in plan.steps:
            if isinstance(step, Launch) and step.kernel.source == "quantized_gemm":
                check_compiles(step.kernel, H200, spills=16 if step.kernel.defines["CONSUMERS"] == 3 else 0)


@pytest.mark.parametrize("device", [A100, H200], ids=lambda each: each.name)
def test_layers_that_differ_in_scales_and_zero_points_have_the_same_kernels(device: Device) -> None:
    case = AFTER[0]
    node, (scale, zero) = case.node(), case.step
    text = str(node.attributes["program"]).replace(f'"value": {scale}', '"value": 0.7').replace(f": {zero}}}", ": 9}")
    other = replace(node, attributes={**node.attributes, "program": text})
    plans = [candidates(each, case.specs(), device)[0] for each in (node, other)]
    first, second = ([step for step in plan.steps if isinstance(step, Launch)] for plan in plans)
    assert text != node.attributes["program"] and [each.kernel for each in first] == [each.kernel for each in second]
    assert first[-1].arguments != second[-1].arguments


@pytest.mark.parametrize("case", [GEMMS[0], CONVS[0], OF_FLOAT8[0]], ids=str)
def test_other_gpus_multiply_numbers(case: Case) -> None:
    for plan in plans_of(case, A100):
        assert len(plan.steps) >= 3 and len(plan.scratch) >= 2
