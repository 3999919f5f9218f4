"""Disentangled attention without a GPU: its kernels compile without spills, and bad nodes are refused by name."""

from __future__ import annotations

import dataclasses

import pytest
from architectures import DEVICES, H200, check_compiles, covering, to_compile
from disentangled_cases import CASES, Case
from sampling import by_parts

from onnxfuse.kernels.attention import host
from onnxfuse.runtime.plan import Device, Kernel, Launch, TensorSpec

FORMS = [Case(128, 128, dtype=dtype) for dtype in ("float16", "bfloat16", "float32")]
FORMS += [CASES[name] for name in ("large_heads", "unaligned")]


def kernels(device: Device) -> list[Kernel]:
    plans = [
        plan
        for here in (device, dataclasses.replace(device, tf32=True))
        for form in FORMS
        if form.size < 128 or device.arch >= 80
        for plan in host.candidates(form.node(), form.specs(), here)
    ]
    steps = [step for plan in plans for step in plan.steps if isinstance(step, Launch)]
    assert all(step.shared <= device.shared_per_block for step in steps)
    return [step.kernel for step in steps]


@by_parts(2)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in covering(to_compile(device, kernels), part, 2):
        check_compiles(kernel, device)


def test_refusals() -> None:
    case = CASES["one_tile"]
    dtypes = dict(zip(case.inputs(), (spec.dtype for spec in case.specs()), strict=True))

    def refused(**changed: str) -> str | None:
        return host.supports(case.node(), [*(dtypes | changed).values()], H200)

    assert refused() is None
    assert refused(key_positions="float32") == (
        "disentangled_attention: key_positions is float32; required float16, as q"
    )
    assert refused(query_index="int32") == (
        "disentangled_attention: the indices are int64 and int32; the kernel takes one of int32, int64"
    )


@pytest.mark.parametrize(
    ("operand", "shape", "sentence"),
    [("key_positions", (3, 80, 64), r"key_positions has shape \[3, 80, 64\]; required \(2, at least 1, 64\)"),
     ("query_positions", (2, 0, 64), r"query_positions has shape \[2, 0, 64\]; required \(2, at least 1, 64\)"),
     ("query_index", (1, 64, 63), r"query_index has shape \[1, 64, 63\]; required \[64, 64\] at its end")],
)  # fmt: skip
def test_shapes_that_do_not_fit(operand: str, shape: tuple[int, ...], sentence: str) -> None:
    case = CASES["one_tile"]
    node, specs = case.node(), list(case.specs())
    place = node.operands.index(operand)
    specs[place] = TensorSpec(shape, specs[place].dtype)
    with pytest.raises(ValueError, match=sentence):
        host.candidates(node, specs, H200)
