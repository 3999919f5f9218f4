"""Templates of norms, softmax, elements, embeddings, rotary embeddings and copies: few kernels for all sizes."""

from __future__ import annotations

import functools

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, to_compile
from row_template_cases import TemplateCase, all_cases
from sampling import by_parts, sampled
from template_checks import template_of

from onnxfuse.kernels.tensors import divisor
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, TensorSpec

PARTS = 24  # of the kernels, of which one is compiled in a plain run
CASES = all_cases()
SHORT = [case for case in CASES if not any(dim in (1023, 40960) for shape in case.shapes.values() for dim in shape)]


@pytest.mark.parametrize("device", [H200, A100, T4], ids=lambda device: device.name)
@pytest.mark.parametrize("case", sampled(CASES, 12), ids=str)
def test_few_kernels_take_all_sizes(case: TemplateCase, device: Device) -> None:
    for dtype, aligned in ("float16", True), ("float32", True), ("float16", False):
        case.check(dtype, device, aligned)


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of all templates: fp16 in full, rows of usual lengths in fp32."""
    found = [kernel for case in CASES for kernel in case.template("float16", device).kernels]
    found += [kernel for case in SHORT for kernel in case.template("float32", device).kernels]
    return list({repr(kernel): kernel for kernel in found}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", sampled(DEVICES, 9), ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20, (1 << 30) + 1, (1 << 31) - 1])
def test_quotients_by_a_divisor_are_exact(size: int) -> None:
    value, multiplier = (int(scalar.value) for scalar in divisor(size))
    assert (value, multiplier < 1 << 63) == (size, True)
    numbers = {0, 1, size - 1, size, size + 1, 2 * size - 1, (1 << 31) - 1, (1 << 31) - 1 - (1 << 31) % size}
    assert all((n << 2) * multiplier >> 64 == n // size for n in numbers if n < 1 << 31)


@pytest.mark.parametrize("fusion", ["layer_norm", "rms_norm"])
def test_kernels_of_a_symbolic_scale_have_a_constant_row(fusion: str) -> None:
    """A scale that is an input of the model may have any length: a kernel is for that of the run it is made for."""
    weights = ("scale", "bias") if fusion == "layer_norm" else ("scale",)
    node = FusedNode(fusion, "n", ("x", *weights), {"epsilon": 1e-5}, ("float16",))
    specs = [TensorSpec((-1, -2), "float16"), *(TensorSpec((-2,), "float16") for _ in weights)]
    template = template_of(node, specs, H200)
    assert all(isinstance(kernel.defines["ROW"], int) for kernel in template.kernels)
    check_compiles(template.kernels[0], H200)
