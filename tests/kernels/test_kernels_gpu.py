"""Norms and softmax, launched from their plans, against float64: all dtypes, odd and misaligned sizes; and streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_hosts import first_plan, host_of
from kernel_references import layer_norm, rms_norm, softmax, wide
from kernel_runs import DTYPES, check, cupy, launch, normal, result, run, small_gpu, upload

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

# Sizes for every path of rows.cuh: a single element; rows shorter than a vector; few rows of odd length, and many; rows
# of a part of a warp, few and many; rows of a warp with several vectors; rows of a block, few and many; rows of an odd
# number of vectors; rows of a cluster, few and many; the same of odd length; rows longer than all registers; no rows.
ROWS = [(1, 1), (3, 5), (3, 1023), (7, 4097), (4, 128), (128, 128), (30, 768), (1, 4096), (9, 4096), (9, 1000),
        (2, 65536), (9, 16384), (3, 100003), (5, 20001), (1, 300000), (0, 128)]  # fmt: skip
# Short rows in narrow and in full vectors; rows of a large block; rows in shared memory of one block (in fp32 of two),
# and of several.
MANY = [(4096, 64), (8200, 64), (9, 8192), (9, 20000), (9, 40000)]
MISALIGNED = [(3, 1023), (4, 128), (30, 768), (9, 4096), (5, 20001)]
SHAPE_AND_ALIGNMENT = [*((shape, True) for shape in [*ROWS, *MANY]), *((shape, False) for shape in MISALIGNED)]
ADDED = [(3, 5), (7, 4097), (30, 768), (1, 4096), (2, 65536), (9, 16384), (3, 100003), (1, 300000), (0, 128),
         (4096, 64), (8200, 64), (9, 20000)]  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Device:
    return small_gpu()


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "aligned"), SHAPE_AND_ALIGNMENT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, scale, bias = normal(shape, dtype, 1, 2.0, 0.5), normal(shape[1:], dtype, 2), normal(shape[1:], dtype, 3)
    inputs = {"x": x, "scale": scale, "bias": bias}
    (y,) = run("layer_norm", inputs, [dtype], device, aligned, epsilon=1e-5)
    check(y, layer_norm(*wide(x, scale, bias), 1e-5))


@pytest.mark.parametrize(("shape", "aligned"), SHAPE_AND_ALIGNMENT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, scale = normal(shape, dtype, 1, 2.0, 0.5), normal(shape[1:], dtype, 2)
    (y,) = run("rms_norm", {"x": x, "scale": scale}, [dtype], device, aligned, epsilon=1e-6)
    check(y, rms_norm(*wide(x, scale), 1e-6))


@pytest.mark.parametrize(("shape", "aligned"), SHAPE_AND_ALIGNMENT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x = normal(shape, dtype, 1, 4.0)
    (y,) = run("softmax", {"x": x}, [dtype], device, aligned)
    check(y, softmax(*wide(x)), slack=2.0)


@pytest.mark.parametrize("fusion", ["layer_norm", "rms_norm", "softmax"])
@pytest.mark.parametrize("shape", [(8192, 768), (2000, 8192), (600, 20000), (270, 40000)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_fill_the_gpu(dtype: str, shape: tuple[int, int], fusion: str) -> None:
    x, scale = normal(shape, dtype, 1), normal(shape[1:], dtype, 2)
    given = {"x": x} if fusion == "softmax" else {"x": x, "scale": scale}
    (y,) = run(fusion, given, [dtype], gpu(0), **({} if fusion == "softmax" else {"epsilon": 1e-5}))
    formulas = {"softmax": lambda: softmax(*wide(x)), "rms_norm": lambda: rms_norm(*wide(x, scale), 1e-5)}
    check(y, formulas.get(fusion, lambda: layer_norm(*wide(x, scale), 0.0, 1e-5))(), slack=2.0)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_layer_norm without bias", "add_rms_norm"])
@pytest.mark.parametrize("shape", ADDED, ids=str)
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


@pytest.mark.parametrize("fusion", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("shape", [(137, 768), (43, 2048)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate(device: Device, dtype: str, shape: tuple[int, int], fusion: str) -> None:
    """With more rows than are resident at once, one candidate is persistent; its last round is not full."""
    x, residual, scale, bias = (normal(s, dtype, i) for i, s in enumerate((shape, shape, shape[1:], shape[1:])))
    left_out = [name for name, word in (("residual", "add"), ("bias", "layer")) if word not in fusion]
    given = {"x": x, "residual": residual, "scale": scale, "bias": bias}
    inputs = {name: each for name, each in given.items() if name not in left_out}
    node = FusedNode(fusion, fusion, tuple(inputs), {"epsilon": 1e-5}, (dtype,) * (2 if "add" in fusion else 1))
    specs = [TensorSpec(each.shape, dtype, constant=each.ndim == 1) for each in inputs.values()]
    total = x.astype(np.float64) + (residual.astype(np.float64) if "add" in fusion else 0.0)
    norm = layer_norm(total, *wide(scale, bias), 1e-5) if "layer" in fusion else rms_norm(total, *wide(scale), 1e-5)
    plans = host_of(fusion).candidates(node, specs, device)
    two = device.arch in (90, 100) or (device.arch == 80 and shape == (137, 768))  # on sm_80 only rows of a warp
    assert len(plans) == 2 or dtype == "float32" or not two
    for plan in plans:
        written = [upload(np.full(shape, np.nan, each.dtype)) for each in (x, x)[: len(plan.outputs)]]
        launch(plan, [upload(each) for each in inputs.values()], written)
        for buffer, spec, reference in zip(written, plan.outputs, [norm, total], strict=False):
            check(result(buffer, spec, aligned=True), reference)


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
    [((1, 40, 64, 64), 4), ((2, 64, 7, 7), 32), ((1, 32, 5, 3), 4), ((3, 16, 8), 16), ((2, 16, 64, 64), 4),
     ((2, 16, 128, 128), 4), ((1, 8, 300, 301), 1), ((0, 8, 4, 4), 2), ((4, 24), 3),
     ((2, 24, 5, 9, 11), 24), ((1, 8, 300, 301), 8)],
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
    check(y, ACTIVATIONS[activation].formula(expected, 0, 0).reshape(shape), slack=2.0)


@pytest.mark.parametrize("fusion", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("shape", [(7, 4097), (30, 768), (9, 4096), (2, 65536), (2, 400000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_misaligned(device: Device, dtype: str, shape: tuple[int, int], fusion: str) -> None:
    x, residual, scale = normal(shape, dtype, 1), normal(shape, dtype, 2), normal(shape[1:], dtype, 3)
    inputs = {"x": x, "residual": residual, "scale": scale}
    y, total = run(fusion, inputs, [dtype] * 2, device, aligned=False, epsilon=1e-5)
    expected, weight = x.astype(np.float64) + residual.astype(np.float64), scale.astype(np.float64)
    check(y, rms_norm(expected, weight, 1e-5) if "rms" in fusion else layer_norm(expected, weight, 0.0, 1e-5))
    check(total, expected)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 40, 64, 64), 4), ((2, 16, 9, 9), 4), ((2, 16, 64, 64), 4), ((1, 8, 300, 300), 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_misaligned(device: Device, dtype: str, shape: tuple[int, ...], groups: int) -> None:
    x, scale, bias = normal(shape, dtype, 1), normal(shape[1:2], dtype, 2), normal(shape[1:2], dtype, 3)
    inputs = {"x": x, "scale": scale, "bias": bias}
    (y,) = run("group_norm", inputs, [dtype], device, aligned=False, groups=groups, epsilon=1e-5, activation="none")
    rows = x.astype(np.float64).reshape(shape[0], groups, math.prod(shape[1:]) // groups)
    norm = layer_norm(rows, np.ones(1), 0.0, 1e-5).reshape(*shape[:2], math.prod(shape[2:]))
    check(y, (norm * scale.astype(float)[:, None] + bias.astype(float)[:, None]).reshape(shape), slack=2.0)


# ---- streams -----------------------------------------------------------------------------------------------------

DELAY = 'extern "C" __global__ void delay() { for (long long end = clock64() + 20000000; clock64() < end;) {} }'


@pytest.mark.parametrize("fusion", ["layer_norm", "softmax", "activation", "group_norm", "rotary_embedding"])
def test_another_stream(device: Device, fusion: str) -> None:
    """A kernel runs on the stream that it is given: on another one it would read NaN, as its input is written late."""
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
    ready = ready_plan(plan, [TensorSpec(value.shape, "float32") for value in inputs.values()])
    delay, stream = cupy.RawKernel(DELAY, "delay"), cupy.cuda.Stream(non_blocking=True)
    delay.compile()
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        delay((1,), (1,), ())
        cupy.copyto(read[0], given)
    ready.run([each.data.ptr for each in read], [written.data.ptr], stream=stream.ptr)
    stream.synchronize()
    np.testing.assert_array_equal(written.get().view(np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("rows", [1, 128, 6304])
def test_launches_that_start_early_wait_for_what_they_read(rows: int) -> None:
    """In a chain each launch reads what the one before wrote, and overwrites what that one read."""
    shape, weight = (rows, 768), normal((768,), "float16", 9)
    given, whole = [normal(shape, "float16", seed) for seed in range(4)], gpu(0)
    chain = [
        ("add_layer_norm", ["x", "residual", "scale", "bias"], (0, 1), (2, 3), {"epsilon": 1e-5}),
        ("activation", ["x"], (2,), (0,), {"activation": "silu"}),
        ("gated_activation", ["gate", "up"], (3, 2), (1,), {"activation": "sigmoid"}),
        ("softmax", ["x"], (0,), (2,), {}),
    ]
    results = []
    for wait in (True, False):
        buffers, scale, stream = [upload(value) for value in given], upload(weight), cupy.cuda.Stream(non_blocking=True)
        links = []
        for fusion, names, read, written, attributes in chain:
            inputs = dict(zip(names, [*(given[i] for i in read), weight, weight], strict=False))
            plan = plan_of(fusion, inputs, ["float16"] * len(written), whole, **attributes)
            assert all(isinstance(step, Launch) and step.pdl == (whole.arch >= 90) for step in plan.steps)
            ready = ready_plan(plan, [TensorSpec(value.shape, "float16") for value in inputs.values()])
            read_from = [*(buffers[i] for i in read), scale, scale][: len(names)]
            links.append((ready, read_from, [buffers[i] for i in written]))
        cupy.cuda.runtime.deviceSynchronize()
        for ready, read_from, write_to in links * 25:
            ready.run([a.data.ptr for a in read_from], [a.data.ptr for a in write_to], stream=stream.ptr)
            if wait:
                stream.synchronize()
        stream.synchronize()
        results.append([buffer.get() for buffer in buffers])
    for one_by_one, early in zip(*results, strict=True):
        np.testing.assert_array_equal(early, one_by_one)
    assert np.isfinite(results[0][1].view(np.float16)).all()


def plan_of(fusion: str, inputs: dict[str, np.ndarray], outputs: list[str], device: Device, **attributes: Any) -> Plan:
    node = FusedNode(fusion, fusion, tuple(inputs), attributes, tuple(outputs))
    specs = [TensorSpec(value.shape, value.dtype.name) for value in inputs.values()]
    return first_plan(node, specs, device)
