"""Pooling on a CPU against onnxruntime: sizes, padding and divisors, and the kernels themselves, emulated."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import A100, H200
from images_between_quantizers import check_between_quantizers
from kernel_hosts import host_of
from onnx import TensorProto, helper
from runtimes import open_on_cpu
from sampling import sampled

from onnxfuse.kernels.image_quantizers import OPERANDS
from onnxfuse.kernels.pooling.windows import windows
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.testing.emulated_launches import NUMPY, emulate

OPERATORS = {"max_pool": "MaxPool", "average_pool": "AveragePool", "global_average_pool": "GlobalAveragePool"}


def onnxruntime(fusion: str, x: np.ndarray, attributes: dict[str, Any], opset: int = 22) -> np.ndarray:
    """Return what onnxruntime computes for x (n, ..., c) in float32: by a fusion's operator, or one of that name."""
    rank = x.ndim
    node = helper.make_node(OPERATORS.get(fusion, fusion), ["x"], ["y"], **attributes)
    declared = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * rank)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)
    graph = helper.make_graph([node], "pool", [declared], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    (y,) = open_on_cpu(model).run(None, {"x": np.ascontiguousarray(np.moveaxis(x.astype(np.float32), -1, 1))})
    return np.moveaxis(y, 1, -1)


def node_of(fusion: str, dtype: str, attributes: dict[str, Any]) -> FusedNode:
    return FusedNode(fusion, "n", ("x",), {"layout": "nhwc", **attributes}, (dtype,))


def plans(
    fusion: str, x: np.ndarray, attributes: dict[str, Any], device: Device = H200, aligned: bool = True
) -> list[Plan]:
    host, node = host_of(fusion), node_of(fusion, x.dtype.name, attributes)
    assert host.supports(node, [x.dtype.name], device) is None
    return host.candidates(node, [TensorSpec(x.shape, x.dtype.name, aligned)], device)


def drawn(random: np.random.Generator) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the spatial sizes of x and the attributes of a window; the window may be larger than x."""
    axes = int(random.integers(1, 4))
    kernel = random.integers(1, 5, axes)
    dilations = random.integers(1, 3, axes)
    attributes: dict[str, Any] = {"kernel_shape": kernel.tolist(), "strides": random.integers(1, 5, axes).tolist()}
    attributes |= {"dilations": dilations.tolist(), "ceil_mode": int(random.integers(0, 2))}
    auto_pad = random.choice(["", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
    if auto_pad:
        attributes["auto_pad"] = str(auto_pad)
    if auto_pad in ("", "NOTSET"):
        attributes["pads"] = [int(random.integers(0, k)) for k in (*kernel, *kernel)]
    span = (kernel - 1) * dilations + 1
    return tuple(int(1 + random.integers(0, low + 8)) for low in span), attributes


def test_sizes_are_those_of_onnxruntime() -> None:
    """Where onnxruntime raises an error, either the host does, or padding is negative, which the kernels take."""
    random, larger, refused = np.random.default_rng(1), 0, 0
    for _ in range(800):
        spatial, attributes = drawn(random)
        shape = (1, *spatial, 1)
        node = node_of("max_pool", "float32", attributes)
        try:
            expected = onnxruntime("max_pool", np.zeros(shape, np.float32), attributes).shape
        except Exception as error:  # onnxruntime's errors have no common class
            if "padding values must be non-negative" not in str(error):
                refused += 1
                with pytest.raises(ValueError, match="elements with it, for a window of"):
                    windows(node, shape)
            continue
        found = windows(node, shape)
        assert (1, *(each.y_size for each in found), 1) == expected, (shape, attributes)
        padded = [each.size + each.pad_begin + each.pad_end for each in found]
        spans = [(each.kernel - 1) * each.dilation + 1 for each in found]
        larger += any(span > size and each.y_size for span, size, each in zip(spans, padded, found, strict=True))
    assert larger > 20 and refused > 20, "such cases are drawn"


@pytest.mark.parametrize("seed", sampled(range(6), 3))
@pytest.mark.parametrize("fusion", ["max_pool", "average_pool"])
def test_windows_at_random(fusion: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    aligned, channels = bool(seed % 3), int(random.choice([1, 3, 8, 24, 80, 104]))
    dtype = ("float32", "float16", "bfloat16")[seed % 3]
    x, attributes, expected = drawn_run(fusion, random, channels, dtype)
    for plan in plans(fusion, x, attributes, aligned=aligned)[:1]:
        (y,) = emulate(plan, [x], tmp_path, aligned)
        np.testing.assert_allclose(y.astype(np.float32), _rounded(expected, dtype), rtol=_tolerance(dtype), atol=1e-6)


def drawn_run(
    fusion: str, random: np.random.Generator, channels: int, dtype: str
) -> tuple[np.ndarray, dict[str, Any], np.ndarray]:
    """Return x, the attributes of a window that the kernels and onnxruntime take, and what onnxruntime computes."""
    while True:
        spatial, attributes = drawn(random)
        if fusion == "average_pool":
            attributes["count_include_pad"] = int(random.integers(0, 2))
        if host_of(fusion).supports(node_of(fusion, dtype, attributes), [dtype], H200) is not None:
            continue
        x = random.standard_normal((2, *spatial, channels)).astype(NUMPY[dtype])
        with suppress(Exception):  # onnxruntime's errors have no common class
            return x, attributes, onnxruntime(fusion, x, attributes)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("channels", [1, 6, 24, 64])
def test_integers(dtype: str, channels: int, tmp_path: Path) -> None:
    """Padding is below every integer."""
    random, limits = np.random.default_rng(channels), np.iinfo(dtype)
    x = random.integers(limits.min, limits.max + 1, (2, 9, 11, channels)).astype(dtype)
    x[0] = limits.min
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    expected = onnxruntime("max_pool", x, attributes)
    for plan in plans("max_pool", x, attributes, aligned=channels != 6):
        (y,) = emulate(plan, [x], tmp_path, channels != 6)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("channels", [1, 6, 64])
@pytest.mark.parametrize("counted", [0, 1])
def test_means_between_quantizers(dtype: str, channels: int, counted: int, tmp_path: Path) -> None:
    """Padding counts as 0, which is the zero point."""
    limits = np.iinfo(dtype)
    x = np.random.default_rng(channels).integers(limits.min, limits.max + 1, (2, 7, 9, channels)).astype(dtype)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 0], "count_include_pad": counted}
    aligned = channels != 6
    check_between_quantizers(
        "average_pool", x, attributes, lambda x: onnxruntime("average_pool", x, attributes),
        lambda plan, arrays: emulate(plan, arrays, tmp_path, aligned)[0], aligned,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_means_of_images_between_quantizers(dtype: str, device: Device, tmp_path: Path) -> None:
    """On an A100, another launch adds up the sums of blocks, and quantizes."""
    limits, (n, *spatial, channels) = np.iinfo(dtype), (1, 40, 30, 48)
    x = np.random.default_rng(1).integers(limits.min, limits.max + 1, (n, *spatial, channels)).astype(dtype)
    x[..., :20] = x[..., :1] // 3
    check_between_quantizers(
        "global_average_pool", x, {}, lambda x: onnxruntime("global_average_pool", x, {}),
        lambda plan, arrays: emulate(plan, arrays, tmp_path)[0], device=device,
    )  # fmt: skip


def test_dtypes_of_quantizers() -> None:
    node = FusedNode("average_pool", "n", ("x", *OPERANDS), {"layout": "nhwc", "kernel_shape": [2, 2]}, ("int8",))
    found = host_of("average_pool").supports(node, ["uint8", "float32", "uint8", "float32", "int8"], H200)
    assert found == "average_pool: x is uint8, and y is int8; required one dtype, int8 or uint8, and scales of float32"


WINDOWS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("max_pool", (2, 13, 17, 64), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("max_pool", (1, 20, 20, 72), {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}),
    ("max_pool", (1, 15, 9, 8), {"kernel_shape": [13, 13], "pads": [6, 6, 6, 6]}),  # rows in a loop, and columns in two
    (
        "max_pool", (1, 9, 30, 8),
        {"kernel_shape": [2, 11], "dilations": [3, 2], "strides": [2, 1], "pads": [1, 3, 0, 5]},
    ),
    ("max_pool", (3, 40, 8), {"kernel_shape": [4], "strides": [2], "pads": [0, 3], "ceil_mode": 1}),
    ("max_pool", (2, 5, 6, 7, 16), {"kernel_shape": [3, 2, 3], "strides": [2, 1, 1], "pads": [1, 0, 2, 1, 1, 0]}),
    ("average_pool", (2, 14, 14, 40), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("average_pool", (1, 7, 7, 128), {"kernel_shape": [7, 7]}),
    ("average_pool", (1, 17, 12, 8), {"kernel_shape": [14, 12]}),
    ("average_pool", (2, 6, 7, 12), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("average_pool", (2, 4, 9, 5, 8), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 3], "ceil_mode": 1}),
    (
        "average_pool", (1, 6, 6, 4),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1, "count_include_pad": 1},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fusion", "shape", "attributes"), sampled(WINDOWS, 3))
def test_windows(fusion: str, shape: tuple[int, ...], attributes: dict[str, Any], tmp_path: Path) -> None:
    dtype = "float32" if shape[0] == 1 else "float16"
    x = np.random.default_rng(1).standard_normal(shape).astype(NUMPY[dtype])
    expected = onnxruntime(fusion, x, attributes)
    for plan in plans(fusion, x, attributes):
        (y,) = emulate(plan, [x], tmp_path)
        np.testing.assert_allclose(y.astype(np.float32), _rounded(expected, dtype), rtol=_tolerance(dtype), atol=1e-6)


def test_windows_of_infinities_and_nan(tmp_path: Path) -> None:
    """A NaN is kept, wherever onnxruntime, whose results depend on the order of the elements, may lose it."""
    x = np.full((1, 6, 6, 8), -np.inf, np.float32)
    x[0, 1, 1, 0], x[0, 4, 4, 1], x[0, 0, 5, 2] = np.nan, np.inf, np.finfo(np.float32).min
    (y,) = emulate(plans("max_pool", x, {"kernel_shape": [3, 3], "strides": [3, 3]})[0], [x], tmp_path)
    expected = np.full((1, 2, 2, 8), -np.inf, np.float32)
    expected[0, 0, 0, 0], expected[0, 1, 1, 1], expected[0, 0, 1, 2] = np.nan, np.inf, np.finfo(np.float32).min
    np.testing.assert_array_equal(y, expected)


def test_windows_of_padding_alone(tmp_path: Path) -> None:
    """Their largest element is the smallest finite number, unlike that of elements that are -inf; their mean is 0."""
    window = {"kernel_shape": [2], "strides": [3], "dilations": [4]}
    for pads, expected in (([1, 0], np.finfo(np.float32).min), ([0, 1], -np.inf)):
        x, attributes = np.full((1, 2, 4), -np.inf, np.float32), {**window, "pads": pads}
        (largest,) = emulate(plans("max_pool", x, attributes)[0], [x], tmp_path)
        np.testing.assert_array_equal(largest, onnxruntime("max_pool", x, attributes))
        np.testing.assert_array_equal(largest, np.full((1, 1, 4), expected))
    x, attributes = np.ones((1, 2, 4), np.float32), {**window, "pads": [1, 0], "count_include_pad": 1}
    (mean,) = emulate(plans("average_pool", x, attributes)[0], [x], tmp_path)
    np.testing.assert_array_equal(mean, onnxruntime("average_pool", x, attributes))
    np.testing.assert_array_equal(mean, np.zeros((1, 1, 4)))


# The fusion, the shape of x, and a window that is larger than x with its padding, along one axis at least.
LARGER: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("average_pool", (2, 2, 2, 38), {"kernel_shape": [38, 38], "strides": [38, 38], "ceil_mode": 1}),
    ("average_pool", (1, 2, 9, 8), {"kernel_shape": [5, 3], "strides": [4, 2], "pads": [1, 0, 0, 1]}),
    ("average_pool", (1, 3, 2, 8), {"kernel_shape": [5, 3], "strides": [3, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1}),
    ("average_pool", (1, 2, 5, 8), {"kernel_shape": [2, 2], "strides": [3, 3], "dilations": [3, 4]}),
    ("average_pool", (1, 2, 1, 4, 8), {"kernel_shape": [3, 2, 4], "strides": [2, 2, 2], "pads": [0, 0, 1, 0, 0, 2]}),
    ("average_pool", (1, 2, 8), {"kernel_shape": [6], "strides": [5], "auto_pad": "VALID"}),
    ("average_pool", (1, 6, 4, 8), {"kernel_shape": [2, 1], "strides": [5, 3], "auto_pad": "SAME_UPPER"}),
    ("max_pool", (2, 2, 2, 8), {"kernel_shape": [7, 7], "strides": [7, 7]}),
    ("max_pool", (1, 3, 2, 8), {"kernel_shape": [5, 3], "strides": [3, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1}),
    ("max_pool", (1, 2, 5, 8), {"kernel_shape": [2, 3], "strides": [4, 2], "dilations": [3, 2], "pads": [0, 2, 0, 2]}),
    ("max_pool", (1, 3, 8), {"kernel_shape": [2], "strides": [7], "dilations": [9], "pads": [1, 1]}),
    ("max_pool", (1, 5, 8), {"kernel_shape": [2], "strides": [3], "dilations": [3], "auto_pad": "SAME_LOWER"}),
]


@pytest.mark.parametrize(("fusion", "shape", "attributes"), sampled(LARGER, 2))
def test_windows_larger_than_the_image(
    fusion: str, shape: tuple[int, ...], attributes: dict[str, Any], tmp_path: Path
) -> None:
    """Before opset 19, onnxruntime's CPU provider divides by a whole window, and its CUDA provider as here."""
    for counted in (0, 1) if fusion == "average_pool" else (0,):
        given = {**attributes, "count_include_pad": 1} if counted else attributes
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        expected = onnxruntime(fusion, x, given)
        assert expected.size
        for plan in plans(fusion, x, given)[:1]:
            (y,) = emulate(plan, [x], tmp_path)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", ["max_pool", "average_pool"])
def test_no_windows(fusion: str) -> None:
    """One element less than the window and a stride of 1: y is empty, and nothing is launched."""
    x, attributes = np.ones((2, 4, 2, 8), np.float32), {"kernel_shape": [3, 3]}
    (plan,) = plans(fusion, x, attributes)
    assert (plan.outputs[0].shape, plan.steps) == (onnxruntime(fusion, x, attributes).shape, ())


def test_a_mean_of_which_auto_pad_cuts_off_elements_is_not_taken() -> None:
    """The padding behind x is negative: 1 - 3 - (5 - 1) % 3; the body leaves out what it cuts off."""
    attributes = {"kernel_shape": [2], "strides": [3], "dilations": [3], "auto_pad": "SAME_UPPER"}
    node = node_of("average_pool", "float32", attributes)
    assert "strides of [3] pass the window" in str(host_of("average_pool").supports(node, ["float32"], H200))


WHOLE: list[tuple[str, tuple[int, ...]]] = [
    *(("global_average_pool", s) for s in ((2, 7, 7, 80), (1, 60, 60, 24), (3, 5, 20), (2, 3, 5, 7, 12))),
    ("global_average_pool", (1, 33, 37, 3)),
    *(("global_max_pool", s) for s in ((1, 60, 60, 24), (3, 50, 20))),
]


@pytest.mark.parametrize(
    ("fusion", "shape", "device"),
    sampled([(*case, device) for case in WHOLE for device in (H200, A100)], 3),
    ids=[f"{fusion}-{shape}-{device.name}" for fusion, shape in WHOLE for device in (H200, A100)],
)
def test_global_pools(fusion: str, shape: tuple[int, ...], device: Device, tmp_path: Path) -> None:
    formula = np.mean if fusion == "global_average_pool" else np.max
    dtype = "float32" if shape[0] == 1 else "float16"
    x = (np.random.default_rng(1).standard_normal(shape) + 3).astype(NUMPY[dtype])
    for aligned in (True, False):
        (plan,) = plans(fusion, x, {}, device, aligned)
        (y,) = emulate(plan, [x], tmp_path, aligned)
        expected = formula(x.astype(np.float64), tuple(range(1, x.ndim - 1)), keepdims=True)
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=_tolerance(dtype))
        (flat,) = plans(fusion, x, {"keepdims": 0}, device, aligned)
        assert (flat.steps, flat.outputs[0].shape) == (plan.steps, (shape[0], shape[-1]))
    if shape[1] == 60:
        assert plan.steps[0].cluster > 1 or len(plan.steps) > 1, "the pixels of a large image are divided among blocks"


@pytest.mark.parametrize(
    ("fusion", "operator"), [("global_average_pool", "ReduceMean"), ("global_max_pool", "ReduceMax")]
)
@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
def test_global_pools_of_no_pixels(fusion: str, operator: str, device: Device, tmp_path: Path) -> None:
    """A reduction, unlike onnxruntime's pools, takes them; it becomes a global pool."""
    x = np.ones((2, 0, 5, 24), np.float32)
    (plan,) = plans(fusion, x, {}, device)
    (y,) = emulate(plan, [x], tmp_path)
    np.testing.assert_array_equal(y, onnxruntime(operator, x, {"axes": [2, 3]}, 13))


def test_global_max_of_infinities_and_nan(tmp_path: Path) -> None:
    x = np.full((1, 5, 6, 8), -np.inf, np.float32)
    x[0, 4, 5, 0], x[0, 0, 0, 1], x[0, 2, 3, 2] = np.nan, np.inf, np.finfo(np.float32).min
    (y,) = emulate(plans("global_max_pool", x, {})[0], [x], tmp_path)
    np.testing.assert_array_equal(y, x.max((1, 2), keepdims=True))


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(NUMPY[dtype]).astype(np.float32)


def _tolerance(dtype: str) -> float:
    return {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
