"""Resize on a CPU, emulated, against onnxruntime: every coordinate and rounding, and linear interpolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import H200
from images_between_quantizers import check_between_quantizers
from kernel_hosts import host_of
from onnx import TensorProto, helper
from runtimes import open_on_cpu
from sampling import by_parts

from onnxfuse.kernels.resize.host import COORDINATES, NEAREST
from onnxfuse.runtime.plan import FusedNode, TensorSpec
from onnxfuse.testing.emulated_launches import NUMPY, emulate


def onnxruntime(x: np.ndarray, sizes: dict[str, list[float]], attributes: dict[str, Any]) -> np.ndarray:
    """Return what onnxruntime computes for x (n, ..., c) in float32; `sizes` has scales or sizes in that order.

    A size of 0 is that of x.
    """
    ((name, given),) = sizes.items()
    values = [value or size for value, size in zip(given, x.shape, strict=True)]
    order = (values[0], values[-1], *values[1:-1])
    tensor = TensorProto.FLOAT if name == "scales" else TensorProto.INT64
    constant = helper.make_tensor(name, tensor, [len(order)], order)
    node = helper.make_node("Resize", ["x", "", *([""] * (name == "sizes")), name], ["y"], **attributes)
    declared, result = (helper.make_tensor_value_info(each, TensorProto.FLOAT, [None] * x.ndim) for each in "xy")
    graph = helper.make_graph([node], "resize", [declared], [result], [constant])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    (y,) = open_on_cpu(model).run(None, {"x": np.ascontiguousarray(np.moveaxis(x.astype(np.float32), -1, 1))})
    return np.moveaxis(y, 1, -1)


SIZES: list[tuple[tuple[int, ...], dict[str, list[float]]]] = [
    ((1, 5, 7, 1), {"scales": [1, 2, 2, 1]}),
    ((1, 9, 30, 1), {"scales": [1, 1.7, 0.61, 1]}),
    ((2, 33, 10, 8), {"scales": [1, 1.0, 0.1, 1]}),
    ((1, 8, 8, 3), {"sizes": [1, 13, 3, 3]}),
    ((1, 100, 3, 1), {"sizes": [1, 299, 1, 1]}),
    ((1, 17, 2, 4), {"sizes": [1, 17, 50, 4]}),
]


def run(
    x: np.ndarray, sizes: dict[str, list[float]], attributes: dict[str, Any], folder: Path, aligned: bool = True
) -> np.ndarray:
    dtype = x.dtype.name
    node = FusedNode("resize", "n", ("x",), {"layout": "nhwc", **sizes, **attributes}, (dtype,))
    host = host_of("resize")
    assert host.supports(node, [dtype], H200) is None
    (plan,) = host.candidates(node, [TensorSpec(x.shape, dtype, aligned)], H200)
    return emulate(plan, [x], folder, aligned)[0]


@by_parts(6)
@pytest.mark.parametrize("nearest", NEAREST)
@pytest.mark.parametrize("coordinate", COORDINATES)
def test_the_nearest_elements_are_those_of_onnxruntime(
    coordinate: str, nearest: str, part: int, tmp_path: Path
) -> None:
    attributes = {"mode": "nearest", "coordinate_transformation_mode": coordinate, "nearest_mode": nearest}
    index = (COORDINATES.index(coordinate) + NEAREST.index(nearest) + part) % 6
    for shape, sizes in SIZES[index::6]:
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        expected = onnxruntime(x, sizes, attributes)
        np.testing.assert_array_equal(run(x, sizes, attributes, tmp_path), expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_the_nearest_elements_of_integers(dtype: str, tmp_path: Path) -> None:
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for shape, sizes in SIZES:
        x = np.random.default_rng(1).integers(0, 256, shape).astype(dtype)
        np.testing.assert_array_equal(run(x, sizes, attributes, tmp_path), onnxruntime(x, sizes, attributes))
    linear = FusedNode("resize", "n", ("x",), {"layout": "nhwc", **SIZES[0][1], "mode": "linear"}, (dtype,))
    assert "x is" in (host_of("resize").supports(linear, [dtype], H200) or "")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_integers_between_quantizers(dtype: str, mode: str, tmp_path: Path) -> None:
    attributes, limits = {"mode": mode}, np.iinfo(dtype)
    for shape, sizes in (((1, 5, 7, 24), {"scales": [1, 2, 1.6, 1]}), ((2, 3, 4, 5, 6), {"sizes": [2, 5, 4, 3, 6]})):
        x = np.random.default_rng(1).integers(limits.min, limits.max + 1, shape).astype(dtype)
        check_between_quantizers(
            "resize", x, {**sizes, **attributes}, lambda x, of=sizes: onnxruntime(x, of, attributes),
            lambda plan, arrays: emulate(plan, arrays, tmp_path)[0],
        )  # fmt: skip


@by_parts(3)
@pytest.mark.parametrize("coordinate", COORDINATES)
def test_linear_interpolation(coordinate: str, part: int, tmp_path: Path) -> None:
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinate}
    for i, (shape, sizes) in list(enumerate(SIZES[:5]))[part::3]:
        dtype = ("float32", "float16", "bfloat16")[i % 3]
        x = np.random.default_rng(1).standard_normal(shape).astype(NUMPY[dtype])
        expected = onnxruntime(x, sizes, attributes)
        found = run(x, sizes, attributes, tmp_path, aligned=i != 2).astype(np.float32)
        tolerance = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 6, 8), {"scales": [1, 2, 1]}),
        ((1, 9, 3), {"sizes": [1, 5, 3]}),
        ((2, 3, 5, 4, 8), {"scales": [1, 2, 2, 2, 1]}),
        ((1, 4, 3, 5, 2), {"sizes": [1, 7, 3, 2, 2]}),
        ((1, 1, 6, 4, 4), {"scales": [1, 1, 1.5, 2, 1]}),
    ],
)
def test_one_and_three_spatial_axes(shape: tuple[int, ...], sizes: dict[str, list[float]], tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    np.testing.assert_array_equal(run(x, sizes, attributes, tmp_path), onnxruntime(x, sizes, attributes))
    attributes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    found, expected = run(x, sizes, attributes, tmp_path), onnxruntime(x, sizes, attributes)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"mode": "cubic"}, "mode is cubic; the kernel has nearest, linear"),
        ({"coordinate_transformation_mode": "tf_crop_and_resize"}, "coordinate_transformation_mode is tf_crop_and"),
        ({"antialias": 1, "mode": "linear"}, "antialias is 1; the kernel has 0"),
        ({"scales": [1.0, 2.0, 2.0, 2.0]}, "leaves the first and last axis"),
        ({"scales": [1.0, 1.0]}, "x has 2 axes; the kernel takes 3 or 4 or 5"),
        ({"layout": "nchw"}, "layout is nchw; the kernel has nhwc"),
    ],
)
def test_what_no_kernel_runs(attributes: dict[str, Any], sentence: str) -> None:
    given = {"layout": "nhwc", "scales": [1.0, 2.0, 2.0, 1.0], **attributes}
    refusal = host_of("resize").supports(FusedNode("resize", "n", ("x",), given, ("float16",)), ["float16"], H200)
    assert refusal is not None and sentence in refusal


def test_sizes_of_0_stay(tmp_path: Path) -> None:
    """A model that resizes the spatial axes alone says so of n and channels that it does not know."""
    sizes: dict[str, list[float]] = {"sizes": [0, 5, 9, 0]}
    x = np.random.default_rng(1).standard_normal((2, 3, 4, 8)).astype(np.float32)
    for mode in ("nearest", "linear"):
        found, expected = run(x, sizes, {"mode": mode}, tmp_path), onnxruntime(x, sizes, {"mode": mode})
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_one_of_three_says_the_sizes() -> None:
    node = FusedNode("resize", "n", ("x",), {"layout": "nhwc"}, ("float16",))
    sentence = "it has neither scales nor sizes nor an operand like"
    assert sentence in (host_of("resize").supports(node, ["float16"], H200) or "")


def test_sizes_that_do_not_fit_are_an_error() -> None:
    like = FusedNode("resize", "n", ("x", "like"), {"layout": "nhwc"}, ("float16",))
    with pytest.raises(ValueError, match=r"x has shape \[1, 4, 4, 4\] and like \[0, 8\]; required one axis less"):
        host_of("resize").candidates(like, [TensorSpec((1, 4, 4, 4), "float16"), TensorSpec((0, 8), "float16")], H200)
    node = FusedNode("resize", "n", ("x",), {"layout": "nhwc", "sizes": [2, 8, 8, 4]}, ("float16",))
    with pytest.raises(ValueError, match="required the same n and channels"):
        host_of("resize").candidates(node, [TensorSpec((1, 4, 4, 4), "float16")], H200)
