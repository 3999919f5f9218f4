"""Read sizes, such as the number of rows of a tensor, from graph inputs that have them, and compute them once."""

from __future__ import annotations

from collections.abc import Hashable

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass()
def merge_equal_sizes(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace tensors of sizes by equal ones that are computed from shapes of graph inputs.

    A tensor that was read only for its shape can then stay inside a fusion.  Returns the number of replaced tensors.
    """
    if "Shape" not in graph.operators:
        return 0
    count = _read_from_inputs(graph, shapes)
    of_inputs: set[int] = set()
    kept: dict[Hashable, Tensor] = {}
    found: list[tuple[Hashable, Tensor]] = []
    for node in graph.nodes:
        if _is_of_inputs(node, of_inputs):
            of_inputs.update(map(id, node.outputs))
        for tensor in node.outputs:
            value = shapes.value(tensor) if tensor.name and tensor.outputs else None
            if value is not None and not graph.is_kept(tensor):
                key = shapes.dtype(tensor), value.shape, tuple(map(str, value.ravel()))
                found.append((key, tensor))
                if id(tensor) in of_inputs:
                    kept.setdefault(key, tensor)
    return count + sum(graph.replace(tensor, kept[key]) for key, tensor in found if kept.get(key, tensor) is not tensor)


def _is_of_inputs(node: Node, of_inputs: set[int]) -> bool:
    """Return whether a node computes only from shapes of graph inputs, and from tensors with ids in `of_inputs`."""
    computed = [each for each in node.inputs if each.name and not is_constant(each)]
    if op_of(node) == "Shape" and computed:
        return producer(computed[0]) is None
    return bool(computed) and all(id(each) in of_inputs for each in computed)


def _read_from_inputs(graph: Graph, shapes: ShapeInfo) -> int:
    """Read single sizes from graph inputs that have them; return the number of Shapes that were replaced."""
    sources = {
        str(size): (tensor, axis)
        for tensor in reversed(graph.linked.inputs)
        for axis, size in enumerate(shapes.shape(tensor) or ())
    }
    count = 0
    for node in list(graph.nodes):
        if op_of(node) != "Shape" or "start" not in node.attrs or graph.is_kept(node.outputs[0]):
            continue
        value = shapes.value(node.outputs[0])
        source = sources.get(str(value[0])) if value is not None and value.size == 1 else None
        if source is not None and source[0] is not node.inputs[0]:
            tensor, axis = source
            attributes = {"start": axis, "end": axis + 1}
            count += graph.replace(node.outputs[0], write(shapes, "Shape", [tensor], f"{tensor.name}_size", attributes))
    return count
