"""What `onnxfuse inspect` foretells, in sessions of onnxruntime on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
from test_inspect import COPIED

from onnxfuse.runtime import cupy_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]


@pytest.mark.parametrize("name", COPIED)
def test_a_session_copies_what_is_foretold(name: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "placed.onnx")
    options.log_severity_level = 3  # it warns of the copies, and that the file holds for this machine alone
    onnxruntime.InferenceSession(exported(name), options, providers=["CUDAExecutionProvider"])
    nodes = [node for node in onnx.load(tmp_path / "placed.onnx").graph.node if node.op_type.startswith("Memcpy")]
    to_host = {True: "to host", False: "to GPU"}
    made = [
        f"{to_host[node.op_type == 'MemcpyToHost']}: {node.input[0].removesuffix('_CUDAExecutionProvider')}"
        for node in nodes
    ]
    assert sorted(made) == COPIED[name]
