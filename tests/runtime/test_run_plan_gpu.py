"""Plans with tensor maps and with cuBLASLt's products run without onnxruntime, and agree with float64."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from kernel_runs import DTYPES, NUMPY, RELATIVE, compile_native, cupy, launch, normal, result, upload

import onnxfuse.kernels
from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.runtime import cuda_driver, run_plan
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Device, Kernel, Launch, Matmul, Matrix, Plan, Pointer, TensorMap, TensorSpec

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]

# One element; vectors and a matrix by a vector; odd sizes; whole tiles; several tiles in each direction and a long sum.
SIZES = [(1, 1, 1), (1, 257, 64), (130, 1, 33), (3, 5, 7), (128, 128, 64), (300, 257, 129), (64, 200, 4096)]
SUMS = 2.0**-20  # error of float32 sums in any order, relative to the sum of the terms' magnitudes
SUMS_TF32 = 2.0**-10


@pytest.fixture(scope="module")
def device() -> Device:
    compile_native()
    return cuda_driver.gpu(0)


def run(plan: Plan, inputs: Mapping[str, Array], aligned: bool) -> Array:
    """Return the first output in the plan's dtype, after a check that the memory around it is untouched."""
    spec = plan.outputs[0]
    read = [upload(value, aligned) for value in inputs.values()]
    written = upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned)
    launch(plan, read, [written])
    return result(written, spec, aligned)


def close(found: Array, expected: Array, magnitude: Array, sums: float = SUMS) -> None:
    allowed = RELATIVE[found.dtype.name] * np.abs(expected) + sums * magnitude + 1e-7
    worst = np.abs(found.astype(np.float64) - expected) / allowed
    assert worst.max() <= 1, f"{worst.max()} times the tolerance; {(worst > 1).sum()} of {worst.size} wrong"


# --- products --------------------------------------------------------------------------------------------------------


def operands(m: int, n: int, k: int, dtype: str, transposed: bool, batch: int = 1) -> dict[str, Array]:
    lead = (batch,) if batch > 1 else ()
    return {
        "x": normal((*lead, m, k), dtype, 1),
        "w": normal((*lead, n, k) if transposed else (*lead, k, n), dtype, 2, 1 / math.sqrt(k)),
        "bias": normal((n,), dtype, 3),
        "c": normal((*lead, m, n), dtype, 4),
    }


def matmul(m: int, n: int, k: int, dtype: str, transposed: bool, aligned: bool, **more: Any) -> Matmul:
    """Return a product of the inputs x, w, bias and c, in this order."""
    rows, columns = (n, k) if transposed else (k, n)
    x = Matrix(Pointer("input", 0), dtype, m, k, k, m * k)
    w = Matrix(Pointer("input", 1), dtype, rows, columns, columns, n * k)
    y = Matrix(Pointer("output", 0), dtype, m, n, n, m * n)
    if more.pop("c", False):
        more["c"] = dataclasses.replace(y, pointer=Pointer("input", 3))
    if more.pop("bias", False):
        more["bias"] = Pointer("input", 2)
    return Matmul(x, w, y, transposed, aligned=aligned, **more)


def product(given: Mapping[str, Array], transposed: bool) -> tuple[Array, Array]:
    """Return x w, and the sum of the magnitudes of its terms."""
    x, w = given["x"].astype(np.float64), given["w"].astype(np.float64)
    w = np.swapaxes(w, -1, -2) if transposed else w
    return x @ w, np.abs(x) @ np.abs(w)


EPILOGUES = [
    {},
    {"bias": True},
    {"c": True},
    {"bias": True, "c": True},
    {"activation": "relu", "bias": True},
    {"activation": "gelu_tanh", "bias": True},
    {"activation": "relu"},
    {"activation": "gelu_tanh"},
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aligned", [True, False])
def test_a_product_with_every_epilogue(device: Device, dtype: str, transposed: bool, aligned: bool) -> None:
    for m, n, k in SIZES:
        given = operands(m, n, k, dtype, transposed)
        exact, magnitude = product(given, transposed)
        for more in EPILOGUES:
            step = matmul(m, n, k, dtype, transposed, aligned, **more)
            wide = {name: given[name].astype(np.float64) * (name in more) for name in ("bias", "c")}
            y = ACTIVATIONS[more.get("activation", "none")].formula(exact + wide["bias"] + wide["c"], 0, 0)
            found = run(Plan((TensorSpec((m, n), dtype, aligned),), (step,)), given, aligned)
            # cuBLASLt may round before an activation, or between two sums, to the result's dtype.
            parts = sum(map(np.abs, wide.values()), np.abs(exact))
            close(found, y, magnitude + 1 + 2 * RELATIVE[dtype] / SUMS * parts)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_products_whose_w_may_be_shared(device: Device, dtype: str, shared: bool) -> None:
    m, n, k, batch = 33, 48, 40, 5
    given = operands(m, n, k, dtype, True, batch)
    if shared:
        given["w"] = given["w"][0]
    step = matmul(m, n, k, dtype, True, True, batch=batch, bias=True)
    step = dataclasses.replace(step, w=dataclasses.replace(step.w, batch_stride=0)) if shared else step
    exact, magnitude = product(given, True)
    y = exact + given["bias"].astype(np.float64)
    close(run(Plan((TensorSpec((batch, m, n), dtype),), (step,)), given, True), y, magnitude + 1)


def test_half_precision_operands_may_give_fp32(device: Device) -> None:
    m, n, k = 40, 24, 72
    for dtype in ("float16", "bfloat16"):
        given = operands(m, n, k, dtype, False)
        step = matmul(m, n, k, dtype, False, True)
        step = dataclasses.replace(step, y=dataclasses.replace(step.y, dtype="float32"))
        close(run(Plan((TensorSpec((m, n), "float32"),), (step,)), given, True), *product(given, False))


def test_tf32_is_used_only_where_it_is_allowed(device: Device) -> None:
    m, n, k = 256, 256, 1024
    given = operands(m, n, k, "float32", False)
    exact, magnitude = product(given, False)
    found = {}
    for tf32 in (False, True):
        step = matmul(m, n, k, "float32", False, True, tf32=tf32)
        found[tf32] = run(Plan((TensorSpec((m, n), "float32"),), (step,)), given, True)
    close(found[False], exact, magnitude)
    close(found[True], exact, magnitude, SUMS_TF32)
    assert np.abs(found[True] - exact).max() > 20 * np.abs(found[False] - exact).max()


def test_every_algorithm_that_cublaslt_proposes_runs(device: Device) -> None:
    m, n, k = 256, 512, 2048
    given = operands(m, n, k, "float16", False)
    exact, magnitude = product(given, False)
    wanted = matmul(m, n, k, "float16", False, True, workspace_bytes=32 << 20)
    found = run_plan.algorithms(wanted, 0, 8)
    assert len({each.words for each in found}) == len(found) > 1
    for each in found:
        workspace = Pointer("scratch", 0) if each.workspace_bytes else None
        changes = {"algorithm": each.words, "workspace": workspace, "workspace_bytes": each.workspace_bytes}
        step = dataclasses.replace(wanted, **changes)
        plan = Plan((TensorSpec((m, n), "float16"),), (step,), (each.workspace_bytes,))
        close(run(plan, given, True), exact, magnitude)


def test_an_algorithm_without_its_workspace_is_refused(device: Device) -> None:
    wanted = matmul(64, 64, 65536, "float16", False, True, workspace_bytes=32 << 20)
    hungry = next(each for each in run_plan.algorithms(wanted, 0, 16) if each.workspace_bytes)
    step = dataclasses.replace(wanted, algorithm=hungry.words, workspace_bytes=0)
    specs = [TensorSpec(shape, "float16") for shape in ((64, 65536), (65536, 64), (64,), (64, 64))]
    with pytest.raises(NativeError, match=r"for a product of float16 64x65536 and 65536x64 needs \d+ bytes of work"):
        ready_plan(Plan((TensorSpec((64, 64), "float16"),), (step,)), specs)


def test_eight_threads_run_one_plan_with_biases_of_their_own(device: Device) -> None:
    m, n, k = 64, 96, 128
    plan = Plan((TensorSpec((m, n), "float16"),), (matmul(m, n, k, "float16", False, True, bias=True),))
    given = operands(m, n, k, "float16", False)
    specs = [TensorSpec(value.shape, "float16") for value in given.values()]
    ready = ready_plan(plan, specs)
    exact, magnitude = product(given, False)
    shared = [upload(value) for value in given.values()]

    def work(seed: int) -> None:
        bias = normal((n,), "float16", seed)
        uploaded, stream = upload(bias), cupy.cuda.Stream(non_blocking=True)
        outputs = [upload(np.full((m, n), np.nan, np.float16)) for _ in range(50)]
        inputs = [each.data.ptr for each in (shared[0], shared[1], uploaded, shared[3])]
        cupy.cuda.runtime.deviceSynchronize()
        for output in outputs:
            ready.run(inputs, [output.data.ptr], stream=stream.ptr)
        stream.synchronize()
        for output in outputs:
            close(result(output, plan.outputs[0], True), exact + bias.astype(np.float64), magnitude + 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_sessions_keep_to_their_own_use_tf32(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions of one model run at the same time with the cuBLASLt that onnxruntime has loaded."""
    ort = pytest.importorskip("onnxruntime")
    provider = importlib.import_module("onnxfuse.session")
    folder = Path(__file__).parents[1] / "native"
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, str(folder / "kernels")])
    ort.preload_dlls()
    call = '<fusion = "product", operands = "x w bias", output_types = [1]>'
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]> g (float[m, k] x, float[k, n] w, float[n] bias) => '
        f"(float[m, n] y) {{ y = onnxfuse.product {call} (x, w, bias) }} "
        '<domain: "onnxfuse", opset_import: ["" : 17]> product <fusion, operands, output_types> (x, w, bias) => (y) '
        "{ m = MatMul(x, w) y = Add(m, bias) }"
    ).SerializeToString()
    given = {name: value for name, value in operands(256, 256, 1024, "float32", False).items() if name != "c"}
    exact = product(given, False)[0] + given["bias"].astype(np.float64)
    runs = {
        tf32: provider.InferenceSession(source, providers=[("CUDAExecutionProvider", {"use_tf32": int(tf32)})])
        for tf32 in (True, False)
    }
    assert [r.how for r in provider.explain_session(runs[True])] == ["kernel"]
    off = {tf32: np.abs(run.run(None, given)[0] - exact).max() for tf32, run in runs.items()}
    assert off[True] > 20 * off[False]


# --- Gemms -----------------------------------------------------------------------------------------------------------

NAMES = ("x", "w", "bias", "up", "up_bias", "column_scale", "residual")
GEMMS = [(("bias", "residual"), "none"), (("bias",), "gelu_tanh"), (("bias",), "relu"), (("bias",), "gelu"),
         ((), "silu"), (("residual",), "gelu_tanh"), (("bias", "up", "up_bias", "residual"), "silu"),
         (("up",), "silu"), (("bias", "column_scale", "residual"), "none")]  # fmt: skip


@pytest.mark.parametrize("has, activation", GEMMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gemm_with_any_epilogue(device: Device, dtype: str, has: tuple[str, ...], activation: str) -> None:
    for (m, n, k), aligned, transposed in [(SIZES[5], True, True), (SIZES[5], False, False), (SIZES[4], True, False),
                                           (SIZES[0], True, True), (SIZES[1], True, False)]:  # fmt: skip
        given = gemm_operands(m, n, k, dtype, transposed)
        pointers = {name: Pointer("input", i) for i, name in enumerate(NAMES) if name in ("x", "w", *has)}
        gemm = Gemm(m, n, k, dtype, transposed, aligned, y=Pointer("output", 0), activation=activation, **pointers)
        expected, magnitude = gemm_reference(given, has, activation, transposed)
        found = cublaslt.implementations(gemm, device)
        assert found
        for candidate in found[:4]:
            plan = Plan((TensorSpec((m, n), dtype, aligned),), candidate.steps, candidate.scratch)
            close(run(plan, given, aligned), expected, magnitude)


def gemm_operands(m: int, n: int, k: int, dtype: str, transposed: bool) -> dict[str, Array]:
    weight = (n, k) if transposed else (k, n)
    shapes = {"x": (m, k), "w": weight, "bias": (n,), "up": weight, "up_bias": (n,), "column_scale": (n,),
              "residual": (m, n)}  # fmt: skip
    scales = {"w": 1 / math.sqrt(k), "up": 1 / math.sqrt(k)}
    return {name: normal(shapes[name], dtype, i, scales.get(name, 1.0)) for i, name in enumerate(NAMES)}


def gemm_reference(
    given: Mapping[str, Array], has: tuple[str, ...], activation: str, transposed: bool
) -> tuple[Array, Array]:
    exact, magnitude = product(given, transposed)
    magnitude = magnitude + 1
    wide = {name: value.astype(np.float64) for name, value in given.items() if name in has}
    y = ACTIVATIONS[activation].formula(exact + wide.get("bias", 0), 0, 0)
    if "up" in has:
        up, more = product({"x": given["x"], "w": given["up"]}, transposed)
        up = up + wide.get("up_bias", 0)
        y, magnitude = y * up, magnitude * (np.abs(up) + 1) + more * np.abs(y)
    scale = wide.get("column_scale", np.ones(1))
    return y * scale + wide.get("residual", 0), magnitude * (np.abs(scale) + 1)


# --- tensor maps -----------------------------------------------------------------------------------------------------

BOXES = [("float16", (64, 8), 128), ("bfloat16", (32, 16), 64), ("float32", (32, 8), 128), ("float16", (8, 4), 0),
         ("uint8", (128, 4), 0), ("float16", (16, 32), 32)]  # fmt: skip


@pytest.mark.parametrize("dtype, box, swizzle", BOXES)
def test_a_tensor_map_loads_boxes_and_zeros_outside(
    device: Device, monkeypatch: pytest.MonkeyPatch, dtype: str, box: tuple[int, int], swizzle: int
) -> None:
    if device.arch < 90:
        pytest.skip("tensor maps need sm_90")
    folder = str(Path(__file__).parents[1] / "native" / "gpu_kernels")
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, folder])
    kind = np.dtype(np.uint8) if dtype == "uint8" else NUMPY[dtype]
    rows, columns, stride = 45, 80, 128  # elements
    values = np.random.default_rng(1).integers(0, 100, (rows, stride)).astype(kind)
    wide, high = box
    grid = (-(-columns // wide), -(-rows // high))
    map_ = TensorMap(
        Pointer("input", 0, 16), dtype, (columns - 16 // kind.itemsize, rows), (stride * kind.itemsize,), box, swizzle
    )
    lanes = swizzle // 16
    defines = {"ELEMENT": kind.itemsize, "WIDE": wide, "HIGH": high, "LANES": lanes}
    step = Launch(Kernel("map_copy", "map_copy", defines, True), (*grid, 1), (64, 1, 1), (map_, Pointer("output", 0)))
    shape = (grid[1], grid[0], high, wide)
    size = math.prod(shape) * kind.itemsize
    output = upload(np.full(size, 0xAA, np.uint8))
    launch(Plan((TensorSpec((size,), "uint8"),), (step,)), [upload(values)], [output])
    padded = np.zeros((grid[1] * high, grid[0] * wide), kind)
    padded[:rows, : columns - 16 // kind.itemsize] = values[:, 16 // kind.itemsize : columns]
    expected = padded.reshape(grid[1], high, grid[0], wide).swapaxes(1, 2)
    found = output.get().view(kind).reshape(shape)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
