"""Models around convolutions in ONNX text, made channels-last, run and compared."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from runtimes import open_on_cpu

from onnxfuse.dsl import catalogue
from onnxfuse.fuse_model import FusedModel, Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN


def parse(text: str, opset: int = 20, **weights: np.ndarray) -> onnx.ModelProto:
    """Return a model from ONNX text.  Weights that are declared without a value get random ones, others are given."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> main {text}')
    random = np.random.default_rng(0)
    known = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.value_info:
        if value.name not in known:
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            array = (random.uniform(-1, 1, shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(kind)
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.checker.check_model(model, full_check=True)
    return model


def converted(model: onnx.ModelProto, layout: Any = "nhwc", **options: Any) -> FusedModel:
    """Return the model with channels-last regions, which is checked."""
    result = fuse_model(model, None, Settings(catalogue.with_folders([]), layout=layout, keep_unfused=True, **options))
    onnx.checker.check_model(result.model, full_check=True)
    return result


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, optimize: bool = True) -> list[np.ndarray]:
    return open_on_cpu(model, optimize=optimize).run(None, feeds)


def drawn(model: onnx.ModelProto, **sizes: int) -> dict[str, np.ndarray]:
    """Return random inputs; `sizes` are those of dynamic dims."""
    random, feeds = np.random.default_rng(1), {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = random.standard_normal(shape).astype(kind) if kind.kind == "f" else np.ones(shape, kind)
    return feeds


def assert_same(before: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 2e-5, **sizes: int) -> None:
    """Assert that onnxruntime computes the same, with and without its own optimizations."""
    feeds = drawn(before, **sizes)
    expected = run(before, feeds)
    for optimize in (True, False):
        for old, new in zip(expected, run(after, feeds, optimize=optimize), strict=True):
            assert (old.dtype, old.shape) == (new.dtype, new.shape)
            scale = np.abs(old.astype(np.float64)).max(initial=0) + 1
            np.testing.assert_allclose(new.astype(np.float64), old.astype(np.float64), rtol=0, atol=tolerance * scale)


def operators(result: FusedModel) -> Counter[str]:
    """Return how often the fused model has each fusion and each operator."""
    return Counter(
        attribute(node, "fusion") if node.domain == DOMAIN else node.op_type for node in result.model.graph.node
    )


def attribute(node: onnx.NodeProto, name: str) -> Any:
    """Return an attribute of a node; None where it has none."""
    for each in node.attribute:
        if each.name == name:
            value = onnx.helper.get_attribute_value(each)
            return value.decode() if isinstance(value, bytes) else value
    return None


def nodes(result: FusedModel, fusion: str) -> list[onnx.NodeProto]:
    """Return the nodes of a fusion or an operator, in order."""
    return [n for n in result.model.graph.node if fusion in (attribute(n, "fusion"), n.op_type)]
