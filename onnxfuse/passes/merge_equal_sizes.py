"""Compute equal sizes, such as the numbers of rows of two tensors, only once, and from graph inputs if possible."""

from __future__ import annotations

from collections.abc import Hashable

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, op_of
from onnxfuse.passes.emit import write


def merge_equal_sizes(graph: Graph, shapes: ShapeInfo) -> None:
    """Replace all tensors of a sorted graph that hold the same sizes by the first of them."""
    _read_from_inputs(graph, shapes)
    first: dict[Hashable, Tensor] = {}
    for node in graph.nodes:
        for tensor in node.outputs:
            value = shapes.value(tensor) if tensor.name else None
            if value is not None and not graph.is_kept(tensor):
                kept = first.setdefault((shapes.dtype(tensor), value.shape, tuple(map(str, value.ravel()))), tensor)
                if kept is not tensor:
                    graph.replace(tensor, kept)
    graph.remove_dead()


def _read_from_inputs(graph: Graph, shapes: ShapeInfo) -> None:
    """Read single sizes from graph inputs that have them, so that no other tensor is read for its shape alone."""
    sources = {
        str(size): (tensor, axis)
        for tensor in reversed(graph.linked.inputs)
        for axis, size in enumerate(shapes.shape(tensor) or ())
    }
    for node in list(graph.nodes):
        if op_of(node) != "Shape" or "start" not in node.attrs or graph.is_kept(node.outputs[0]):
            continue
        value = shapes.value(node.outputs[0])
        source = sources.get(str(value[0])) if value is not None and value.size == 1 else None
        if source is not None:
            tensor, axis = source
            attributes = {"start": axis, "end": axis + 1}
            graph.replace(node.outputs[0], write(shapes, "Shape", [tensor], f"{tensor.name}_size", attributes))
    graph.remove_dead()
    graph.sort()
