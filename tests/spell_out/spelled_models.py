"""Small models of one operator each, and what they compute before and after the operator is spelled out."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from case_documents import with_weights
from runtimes import open_on_cpu

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph, write_model
from onnxfuse.spell_out import SpelledOut, spell_out


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    """Return a model from `(inputs) => (outputs) <weights> { nodes }`; weights are drawn."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    return with_weights(onnx.parser.parse_model(f"{head}\nmain {text}"))


def spelled(model: onnx.ModelProto) -> tuple[onnx.ModelProto, SpelledOut]:
    """Return the model with its operators spelled out, and what was."""
    graph = read_graph(model)
    graph.sort()
    found = spell_out(graph, infer_shapes(graph))
    return write_model(graph), found


def by_onnxruntime(export: Path, kind: str) -> Path:
    """Return the path of the model that onnxruntime's transformers optimizer writes for an exported one.

    `kind` is what the optimizer calls the architecture.  Skips the test where a package is missing that it imports.
    """
    pytest.importorskip("sympy", reason="onnxruntime's transformers optimizer needs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.transformers.optimizer import optimize_model

        made = export.with_suffix(".made.onnx")
        optimize_model(str(export), kind, num_heads=0, hidden_size=0, opt_level=0).save_model_to_file(str(made))
    return made


def drawn(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Return inputs of a model whose sizes are numbers: floats, 0 or 1, or booleans."""
    random = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype.kind == "f":
            feeds[value.name] = random.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            feeds[value.name] = random.random(shape) < 0.7
        else:
            feeds[value.name] = random.integers(0, 2, shape).astype(dtype)
    return feeds


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what plain onnxruntime computes on the CPU, without its graph optimizations."""
    session = open_on_cpu(model, optimize=False)
    used = {each.name: feeds[each.name] for each in session.get_inputs()}
    return list(session.run(None, used))
