"""Products and convolutions of 8 bits against exact sums: every plan, aligned and not, and what follows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from kernel_runs import compile_all, launch, upload
from quantized_cases import CASES, NUMPY, Case
from runtimes import open_on_cpu

import onnxfuse
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.quantized.host import candidates, supports
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.gpu
OF_VALUES = ("quantized_gemm", "quantized_conv")


@pytest.fixture(scope="module")
def gpu() -> Device:
    return dataclasses.replace(cuda_driver.gpu(0), tf32=False)  # numbers of float32 keep their precision


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan(gpu: Device, case: Case, aligned: bool) -> None:
    node, specs, arrays = case.node(), case.specs(aligned), case.arrays()
    assert supports(node, [spec.dtype for spec in specs], gpu) is None
    plans = candidates(node, specs, gpu)
    compile_all((step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)), gpu)
    for plan in plans:
        kernels = [step.kernel for step in plan.steps if isinstance(step, Launch)]
        of_values = any(each.source in OF_VALUES or each.defines.get("EIGHT_BITS") for each in kernels)
        y = output(plan, list(arrays.values()), aligned)
        if y.size:
            case.check(arrays, y, exact=of_values, truncated=True)


@pytest.mark.parametrize("case", [each for each in CASES if each.m and each.m * each.k < 1 << 14][:12], ids=str)
def test_small_gpus_take_several_tiles_a_block(gpu: Device, case: Case) -> None:
    node, specs, arrays = case.node(), case.specs(), case.arrays()
    for plan in candidates(node, specs, dataclasses.replace(gpu, multiprocessors=2))[:4]:
        case.check(arrays, output(plan, list(arrays.values()), True), exact=len(plan.scratch) < 2, truncated=True)


@pytest.mark.parametrize("k", [16384, 40000])
def test_long_sums_of_equal_float8_products_are_exact(gpu: Device, k: int) -> None:
    """A single accumulator of the tensor cores would stop at 2^13 products."""
    case = Case(130, 96, k, x_dtype=FLOAT8, w_dtype=FLOAT8, bias=False, per_column=False)
    arrays = {name: np.ones_like(each) for name, each in case.arrays().items()}
    for plan in candidates(case.node(), case.specs(), gpu)[:4]:
        assert isinstance(plan.steps[-1], Launch) and plan.steps[-1].kernel.source == "quantized_gemm"
        np.testing.assert_array_equal(output(plan, list(arrays.values()), True), np.full((130, 96), k, np.float32))


def test_nan_of_float8_stays_in_its_row(gpu: Device) -> None:
    case = Case(130, 96, 272, x_dtype=FLOAT8, w_dtype=FLOAT8, after="relu")
    arrays = case.arrays()
    arrays["x"][7, 3] = np.nan
    for plan in candidates(case.node(), case.specs(), gpu):
        y = output(plan, list(arrays.values()), True).astype(np.float32)
        assert np.isnan(y[7]).all() and np.isfinite(np.delete(y, 7, axis=0)).all()


LAYER = """<ir_version: 9, opset_import: ["" : 19]> g (float[batch,64] x) => (float[batch,64] y)
    <float[64] scale, float[64] shift, float[64,96] w, float[96] bias, float[96,64] v, float step = {0.02},
     float steps = {0.003}, float8e4m3fn zero = {0}>
    { normal = LayerNormalization (x, scale, shift)
      q = QuantizeLinear (normal, step, zero)  values = DequantizeLinear (q, step, zero)
      stored = QuantizeLinear (w, steps, zero)  weight = DequantizeLinear (stored, steps, zero)
      sums = MatMul (values, weight)  product = Add (sums, bias)  positive = Relu (product)
      q2 = QuantizeLinear (positive, step, zero)  values2 = DequantizeLinear (q2, step, zero)
      stored2 = QuantizeLinear (v, steps, zero)  weight2 = DequantizeLinear (stored2, steps, zero)
      second = MatMul (values2, weight2)  y = Add (second, x) }"""


def test_a_session_runs_layers_of_float8() -> None:
    """A float8 number that rounds otherwise moves its row by little."""
    ort = pytest.importorskip("onnxruntime")
    original, random = onnx.parser.parse_model(LAYER), np.random.default_rng(1)
    for value in original.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if shape:
            drawn = (random.standard_normal(shape) / 8 + (value.name == "scale")).astype(np.float32)
            original.graph.initializer.append(onnx.numpy_helper.from_array(drawn, value.name))
    optimized, report = onnxfuse.optimize(original, verify=False)
    assert report.counts == {"layer_norm": 1, "quantized_gemm": 2}
    x = np.random.default_rng(0).standard_normal((70, 64)).astype(np.float32)
    expected = open_on_cpu(original, optimize=False).run(None, {"x": x})[0]
    ort.preload_dlls()
    session = onnxfuse.InferenceSession(optimized.SerializeToString(), providers=["CUDAExecutionProvider"])
    assert {each.how for each in onnxfuse.explain_session(session)} == {"kernel"}
    errors = np.abs(session.run(None, {"x": x})[0] - expected) / np.abs(expected).max()
    assert errors.max() < 0.02 and errors.mean() < 1e-3


def output(plan: Plan, arrays: Sequence[np.ndarray], aligned: bool) -> np.ndarray:
    (spec,) = plan.outputs
    read = [upload(np.asarray(array), aligned) for array in arrays]
    written = upload(np.zeros(spec.shape, NUMPY[spec.dtype]), aligned)
    written[:] = 0x55
    launch(plan, read, [written])
    after = written.base[written.data.ptr - written.base.data.ptr + written.nbytes :].get()
    assert (after == 0xFF).all(), "written beyond the end"
    return np.asarray(written.get().view(NUMPY[spec.dtype]).reshape(spec.shape))
