"""concat and split compile for every architecture, in registers, and launches fit; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from concat_cases import LARGE, SMALL, Case
from kernel_hosts import host_of

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
from sampling import by_parts

from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorSpec

FUSIONS = ("concat", "split")
PARTS = 4  # of the kernels, of which one is compiled in a plain run


def plans(device: Device, cases: tuple[Case, ...]) -> Iterator[Plan]:
    for case in cases:
        for fusion in FUSIONS:
            for dtype, aligned in (("float16", True), ("float32", case not in SMALL)):
                node, specs = case.node(fusion, dtype), case.specs(fusion, dtype, aligned)
                host = host_of(fusion)
                assert host.supports(node, [spec.dtype for spec in specs], device) is None
                yield from host.candidates(node, specs, device)


@functools.cache
def launches(device: Device, cases: tuple[Case, ...]) -> list[Launch]:
    return [step for plan in plans(device, cases) for step in plan.steps if isinstance(step, Launch)]


def kernels(device: Device) -> list[Kernel]:
    return [step.kernel for step in launches(device, (*SMALL, *LARGE))]


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_in_registers(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        registers = check_compiles(kernel, device, stack=0).registers
        assert registers <= 64, f"{kernel} takes {registers} registers on sm_{device.arch}"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_norms_of_parts_compile(device: Device) -> None:
    for case in (LARGE[0], LARGE[3]):
        node, specs = (each[0] for each in case.norms("float16"))
        for step in host_of(node.fusion).candidates(node, specs, device)[0].steps:
            assert isinstance(step, Launch) and step.kernel.defines["PARTS"] == len(case.channels)
            check_compiles(step.kernel, device, stack=0)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_launch_is_one_that_the_device_takes(device: Device) -> None:
    for step in launches(device, (*SMALL, *LARGE)):
        assert 0 < step.grid[0] <= 2**31 - 1 and step.grid[1:] == (1, 1)
        assert len(step.values) == step.kernel.defines["PARTS"] + 2
        assert step.pdl == (device.arch >= 90)


def test_tensors_of_more_elements_than_a_word_counts() -> None:
    case = Case((1, 2**15, 2**14), (8, 8))
    (plan,) = host_of("concat").candidates(case.node("concat", "float16"), case.specs("concat", "float16"), H200)
    (step,) = plan.steps
    assert isinstance(step, Launch) and step.kernel.defines["INDEX"] == "u64"
    check_compiles(step.kernel, H200, stack=0)


@pytest.mark.parametrize(
    ("channels", "aligned", "width"),
    [((16, 24), True, 8), ((16, 20), True, 4), ((6, 64), True, 2), ((3, 64), True, 1), ((16, 24), False, 1)],
)
def test_vectors_divide_every_part(channels: tuple[int, ...], aligned: bool, width: int) -> None:
    case = Case((2, 3), channels)
    for fusion in FUSIONS:
        (plan,) = host_of(fusion).candidates(case.node(fusion, "float16"), case.specs(fusion, "float16", aligned), H200)
        (step,) = plan.steps
        assert isinstance(step, Launch) and step.kernel.defines["WIDTH"] == width


def test_what_has_no_kernel() -> None:
    case = Case((2, 4, 4), (8, 8))
    for fusion in FUSIONS:
        node, host = case.node(fusion, "float16"), host_of(fusion)
        dtypes = ["float16"] * len(node.operands)
        for change, sentence in (
            ({"layout": "nchw"}, "layout is nchw; the kernel has nhwc"),
            ({"axis": 1}, "axis is 1; the kernel has -1"),
        ):
            other = dataclasses.replace(node, attributes={**node.attributes, **change})
            assert host.supports(other, dtypes, H200) == f"{fusion}: {sentence}"
        many = Case((2, 4, 4), (8,) * 33).node(fusion, "float16")
        refusal = host.supports(many, ["float16"] * len(many.operands), H200)
        assert refusal == f"{fusion}: 33 tensors are the parts of one; the kernel takes 32"
    refusal = host_of("concat").supports(case.node("concat", "float16"), ["float16", "float32"], H200)
    assert refusal == "concat: its tensors are float16, float32; the kernel takes one dtype"


def test_what_does_not_fit_is_an_error() -> None:
    case = Case((2, 4, 4), (8, 8))
    specs = [TensorSpec((2, 4, 4, 8), "float16"), TensorSpec((2, 4, 5, 8), "float16")]
    with pytest.raises(ValueError, match=r"x_1 has shape \[2, 4, 5, 8\]; required \[2, 4, 4, 'channels'\], by x_0"):
        host_of("concat").candidates(case.node("concat", "float16"), specs, H200)
    with pytest.raises(ValueError, match=r"split is \[8, 8\]; required 2 sizes of its channels"):
        host_of("split").candidates(case.node("split", "float16"), [TensorSpec((2, 24), "float16")], H200)
