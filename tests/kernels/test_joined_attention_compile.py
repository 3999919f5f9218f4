"""Group norms and attention with elementwise operators in their epilogue, without a GPU: plans, and what compiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from attention_cases import Case
from joined_cases import (
    GroupNormCase,
    JoinedCase,
    attention_case,
    group_norm_case,
)
from kernel_hosts import host_of, require_support
from sampling import by_parts, sampled
from template_checks import template_of, with_dynamic_dims

from onnxfuse.kernels.tensors import ITEM_BYTES
from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorMap

PARTS = 40  # a plain run compiles one of so many parts of the kernels for an H200


def cases() -> Iterator[JoinedCase]:
    for kind in ("several", "only float32", "modulated", "quantized"):
        if kind != "quantized":
            yield group_norm_case(kind, GroupNormCase((1, 64, 64, 64), 8))
            yield group_norm_case(kind, GroupNormCase((2, 64, 32, 32), 8, "nchw"))
        yield attention_case(kind, Case(heads=4, kv_heads=4, queries=512, keys=512))
        yield attention_case(kind, Case(heads=4, kv_heads=4, queries=512, keys=512, dtype="float32"))
        yield attention_case(kind, Case(heads=8, kv_heads=2, queries=1, keys=2048, size=128, value_size=128))


def plans(each: JoinedCase, device: Device) -> list[Plan]:
    made = each.made()
    node, specs = made.node(), made.specs()
    require_support(host_of(node.fusion), node, [spec.dtype for spec in specs], device)
    return host_of(node.fusion).candidates(node, specs, device)


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels with programs in their epilogue, each once."""
    steps = [step for each in cases() for plan in plans(each, device) for step in plan.steps]
    found = [step.kernel for step in steps if isinstance(step, Launch) and step.kernel.text]
    return list({repr(kernel): kernel for kernel in found if kernel.source != "region"}.values())


@by_parts(PARTS)
def test_compiles_without_spills(part: int) -> None:
    for kernel in kernels(H200)[part::PARTS]:
        assert "wgmma" not in check_compiles(kernel, H200).log  # "… are serialized due to …"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_for_every_architecture(device: Device) -> None:
    for kernel in to_compile(device, kernels):
        assert "wgmma" not in check_compiles(kernel, device).log  # "… are serialized due to …"


def test_the_program_is_in_the_kernel_first() -> None:
    """The plan of two launches, or more, comes last."""
    for each in cases():
        found = plans(each, H200)
        last = [[step.kernel.source for step in plan.steps if isinstance(step, Launch)][-1] for plan in found]
        assert last[0] != "region" and "region" in last


def test_tensor_maps_end_in_their_tensors() -> None:
    """A program can store outputs of other sizes than those that TMA stores."""
    for each in cases():
        for plan in plans(each, H200):
            launches = [step for step in plan.steps if isinstance(step, Launch)]
            maps = [one for step in launches for one in step.arguments if isinstance(one, TensorMap)]
            for one in (one for one in maps if one.pointer.kind == "output"):
                spec = plan.outputs[one.pointer.index]
                last = sum((size - 1) * stride for size, stride in zip(one.sizes[1:], one.strides, strict=True))
                assert last + 2 * one.sizes[0] <= math.prod(spec.shape) * ITEM_BYTES[spec.dtype], each


DYNAMIC = [
    group_norm_case("broadcasts", GroupNormCase((5, 13, 7, 64), 4)),
    group_norm_case("modulated", GroupNormCase((5, 64, 13, 8), 4, "nchw")),
    attention_case("modulated", Case(batch=5, heads=4, kv_heads=4, queries=13, keys=13)),
]


@pytest.mark.parametrize("each", sampled(DYNAMIC, 3), ids=str)
def test_dynamic_sizes(each: JoinedCase) -> None:
    """One template has plans for all sizes, and its kernels take the sizes that a program reads as arguments."""
    made = each.made()
    template = template_of(made.node(), with_dynamic_dims(made.specs(), 5, 13), H200)
    assert not sorted({where for variant in template.variants for where, _ in variant.fixed})
    assert len(template.kernels) <= 12 and any(kernel.text for kernel in template.kernels)
    for sizes in ((1, 1), (5, 13), (3, 1), (64, 128), (7, 1001)):
        assert template.chosen(sizes) is not None, sizes
