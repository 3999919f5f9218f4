"""Models in ONNX text for the tests of passes: written, rewritten, run and compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
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
    graph.sort()
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


SPECIAL_VALUES = (np.nan, np.inf, -np.inf, -0.0, 0.0)


def assert_same_at_all_sizes(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    sizes: Sequence[int] = (0, 1, 2, 3),
    tol: float = 1e-5,
    *,
    special: bool = True,
) -> None:
    """Assert that two models give the same outputs at every combination of sizes of their dims that the first takes.

    The inputs hold random values, and with `special` then also NaN, infinities and zeros of both signs.
    """
    first, second = (open_on_cpu(model, optimize=False) for model in (before, after))
    dims = {d.dim_param for i in before.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    read, runs = {each.name for each in second.get_inputs()}, 0
    for numbers in itertools.product(sizes, repeat=len(dims)):
        for has_special in (False, True) if special else (False,):
            feeds = _drawn(before, dict(zip(sorted(dims), numbers, strict=True)), has_special)
            try:
                expected = first.run(None, feeds)
            except (Fail, InvalidArgument, RuntimeException):  # which sizes the original refuses
                continue
            runs += 1
            found = second.run(None, {name: value for name, value in feeds.items() if name in read})
            for a, b in zip(expected, found, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), numbers
                np.testing.assert_allclose(b, a, rtol=tol, atol=tol, err_msg=f"at sizes {numbers}")
    assert runs, "the original runs at no size"


def _drawn(model: onnx.ModelProto, sizes: dict[str, int], special: bool) -> dict[str, np.ndarray]:
    """Return inputs at the sizes that are given for the model's dims, some of their values special ones."""
    random_state, feeds = np.random.default_rng(0), {}
    for each in model.graph.input:
        found = each.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in found.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(found.elem_type)
        if dtype.kind == "f":
            values = random_state.standard_normal(shape)
            if special:
                drawn = random_state.choice(SPECIAL_VALUES, shape)
                values = np.where(random_state.random(shape) < 0.4, drawn, values)
        else:
            values = random_state.integers(0, 2, shape)
        feeds[each.name] = np.asarray(values, dtype)
    return feeds


def random(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """Return values between 0.3 and 1.5, by which scales and weights can be divided."""
    return np.random.default_rng(seed + sum(shape)).uniform(0.3, 1.5, shape).astype(dtype)
