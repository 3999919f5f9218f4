"""Estimates of unknown sizes: each is assumed to be about as large as the sizes from which it is computed.

Only costs are computed from these estimates.  For example, an unknown size after a computed Pad is estimated by the
size before the Pad, although the Pad could make the axis of any size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from onnxfuse.algebra.bounds import maximum
from onnxfuse.algebra.sizes import UNKNOWN, Shape, Size, floor_divide, name_of, product, symbols
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import assumed_number
from onnxfuse.ir.node import Node, Tensor, op_of

NAMELESS: Final = re.compile(rf"unk__\d+|s\d+|.*DynamicDimension\.\d+|{re.escape(UNKNOWN)}.*")  # exporters' names
MIN_IMAGE_RANK: Final = 4  # the least rank of images, videos, and the keys and values of attention


def relate_batch(shapes: ShapeInfo, tensor: Tensor) -> None:
    """Record 1 for the first dim of a graph input, if it is dynamic and the input has several axes: a batch of one.

    Exporters often give that dim a name such as "p2o.DynamicDimension.0", or none.  An input with fewer axes than
    MIN_IMAGE_RANK may begin with a length, if that dim has a name of another kind.
    """
    shape = shapes.shape(tensor) or ()
    name = name_of(shape[0]) if len(shape) > 1 else None
    if name and (len(shape) >= MIN_IMAGE_RANK or NAMELESS.fullmatch(name)):
        shapes.related.setdefault(name, 1)


@contextmanager
def at_sizes(shapes: ShapeInfo, requested: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """In the block, estimate for these sizes of the graph's inputs, by name, in place of assumed ones."""
    assumed = shapes.related
    pairs = (
        pair
        for tensor in shapes.graph.linked.inputs
        for pair in zip(shapes.shape(tensor) or (), requested.get(tensor.name, ()), strict=False)
    )
    shapes.related = assumed | {name: number for size, number in pairs if (name := name_of(size)) is not None}
    try:
        yield
    finally:
        shapes.related = assumed


def relate_sizes(shapes: ShapeInfo, node: Node) -> None:
    """For each unknown size of a node's outputs that has no estimate yet, record a number that is about as large.

    For a Reshape, the number is the source's element count divided by the other sizes.  For other operators, it
    is the size of the same axis in an input of the same rank.
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
                shapes.related[name] = assumed_number(shapes, other)


def _unknown(size: Size) -> str:
    """Return the name of a size that is a single unknown symbol; "" for any other size."""
    name = name_of(size)
    return name if name is not None and name.startswith(UNKNOWN) else ""


def _same_axis(shapes: ShapeInfo, node: Node, shape: Shape, axis: int) -> Size | None:
    """Return the largest size of the axis among the inputs that have the output's rank; None if there are none."""
    inputs = [found for tensor in node.inputs if tensor.name and (found := shapes.shape(tensor)) is not None]
    alike = [found[axis] for found in inputs if len(found) == len(shape)]
    return maximum(*alike) if alike else None


def _rest(shapes: ShapeInfo, node: Node, shape: Shape, axis: int) -> Size | None:
    """Return the element count of a Reshape divided by the sizes of all axes but `axis`, rounded up.

    Return None if another size is unknown and has no estimate.  The quotient is rounded up, because estimates may not
    divide evenly, and the view should not look smaller than its source.
    """
    source, others = shapes.shape(node.inputs[0]), (*shape[:axis], *shape[axis + 1 :])
    are_known = all(not name or name in shapes.related for name in map(_unknown, others))
    if source is None or not are_known or 0 in others:
        return None
    return floor_divide(product(source) + product(others) - 1, product(others))
