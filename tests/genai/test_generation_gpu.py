"""Test on a GPU that onnxruntime_genai generates the same tokens by kernels, until two are nearly as likely.

The package is onnxruntime-genai-cuda; models and tokenizers come from models/exported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from genai_graphs import write_folder
from generation import check_same_until_tie

import onnxfuse
from onnxfuse.runtime import cupy_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai-cuda")


@pytest.mark.parametrize("name", ["fp16.onnx", "int4.onnx"])
def test_kernels_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path / "a")
    (one,) = onnxfuse.optimize_folder(tmp_path / "a", tmp_path / "b")
    assert one.report.fused and (tmp_path / "b" / "libonnxfuse.so.plans").is_file()
    check_same_until_tie(tmp_path / "a", tmp_path / "b", tie=0.02)
