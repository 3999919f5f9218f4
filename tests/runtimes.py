"""Run models in onnxruntime and in onnx.reference, and compare results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError
from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_21

from onnxfuse.verify.ort_session import EXACT_PRODUCTS

# Relative to the largest value. float32 sums are rounded in another order; 16-bit values are rounded at every operator.
TOLERANCE = {
    TensorProto.DOUBLE: 1e-9,
    TensorProto.FLOAT: 1e-5,
    TensorProto.FLOAT16: 5e-3,
    TensorProto.BFLOAT16: 2e-2,
}


def open_on_cpu(model: onnx.ModelProto, *, optimize: bool = True) -> onnxruntime.InferenceSession:
    """Open a model in one thread, because the processes of a test run share the cores, and idle threads spin."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry(*EXACT_PRODUCTS)
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray] | None, str]:
    """Return what onnxruntime computes on the CPU, and ""; or None, and the reason why it cannot run the model."""
    try:
        session = open_on_cpu(model)
        if not any(array.dtype.name == "bfloat16" for array in inputs.values()):
            return session.run(None, dict(inputs)), ""
        return None, "numpy arrays of bfloat16 are not taken"
    except Exception as error:  # onnxruntime has no public base class of its errors
        return None, str(error).strip().splitlines()[0]


class BatchNormalization(OpRun):
    """The operator in inference mode; that of onnx.reference takes opsets 9 to 13 for training."""

    op_domain = ""

    def _run(self, x, scale, bias, mean, var, epsilon=1e-5, momentum=0.9, spatial=1, training_mode=0):
        assert not training_mode and spatial != 0
        scale, bias, mean, var = (each.reshape(-1, *(1,) * (x.ndim - 2)) for each in (scale, bias, mean, var))
        return (((x - mean) * (scale / np.sqrt(var + (1e-5 if epsilon is None else epsilon))) + bias).astype(x.dtype),)


class MatMulNBits(OpRun):
    """The operator of onnxruntime, whose weights are stored with the lowest bits of each byte first."""

    op_domain = "com.microsoft"

    def _run(self, x, w, scales, zeros=None, group_index=None, bias=None, **said):
        bits, size = said.get("bits") or 4, said["block_size"]
        n, blocks, _ = w.shape
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        unpacked = lambda packed: (packed[..., None] >> shifts & (2**bits - 1)).reshape(n, -1)  # noqa: E731
        points = np.full((n, blocks), 2 ** (bits - 1)) if zeros is None else zeros
        if points.dtype == np.uint8:
            points = unpacked(points.reshape(n, -1))[:, :blocks]
        steps = unpacked(w).reshape(n, blocks, size).astype(np.float64) - points.reshape(n, blocks, 1)
        weight = (steps * scales.reshape(n, blocks, 1).astype(np.float64)).reshape(n, -1)[:, : said["K"]]
        product = x.astype(np.float64) @ weight.T
        return ((product if bias is None else product + bias).astype(x.dtype),)


class DequantizeLinear(DequantizeLinear_21):
    """The operator of all opsets: onnx.reference has none before 19."""

    def _run(self, *inputs, axis=None, block_size=None, **said):
        return super()._run(*inputs, axis=1 if axis is None else axis, block_size=block_size or 0)


class Evaluator(ReferenceEvaluator):
    """That of onnx.reference, which makes one of its own class for each function of a model."""

    def __init__(self, model, **options):
        super().__init__(model, **{**options, "new_ops": [BatchNormalization, DequantizeLinear, MatMulNBits]})


def evaluate(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return what onnx.reference computes."""
    with np.errstate(all="ignore"):
        try:
            return Evaluator(model).run(None, dict(inputs))
        except RuntimeContextError:  # it expands Gelu, whose type it does not know inside a function
            typed = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(model))
            return Evaluator(typed).run(None, dict(inputs))


def assert_close(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray], dtype: int) -> None:
    """Fail unless two lists of outputs have equal dtypes and shapes, and values within the tolerance of a dtype."""
    for left, right in zip(expected, actual, strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape
        wide, other = left.astype(np.float64), right.astype(np.float64)
        largest = max(np.abs(wide[np.isfinite(wide)]).max(initial=0), 1e-6)
        np.testing.assert_allclose(other, wide, rtol=0, atol=TOLERANCE[dtype] * largest, equal_nan=True)
