"""Norms with elementwise operators in their epilogue, without a GPU: what compiles, and templates."""

from __future__ import annotations

import functools

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from joined_cases import KINDS, NormCase, norm_case
from sampling import by_parts
from template_checks import template_of, with_dynamic_dims

from onnxfuse.kernels.norms import host
from onnxfuse.runtime.plan import Device, Kernel, Launch, TensorSpec

PARTS = 20  # of the kernels for an H200, of which one is compiled in a plain run
CASES = [
    norm_case(kind, norm)
    for kind in (*KINDS, "modulated")
    for norm in (
        NormCase("layer_norm", (3, 100), 768),
        NormCase("add_rms_norm", (2, 150), 3072, has_sum=True),
        NormCase("rms_norm", (2, 150), 1152, "float32"),
    )
] + [norm_case("modulated", NormCase("layer_norm", (1, 270), 20480, "bfloat16"))]


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels with programs in their epilogue, each once."""
    made = [each.made() for each in CASES]
    plans = (plan for each in made for plan in host.candidates(each.node(), each.specs(), device))
    steps = [step for plan in plans for step in plan.steps]
    found = [step.kernel for step in steps if isinstance(step, Launch) and step.kernel.text]
    return list({repr(kernel): kernel for kernel in found if kernel.source != "region"}.values())


@by_parts(PARTS)
def test_compiles_without_spills(part: int) -> None:
    for kernel in kernels(H200)[part::PARTS]:
        check_compiles(kernel, H200)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_for_every_architecture(device: Device) -> None:
    for kernel in to_compile(device, kernels):
        check_compiles(kernel, device)


def test_dynamic_rows() -> None:
    """One template has plans for all sizes, and its kernels take the sizes that a program reads as arguments."""
    made = norm_case("modulated", NormCase("add_layer_norm", (5, 13), 768, has_sum=True)).made()
    template = template_of(made.node(), with_dynamic_dims(made.specs(), 5, 13), H200)
    assert not sorted({where for variant in template.variants for where, _ in variant.fixed})
    assert len(template.kernels) <= 6 and any("struct Program" in kernel.text for kernel in template.kernels)
    for sizes in ((1, 1), (5, 13), (3, 1), (64, 128), (7, 1001)):
        assert template.chosen(sizes) is not None, sizes


def test_a_batch_without_rows_is_no_launch() -> None:
    made = norm_case("several", NormCase("add_layer_norm", (5,), 8, has_sum=True)).made()
    specs = [TensorSpec(tuple(0 if dim == 5 else dim for dim in spec.shape), spec.dtype) for spec in made.specs()]
    found = host.candidates(made.node(), specs, H200)
    assert [plan.steps for plan in found] == [(), ()]
    assert [spec.shape for spec in found[0].outputs] == [(0, 8)] * 5
