"""Rows of extreme values: large offsets, sums beyond fp16, masks, infinities, NaN, and equal values."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_references import layer_norm, rms_norm, softmax, wide
from kernel_runs import DTYPES, check, normal, rounded, run

from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


# Rows of a part of a warp, of a block, of a cluster, and longer than registers hold.
LENGTHS = [(5, 96), (5, 4096), (5, 65536), (5, 400000)]


def test_offset_much_larger_than_the_spread_keeps_its_variance(device: Device) -> None:
    """E[x^2] - E[x]^2 in fp32 would be nothing but rounding error here."""
    x, scale, bias = normal((64, 4096), "float32", 1, 1.0, 4096.0), normal((4096,), "float32", 2), np.zeros(4096)
    inputs = {"x": x, "scale": scale, "bias": rounded(bias, "float32")}
    (y,) = run("layer_norm", inputs, ["float32"], device, epsilon=1e-5)
    check(y, layer_norm(*wide(x, scale, bias), 1e-5), slack=400.0)  # x - mean is off by an ulp of 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_of_the_largest_fp16_values_do_not_overflow(device: Device, dtype: str) -> None:
    x = normal((16, 4096), dtype, 1, 1.0)
    x = rounded(np.sign(x.astype(np.float32)) * 60000.0, dtype)
    scale = normal((4096,), dtype, 2)
    (y,) = run("rms_norm", {"x": x, "scale": scale}, [dtype], device, epsilon=1e-6)
    check(y, rms_norm(*wide(x, scale), 1e-6))


@pytest.mark.parametrize("shape", [(7, 64), (7, 1000), (7, 4096), (3, 65536)], ids=str)
def test_softmax_of_masked_rows(device: Device, shape: tuple[int, int]) -> None:
    x = normal(shape, "float32", 1)
    x[0, :] = -np.inf  # the result is NaN, as the formula gives
    x[1, 1:] = -np.inf  # all weight is on one element
    x[2, : shape[1] // 2] = -np.inf  # whole warps see nothing but -inf
    x[3 % shape[0], :] = np.finfo(np.float32).min if shape[0] > 3 else x[0, :]  # uniform
    x[4 % shape[0], 3] = np.inf if shape[0] > 4 else x[1, 3]
    x[5 % shape[0], 3] = np.nan if shape[0] > 5 else x[2, 3]
    (y,) = run("softmax", {"x": x}, ["float32"], device)
    with np.errstate(invalid="ignore"):
        check(y, softmax(x.astype(np.float64)))


@pytest.mark.parametrize("shape", LENGTHS, ids=str)
def test_softmax_gives_subnormal_numbers(device: Device, shape: tuple[int, int]) -> None:
    """So that their logarithms are finite."""
    x = np.resize(np.linspace(-88, 0, 33), shape).astype(np.float32)
    (y,) = run("softmax", {"x": x}, ["float32"], device)
    exact = softmax(x.astype(np.float64))
    np.testing.assert_allclose(y, exact, rtol=2e-5, atol=3e-45)
    assert (exact < 1e-38).any() and (exact > 2e-45).all()


@pytest.mark.parametrize("shape", LENGTHS, ids=str)
@pytest.mark.parametrize("fusion", ["layer_norm", "rms_norm", "softmax", "add_layer_norm"])
def test_a_row_of_nan_or_infinity_stays_alone(device: Device, fusion: str, shape: tuple[int, int]) -> None:
    x, ones, none = normal(shape, "float32", 1), np.ones(shape[1:], np.float32), np.zeros(shape, np.float32)
    x[1, shape[1] // 2], x[3, -1] = np.nan, np.inf
    operands = {"layer_norm": ["x", "scale"], "rms_norm": ["x", "scale"], "softmax": ["x"]}
    inputs = {"x": x, "residual": none, "scale": ones}
    given = {name: inputs[name] for name in operands.get(fusion, ["x", "residual", "scale"])}
    (y,) = run(fusion, given, ["float32"], device, **({} if fusion == "softmax" else {"epsilon": 1e-5}))
    assert np.isnan(y[1]).all()
    assert np.isnan(y[3, -1])  # inf - inf, or inf times 0
    wide_x = x[::2].astype(np.float64)
    formulas = {"softmax": lambda: softmax(wide_x), "rms_norm": lambda: rms_norm(wide_x, np.ones(1), 1e-5)}
    expected = formulas.get(fusion, lambda: layer_norm(wide_x, np.ones(1), 0.0, 1e-5))()
    check(y[::2], expected, slack=2.0)


@pytest.mark.parametrize("shape", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_spread_give_the_bias(device: Device, dtype: str, shape: tuple[int, int]) -> None:
    """Only epsilon keeps the divisor from being 0."""
    scale, bias = normal(shape[1:], dtype, 1), normal(shape[1:], dtype, 2)
    x = rounded(np.zeros(shape, np.float32), dtype)
    x[1:] = 3.0
    (y,) = run("layer_norm", {"x": x, "scale": scale, "bias": bias}, [dtype], device, epsilon=1e-12)
    check(y, np.broadcast_to(bias.astype(np.float64), shape))
    (y,) = run("rms_norm", {"x": x[:1], "scale": scale}, [dtype], device, epsilon=1e-12)
    assert (y.astype(np.float32) == 0).all()


@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_rms_norm"])
def test_a_sum_beyond_fp16_is_normalized_in_fp32(device: Device, fusion: str) -> None:
    x = rounded(np.sign(normal((16, 4096), "float32", 1)) * 60000.0, "float16")
    scale = normal((4096,), "float16", 2)
    y, total = run(fusion, {"x": x, "residual": x, "scale": scale}, ["float16"] * 2, device, epsilon=1e-6)
    expected, weight = 2 * x.astype(np.float64), scale.astype(np.float64)
    check(y, rms_norm(expected, weight, 1e-6) if "rms" in fusion else layer_norm(expected, weight, 0.0, 1e-6))
    assert np.isinf(total.astype(np.float32)).all()


@pytest.mark.parametrize("shape", [(2, 64, 16, 16), (2, 8, 256, 256)], ids=str)
def test_group_norm_of_an_offset_much_larger_than_the_spread(device: Device, shape: tuple[int, ...]) -> None:
    x, ones, zeros = (
        normal(shape, "float32", 1, 1.0, 4096.0),
        np.ones(shape[1], np.float32),
        np.zeros(shape[1], np.float32),
    )
    (y,) = run("group_norm", {"x": x, "scale": ones, "bias": zeros}, ["float32"], device, groups=4, epsilon=1e-5)
    rows = x.astype(np.float64).reshape(shape[0], 4, -1)
    check(y, layer_norm(rows, np.ones(1), 0.0, 1e-5).reshape(shape), slack=400.0)
