"""Write operators that take parts of a tensor in few forms.

A Slice names only the axes that it cuts, a Gather of evenly spaced constant indices becomes a Slice, and a Gather moves
before a Transpose if this makes the Transpose unnecessary.  PyTorch writes `x[..., [-2], :]` as a Transpose, a GatherND
and a Transpose.  JAX writes `x[..., ::2]` as a Slice along all axes or, if the batch is dynamic, as a Transpose, a
Gather of the indices 0, 2, 4, and so on, and a Transpose back.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.index_maps import inverse
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import input_shape, input_value, normalize_axis
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.slices import SliceBounds, slice_bounds
from onnxfuse.ir.attributes import int_attribute, perm_of
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, consumers, op_of, producer
from onnxfuse.ir.slices import TO_THE_END
from onnxfuse.passes.emit import integers, sliced, write
from onnxfuse.passes.graph_pass import graph_pass

MIN_INDICES: Final = 2  # a Gather of one index has the form that patterns match


@graph_pass(opset=10)  # from this opset on, the bounds of a Slice are inputs, and it has steps
def normalize_slices(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite Slices and Gathers of floating-point tensors; return how many were rewritten."""
    rules = {
        "Slice": [_name_cut_axes],
        "GatherND": [_gather_of_one_axis],
        "Gather": [_gather_before_transpose, _gather_as_slice],
    }
    found = [(node, rule) for node in graph.nodes for rule in rules.get(op_of(node), ())]
    return sum(_is_read_float(graph, shapes, node) and rule(graph, shapes, node) for node, rule in found)


def _is_read_float(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node computes floats, and its result is read: an earlier rule can have replaced the node."""
    is_read = bool(node.outputs) and (graph.is_kept(node.outputs[0]) or bool(node.outputs[0].outputs))
    return is_read and shapes.dtype(node.outputs[0]) in FUSIBLE_FLOATS


def _name_cut_axes(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Make a Slice name only the axes that it cuts, with bounds counted from the start, if these are constant."""
    shape = shapes.shape(node.inputs[0])
    try:
        bounds = slice_bounds(shapes, node, shape) if shape else {}
    except CannotInfer:
        return False
    found = {axis: _from_start(each, shape[axis]) for axis, each in bounds.items()} if shape else {}
    cut = [(*each, axis) for axis, each in found.items() if shape and not _is_whole(each, shape[axis])]
    if not cut or not all(isinstance(number, int) for each in cut for number in each):
        return False
    if len(cut) == len(bounds) and all(found[axis] == each for axis, each in bounds.items()):
        return False
    starts, ends, steps, axes = zip(*cut, strict=True)
    numbers = [integers(graph, f"{node.outputs[0].name}_bounds", each) for each in (starts, ends, axes, steps)]
    node.inputs = [node.inputs[0], *numbers]
    return True


def _from_start(bounds: SliceBounds, size: Size) -> SliceBounds:
    """Return bounds that count from the start of the axis; unchanged unless the size is known and the step positive."""
    start, end, step = bounds
    if not isinstance(size, int) or not isinstance(step, int) or step < 1:
        return bounds
    start, end = (each + size if isinstance(each, int) and -size <= each < 0 else each for each in (start, end))
    return start, end, step


def _is_whole(bounds: SliceBounds, size: Size) -> bool:
    start, end, step = bounds
    return start == 0 and step == 1 and (end == size or (isinstance(end, int) and end >= TO_THE_END))


def _gather_of_one_axis(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write a GatherND as a Gather if its constant indices are indices of the first axis only."""
    try:
        indices = input_value(shapes, node, 1)
    except CannotInfer:
        return False
    if indices.ndim != 2 or indices.shape[1] != 1 or int_attribute(node, "batch_dims", 0):
        return False
    stem, numbers = f"{node.outputs[0].name}_of_one_axis", [int(index) for index in indices.reshape(-1)]
    inputs = [node.inputs[0], integers(graph, stem, numbers)]
    return graph.replace(node.outputs[0], write(shapes, "Gather", inputs, stem, {"axis": 0}))


def _gather_before_transpose(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Make a Gather of a Transpose's result read the Transpose's input instead, if no Transpose is needed afterwards.

    If the Gather has one index, it removes an axis; the other axes must have the same order without the Transpose.  If
    it has several indices, all nodes that read its result must be Transposes that undo the first one; the new Gather
    replaces these Transposes, too.
    """
    transpose, made, rank = producer(node.inputs[0]), node.outputs[0], shapes.rank(node.inputs[1])
    if transpose is None or op_of(transpose) != "Transpose" or rank not in (0, 1):
        return False
    perm = perm_of(transpose, shapes.rank(node.inputs[0]) or 0)
    axis = normalize_axis(int_attribute(node, "axis", 0), len(perm))
    others, readers = [*perm[:axis], *perm[axis + 1 :]], consumers(made)
    if rank == 0:
        replaced = [made] if others == sorted(others) else []
    else:
        are_back = (op_of(each) == "Transpose" and perm_of(each, len(perm)) == [*inverse(perm)] for each in readers)
        replaced = [each.outputs[0] for each in readers] if not graph.is_kept(made) and all(are_back) else []
    if not replaced:
        return False
    inputs = [transpose.inputs[0], node.inputs[1]]
    gathered = write(shapes, "Gather", inputs, f"{made.name}_in_order", {"axis": perm[axis]})
    return sum(graph.replace(old, gathered) for old in replaced) == len(replaced)


def _gather_as_slice(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write a Gather of constant indices at a constant distance as a Slice."""
    try:
        shape, indices = input_shape(shapes, node), input_value(shapes, node, 1)
        axis = normalize_axis(int_attribute(node, "axis", 0), len(shape))
    except CannotInfer:
        return False
    if indices.ndim != 1 or indices.size < MIN_INDICES:
        return False
    size, taken = shape[axis], indices.tolist()
    first, last, step = taken[0], taken[-1], taken[1] - taken[0]
    if not isinstance(size, int) or not 0 <= first < last < size or taken != [*range(first, last + 1, step)]:
        return False
    stem = f"{node.outputs[0].name}_sliced"
    part = sliced(shapes, node.inputs[0], axis, first, min(last + step, size), step, stem)
    return graph.replace(node.outputs[0], part)
