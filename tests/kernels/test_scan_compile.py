"""Scans without a GPU: their generated kernels compile for every architecture, without spills."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from architectures import DEVICES, check_compiles, to_compile
from scan_cases import CASES, SIZES, fused, specs_of

from onnxfuse.kernels.scan.host import candidates
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.plan import Device, Kernel, Launch, TensorSpec

LARGE = {**SIZES, "b": 1, "t": 2048, "h": 16, "v": 64}


@functools.cache
def calls() -> list[tuple[Call, list[TensorSpec]]]:
    """Return the node of each case, and the specs of its inputs."""
    found = []
    for name, states in [*((name, 16) for name in CASES), ("gated delta", 128)]:
        call = fused(CASES[name].model({"n": states}))
        found.append((call, specs_of(call, CASES[name].arrays({**LARGE, "n": states, "t": 8}))))
    return found


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    plans = [plan for call, specs in calls() for plan in candidates(call.node, specs, device)[:2]]
    steps = [step for plan in plans for step in plan.steps]
    assert len(steps) == len(plans)
    assert all(isinstance(step, Launch) and step.pdl == device.has_pdl for step in steps)
    return [step.kernel for step in steps if isinstance(step, Launch)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_kernels_compile(device: Device) -> None:
    for kernel in to_compile(device, kernels):
        check_compiles(kernel, device)


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_dtypes_compile(dtype: str) -> None:
    for case in (CASES["selective"], CASES["gated delta"]):
        given = replace(case, dtype=dtype)
        call = fused(given.model({"n": 16}))
        (step,) = candidates(call.node, specs_of(call, given.arrays({**SIZES, "n": 16})), DEVICES[1])[0].steps
        assert isinstance(step, Launch)
        check_compiles(step.kernel, DEVICES[1])


def test_more_elements_than_32_bits_count() -> None:
    call = fused(CASES["selective"].model({"n": 16}))
    small = specs_of(call, CASES["selective"].arrays({**SIZES, "n": 16}))
    wide = [replace(spec, shape=tuple(2**24 if size == SIZES["b"] else size for size in spec.shape)) for spec in small]
    ((step,),) = (plan.steps for plan in candidates(call.node, wide, DEVICES[1]))
    assert isinstance(step, Launch) and "const long long own" in (step.kernel.text or "")
    check_compiles(step.kernel, DEVICES[1])
