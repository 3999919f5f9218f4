"""Convolutions by mma.sync and fma without a GPU: what the host plans, and that kernels compile without spills."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from architectures import DEVICES, OF_ARCH, check_compiles, check_sliced_launches, to_compile
from conv_cases import ConvCase
from sampling import by_parts

from onnxfuse.kernels.conv import mma
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer

SAME = (1, 1, 1, 1)  # padding of a filter of 3 x 3
PARTS = 48  # of the kernels, of which one is compiled in a plain run
IN_FULL = (75, 80)  # the others differ in shared memory, and are tested with fewer convolutions


def cases(device: Device) -> Iterator[ConvCase]:
    """Yield copies of every width, layouts, axes and groups; in fp32 with and without TF32."""
    both = ("bias", "residual")
    large = ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME, extra=both)
    small = ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME, activation="silu", extra=both, residual_first=False)
    yield from (large, small)
    yield replace(large, dtype="float32", tf32=True)
    yield replace(large, dtype="float32")
    if device.arch not in IN_FULL:
        return
    yield replace(small, dtype="bfloat16")
    yield replace(small, dtype="float32")
    for c, m in ((20, 60), (6, 62), (5, 63)):
        for dtype in ("float16", "float32"):
            yield ConvCase(2, c, m, (57, 56), (3, 3), (), SAME, dtype=dtype, extra=both)
    for dtype, tf32 in (("float16", False), ("float32", True), ("float32", False)):
        given = {"dtype": dtype, "tf32": tf32}
        yield ConvCase(2, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3), x_nchw=True, **given)
        yield ConvCase(2, 96, 96, (28, 28), (3, 3), (), SAME, group=96, w_hwio=True, **given)
    yield ConvCase(2, 256, 256, (28, 28), (3, 3), (2, 1), SAME, (2, 3), group=32)
    yield ConvCase(2, 64, 64, (28, 28), (3, 3), (), SAME, aligned=False)
    yield ConvCase(2, 64, 64, (128,), (5,), (), (2, 2))
    yield ConvCase(2, 64, 64, (8, 16, 16), (3, 3, 3), (), (1,) * 6)
    yield ConvCase(2, 5, 64, (8, 16, 16), (3, 3, 3), (), (1,) * 6, x_nchw=True)


def problems(device: Device) -> Iterator[Conv]:
    for case in cases(device):
        if device.arch >= 80 or case.dtype != "bfloat16":
            yield case.problem()


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of all tiles for these convolutions; tiles differ in sizes."""
    ways = (mma.implementation(conv, each, device) for conv in problems(device) for each in mma.configs(conv, device))
    found = [step.kernel for way in ways for step in way.steps if isinstance(step, Launch)]
    return list({repr(kernel): kernel for kernel in found}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_launches_fit_the_device(device: Device) -> None:
    for conv in problems(device):
        ways = mma.implementations(conv, device)
        assert 0 < len(ways) <= mma.MAX_CONFIGS
        assert len({way.name for way in ways}) == len(ways)
        for way in ways:
            check_launches(conv, way, device)


def check_launches(conv: Conv, way: Implementation, device: Device) -> None:
    first = check_sliced_launches(way, device, conv.pixels * conv.m)
    tile_m, tile_n, tile_k_bytes, stages = (
        int(first.kernel.defines[name]) for name in ("TILE_M", "TILE_N", "TILE_K_BYTES", "STAGES")
    )
    tiles = -(-conv.pixels // tile_m) * -(-(conv.m // conv.group) // tile_n) * conv.group
    assert first.grid[:2] == (tiles, 1)
    assert first.shared >= max(stages * (tile_m + tile_n) * tile_k_bytes, 4 * tile_m * (tile_n + 8))
    assert first.block[0] % (tile_k_bytes // 16) == 0


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_few_pixels_divide_k_and_many_do_not(device: Device) -> None:
    def slices(way: Implementation) -> int:
        step = way.steps[0]
        assert isinstance(step, Launch)
        return step.grid[2]

    few = ConvCase(1, 512, 512, (7, 7), (3, 3), (), SAME).problem()
    many = ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME).problem()
    assert slices(mma.implementations(few, device)[0]) > 1
    assert slices(mma.implementations(many, device)[0]) == 1


@pytest.mark.parametrize(
    ("dtype", "tf32", "arch", "exact"),
    [
        ("float32", True, 80, False), ("float32", False, 80, True), ("float32", True, 75, True),
        ("float16", True, 75, False), ("float16", False, 90, False), ("bfloat16", True, 80, False),
    ],
)  # fmt: skip
def test_float32_is_rounded_to_tf32_only_where_it_may_be(dtype: str, tf32: bool, arch: int, exact: bool) -> None:
    conv = ConvCase(2, 32, 32, (9, 9), (3, 3), dtype=dtype, tf32=tf32).problem()
    for way in mma.implementations(conv, OF_ARCH[arch]):
        step = way.steps[0]
        assert isinstance(step, Launch)
        assert step.kernel.defines["EXACT"] == int(exact)


@pytest.mark.parametrize(("channels", "copy"), [(8, 16), (4, 8), (6, 4), (3, 2), (24, 16)])
def test_copies_are_as_wide_as_the_channels_of_a_group_allow(channels: int, copy: int) -> None:
    conv = ConvCase(2, 2 * channels, 32, (9, 9), (3, 3), group=2).problem()
    assert mma.copy_bytes(conv)[0] == copy
    assert mma.copy_bytes(replace(conv, aligned=False)) == (2, 2)
    assert mma.copy_bytes(replace(conv, x_nchw=True))[0] == 2


def test_no_elements_are_no_implementation() -> None:
    conv = ConvCase(1, 8, 8, (9, 9), (3, 3)).problem()
    for axis, device in itertools.product(("n", "m"), DEVICES):
        assert mma.implementations(conv, device)
        assert mma.implementations(replace(conv, **{axis: 0}), device) == []
    four = replace(conv, kernel=(1,) * 4, sizes=(2,) * 4, y_sizes=(2,) * 4)
    assert mma.implementations(four, OF_ARCH[90]) == []


def test_sums_of_slices_are_read_by_the_second_launch() -> None:
    conv = ConvCase(1, 512, 512, (7, 7), (3, 3), (), SAME, extra=("bias", "residual")).problem()
    (tile, *_) = mma.MMA_TILES
    way = mma.implementation(conv, mma.ConvConfig(tile, 6), OF_ARCH[90])
    first, second = way.steps
    assert isinstance(first, Launch) and isinstance(second, Launch)
    assert Pointer("scratch", 0) in first.arguments and Pointer("scratch", 0) in second.arguments
    assert second.kernel.defines["SLICES"] == 6 and second.kernel.defines["RESIDUAL_FIRST"] == 1
    assert second.kernel.source == "epilogue"
