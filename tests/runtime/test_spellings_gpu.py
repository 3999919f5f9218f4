"""Convolutions as trained models spell them, from documents of tests/cases, in float16 by channels-last kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from case_documents import read_cases
from onnx import TensorProto, numpy_helper
from test_models_gpu import CUDA, error, session

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.session import InferenceSession, explain_session
from onnxfuse.verify.difference import TOLERANCES
from onnxfuse.verify.widen import model_to_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
CASES = Path(__file__).parents[1] / "cases" / "conv_bias_activation.txt"
NAMES = (
    "conv_with_a_hard_sigmoid_written_out", "conv_with_a_hard_swish_of_other_constants",
    "conv_with_affine_blocks_of_paddle", "conv_with_frozen_batch_norm", "conv_with_learnt_slopes",
    "conv_with_slopes_written_out",
)  # fmt: skip


def in_half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in float16."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    ort.preload_dlls()
    original = in_half_precision(read_cases(CASES)[name].model)
    fused, report = onnxfuse.optimize(original, layout="nhwc", verify=False)
    after = InferenceSession(fused.SerializeToString(), providers=[CUDA])
    runs = explain_session(after)
    assert len(runs) == len(report.fused) and {run.how for run in runs} == {"kernel"}, runs
    x = np.random.default_rng(0).standard_normal((2, 3, 19, 23)).astype(np.float16)
    exactly = session(model_to_float32(original).SerializeToString(), ["CPUExecutionProvider"])
    for found, exact in zip(after.run(None, {"x": x}), exactly.run(None, {"x": x.astype(np.float32)}), strict=True):
        assert found.dtype == np.float16 and found.shape == exact.shape
        assert error(found, exact) <= TOLERANCES["float16"]
