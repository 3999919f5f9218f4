"""Plan templates of pools and resizes: any batch, height and width, by few kernels, which all compile."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, to_compile
from sampling import by_parts, sampled
from template_checks import check_template, concrete_plan, template_of
from test_pooling_emulated import onnxruntime as pooled
from test_resize_emulated import onnxruntime as resized

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, TensorSpec
from onnxfuse.runtime.template_words import words_of
from onnxfuse.testing.emulated_launches import NUMPY, emulate

GPUS = [H200, A100, T4]
MAX_KERNELS = 4
PARTS = 12  # of the kernels, of which one is compiled in a plain run
WINDOW: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
LARGE: dict[str, Any] = {"kernel_shape": [38, 38], "strides": [38, 38], "ceil_mode": 1, "count_include_pad": 1}
BATCH, IMAGES, IMAGE, TEXT = (-1, 28, 30), (-1, -2, -3), (1, -1, -2), (-1, 32, -2)

NODES: list[tuple[str, dict[str, Any], Sequence[tuple[int, ...]]]] = [
    ("max_pool", WINDOW, (BATCH, IMAGES, IMAGE, TEXT)),
    ("max_pool", {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}, (BATCH, IMAGES)),
    ("max_pool", {**WINDOW, "pads": [0, 0, 0, 0], "ceil_mode": 1}, (BATCH, IMAGES)),
    ("max_pool", {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}, (BATCH, IMAGES)),
    ("max_pool", {"kernel_shape": [3], "strides": [2]}, ((-1, 100), (-1, -2))),
    ("max_pool", {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}, ((-1, -2, -3, -4),)),
    ("average_pool", {"kernel_shape": [2, 2], "strides": [2, 2]}, (BATCH, IMAGES, TEXT)),
    ("average_pool", {**WINDOW, "count_include_pad": 1}, (BATCH, IMAGES)),
    ("average_pool", LARGE, (IMAGES, (-1, 40, -2))),
    ("global_average_pool", {}, (BATCH, (-1, 7, 7), IMAGES, TEXT, (-1, -2))),
    ("global_max_pool", {}, (BATCH, IMAGES)),
    ("resize", {"scales": [1, 2, 2, 1]}, (BATCH, IMAGES, IMAGE, TEXT)),
    ("resize", {"scales": [1, 1.7, 0.61, 1], "mode": "linear"}, (BATCH, IMAGES)),
    ("resize", {"sizes": [0, 20, 30, 0], "mode": "linear"}, (IMAGE, IMAGES)),
]
CASES = [(fusion, attributes, dims, c) for fusion, attributes, of in NODES for dims in of for c in (64, 20)]


def described(
    fusion: str, attributes: dict[str, Any], dims: Sequence[int], channels: int, dtype: str = "float16"
) -> tuple[FusedNode, tuple[TensorSpec, ...]]:
    node = FusedNode(fusion, "n", ("x",), {"layout": "nhwc", **attributes}, (dtype,))
    return node, (TensorSpec((*dims, channels), dtype),)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize(("fusion", "attributes", "dims", "channels"), sampled(CASES, 5))
def test_templates_say_what_their_host_says(
    fusion: str, attributes: dict[str, Any], dims: Sequence[int], channels: int, device: Device
) -> None:
    """Blocks are of other sizes where those of rows are dynamic, so that only outputs are compared there."""
    node, inputs = described(fusion, attributes, dims, channels)

    def sizes(seed: int) -> list[int]:
        """Return few images of no more than 600 pixels along an axis."""
        chance = random.Random(seed)
        most = [64 if dim == dims[0] else 600 for dim in dims if dim < 0]
        return [int(each ** chance.random()) for each in most]

    check_template(node, inputs, device, max_kernels=MAX_KERNELS, sizes=sizes, own_tilings=min(dims[1:]) < 0)


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 0.61, 0.7, 1.1, 4 / 3, 1.7, 2.5])
def test_a_scaled_size_is_rounded_as_float32(scale: float) -> None:
    """Products such as 0.7 * 10 are below an integer in float64, and that integer in float32."""
    template = template_of(*described("resize", {"scales": [1, 1, scale, 1]}, (1, 4, -1), 8), H200)
    sizes = np.arange(max(2, int(2 / scale)), 5000)
    expected = (np.float32(scale) * sizes.astype(np.float32)).astype(np.int64)
    values, planned = template.expressions.evaluate([sizes]), np.zeros(sizes.shape, bool)
    for variant in template.variants:
        right = np.logical_and.reduce([values[number].astype(bool) == answer for number, answer in variant.hard])
        width = variant.plan.outputs[0].shape[2]
        np.testing.assert_array_equal(values[width.number][right], expected[right])
        planned |= right
    assert planned.all()


def test_the_bytes_of_a_template_have_every_expression() -> None:
    """The bits of a real argument, here one over the number of pixels, are an expression of their own."""
    template = template_of(*described("global_average_pool", {}, IMAGES, 64), H200)
    functions = {kernel.key: 0 for kernel in template.kernels}
    assert words_of(template, functions) == words_of(template, functions)


SIZES: list[tuple[str, dict[str, Any], tuple[int, ...], list[tuple[int, ...]]]] = [
    ("max_pool", WINDOW, IMAGES, [(2, 13, 17), (1, 1, 1), (3, 40, 9)]),
    ("max_pool", {**WINDOW, "pads": [0, 0, 0, 0], "ceil_mode": 1}, IMAGES, [(2, 14, 17), (1, 3, 4)]),
    ("max_pool", {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}, IMAGES, [(1, 9, 8), (2, 4, 7)]),
    ("average_pool", {**WINDOW, "count_include_pad": 1}, IMAGES, [(2, 13, 17), (1, 2, 30)]),
    ("average_pool", LARGE, IMAGES, [(2, 2, 2), (1, 40, 39)]),
    ("max_pool", {"kernel_shape": [4, 3], "strides": [3, 3]}, IMAGES, [(2, 2, 1), (1, 9, 2)]),
    ("average_pool", {"kernel_shape": [1, 2], "strides": [2, 5], "auto_pad": "SAME_UPPER"}, IMAGES, [(1, 6, 9)]),
    ("global_average_pool", {}, IMAGES, [(2, 7, 7), (1, 60, 61), (3, 1, 1)]),
    ("resize", {"scales": [1, 1.7, 0.61, 1], "mode": "linear"}, IMAGES, [(2, 9, 30), (1, 33, 10)]),
    ("resize", {"scales": [1, 2, 2, 1]}, TEXT, [(2, 32, 9), (1, 32, 1)]),
    ("resize", {"sizes": [0, 20, 30, 0], "mode": "linear"}, IMAGES, [(2, 9, 30), (1, 40, 11)]),
]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("fusion", "attributes", "dims", "sizes"), sampled(SIZES, 3))
def test_a_template_computes_any_size(
    fusion: str, attributes: dict[str, Any], dims: tuple[int, ...], sizes: list[tuple[int, ...]], device: Device,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A plan of the template, with the kernel's own source, run on the CPU."""
    for dtype, channels in (("float16", 24), ("float32", 3)):
        node, inputs = described(fusion, attributes, dims, channels, dtype)
        template = template_of(node, inputs, device)
        for shape in sizes:
            at = [size for size, dim in zip(shape, dims, strict=True) if dim < 0]
            variant = template.chosen(at)
            assert variant
            x = np.random.default_rng(1).standard_normal((*shape, channels)).astype(NUMPY[dtype])
            (y,) = emulate(concrete_plan(template, variant, at), [x], tmp_path)
            given = dict(attributes)
            scales = {name: given.pop(name) for name in ("scales", "sizes") if name in given}
            expected = resized(x, scales, given) if scales else pooled(fusion, x, given)
            assert y.shape == expected.shape
            slack = 2e-3 if dtype == "float16" else 2e-5
            np.testing.assert_allclose(y.astype(np.float32), expected, rtol=slack / 2, atol=slack)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_sizes_that_are_those_of_another_tensor(mode: str, tmp_path: Path) -> None:
    """A tensor without elements has the sizes of y, which are computed and so none of those of x."""
    node = FusedNode("resize", "n", ("x", "like"), {"layout": "nhwc", "mode": mode}, ("float32",))
    inputs = TensorSpec((-1, -2, -3, 24), "float32"), TensorSpec((0, -4, -5), "float32")

    def sizes(seed: int) -> list[int]:
        chance = random.Random(seed)
        return [int(8 ** chance.random()), *(int(600 ** chance.random()) for _ in range(4))]

    template = check_template(node, inputs, H200, max_kernels=MAX_KERNELS, sizes=sizes, own_tilings=True)
    for at in ((2, 9, 30, 18, 60), (1, 33, 10, 7, 3), (1, 1, 1, 3, 2), (2, 5, 6, 5, 6)):
        n, height, width, y_height, y_width = at
        variant = template.chosen(at)
        assert variant
        x = np.random.default_rng(1).standard_normal((n, height, width, 24)).astype(np.float32)
        like = np.zeros((0, y_height, y_width), np.float32)
        (y,) = emulate(concrete_plan(template, variant, at), [x, like], tmp_path)
        expected = resized(x, {"sizes": [0, y_height, y_width, 0]}, {"mode": mode})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-5)


def all_kernels(device: Device) -> list[Kernel]:
    templates = (template_of(*described(*case, dtype), device) for case in CASES for dtype in ("float16", "float32"))
    return [kernel for template in templates for kernel in template.kernels]


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    return list({repr(kernel): kernel for kernel in all_kernels(device)}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", sampled(DEVICES, 9), ids=lambda device: f"sm_{device.arch}")
def test_kernels_compile_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, stack=0)
