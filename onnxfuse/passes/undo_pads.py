"""Remove Pads whose elements a later Slice removes: Slice(x + scale * Pad(y)) becomes Slice(x) + scale * y.

Models that divide a sequence into chunks pad it, add a residual to what the chunks compute, and cut the sum to the
length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.slices import slice_bounds
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass

ELEMENTWISE: Final = ("Add", "Mul", "Sub")
FIRST_WITH_INPUTS: Final = 11  # from this opset on, pads and bounds are inputs of Pad and Slice


@graph_pass(opset=FIRST_WITH_INPUTS)
def undo_pads(graph: Graph, shapes: ShapeInfo) -> int:
    """Move elementwise operators after the Slices that read them if that removes a Pad; return the number of Slices."""
    cuts = [_cut_of(shapes, node) for node in graph.nodes if op_of(node) == "Slice"]
    return sum(cut is not None and cut.moves() for cut in cuts)


def _cut_of(shapes: ShapeInfo, node: Node) -> _Cut | None:
    """Return the Slice of an elementwise result, if it keeps the first elements of one axis; else None."""
    shape, read = shapes.shape(node.inputs[0]), producer(node.inputs[0])
    if shape is None or read is None or op_of(read) not in ELEMENTWISE:
        return None
    try:
        bounds = [*slice_bounds(shapes, node, shape).items()]
    except CannotInfer:
        return None
    axis, (start, end, step) = bounds[0]
    if len(bounds) != 1 or (start, step) != (0, 1) or end is None:
        return None
    return _Cut(shapes, node, axis - len(shape), shape[axis], end)


@dataclass(frozen=True)
class _Cut:
    """A Slice that keeps the first `end` of `size` elements along the axis `place`, which counts from the last axis."""

    shapes: ShapeInfo
    node: Node
    place: int
    size: Size
    end: Size

    def moves(self) -> bool:
        """Move the Slice before the elementwise operators if a Pad vanishes, and one Slice remains at most."""
        leaves = [*self._leaves(self.node.inputs[0])]
        cut = [leaf for leaf in leaves if self._has_axis(leaf)]
        unpadded = [leaf for leaf in cut if self._unpadded(leaf) is not None]
        if not unpadded or len(cut) - len(unpadded) > 1:
            return False
        return self.shapes.graph.replace(self.node.outputs[0], self._cut(self.node.inputs[0]))

    def _operator(self, tensor: Tensor) -> Node | None:
        """Return the elementwise operator that computes a tensor, if this Slice is all that depends on the tensor."""
        node, graph = producer(tensor), self.shapes.graph
        is_moved = node is not None and op_of(node) in ELEMENTWISE and graph.sole_consumer(tensor) is not None
        return node if is_moved and self._has_axis(tensor) else None

    def _leaves(self, tensor: Tensor) -> Iterator[Tensor]:
        node = self._operator(tensor)
        if node is None:
            yield tensor
        for each in () if node is None else node.inputs:
            yield from self._leaves(each)

    def _has_axis(self, tensor: Tensor) -> bool:
        """Return whether a tensor is not broadcast along the axis."""
        shape = self.shapes.shape(tensor)
        return shape is None or (len(shape) >= -self.place and shape[self.place] != 1)

    def _unpadded(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that a Pad extends by exactly what the Slice would remove, if one does."""
        node = producer(tensor)
        if node is None or op_of(node) != "Pad":
            return None
        source, pads = node.inputs[0], self.shapes.value(node.inputs[1])
        before, after = self.shapes.shape(source), self.shapes.shape(tensor)
        if before is None or after is None or pads is None or pads.size != 2 * len(before):
            return None
        axis = self.place % len(before)
        is_cut = pads[axis] == 0 and before[axis] == self.end and (*before[:axis], *before[axis + 1 :]) == (
            *after[:axis], *after[axis + 1 :])  # fmt: skip
        return source if is_cut else None

    def _cut(self, tensor: Tensor) -> Tensor:
        node, shapes = self._operator(tensor), self.shapes
        if node is not None:
            return write(shapes, node.op, [self._cut(each) for each in node.inputs], f"{tensor.name}_cut")
        if not self._has_axis(tensor):
            return tensor
        if (source := self._unpadded(tensor)) is not None:
            return source
        axis = shapes.graph.constant(f"{tensor.name}_axis", np.array([self.place % (shapes.rank(tensor) or 1)]))
        return write(shapes, "Slice", [tensor, *self.node.inputs[1:3], axis], f"{tensor.name}_cut")
