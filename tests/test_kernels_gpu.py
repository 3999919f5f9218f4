"""Every kernel, launched straight from its plan, against float64: all dtypes, odd and misaligned sizes, extremes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_runs import DTYPES, check, cupy, normal, rounded, run, upload

from onnxfuse.provider import planner
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec

pytestmark = pytest.mark.gpu

# A single element; shorter than a vector; odd and therefore element by element; whole vectors; a warp's row with
# several vectors; a block's; a cluster's; odd and a cluster's; nothing.
ROWS = [(1, 1), (3, 5), (33, 1023), (7, 4097), (128, 128), (300, 768), (300, 4096), (1, 4096), (300, 1000),
        (2, 65536), (300, 16384), (5, 100003), (1, 300000), (0, 128)]  # fmt: skip
# Many rows: short ones in narrow vectors, a block's, and in shared memory of one block (in fp32 of two) and of several.
LARGE = [(4096, 64), (2000, 8192), (600, 20000), (270, 40000)]
PLACED = [*((shape, True) for shape in [*ROWS, *LARGE]), *((shape, False) for shape in ROWS[2:9:2])]


@pytest.fixture(scope="module")
def device() -> Device:
    return importlib.import_module("onnxfuse.provider.compile").gpu(0)


# ---- references --------------------------------------------------------------------------------------------------


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray | float, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


erfc = np.vectorize(math.erfc, otypes=[float])

ACTIVATIONS: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "none": lambda x, a, b: x,
    "relu": lambda x, a, b: np.maximum(x, 0),
    "gelu": lambda x, a, b: 0.5 * x * erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x, a, b: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x, a, b: x * sigmoid(x),
    "quick_gelu": lambda x, a, b: x * sigmoid(1.702 * x),
    "hard_swish": lambda x, a, b: x * np.clip(x / 6 + 0.5, 0, 1),
    "mish": lambda x, a, b: x * np.tanh(np.logaddexp(0, x)),
    "sigmoid": lambda x, a, b: sigmoid(x),
    "tanh": lambda x, a, b: np.tanh(x),
    "softplus": lambda x, a, b: np.logaddexp(0, x),
    "clip": lambda x, a, b: np.clip(x, a, b),
    "leaky_relu": lambda x, a, b: np.where(x < 0, a * x, x),
    "elu": lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x),
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
}
PARAMETERS = {"clip": (-0.5, 0.75), "leaky_relu": (0.1, 0.0), "elu": (1.3, 0.0), "hard_sigmoid": (0.2, 0.5)}


def with_parameters(activation: str) -> dict[str, Any]:
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    given = {"alpha": alpha, "beta": beta} if activation in PARAMETERS else {}
    return {"activation": activation, **given}


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "aligned"), PLACED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, scale, bias = normal(shape, dtype, 1, 2.0, 0.5), normal(shape[1:], dtype, 2), normal(shape[1:], dtype, 3)
    inputs = {"x": x, "scale": scale, "bias": bias}
    (y,) = run("layer_norm", inputs, [dtype], device, aligned, epsilon=1e-5)
    check(y, layer_norm(*wide(x, scale, bias), 1e-5))


@pytest.mark.parametrize(("shape", "aligned"), PLACED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, scale = normal(shape, dtype, 1, 2.0, 0.5), normal(shape[1:], dtype, 2)
    (y,) = run("rms_norm", {"x": x, "scale": scale}, [dtype], device, aligned, epsilon=1e-6)
    check(y, rms_norm(*wide(x, scale), 1e-6))


@pytest.mark.parametrize(("shape", "aligned"), PLACED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x = normal(shape, dtype, 1, 4.0)
    (y,) = run("softmax", {"x": x}, [dtype], device, aligned)
    check(y, softmax(*wide(x)), slack=2.0)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_layer_norm without bias", "add_rms_norm"])
@pytest.mark.parametrize("shape", [*ROWS[1::2], (4096, 64), (2200, 768), (280, 20000), (1, 300000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(device: Device, dtype: str, shape: tuple[int, int], fusion: str, outputs: int) -> None:
    x, residual, scale, bias = (normal(s, dtype, i) for i, s in enumerate((shape, shape, shape[1:], shape[1:])))
    inputs = {"x": x, "residual": residual, "scale": scale}
    total, weight, offset = x.astype(float) + residual.astype(float), scale.astype(float), bias.astype(float)
    if fusion == "add_layer_norm":
        inputs["bias"] = bias
    y, *sums = run(fusion.split()[0], inputs, [dtype] * outputs, device, epsilon=1e-5)
    with_bias = offset if fusion == "add_layer_norm" else 0.0
    check(y, rms_norm(total, weight, 1e-5) if "rms" in fusion else layer_norm(total, weight, with_bias, 1e-5))
    assert len(sums) == outputs - 1
    for found in sums:
        check(found, total)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("y_dtype", DTYPES)
def test_dtypes_may_differ(device: Device, x_dtype: str, w_dtype: str, y_dtype: str) -> None:
    x, residual = normal((37, 768), x_dtype, 1), normal((37, 768), y_dtype, 2)
    scale, bias = normal((768,), w_dtype, 3), normal((768,), "float32", 4)
    inputs = {"x": x, "residual": residual, "scale": scale, "bias": bias}
    y, total = run("add_layer_norm", inputs, [y_dtype, x_dtype], device, epsilon=1e-5)
    expected = x.astype(np.float64) + residual.astype(np.float64)
    check(y, layer_norm(expected, *wide(scale, bias), 1e-5))
    check(total, expected)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 320, 64, 64), 32), ((2, 64, 7, 7), 32), ((1, 32, 5, 3), 4), ((3, 16, 8), 16), ((2, 128, 256, 256), 32),
     ((1, 8, 300, 301), 1), ((0, 8, 4, 4), 2), ((4, 24), 3)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm(device: Device, dtype: str, shape: tuple[int, ...], groups: int, activation: str) -> None:
    x, scale, bias = normal(shape, dtype, 1, 2.0, 0.5), normal(shape[1:2], dtype, 2), normal(shape[1:2], dtype, 3)
    inputs = {"x": x, "scale": scale, "bias": bias}
    (y,) = run("group_norm", inputs, [dtype], device, groups=groups, epsilon=1e-5, activation=activation)
    rows = x.astype(np.float64).reshape(shape[0], groups, math.prod(shape[1:]) // groups)
    norm = layer_norm(rows, np.ones(1), 0.0, 1e-5).reshape(*shape[:2], math.prod(shape[2:]))
    expected = norm * scale.astype(float)[:, None] + bias.astype(float)[:, None]
    check(y, ACTIVATIONS[activation](expected, 0, 0).reshape(shape), slack=2.0)


@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("shape", [(7, 4097), (300, 768), (300, 4096), (2, 65536), (2, 400000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_misaligned(device: Device, dtype: str, shape: tuple[int, int], fusion: str) -> None:
    x, residual, scale = normal(shape, dtype, 1), normal(shape, dtype, 2), normal(shape[1:], dtype, 3)
    inputs = {"x": x, "residual": residual, "scale": scale}
    y, total = run(fusion, inputs, [dtype] * 2, device, aligned=False, epsilon=1e-5)
    expected, weight = x.astype(np.float64) + residual.astype(np.float64), scale.astype(np.float64)
    check(y, rms_norm(expected, weight, 1e-5) if "rms" in fusion else layer_norm(expected, weight, 0.0, 1e-5))
    check(total, expected)


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 320, 64, 64), 32), ((2, 16, 9, 9), 4), ((1, 8, 300, 300), 1)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_misaligned(device: Device, dtype: str, shape: tuple[int, ...], groups: int) -> None:
    x, scale, bias = normal(shape, dtype, 1), normal(shape[1:2], dtype, 2), normal(shape[1:2], dtype, 3)
    inputs = {"x": x, "scale": scale, "bias": bias}
    (y,) = run("group_norm", inputs, [dtype], device, aligned=False, groups=groups, epsilon=1e-5, activation="none")
    rows = x.astype(np.float64).reshape(shape[0], groups, math.prod(shape[1:]) // groups)
    norm = layer_norm(rows, np.ones(1), 0.0, 1e-5).reshape(*shape[:2], math.prod(shape[2:]))
    check(y, (norm * scale.astype(float)[:, None] + bias.astype(float)[:, None]).reshape(shape), slack=2.0)


# ---- extreme values ----------------------------------------------------------------------------------------------

LENGTHS = [(5, 96), (5, 4096), (5, 65536), (5, 400000)]  # part of a warp, a block, a cluster, more than registers hold


def test_offset_much_larger_than_the_spread_keeps_its_variance(device: Device) -> None:
    """E[x^2] - E[x]^2 in fp32 would be all error here."""
    x, scale, bias = normal((64, 4096), "float32", 1, 1.0, 4096.0), normal((4096,), "float32", 2), np.zeros(4096)
    inputs = {"x": x, "scale": scale, "bias": rounded(bias, "float32")}
    (y,) = run("layer_norm", inputs, ["float32"], device, epsilon=1e-5)
    check(y, layer_norm(*wide(x, scale, bias), 1e-5), slack=400.0)  # x - mean itself has an ulp of 4096 to lose


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
    x[0, :] = -np.inf  # NaN, as the formula gives
    x[1, 1:] = -np.inf  # all on one element
    x[2, : shape[1] // 2] = -np.inf  # whole warps see nothing but -inf
    x[3 % shape[0], :] = np.finfo(np.float32).min if shape[0] > 3 else x[0, :]  # uniform
    x[4 % shape[0], 3] = np.inf if shape[0] > 4 else x[1, 3]
    x[5 % shape[0], 3] = np.nan if shape[0] > 5 else x[2, 3]
    (y,) = run("softmax", {"x": x}, ["float32"], device)
    with np.errstate(invalid="ignore"):
        check(y, softmax(x.astype(np.float64)))


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
    """Only epsilon keeps the root from being zero."""
    scale, bias = normal(shape[1:], dtype, 1), normal(shape[1:], dtype, 2)
    x = rounded(np.zeros(shape, np.float32), dtype)
    x[1:] = 3.0
    (y,) = run("layer_norm", {"x": x, "scale": scale, "bias": bias}, [dtype], device, epsilon=1e-12)
    check(y, np.broadcast_to(bias.astype(np.float64), shape))
    (y,) = run("rms_norm", {"x": x[:1], "scale": scale}, [dtype], device, epsilon=1e-12)
    assert (y.astype(np.float32) == 0).all()


@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_rms_norm"])
def test_a_sum_beyond_fp16_is_normalised_in_fp32(device: Device, fusion: str) -> None:
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


# ---- streams -----------------------------------------------------------------------------------------------------

DELAY = 'extern "C" __global__ void delay() { for (long long end = clock64() + 20000000; clock64() < end;) {} }'


@pytest.mark.parametrize("fusion", ["layer_norm", "softmax", "activation", "group_norm", "rotary_embedding"])
def test_another_stream(device: Device, fusion: str) -> None:
    """What a stream's earlier work writes late is there: launched anywhere else, the kernel would read NaN."""
    shape = (2, 16, 64, 64)
    x, ones = normal(shape, "float32", 1), np.ones(64, np.float32)
    table = np.ones((1, 64, 64), np.float32)
    inputs = {
        "layer_norm": {"x": x, "scale": ones}, "group_norm": {"x": x, "scale": ones[:16], "bias": ones[:16]},
        "rotary_embedding": {"x": x, "cos": table, "sin": table},
    }.get(fusion, {"x": x})  # fmt: skip
    attributes = {"groups": 4, "epsilon": 1e-5, "activation": "silu"} if fusion in ("group_norm", "activation") else {}
    (expected,) = run(fusion, inputs, ["float32"], device, **attributes)
    plan = plan_of(fusion, inputs, ["float32"], device, **attributes)
    read, given = [upload(value) for value in inputs.values()], upload(x)
    read[0].fill(0xFF)
    written = upload(np.zeros(plan.outputs[0].shape, np.float32))
    ready = planner.ready(plan, [TensorSpec(value.shape, "float32") for value in inputs.values()])
    delay, stream = cupy.RawKernel(DELAY, "delay"), cupy.cuda.Stream(non_blocking=True)
    delay.compile()
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        delay((1,), (1,), ())
        cupy.copyto(read[0], given)
    ready.run([each.data.ptr for each in read], [written.data.ptr], stream=stream.ptr)
    stream.synchronize()
    np.testing.assert_array_equal(written.get().view(np.float32).reshape(expected.shape), expected)


def plan_of(fusion: str, inputs: dict[str, np.ndarray], outputs: list[str], device: Device, **attributes: Any) -> Plan:
    node = FusedNode(fusion, fusion, tuple(inputs), attributes, tuple(outputs))
    specs = [TensorSpec(value.shape, value.dtype.name) for value in inputs.values()]
    plan: Plan = importlib.import_module(f"onnxfuse.kernels.{fusion}").plan(node, specs, device)
    return plan


# ---- elements ----------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (3, 5), (33, 1023), (128, 128), (4096, 64), (1031, 4099), (0, 128)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_over_its_range(device: Device, dtype: str, activation: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20011), np.linspace(-1e-3, 1e-3, 1001), [-6e4, -300, 300, 6e4, 0.0, -0.0]])
    x = rounded(x.astype(np.float32), dtype)
    (y,) = run("activation", {"x": x}, [dtype], device, **with_parameters(activation))
    with np.errstate(over="ignore"):
        check(y, ACTIVATIONS[activation](x.astype(np.float64), *PARAMETERS.get(activation, (0, 0))), tiny=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_infinity_and_nan(device: Device, activation: str) -> None:
    x = np.array([np.nan, np.inf], dtype=np.float32)
    (y,) = run("activation", {"x": x}, ["float32"], device, **with_parameters(activation))
    assert np.isnan(y[0])
    _, beta = PARAMETERS.get(activation, (0.0, 0.0))
    bounded = {"sigmoid": 1.0, "tanh": 1.0, "hard_sigmoid": 1.0, "clip": beta}
    assert y[1] == bounded.get(activation, np.inf)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_of_any_size(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, up, bias = normal(shape, dtype, 1, 2.0), normal(shape, dtype, 2), normal(shape[1:], dtype, 3)
    silu = ACTIVATIONS["silu"]
    (y,) = run("activation", {"x": x}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64), 0, 0), tiny=True)
    (y,) = run("gated_activation", {"gate": x, "up": up}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64), 0, 0) * up.astype(np.float64), tiny=True)
    (y,) = run("bias_activation", {"x": x, "bias": bias}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64) + bias.astype(np.float64), 0, 0), tiny=True)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(device: Device, dtype: str, activation: str) -> None:
    gate, up = normal((77, 1024), dtype, 1, 3.0), normal((77, 1024), "float16", 2)
    (y,) = run("gated_activation", {"gate": gate, "up": up}, [dtype], device, activation=activation)
    check(y, ACTIVATIONS[activation](gate.astype(np.float64), 0, 0) * up.astype(np.float64), tiny=True)


# ---- rotary embedding --------------------------------------------------------------------------------------------


def rotate_half(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("table", ["bsd", "b1sd"])
@pytest.mark.parametrize("layout", ["packed", "bshd", "bhsd"])
@pytest.mark.parametrize(
    ("batch", "tables", "heads", "seq", "size"),
    [(2, 1, 3, 5, 6), (2, 2, 8, 33, 64), (1, 1, 32, 512, 128), (3, 1, 5, 7, 20), (0, 1, 4, 8, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(
    device: Device, dtype: str, batch: int, tables: int, heads: int, seq: int, size: int, layout: str, table: str,
    aligned: bool,
) -> None:  # fmt: skip
    x = normal((batch, heads, seq, size), dtype, 1)
    cos, sin = (normal((tables, seq, size), dtype, seed) for seed in (2, 3))
    turned = {"bhsd": x, "bshd": x.swapaxes(1, 2), "packed": x.swapaxes(1, 2).reshape(batch, seq, heads * size)}[layout]
    shape = (tables, seq, size) if table == "bsd" else (tables, 1, seq, size)
    inputs = {"x": np.ascontiguousarray(turned), "cos": cos.reshape(shape), "sin": sin.reshape(shape)}
    (y,) = run("rotary_embedding", inputs, [dtype], device, aligned, layout=layout, table=table)
    angles = (angle.astype(np.float64)[:, None] for angle in (cos, sin))
    check(y, rotate_half(x.astype(np.float64), *angles))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (128, 32), (10, 6), (96, 48)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_operator(
    device: Device, dtype: str, packed: bool, size: int, rotated: int, interleaved: int
) -> None:
    batch, heads, seq = 2, 6, 19
    x = normal((batch, heads, seq, size), dtype, 1)
    cos, sin = (normal((batch, seq, rotated // 2), dtype, seed) for seed in (2, 3))
    given = np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, seq, heads * size) if packed else x
    options = {"form": "operator", "interleaved": interleaved, "num_heads": heads, "rotary_embedding_dim": rotated}
    (y,) = run("rotary_embedding", {"x": given, "cos": cos, "sin": sin}, [dtype], device, **options)
    expected, c, s = x.astype(np.float64), *(angle.astype(np.float64)[:, None] for angle in (cos, sin))
    first = np.s_[..., 0:rotated:2] if interleaved else np.s_[..., : rotated // 2]
    second = np.s_[..., 1:rotated:2] if interleaved else np.s_[..., rotated // 2 : rotated]
    one, other = expected[first].copy(), expected[second].copy()
    expected[first], expected[second] = one * c - other * s, one * s + other * c
    check(y, expected.swapaxes(1, 2).reshape(batch, seq, heads * size) if packed else expected)
