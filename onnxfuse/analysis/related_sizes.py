"""Estimates of unknown sizes: about as large as the sizes that they were computed from.

This is for estimates alone.  A computed Pad, for example, may make an axis of any size, and hardly changes it.
"""

from __future__ import annotations

from onnxfuse.algebra.bounds import maximum
from onnxfuse.algebra.sizes import UNKNOWN, Shape, Size, floor_divide, name_of, product, symbols
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Node, op_of


def relate_sizes(shapes: ShapeInfo, node: Node) -> None:
    """Record, for each unknown size of a node's outputs without a relation, a size that is about as large.

    Of a Reshape that is the size that is left; else the one of the same axis in an input of as many axes.
    """
    for output in node.outputs:
        shape = shapes.shape(output) if output.name else None
        for axis, size in enumerate(shape or ()):
            name = _unknown(size)
            if shape is None or not name or name in shapes.related:
                continue
            other = (
                _rest(shapes, node, shape, axis) if op_of(node) == "Reshape" else _same_axis(shapes, node, shape, axis)
            )
            if other is not None and name not in symbols(other):
                shapes.related[name] = other


def _unknown(size: Size) -> str:
    """Return the name of an unknown size; "" for known sizes, and for sizes that depend on an unknown one."""
    name = name_of(size)
    return name if name is not None and name.startswith(UNKNOWN) else ""


def _same_axis(shapes: ShapeInfo, node: Node, shape: Shape, axis: int) -> Size | None:
    """Return the largest size of the axis among the inputs, which are aligned at their last axes if they broadcast."""
    inputs = [found for tensor in node.inputs if tensor.name and (found := shapes.shape(tensor)) is not None]
    alike = [found[axis] for found in inputs if len(found) == len(shape)]
    return maximum(*alike) if alike else None


def _rest(shapes: ShapeInfo, node: Node, shape: Shape, axis: int) -> Size | None:
    """Return the size that a Reshape leaves for an axis, rounded up, if something is known of all others.

    Assumed sizes need not divide each other, and the view should not look smaller than its source.
    """
    source, others = shapes.shape(node.inputs[0]), (*shape[:axis], *shape[axis + 1 :])
    are_known = all(not name or name in shapes.related for name in map(_unknown, others))
    if source is None or not are_known or 0 in others:
        return None
    return floor_divide(product(source) + product(others) - 1, product(others))
