"""Kernels between convolutions on a GPU, every plan of them: all dtypes, misaligned tensors, sizes of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from channels_last_cases import LARGE, RESIZES, SMALL, Case
from images_between_quantizers import check_between_quantizers
from kernel_hosts import host_of, require_support
from kernel_runs import DTYPES, NUMPY, check, launch, result, small_gpu, upload
from test_pooling_emulated import onnxruntime as pooled
from test_resize_emulated import onnxruntime

from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


def run(case: Case, inputs: dict[str, np.ndarray], device: Device, aligned: bool = True) -> list[np.ndarray]:
    """Return what each plan of a node computes."""
    dtype = inputs["x"].dtype.name
    host, node, specs = host_of(case.fusion), case.node(dtype), case.specs(dtype, aligned)
    require_support(host, node, [spec.dtype for spec in specs], device)
    found = []
    for plan in host.candidates(node, specs, device):
        read = [upload(value, aligned) for value in inputs.values()]
        written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
        launch(plan, read, written)
        found.append(result(written[0], plan.outputs[0], aligned))
    return found


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tensors(device: Device, dtype: str, case: Case, aligned: bool) -> None:
    inputs = case.inputs(dtype)
    expected = case.expected(inputs) if inputs["x"].size else np.empty(0)
    for gpu in (device, small_gpu()):  # with few multiprocessors, tiles and parts are larger
        for y in run(case, inputs, gpu, aligned):
            assert bool(y.size) == bool(expected.size)
            if y.size:
                check(y, expected, slack=2.0)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("shape", [(2, 7, 9, 24), (3, 33, 40, 64), (1, 5, 6, 3)])
def test_between_quantizers(device: Device, shape: tuple[int, ...], dtype: str, aligned: bool) -> None:
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max + 1, shape).astype(dtype)
    x[..., ::2] = x[:1, :1, :1, :1] // 2 + x[..., ::2] // 4  # means that differ by channel

    def on_gpu(plan: Plan, arrays: Sequence[np.ndarray]) -> np.ndarray:
        (spec,) = plan.outputs
        written = upload(np.zeros(spec.shape, dtype), aligned)
        launch(plan, [upload(np.asarray(each), aligned) for each in arrays], [written])
        return written.get().view(dtype).reshape(spec.shape)

    window = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 0], "count_include_pad": 1}
    scales: dict[str, list[float]] = {"scales": [1, 2, 1.6, 1]}
    for fusion, of, operator in (
        ("average_pool", window, lambda x: pooled("average_pool", x, window)),
        ("global_average_pool", {}, lambda x: pooled("global_average_pool", x, {})),
        ("resize", {**scales, "mode": "linear"}, lambda x: onnxruntime(x, scales, {"mode": "linear"})),
        ("resize", {**scales, "mode": "nearest"}, lambda x: onnxruntime(x, scales, {"mode": "nearest"})),
    ):
        check_between_quantizers(fusion, x, of, operator, on_gpu, aligned, device)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", [each for each in SMALL if each.fusion == "max_pool"], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_pools_of_integers(device: Device, dtype: str, case: Case, aligned: bool) -> None:
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max + 1, case.shape).astype(dtype)
    expected = (
        np.maximum(case.expected({"x": x}), limits.min) if x.size else np.empty(0)
    )  # of padding alone: the lowest
    node, specs = case.node(dtype), case.specs(dtype, aligned)
    for plan in host_of(case.fusion).candidates(node, specs, device):
        (spec,) = plan.outputs
        y = upload(np.zeros(spec.shape, dtype), aligned)
        launch(plan, [upload(x, aligned)], [y])
        assert not x.size or (y.get().view(dtype).reshape(expected.shape) == expected).all()


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_sizes_of_models(device: Device, case: Case) -> None:
    inputs = case.inputs("float16")
    expected = case.expected(inputs)
    for y in run(case, inputs, device):
        check(y, expected, slack=2.0)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize(("shape", "attributes"), RESIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resize(device: Device, dtype: str, shape: tuple[int, ...], attributes: dict, aligned: bool) -> None:
    case = Case("resize", shape, attributes)
    inputs = case.inputs(dtype)
    sizes = {name: attributes[name] for name in ("scales", "sizes") if name in attributes}
    others = {name: value for name, value in attributes.items() if name not in sizes}
    expected = onnxruntime(inputs["x"], sizes, others)
    for y in run(case, inputs, device, aligned):
        if attributes.get("mode") == "linear":
            check(y, expected.astype(np.float64), slack=2.0)
        else:
            np.testing.assert_array_equal(y.astype(np.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_infinities_and_nan(device: Device, dtype: str) -> None:
    case = Case("max_pool", (1, 6, 6, 8), {"kernel_shape": [3, 3], "strides": [3, 3]})
    x = np.full(case.shape, -np.inf, np.float32)
    x[0, 1, 1, 0], x[0, 4, 4, 1], x[0, 0, 5, 2] = np.nan, np.inf, -60000.0
    expected = np.full((1, 2, 2, 8), -np.inf, np.float32)
    expected[0, 0, 0, 0], expected[0, 1, 1, 1], expected[0, 0, 1, 2] = np.nan, np.inf, -60000.0
    for y in run(case, {"x": x.astype(NUMPY[dtype])}, device):
        np.testing.assert_array_equal(y.astype(np.float32), expected.astype(NUMPY[dtype]).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_padding_alone(device: Device, dtype: str) -> None:
    """Their largest element is the smallest finite number of float32, unlike that of elements that are -inf."""
    for pads, expected in (([1, 0], np.finfo(np.float32).min), ([0, 1], -np.inf)):
        window = {"kernel_shape": [2], "strides": [3], "dilations": [4], "pads": pads}
        x = np.full((1, 2, 8), -np.inf, np.float32)
        with np.errstate(over="ignore"):
            rounded = np.full((1, 1, 8), expected, np.float32).astype(NUMPY[dtype])
        for y in run(Case("max_pool", x.shape, window), {"x": x.astype(NUMPY[dtype])}, device):
            np.testing.assert_array_equal(y, rounded)


@pytest.mark.parametrize(("fusion", "expected"), [("global_average_pool", 0.0), ("global_max_pool", -np.inf)])
def test_global_pools_of_no_pixels(device: Device, fusion: str, expected: float) -> None:
    for gpu in (device, small_gpu()):
        for y in run(Case(fusion, (2, 0, 5, 24)), {"x": np.empty((2, 0, 5, 24), np.float32)}, gpu):
            np.testing.assert_array_equal(y, np.full((2, 1, 1, 24), expected, np.float32))


def test_sums_beyond_float16(device: Device) -> None:
    case = Case("global_average_pool", (2, 112, 112, 32), {})
    x = np.full(case.shape, 60000.0, np.float16)
    for y in run(case, {"x": x}, device):
        np.testing.assert_array_equal(y, x[:, :1, :1])


@pytest.mark.parametrize("shape", [(2, 64, 64, 320), (1, 256, 256, 128)])
def test_groups_far_from_zero(device: Device, shape: tuple[int, ...]) -> None:
    """Variances do not cancel where means are large."""
    case = Case("group_norm", shape, {"groups": 32, "epsilon": 1e-5, "activation": "none"})
    inputs = case.inputs("float32")
    inputs["x"] += np.float32(1000.0)
    for y in run(case, inputs, device):
        check(y, case.expected(inputs), slack=100.0)  # a mean is rounded to 2^-14, of a deviation of 2
