"""Infer the shapes of Loops' results, which onnx leaves unknown, for the nodes after the Loops."""

from __future__ import annotations

from onnxfuse.algebra.sizes import UNKNOWN, Shape, Size
from onnxfuse.analysis.shape_inference import correct_records, infer_behind
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import Body, read_bodies
from onnxfuse.control_flow.repeated_shapes import CARRIED
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, consumers


def infer_results(graph: Graph, shapes: ShapeInfo) -> None:
    """Record the shapes of Loops' results where inference left them unknown, and infer the nodes after the Loops.

    Shapes that the model declares for these results are corrected.
    """
    for body in read_bodies(graph, shapes, ["Loop"]):
        found = {id(t): t for t in body.node.outputs if t.name and shapes.shape(t) is None}
        known = {key: shape for key, shape in _results(body, shapes).items() if key in found and shape is not None}
        for key, shape in known.items():
            shapes.record(found[key], shape, shapes.dtype(found[key]))
        if known:
            correct_records(shapes, [body.node])
            infer_behind(shapes, {reader for key in known for reader in consumers(found[key])})


def _results(body: Body, shapes: ShapeInfo) -> dict[int, Shape | None]:
    """Return the shapes of a Loop's outputs, by the tensor's id: final carried values, and stacked scan outputs.

    After zero iterations, onnxruntime's stacked output has size 0 on every axis whose size is not a number, so the size
    of such an axis is unknown.
    """
    inputs, results = body.graph.linked.inputs, body.result_shapes
    carried = len(body.node.inputs) - 2
    found: dict[int, Shape | None] = {}
    for i, output in enumerate(body.node.outputs):
        inner = body.shapes.shape(inputs[2 + i]) if i < carried else results[1 + i]
        if inner is not None and i < carried:
            found[id(output)] = tuple(_outside(shapes, output, axis, size) for axis, size in enumerate(inner))
        elif inner is not None:
            sizes = enumerate(inner, 1)
            joined = (size if isinstance(size, int) else shapes.unknown(output.name, axis) for axis, size in sizes)
            found[id(output)] = (shapes.unknown(output.name, 0), *joined)
    return found


def _outside(shapes: ShapeInfo, output: Tensor, axis: int, size: Size) -> Size:
    """Return a size of a body's tensor as a size in the graph around the body.

    The result is an unknown size if the size is unknown in the body or varies between iterations.
    """
    inside_only = not isinstance(size, int) and any(word in str(size) for word in (CARRIED, UNKNOWN))
    return shapes.unknown(output.name, axis) if inside_only else size
