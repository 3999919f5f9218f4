"""Open and run models in onnxruntime on the CPU.

This module imports little, because every worker process starts by importing it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnxruntime as ort

BFLOAT16: Final = 16  # onnx.TensorProto.BFLOAT16; this module does not import onnx, which would take long
# onnxruntime's optimizations replace DequantizeLinear and MatMul by MatMulNBits if no other node reads the dequantized
# weight.  The CPU kernel of MatMulNBits, unlike GPU kernels, rounds the activations to 8 bits; this option prevents it.
EXACT_PRODUCTS: Final = "session.qdq_matmulnbits_accuracy_level", "1"


def start(source: bytes | str, folder: str | None, optimize: bool) -> ort.InferenceSession:
    """Open a CPU session of a model file, or of a serialized model with its external weights in `folder`.

    With `optimize`, onnxruntime optimizes the graph, but must not round the operands of products to 8 bits.  Any
    exception of onnxruntime is passed on.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised; level 3 would print them a second time
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads must not use the CPU
    options.add_session_config_entry(*EXACT_PRODUCTS)
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None and isinstance(source, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, object]:
    """Return the outputs by name.  onnxruntime takes no bfloat16 arrays, so OrtValues carry bfloat16 tensors."""
    names = [o.name for o in session.get_outputs()]
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    if not any("bfloat16" in each.type for each in (*session.get_inputs(), *session.get_outputs())):
        return dict(zip(names, session.run(names, feeds), strict=True))
    values = session.run_with_ort_values(names, {name: to_ort_value(value) for name, value in feeds.items()})
    return {name: from_ort_value(value) for name, value in zip(names, values, strict=True)}


def to_ort_value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """Return the array as an OrtValue on the CPU, bfloat16 included."""
    from onnxruntime import OrtValue

    if array.dtype != ml_dtypes.bfloat16:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)


def from_ort_value(value: ort.OrtValue) -> npt.NDArray[Any]:
    """Return a tensor on the CPU as an array; its dtype is ml_dtypes.bfloat16 if the tensor is bfloat16."""
    if value.data_type() != "tensor(bfloat16)":
        array: npt.NDArray[Any] = value.numpy()
        return array
    if 0 in value.shape():
        return np.empty(value.shape(), ml_dtypes.bfloat16)
    memory = (ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())
    return np.frombuffer(memory, ml_dtypes.bfloat16).reshape(value.shape()).copy()
