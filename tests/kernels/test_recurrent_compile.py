"""The kernels of recurrent layers compile for every architecture and stay in registers; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, to_compile
from recurrent_cases import CASES, STATES, Case
from sampling import by_parts

from onnxfuse.kernels.recurrent import host
from onnxfuse.runtime.plan import Device, Kernel, Launch

PARTS = 12  # of the kernels; a plain run compiles one part
SIZES = (
    (32, 1), (128, 1), (128, 40), (300, 3), (512, 1), (512, 32), (512, 200),
)  # fmt: skip


@functools.cache
def launches(device: Device) -> list[Launch]:
    """Return the last launches of the plans of layers of several sizes, and of every form."""
    of_sizes = [Case(fusion, 20, batch, 64, hidden, extra=STATES) for fusion in host.GATES for hidden, batch in SIZES]
    found = []
    for case in [dataclasses.replace(each, dtype=dtype) for each in (*of_sizes, *CASES.values())
                 for dtype in ("float16", "float32", "bfloat16")]:  # fmt: skip
        node, specs = case.node(), case.specs()
        if host.supports(node, [spec.dtype for spec in specs], device) is None:
            layer = host.layer_of(node, specs)
            found += [host.steps_of(node, specs, layer, config, device) for config in host.ranked(layer, device)]
    return found


def kernels(device: Device) -> list[Kernel]:
    return [step.kernel for step in launches(device)]


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, stack=0)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_launch_fits_the_device(device: Device) -> None:
    for step in launches(device):
        assert step.shared <= device.shared_per_block
        assert step.cluster <= (16 if device.shared_per_block > 200 << 10 else 8) and step.grid[0] % step.cluster == 0
        assert step.cluster == 1 or device.arch >= 90
        assert step.pdl == (device.arch >= 90)


def test_few_multiprocessors_run_no_cluster_of_16_blocks() -> None:
    def largest(multiprocessors: int) -> int:
        device = dataclasses.replace(H200, multiprocessors=multiprocessors)
        layer = host.layer_of(case.node(), case.specs())
        return max(config.cluster for config in host.configs(layer, device))

    case = Case(hidden=256, dtype="float16")
    assert [largest(count) for count in (20, 64, 78, 114, 132, 148)] == [8, 8, 8, 16, 16, 16]


def test_what_does_not_fit_on_chip_is_refused() -> None:
    def refused(hidden: int, dtype: str, device: Device) -> str | None:
        case = Case(hidden=hidden, dtype=dtype)
        return host.supports(case.node(), [spec.dtype for spec in case.specs()], device)

    for hidden, dtype, device in (512, "float16", H200), (512, "float32", H200), (128, "float16", A100):
        assert refused(hidden, dtype, device) is None
    told = "lstm: no kernel keeps the 8192 KiB of recurrent weights of 1024 units on chip"
    assert refused(1024, "float16", H200) == told
    assert "no kernel keeps the 2048 KiB" in str(refused(512, "float16", A100))
    assert "x is bfloat16" in str(refused(64, "bfloat16", T4))


def test_shapes_that_do_not_fit_are_an_error() -> None:
    case = Case(extra=STATES)
    specs = case.specs()
    for index, shape, told in (
        (1, (1, 24, 9), "w has shape"), (2, (1, 23, 6), "r"), (3, (1, 47), r"bias has shape \[1, 47\]"),
        (4, (1, 3, 6), r"initial_h has shape \[1, 3, 6\]; required \[1, 2, 6\]"),
    ):  # fmt: skip
        wrong = [dataclasses.replace(spec, shape=shape) if i == index else spec for i, spec in enumerate(specs)]
        with pytest.raises(ValueError, match=told):
            host.candidates(case.node(), wrong, H200)


def test_no_sequence_is_no_launch() -> None:
    case = Case(batch=0, dtype="float16")
    (plan,) = host.candidates(case.node(), case.specs(), H200)
    assert plan.steps == () and [spec.shape for spec in plan.outputs] == [(5, 1, 0, 6), (1, 0, 6), (1, 0, 6)]
