"""Kernels between convolutions compile for every architecture, in registers, and launches fit; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from channels_last_cases import LARGE, RESIZES, SMALL, Case
from kernel_hosts import host_of

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
from sampling import by_parts

from onnxfuse.kernels.image_quantizers import OPERANDS, SCALES
from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec

PARTS = 72  # of the kernels, of which one is compiled in a plain run

CASES = [*SMALL, *LARGE, *(Case("resize", shape, attributes) for shape, attributes in RESIZES)]
BETWEEN_QUANTIZERS = ("average_pool", "global_average_pool", "resize")
SOURCES = (
    "max_pool", "average_pool", "global_average_pool", "global_max_pool", "channel_scale", "batch_norm_activation",
    "resize", "pixel_blocks", "group_norm_nhwc", "group_norm_nhwc_statistics", "group_norm_nhwc_apply",
)  # fmt: skip


def plans(device: Device) -> Iterator[Plan]:
    for case in CASES:
        some = ("float16", "float32", "bfloat16") if case in LARGE else ("float16", "float32")
        for dtype in (*some, *(("int8", "uint8") if case.fusion == "max_pool" else ())):
            for aligned in (True, False) if case not in LARGE else (True,):
                node, specs = case.node(dtype), case.specs(dtype, aligned)
                host = host_of(case.fusion)
                assert host.supports(node, [spec.dtype for spec in specs], device) is None
                found = host.candidates(node, specs, device)
                assert len({repr(each) for each in found}) == len(found), case
                yield from found
        if case.fusion in BETWEEN_QUANTIZERS:
            node = dataclasses.replace(case.node("uint8"), operands=("x", *OPERANDS))
            scalars = [TensorSpec((), "float32" if name in SCALES else "uint8", constant=True) for name in OPERANDS]
            yield from host_of(case.fusion).candidates(node, [case.specs("uint8")[0], *scalars], device)


@functools.cache
def launches(device: Device) -> list[Launch]:
    return [step for plan in plans(device) for step in plan.steps if isinstance(step, Launch)]


def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of the cases, those with vectors first."""
    found = {repr(step.kernel): step.kernel for step in launches(device)}.values()
    return sorted(found, key=lambda kernel: int(kernel.defines["WIDTH"]) == 1)


def allowed_spills(kernel: Kernel) -> int:
    """Return the bytes that may be spilled: one word, stored and loaded, of windows of fp32 over three axes."""
    return 8 if kernel.source == "max_pool" and kernel.defines["T"] == "f32" and kernel.defines["KERNEL_D"] != 1 else 0


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, allowed_spills(kernel))


@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_the_architecture_itself(source: str) -> None:
    kernel = next(step.kernel for step in launches(H200) if step.kernel.source == source)
    assert compile_cubin(dataclasses.replace(kernel, arch_specific=True), 90).code


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_launch_is_one_that_the_device_takes(device: Device) -> None:
    for step in launches(device):
        assert 0 < math.prod(step.block) <= 1024
        assert 0 < step.grid[0] <= 2**31 - 1 and 0 < step.grid[1] <= 65535 and step.grid[2] == 1
        assert step.cluster <= (8 if device.arch >= 90 else 1) and step.grid[0] % step.cluster == 0
        assert step.shared <= device.shared_per_block
        assert step.pdl == (device.arch >= 90)


@pytest.mark.parametrize(
    "fusion", ["max_pool", "average_pool", "global_average_pool", "channel_scale", "resize", "depth_to_space"]
)
def test_channels_first_tensors_have_no_kernel(fusion: str) -> None:
    case = next(each for each in CASES if each.fusion == fusion)
    node = dataclasses.replace(case.node("float16"), attributes=dict(case.attributes))
    refusal = host_of(fusion).supports(node, ["float16"] * len(case.operands), H200)
    assert refusal == f"{fusion}: layout is nchw; the kernel has nhwc"


def test_what_does_not_fit_is_an_error() -> None:
    attributes = {"layout": "nhwc", "kernel_shape": [3, 3]}
    node = FusedNode("max_pool", "n", ("x",), attributes, ("float16",))
    with pytest.raises(ValueError, match="required at least 2 elements with it, for a window of 3"):
        host_of("max_pool").candidates(node, [TensorSpec((1, 1, 8, 4), "float16")], H200)
    with pytest.raises(ValueError, match="required 2 axes between n and channels"):
        host_of("max_pool").candidates(node, [TensorSpec((1, 8, 4), "float16")], H200)
    node = FusedNode("channel_scale", "n", ("x", "gate"), {"layout": "nhwc"}, ("float16",))
    specs = [TensorSpec((2, 8, 8, 4), "float16"), TensorSpec((2, 4), "float16")]
    with pytest.raises(ValueError, match=r"gate has shape \[2, 4\]; required \[2, 1, 1, 4\]"):
        host_of("channel_scale").candidates(node, specs, H200)
    specs = [TensorSpec(shape, "float16") for shape in ((2, 8, 8, 4), (2, 1, 1, 4), (2, 8, 4, 4))]
    node = FusedNode("channel_scale", "n", ("x", "gate", "residual"), {"layout": "nhwc"}, ("float16",))
    with pytest.raises(ValueError, match=r"residual has shape \[2, 8, 4, 4\]; required \[2, 8, 8, 4\], as x"):
        host_of("channel_scale").candidates(node, specs, H200)
    case = Case("space_to_depth", (1, 5, 4, 8), {"blocksize": 2})
    with pytest.raises(ValueError, match="required four axes, and multiples of 2 rows and columns"):
        host_of("space_to_depth").candidates(case.node("float16"), case.specs("float16"), H200)
    with pytest.raises(ValueError, match="6 channels do not make 4 groups"):
        case = Case("group_norm", (1, 2, 2, 6), {"groups": 4})
        host_of("group_norm").candidates(case.node("float16"), case.specs("float16"), H200)
