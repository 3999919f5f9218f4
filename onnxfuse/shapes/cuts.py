"""Slice, Split and Gather as what they take of a tensor."""

from __future__ import annotations

from onnxfuse.model.graph import Node, Tensor, op_of
from onnxfuse.shapes.dims import Size
from onnxfuse.shapes.inference import Shapes
from onnxfuse.shapes.rules import Undecided, axis_of, value_in
from onnxfuse.shapes.rules_of_views import slices, split_sizes

CUTS = {"Slice", "Split", "Gather"}
Cut = dict[int, tuple[int, int]]  # by axis: the first element that is taken, and how many


def taken(s: Shapes, node: Node, made: Tensor) -> Cut:
    """What a node takes of its first input for the output `made`.  Raises Undecided where that is not one run."""
    shape = s.shape(node.inputs[0])
    if shape is None:
        raise Undecided
    match op_of(node):
        case "Slice":
            return {
                axis: _run(shape[axis], start, end, step) for axis, (start, end, step) in slices(s, node, shape).items()
            }
        case "Split":
            axis = axis_of(node.attrs.get("axis", 0), len(shape))
            sizes = split_sizes(s, node, shape[axis])
            place = next(i for i, output in enumerate(node.outputs) if output is made)
            counts = [size for size in sizes[: place + 1] if isinstance(size, int) and size]
            if len(counts) <= place:
                raise Undecided
            return {axis: (sum(counts[:-1]), counts[-1])}
    axis, index = axis_of(node.attrs.get("axis", 0), len(shape)), value_in(s, node, 1)
    whole = shape[axis]
    if index.size != 1 or not isinstance(whole, int):
        raise Undecided
    place = index.reshape(()).item()
    if not isinstance(place, int):
        raise Undecided
    return {axis: (place % whole, 1)}


def _run(size: Size, start: object, end: object, step: object) -> tuple[int, int]:
    if not isinstance(size, int) or not isinstance(start, int) or not isinstance(end, int) or step != 1:
        raise Undecided
    run = range(size)[start:end]
    if not run:
        raise Undecided
    return run.start, len(run)
