"""Open and run models in onnxruntime on the CPU.

This module imports little, because every worker process starts by importing it.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnxruntime as ort

# The dtypes that NumPy lacks, by onnxruntime's name: the NumPy dtype, the integers in which onnxruntime takes their
# bits, and the number of onnx.TensorProto.DataType.  This module does not import onnx, which would take long.
WITHOUT_NUMPY: Final[dict[str, tuple[np.dtype[Any], np.dtype[Any], int]]] = {
    "tensor(bfloat16)": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), 16),
    "tensor(float8e4m3fn)": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), 17),
    "tensor(float8e5m2)": (np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8), 19),
}
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
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0  # Linux has it
    if allowed < (os.cpu_count() or 1):  # as in a container; onnxruntime would start a thread for each processor
        options.intra_op_num_threads = allowed
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None and isinstance(source, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, object]:
    """Return the outputs by name.  OrtValues carry the tensors whose dtypes NumPy lacks."""
    names = [o.name for o in session.get_outputs()]
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    if not any(each.type in WITHOUT_NUMPY for each in (*session.get_inputs(), *session.get_outputs())):
        return dict(zip(names, session.run(names, feeds), strict=True))
    values = session.run_with_ort_values(names, {name: to_ort_value(value) for name, value in feeds.items()})
    return {name: from_ort_value(value) for name, value in zip(names, values, strict=True)}


def to_ort_value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """Return the array as an OrtValue on the CPU; its dtype can be one that NumPy lacks."""
    from onnxruntime import OrtValue

    for dtype, bits, number in WITHOUT_NUMPY.values():
        if array.dtype == dtype:
            return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(bits), number)
    return OrtValue.ortvalue_from_numpy(array)


def from_ort_value(value: ort.OrtValue) -> npt.NDArray[Any]:
    """Return a tensor on the CPU as an array; its dtype is one of ml_dtypes if NumPy lacks it."""
    if value.data_type() not in WITHOUT_NUMPY:
        array: npt.NDArray[Any] = value.numpy()
        return array
    dtype, _, _ = WITHOUT_NUMPY[value.data_type()]
    if 0 in value.shape():
        return np.empty(value.shape(), dtype)
    memory = (ctypes.c_uint8 * (math.prod(value.shape()) * dtype.itemsize)).from_address(value.data_ptr())
    return np.frombuffer(memory, dtype).reshape(value.shape()).copy()
