"""Count the bytes that a model and its weights take on disk."""

from __future__ import annotations

from pathlib import Path

import onnx

from onnxfuse.ir.external_data import external_range
from onnxfuse.ir.protos import external_tensors, tensors
from onnxfuse.ir.validate import size_of


def file_bytes(path: Path, model: onnx.ModelProto) -> int:
    """Return the bytes of a model's file plus its external data; bytes that several tensors share count once.

    `model` is the parsed content of the file.  Raises ModelError where external data is missing.
    """
    external = {external_range(tensor, path.resolve().parent) for tensor in external_tensors(model)}
    return path.stat().st_size + sum(length for _, _, length in external)


def weight_bytes(model: onnx.ModelProto) -> int:
    """Return the total bytes of all initializers and of all Constants' values, including subgraphs and functions."""
    return sum(map(size_of, tensors(model.graph, *model.functions)))
