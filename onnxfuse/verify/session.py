"""One run of a model in plain onnxruntime on the CPU."""

from __future__ import annotations

import ctypes
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.model.save import save, serialize

Array: TypeAlias = NDArray[Any]


def open_session(model: onnx.ModelProto, folder: Path | None) -> Any:
    """A CPU session; weights are read from `folder` in place, and only a model over 2 GiB is written to a file."""
    try:
        import onnxruntime
    except ImportError as error:
        raise VerificationError(
            "onnxruntime is not installed, so nothing was compared; "
            f"pip install 'onnxfuse[cpu]' or pip install 'onnxfuse[cuda]' ({first_line(error)})"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised as well; 3 would print it a second time
    providers, content = ["CPUExecutionProvider"], serialize(model)
    if content is None:
        with tempfile.TemporaryDirectory() as scratch:
            save(model, path := Path(scratch, "model.onnx"), folder=folder)
            return onnxruntime.InferenceSession(str(path), options, providers=providers)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return onnxruntime.InferenceSession(content, options, providers=providers)


def run(session: Any, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """The outputs by name.  onnxruntime has no bfloat16 arrays, so these travel as OrtValue."""
    names = [o.name for o in session.get_outputs()]
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    if not any("bfloat16" in each.type for each in (*session.get_inputs(), *session.get_outputs())):
        return dict(zip(names, session.run(names, feeds), strict=True))
    values = session.run_with_ort_values(names, {name: _to_ort(value) for name, value in feeds.items()})
    return {name: _from_ort(value) for name, value in zip(names, values, strict=True)}


def _to_ort(array: Array) -> Any:
    from onnxruntime import OrtValue

    if array.dtype != ml_dtypes.bfloat16:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def _from_ort(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    if 0 in value.shape():
        return np.empty(value.shape(), ml_dtypes.bfloat16)
    memory = (ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())
    return np.frombuffer(memory, ml_dtypes.bfloat16).reshape(value.shape()).copy()


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, without onnxruntime's error class and C++ source position."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    return re.sub(r"/\S+\.(h|cc):\d+ .*?\) (?=\w)", "", line)[:300]
