"""Models in ONNX text for the tests of passes: written, rewritten, run and compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper
from runtimes import open_on_cpu

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.serde import read_graph, write_model


def parse(text: str, opset: int = 20, **weights: np.ndarray) -> onnx.ModelProto:
    """Return a model from ONNX text, with initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> main {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    typed = onnx.shape_inference.infer_shapes(model)  # the text leaves the outputs' types out
    model.graph.ClearField("output")
    model.graph.output.extend(typed.graph.output)
    return model


def apply(model: onnx.ModelProto, *passes: Callable[[Graph, ShapeInfo], object]) -> tuple[onnx.ModelProto, list]:
    """Return the model after some passes, which is checked, and what they returned."""
    graph = read_graph(model)
    shapes = infer_shapes(graph)
    results = [each(graph, shapes) for each in passes]
    changed = write_model(graph)
    onnx.checker.check_model(changed, full_check=True)
    return changed, results


def ops(model: onnx.ModelProto) -> str:
    """Return the names of the operators, in order."""
    return " ".join(node.op_type for node in model.graph.node)


def value(model: onnx.ModelProto, name: str) -> list:
    """Return an initializer as a list."""
    return next(numpy_helper.to_array(t).tolist() for t in model.graph.initializer if t.name == name)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs that onnxruntime computes without optimizing the model."""
    return open_on_cpu(model, optimize=False).run(None, feeds)


def assert_same(
    before: onnx.ModelProto, after: onnx.ModelProto, shape: tuple[int, ...], dtype: type = np.float32, tol: float = 2e-6
) -> None:
    """Assert that two models give the same outputs for random values of their only input."""
    x = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    feeds = {before.graph.input[0].name: x}
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(b.astype(float), a.astype(float), rtol=0, atol=tol * (np.abs(a).max(initial=0) + 1))


def random(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """Return values between 0.3 and 1.5, by which scales and weights can be divided."""
    return np.random.default_rng(seed + sum(shape)).uniform(0.3, 1.5, shape).astype(dtype)
