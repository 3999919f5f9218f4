"""Give attention whose products have five axes or more, as of windows of an image, four.

Vision models compute attention in windows, groups or units of pooled queries, with q, k and v of (batch, windows,
heads, rows, size).  Two axes in front of the rows are merged: the first two, or the second and the third where the
result is read with the second beside the size, which is then the one for heads, or with both, as groups of heads that
share their keys.  What comes into the computation is reshaped, and so is the result; these Reshapes compose with the
views around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.operators import SLICING
from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.shape_info import CannotInfer, Shape, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.attributes import ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.attention_nodes import AttentionNodes, computes_probabilities, is_batched_product
from onnxfuse.passes.compose_views import View, farthest_view, write_scalings, write_views, written_from
from onnxfuse.passes.emit import emit
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size

RANK: Final = 4  # of the products that patterns know


@graph_pass(opset=13)  # whose Softmax is of one axis
def merge_window_axes(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge two axes of every attention of more than four.  Returns the number of attentions."""
    found = [node for node in graph.nodes if _is_product(shapes, node) and computes_probabilities(node.inputs[0])]
    return sum(_merge(graph, shapes, node) for node in found)


def _is_product(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a product with more axes than patterns know, of as many in both operands."""
    return is_batched_product(shapes, node) and (shapes.rank(node.outputs[0]) or 0) > RANK


def _merge(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Merge two axes of the attention that ends in a product; return whether that was possible."""
    shape = shapes.shape(last.outputs[0])
    if shape is None:
        return False
    merged = MergedAxes(graph, shapes, last, _first_merged_axis(last), shape)
    result = AttentionNodes(graph, shapes, last, partial(_joined, at=merged.axis), merged.operand, "merged").rewritten()
    split = None if result is None else merged.split(result)
    return split is not None and graph.replace(last.outputs[0], split)


def _first_merged_axis(last: Node) -> int:
    """Return 1 where a Transpose puts the second axis beside the size, or the third with the second, else 0."""
    for reader in consumers(last.outputs[0]):
        perm = ints_attribute(reader, "perm", ()) if op_of(reader) == "Transpose" else []
        if len(perm) == RANK + 1 and perm[-1] == RANK and (perm[-2] == 1 or perm[-3:-1] == [1, 2]):
            return 1
    return 0


@dataclass(frozen=True)
class MergedAxes:
    """The axes `axis` and `axis + 1` of an attention's result, which become one of whatever has them."""

    graph: Graph
    shapes: ShapeInfo
    last: Node
    axis: int
    shape: Shape  # of the result

    def operand(self, tensor: Tensor) -> Tensor | None:
        """Return what comes from outside with the axes merged; it broadcasts over axes that it does not have."""
        shape = self.shapes.shape(tensor)
        if shape is None:
            return None
        at = self.axis + len(shape) - len(self.shape)  # the first of the two axes in this tensor
        if at < -1 or (at == -1 and shape[0] == 1):
            return tensor
        full, at = ((1, *shape), 0) if at == -1 else (shape, at)
        found, wanted = full[at : at + 2], self.shape[self.axis : self.axis + 2]
        if found in (wanted, (1, 1)):
            return self.reshaped(tensor, _joined(full, at))
        expanded = self._expanded(tensor, full, at, wanted)
        full = (*full[:at], *wanted, *full[at + 2 :])
        made = None if expanded is None else self.reshaped(expanded, _joined(full, at))
        return made or self._repeated_behind(tensor, shape, at, wanted)

    def _repeated_behind(self, tensor: Tensor, shape: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Return a tensor that is repeated along the two axes with these behind all others, which a Reshape then keeps.

        None where their sizes are no numbers, or the tensor lacks an axis.
        """
        others = [axis for axis in range(len(shape)) if axis not in (at, at + 1)]
        count, order = product(wanted), (*others, at, at + 1)
        if not isinstance(count, int) or len(shape) < len(self.shape):
            return None
        moved = self._emit("Transpose", [tensor], tuple(shape[axis] for axis in order), tensor, {"perm": list(order)})
        rows = tuple(shape[axis] for axis in others)
        expanded = self._expanded(moved, (*rows, *shape[at : at + 2]), len(rows), wanted)
        made = None if expanded is None else self.reshaped(expanded, (*rows, count))
        back = [*range(at), len(rows), *range(at, len(rows))]
        joined = (*shape[:at], count, *shape[at + 2 :])
        return None if made is None else self._emit("Transpose", [made], joined, tensor, {"perm": back})

    def _expanded(self, tensor: Tensor, full: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Return a tensor that is repeated along the two axes; None where values do not tell how often."""
        target: list[Size] = [1] * len(full)
        for i, (size, found) in enumerate(zip(wanted, full[at : at + 2], strict=True)):
            target[at + i] = size if size != found or isinstance(size, int) else 1
        sizes = self._sizes(target, at, f"{tensor.name}_sizes")
        expanded = (*full[:at], *wanted, *full[at + 2 :])
        return None if sizes is None else self._emit("Expand", [tensor, sizes], expanded, tensor)

    def _sizes(self, target: Sequence[Size], at: int, stem: str) -> Tensor | None:
        """Return sizes as a tensor; those of the two axes that are no numbers are read of the values of the attention.

        None where the values have others.
        """
        open_axes = [i for i, size in enumerate(target) if not isinstance(size, int)]
        numbers = np.array([size if isinstance(size, int) else 1 for size in target], np.int64)
        if not open_axes:
            return self.graph.constant(stem, numbers)
        values, axis = self.last.inputs[1], self.axis - at + open_axes[0]
        shape = self.shapes.shape(values)
        if len(open_axes) > 1 or shape is None or shape[axis] != target[open_axes[0]]:
            return None
        source, axis = origin_of_size(self.shapes, values, axis)
        write, (open_axis,) = (self.graph, self.shapes), open_axes
        rank = self.shapes.rank(source) or 0
        found = emit(*write, "Shape", [source], f"{stem}_of_values", (rank,), TensorProto.INT64)
        index = self.graph.constant(f"{stem}_axis", np.array([axis], np.int64))
        size = emit(*write, "Gather", [found, index], f"{stem}_size", (1,), TensorProto.INT64, {"axis": 0})
        parts = [numbers[:open_axis], numbers[open_axis + 1 :]]
        before, behind = (
            [self.graph.constant(f"{stem}_{side}", part)] if part.size else []
            for side, part in zip(("before", "behind"), parts, strict=True)
        )
        return emit(*write, "Concat", [*before, size, *behind], stem, (len(target),), TensorProto.INT64, {"axis": 0})

    def split(self, result: Tensor) -> Tensor | None:
        """Return the result with the two axes that were merged; None where a Reshape would need a computed target."""
        made, sizes = self.reshaped(result, self.shape), self.shape[self.axis : self.axis + 2]
        if made is not None or not all(isinstance(size, int) for size in sizes):
            return made
        others = [axis for axis in range(len(self.shape) - 1) if axis != self.axis]
        rows = tuple(_joined(self.shape, self.axis)[axis] for axis in others)
        order = [*others, self.axis]  # the Reshape keeps the axes in front of the merged one
        moved = self._emit("Transpose", [result], (*rows, product(sizes)), result, {"perm": order})
        target = self.graph.constant(f"{result.name}_shape", np.array([*[0] * len(rows), *sizes], np.int64))
        made = self._emit("Reshape", [moved, target], (*rows, *sizes), result)
        back = [*range(self.axis), len(rows), len(rows) + 1, *range(self.axis, len(rows))]
        return self._emit("Transpose", [made], self.shape, result, {"perm": back})

    def reshaped(self, tensor: Tensor, wanted: Shape) -> Tensor | None:
        """Return a tensor with the wanted shape; None where a Reshape would need a computed target."""
        if (found := farthest_view(self.graph, self.shapes, tensor, View(None, wanted))) is not None:
            source, views = self._merged_in_front_of_slice(*found[:2])
            made = write_views(self.graph, self.shapes, source, views, f"{tensor.name}_merged")
            return None if made is None else write_scalings(self.graph, self.shapes, made, found[2])
        target = reshape_target(self.shapes.shape(tensor), wanted)
        if target is None or 0 in wanted:
            return None
        stored = self.graph.constant(f"{tensor.name}_shape", np.array(target, np.int64))
        return self._emit("Reshape", [tensor, stored], wanted, tensor)

    def _merged_in_front_of_slice(self, source: Tensor, views: tuple[View, ...]) -> tuple[Tensor, tuple[View, ...]]:
        """Return a slice of a packed product of three axes in place of one of more, as patterns read it uncopied."""
        node, shape = producer(source), self.shapes.shape(source)
        whole = None if node is None or op_of(node) not in SLICING else self.shapes.shape(node.inputs[0])
        if node is None or whole is None or shape is None or len(whole) < RANK or shape[:-1] != whole[:-1]:
            return source, views
        try:
            ranges = slice_ranges(self.shapes, node, source)
        except CannotInfer:
            return source, views
        rows = (product(whole[:-2]), *whole[-2:])
        target = reshape_target(whole, rows)
        after = written_from((*rows[:-1], shape[-1]), (View(None, shape), *views))
        if target is None or after is None:
            return source, views
        first, count = ranges[len(whole) - 1]
        numbers = {"shape": target, "start": [first], "end": [first + count], "axis": [2]}
        stored = [self.graph.constant(f"{source.name}_{k}", np.array(v, np.int64)) for k, v in numbers.items()]
        merged = self._emit("Reshape", [node.inputs[0], stored[0]], rows, node.inputs[0])
        return self._emit("Slice", [merged, *stored[1:]], (*rows[:-1], shape[-1]), source), after

    def _emit(
        self,
        op: str,
        inputs: Sequence[Tensor],
        shape: Shape,
        like: Tensor,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Tensor:
        dtype = self.shapes.dtype(like)
        return emit(self.graph, self.shapes, op, inputs, f"{like.name}_merged", shape, dtype, attributes)


def _joined(shape: Shape, at: int) -> Shape:
    """Return a shape with the axes `at` and `at + 1` as one."""
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
