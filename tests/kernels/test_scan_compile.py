"""Scans without a GPU: their generated kernels compile for every architecture, without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import DEVICES, check_compiles
from scan_cases import CASES, SIZES, fused, specs_of

from onnxfuse.kernels.scan.host import candidates
from onnxfuse.runtime.plan import Device, Launch

LARGE = {**SIZES, "b": 1, "t": 2048, "h": 16, "v": 64}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize(("name", "states"), [*((name, 16) for name in CASES), ("gated delta", 128)])
def test_kernels_compile(name: str, states: int, device: Device) -> None:
    case, sizes = CASES[name], {**LARGE, "n": states}
    call = fused(case.model({"n": states}))
    for plan in candidates(call.node, specs_of(call, case.arrays({**sizes, "t": 8})), device)[:2]:
        (step,) = plan.steps
        assert isinstance(step, Launch) and step.pdl == device.has_pdl
        check_compiles(step.kernel, device)


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
