"""Find the input sizes that a model's filters require: onnxruntime may run a Conv on a wrong number of channels.

onnxruntime's convolutions in a blocked layout then read past the end of memory, so sizes must not be found by trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.protos import nodes
from onnxfuse.verify.inputs import Input

OPERATORS: Final = frozenset({"Conv", "ConvTranspose", "FusedConv"})


def with_required_sizes(model: onnx.ModelProto, inputs: Sequence[Input]) -> list[Input]:
    """Return the inputs of a model; dims for which only one size is possible are replaced by that number."""
    has_dynamic = any(isinstance(dim, str) for each in inputs for dim in each.dims[1:])
    if not has_dynamic or not any(node.op_type in OPERATORS for node in nodes(model.graph)):
        return list(inputs)
    shapes = inferred_shapes(model, None)
    known = {} if shapes is None else {tensor.name: shapes.shape(tensor) for tensor in shapes.graph.linked.inputs}
    return [_completed(each, known.get(each.name)) for each in inputs]


def _completed(each: Input, known: Sequence[object] | None) -> Input:
    if known is None or len(known) != len(each.dims):
        return each
    pairs = zip(each.dims, known, strict=True)
    return replace(each, dims=tuple(size if isinstance(size, int) else dim for dim, size in pairs))


def inferred_shapes(model: onnx.ModelProto, folder: Path | None) -> ShapeInfo | None:
    """Return the shapes of a model's tensors; None if it cannot be read.  `folder` has its external data."""
    try:
        return read_and_infer(model, folder)
    except ModelError:  # raised for fused nodes of another version, or a cycle
        return None
