"""Transposed convolutions without a GPU: what the host plans, and that kernels compile without spills."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from architectures import A100, DEVICES, H200, OF_ARCH, check_compiles, check_sliced_launches, to_compile
from conv_cases import with_vectors
from conv_transpose_cases import BOTH, HOPPER, SAME, WITH_VECTORS, ConvTransposeCase, depthwise, shuffled
from sampling import by_parts

from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.conv_transpose import depthwise as depthwise_host
from onnxfuse.kernels.conv_transpose import hopper, host, mma
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Pointer, TensorMap, TensorSpec

PARTS = 72  # of the kernels, of which one is compiled in a plain run
IN_FULL = (75, 80)  # the others differ in shared memory, and are tested with fewer convolutions


def cases(device: Device) -> Iterator[ConvTransposeCase]:
    """Yield copies of every width, phases and products, axes and groups; in fp32 with and without TF32."""
    large = ConvTransposeCase(32, 512, 256, (16, 16), (4, 4), (2, 2), SAME, extra=BOTH)
    product = shuffled(8, 256, 128, (32, 32), (2, 2), extra=BOTH, residual_first=False, activation="silu")
    for dtype, tf32 in (("float16", False), ("float32", True), ("float32", False)):
        yield from (replace(case, dtype=dtype, tf32=tf32) for case in (large, product))
    yield depthwise(8, 64, (64, 64), (4, 4), (2, 2), SAME)
    if device.arch not in IN_FULL:
        return
    yield from (replace(case, dtype="bfloat16") for case in (large, product))
    yield shuffled(8, 64, 1, (320, 320), (2, 2))
    for c, m in ((20, 60), (6, 62), (5, 63)):
        for dtype in ("float16", "float32"):
            yield ConvTransposeCase(2, c, m, (57, 56), (3, 3), (2, 2), SAME, dtype=dtype, extra=BOTH)
            yield shuffled(2, c, m, (57, 56), (2, 2), dtype=dtype, extra=BOTH)
    yield ConvTransposeCase(2, 256, 256, (28, 28), (3, 3), (2, 1), SAME, (2, 3), group=32)
    yield ConvTransposeCase(2, 64, 64, (28, 28), (4, 4), (2, 2), SAME, aligned=False)
    yield ConvTransposeCase(2, 64, 64, (128,), (16,), (8,), (4, 4))
    yield ConvTransposeCase(2, 64, 64, (8, 16, 16), (4, 4, 4), (2, 2, 2), (1,) * 6)
    yield ConvTransposeCase(2, 512, 21, (20, 20), (64, 64), (32, 32), (16, 16, 16, 16))
    yield depthwise(2, 20, (28, 28), (8, 8), (4, 4), (2, 2, 2, 2), dtype="float32", extra=BOTH)
    yield depthwise(2, 21, (20, 20), (64, 64), (32, 32), (16, 16, 16, 16))
    yield from (*WITH_VECTORS["mma"][::3], *WITH_VECTORS["depthwise"][::3])


def taken(device: Device) -> Iterator[ConvTransposeCase]:
    yield from (case for case in cases(device) if device.arch >= 80 or case.dtype != "bfloat16")


def ways(case: ConvTransposeCase, device: Device) -> list[Implementation]:
    """Return all ways but those by cuDNN."""
    conv = case.problem()
    if case.w_hwio:
        return depthwise_host.implementations(conv, device)
    return [mma.implementation(conv, config, device) for config in mma.configs(conv, device)]


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of all tiles for these convolutions; tiles differ in sizes."""
    every = (step for case in taken(device) for way in ways(case, device) for step in way.steps)
    found = [step.kernel for step in every if isinstance(step, Launch)]
    return list({repr(kernel): kernel for kernel in found}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_launches_fit_the_device(device: Device) -> None:
    for case in taken(device):
        conv, found = case.problem(), ways(case, device)
        assert found and len({way.name for way in found}) == len(found)
        for way in found:
            check_sliced_launches(way, device, conv.pixels * conv.m)
            assert all(Pointer("scratch", 0) in step.arguments for step in way.steps if len(way.steps) > 1)  # type: ignore[union-attr]


def test_a_filter_as_large_as_its_stride_is_one_product() -> None:
    """The product has the columns of all phases; padding, or pixels beyond the filter, require several products."""
    conv = shuffled(2, 32, 24, (9, 7), (2, 3)).problem()
    assert (mma.is_shuffled(conv), mma.phases(conv), mma.columns(conv), mma.positions(conv)) == (True, 1, 144, 126)
    for other in (
        replace(conv, pads_begin=(1, 0), y_sizes=(17, 21)),
        replace(conv, y_sizes=(19, 21)),
        replace(conv, dilations=(2, 1), y_sizes=(19, 21)),
        replace(conv, group=2),
    ):
        assert (mma.is_shuffled(other), mma.phases(other)) == (False, 6)


def test_few_positions_divide_k_and_many_do_not() -> None:
    few = ConvTransposeCase(1, 1024, 128, (8, 8), (4, 4), (2, 2), SAME).problem()
    many = ConvTransposeCase(32, 512, 256, (16, 16), (4, 4), (2, 2), SAME).problem()
    assert [len(mma.implementations(conv, H200)[0].steps) for conv in (few, many)] == [2, 1]


@pytest.mark.parametrize(
    ("dtype", "tf32", "arch", "exact"),
    [
        ("float32", True, 80, False), ("float32", False, 80, True), ("float32", True, 75, True),
        ("float16", True, 75, False), ("float16", False, 90, False), ("bfloat16", True, 80, False),
    ],
)  # fmt: skip
def test_float32_is_rounded_to_tf32_only_where_it_may_be(dtype: str, tf32: bool, arch: int, exact: bool) -> None:
    conv = ConvTransposeCase(2, 32, 32, (9, 9), (3, 3), (2, 2), dtype=dtype, tf32=tf32).problem()
    for way in mma.implementations(conv, OF_ARCH[arch]):
        step = way.steps[0]
        assert isinstance(step, Launch)
        assert step.kernel.defines["EXACT"] == int(exact)


def test_no_elements_are_no_implementation() -> None:
    conv = ConvTransposeCase(1, 8, 8, (9, 9), (3, 3), (2, 2)).problem()
    for axis, device in itertools.product(("n", "m"), DEVICES):
        assert mma.implementations(conv, device)
        assert mma.implementations(replace(conv, **{axis: 0}), device) == []


# ---- by wgmma -----------------------------------------------------------------------------------------------------

LARGE = ConvTransposeCase(32, 512, 256, (16, 16), (4, 4), (2, 2), SAME, extra=BOTH)


@pytest.mark.parametrize(
    "case",
    [LARGE, shuffled(8, 64, 64, (160, 160), (2, 2), activation="silu"), *with_vectors(LARGE)[1:3]],
    ids=str,
)
def test_tiles_by_wgmma_compile_without_spills(case: ConvTransposeCase) -> None:
    for way in hopper.implementations(case.problem(), H200)[::2]:
        (step,) = way.steps
        assert isinstance(step, Launch)
        check_compiles(step.kernel, H200)


@pytest.mark.parametrize("case", [LARGE, *HOPPER], ids=str)
def test_launches_and_maps_by_wgmma_fit(case: ConvTransposeCase) -> None:
    conv = case.problem()
    assert hopper.fitting(conv, H200)
    for config in hopper.fitting(conv, H200):
        (step,) = hopper.implementation(conv, config, H200).steps
        assert isinstance(step, Launch)
        assert step.shared <= H200.shared_per_block and step.grid[0] <= H200.multiprocessors
        x, w, *results = (argument for argument in step.arguments if isinstance(argument, TensorMap))
        assert x.im2col is not None and x.box == (64, config.tile_m) and w.box == (64, 1, 64)
        assert len(results) == 1 + ("residual" in case.extra)
        for each in results:
            assert each.box[0] * each.box[1] * each.box[3] in (512, 1024, 2048, 4096)
            assert all(stride % 16 == 0 for stride in each.strides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": (3, 3)}, "equally many taps"),
        ({"output_padding": (1, 1)}, "equally many taps"),
        ({"pads": (0, 0, 1, 1)}, "equally many taps"),
        ({"dilations": (3, 3), "pads": (4, 4, 4, 4)}, "equally many taps"),
        ({"sizes": (16, 18)}, "a box has at least 8 positions"),
        ({"group": 2}, "one group"),
        ({"m": 96}, "tiles of 64 filters"),
        ({"c": 36}, "multiples of 16 bytes"),
        ({"dtype": "float32"}, "16-bit types"),
        ({"pads": (301, 1, 301, 1), "sizes": (400, 16)}, "a walk begins and ends"),
    ],
    ids=str,
)
def test_what_is_left_to_mma(changes: dict[str, Any], message: str) -> None:
    conv = replace(LARGE, **changes).problem()
    assert message in str(hopper.why_not(conv, H200))
    names = [way.name for way in host.implementations(conv, H200)]
    assert names and not any("hopper" in name for name in names)


def test_only_hopper_gpus_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_is_available", lambda: False)  # an earlier test may have opened a stand-in
    assert hopper.implementations(LARGE.problem(), A100) == []
    names = [way.name.split()[0] for way in host.implementations(LARGE.problem(), H200)]
    assert names[0] == "conv_transpose_hopper" and names.count("conv_transpose_mma") == 2


# ---- the node -----------------------------------------------------------------------------------------------------


def node(x: tuple[int, ...], w: tuple[int, ...], **attributes: Any) -> tuple[FusedNode, list[TensorSpec]]:
    given = {"layout": "nhwc", "activation": "relu", **attributes}
    specs = [TensorSpec(shape, "float16") for shape in (x, w)]
    return FusedNode("conv_transpose_bias_activation", "up", ("x", "w"), given, ("float16",)), specs


@pytest.mark.parametrize(
    ("x", "w", "attributes", "message"),
    [
        ((1, 4, 4, 8), (6, 2, 2, 5), {}, "x has 8 channels, w 6"),
        ((1, 4, 4, 8), (8, 2, 2, 5), {"group": 3}, "in 3 groups of equal size"),
        ((1, 4, 4, 8), (8, 2, 5), {}, "required one rank"),
        ((1, 4, 4, 8), (2, 2, 1, 8), {"w_layout": "hwoi"}, "required one channel and one filter for each group"),
        ((1, 4, 4, 8), (8, 2, 2, 5), {"output_padding": [1]}, "output_padding is [1]; required 2 integers"),
        ((1, 4, 4, 8), (8, 2, 2, 5), {"strides": [0, 1]}, "strides is [0, 1]; required 2 positive integers"),
        ((1, 4, 4, 8), (8, 2, 2, 5), {"kernel_shape": [2, 3]}, "required kernel_shape, which is [2, 3]"),
    ],
)
def test_shapes_that_do_not_fit(x: tuple[int, ...], w: tuple[int, ...], attributes: Any, message: str) -> None:
    one, specs = node(x, w, **attributes)
    with pytest.raises(ValueError) as raised:
        host.candidates(one, specs, H200)
    assert message in str(raised.value)


def test_what_no_kernel_runs() -> None:
    for attributes, message in (
        ({"layout": "nchw"}, "layout is nchw"),
        ({"w_layout": "ohwi"}, "w_layout is ohwi"),
        ({"w_layout": "hwoi", "strides": [2, 65]}, "the stride along the width is 65"),
    ):
        one, _ = node((1, 4, 4, 8), (8, 2, 2, 5), **attributes)
        assert message in str(host.supports(one, ["float16"] * 2, H200))
    one, _ = node((1, 4, 4, 8), (8, 2, 2, 5), strides=[2, 65])
    assert host.supports(one, ["float16"] * 2, H200) is None
