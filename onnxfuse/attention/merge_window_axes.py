"""Give attention whose products have five axes or more, as of windows of an image, four.

Vision models compute attention in windows, groups or units of pooled queries, with q, k and v of (batch, windows,
heads, rows, size).  Two axes in front of the rows are merged: the first two, or the second and the third where the
result is read with the second beside the size, which is then the one for heads, or with both, as groups of heads that
share their keys.  What comes into the computation is reshaped, and so is the result; these Reshapes compose with the
views around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxfuse.algebra.operators import SLICING
from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.scores import RANK, computes_probabilities, is_batched_product
from onnxfuse.analysis.shape_info import CannotInfer, Shape, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.attention.new_axes import NewAxes, attention_before
from onnxfuse.ir.attributes import ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.compose_views import View, farthest_view, write_scalings, write_views, written_from
from onnxfuse.passes.emit import emit, integers, joined_sizes, sizes_along
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size


@graph_pass(opset=13)  # whose Softmax is of one axis
def merge_window_axes(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge two axes of every attention of more than four.  Returns the number of attentions."""
    found = [
        node
        for node in graph.nodes
        if is_batched_product(shapes, node)
        and (shapes.rank(node.outputs[0]) or RANK) > RANK
        and computes_probabilities(node.inputs[0])
    ]
    return sum(_merge(graph, shapes, node) for node in found)


def _merge(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Merge two axes of the attention that ends in a product; return whether that was possible."""
    end = last.outputs[0]
    shape, inside = shapes.shape(end), attention_before(graph, shapes, last)
    if shape is None or inside is None:
        return False
    merged = MergedAxes(graph, shapes, last, _first_merged_axis(last), shape)
    result = NewAxes(graph, shapes, inside, merged.joined, merged.operand, "merged").of(end)
    split = None if result is None else merged.split(result)
    return split is not None and graph.replace(end, split)


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
            return self._reshaped(tensor, _joined(full, at))
        expanded = self._expanded(tensor, full, at, wanted)
        full = (*full[:at], *wanted, *full[at + 2 :])
        made = None if expanded is None else self._reshaped(expanded, _joined(full, at))
        return made or self._repeated_last(tensor, shape, at, wanted)

    def _repeated_last(self, tensor: Tensor, shape: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Return a tensor that is repeated along the two axes after these became the last ones, which a Reshape joins.

        None where their sizes are no numbers, or the tensor lacks an axis.
        """
        others = [axis for axis in range(len(shape)) if axis not in (at, at + 1)]
        count, order = product(wanted), (*others, at, at + 1)
        if not isinstance(count, int) or len(shape) < len(self.shape):
            return None
        rows = tuple(shape[axis] for axis in others)
        moved = self._viewed(tensor, View(order, (*rows, *shape[at : at + 2])))
        expanded = None if moved is None else self._expanded(moved, (*rows, *shape[at : at + 2]), len(rows), wanted)
        made = None if expanded is None else self._reshaped(expanded, (*rows, count))
        back = View((*range(at), len(rows), *range(at, len(rows))), (*shape[:at], count, *shape[at + 2 :]))
        return None if made is None else self._viewed(made, back)

    def _expanded(self, tensor: Tensor, full: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Return a tensor that is repeated along the two axes; None where values do not tell how often."""
        target: list[Size] = [1] * len(full)
        for i, (size, found) in enumerate(zip(wanted, full[at : at + 2], strict=True)):
            target[at + i] = size if size != found or isinstance(size, int) else 1
        sizes = self._sizes(target, at, f"{tensor.name}_sizes")
        expanded = (*full[:at], *wanted, *full[at + 2 :])
        if sizes is None:
            return None
        stem, dtype = f"{tensor.name}_merged", self.shapes.dtype(tensor)
        return emit(self.graph, self.shapes, "Expand", [tensor, sizes], stem, expanded, dtype)

    def _sizes(self, target: Sequence[Size], at: int, stem: str) -> Tensor | None:
        """Return sizes as a tensor; those of the two axes that are no numbers are read of the values of the attention.

        None where the values have others.
        """
        open_axes = [i for i, size in enumerate(target) if not isinstance(size, int)]
        sizes: list[int | Tensor] = [size if isinstance(size, int) else 1 for size in target]
        if open_axes:
            values, axis = self.last.inputs[1], self.axis - at + open_axes[0]
            shape = self.shapes.shape(values)
            if len(open_axes) > 1 or shape is None or shape[axis] != target[open_axes[0]]:
                return None
            source, axis = origin_of_size(self.shapes, values, axis)
            sizes[open_axes[0]] = sizes_along(self.graph, self.shapes, source, [axis], stem)
        return joined_sizes(self.graph, self.shapes, sizes, stem)

    def split(self, result: Tensor) -> Tensor | None:
        """Return the result with the two axes that were merged; None where a Reshape would need a computed target."""
        made, sizes = self._reshaped(result, self.shape), self.shape[self.axis : self.axis + 2]
        if made is not None or not all(isinstance(size, int) for size in sizes):
            return made
        others = [axis for axis in range(len(self.shape) - 1) if axis != self.axis]
        rows = tuple(self.joined(self.shape)[axis] for axis in others)
        back = (*range(self.axis), len(rows), len(rows) + 1, *range(self.axis, len(rows)))
        moved = View((*others, self.axis), (*rows, product(sizes)))  # a Reshape keeps the axes before the merged one
        return self._viewed(result, moved, View(None, (*rows, *sizes)), View(back, self.shape))

    def joined(self, shape: Shape) -> Shape:
        """Return a shape with the two axes as one."""
        return _joined(shape, self.axis)

    def _reshaped(self, tensor: Tensor, wanted: Shape) -> Tensor | None:
        """Return a tensor with the wanted shape; None where a Reshape would need a computed target."""
        if (found := farthest_view(self.graph, self.shapes, tensor, View(None, wanted))) is not None:
            source, views = self._merged_before_slice(*found[:2])
            made = self._viewed(source, *views)
            return None if made is None else write_scalings(self.graph, self.shapes, made, found[2])
        return None if 0 in wanted else self._viewed(tensor, View(None, wanted))

    def _merged_before_slice(self, source: Tensor, views: tuple[View, ...]) -> tuple[Tensor, tuple[View, ...]]:
        """Return a slice of a packed product of three axes in place of one of more, as patterns read it uncopied."""
        node, shape = producer(source), self.shapes.shape(source)
        whole = None if node is None or op_of(node) not in SLICING else self.shapes.shape(node.inputs[0])
        if node is None or whole is None or shape is None or len(whole) < RANK or shape[:-1] != whole[:-1]:
            return source, views
        try:
            first, count = slice_ranges(self.shapes, node, source)[len(whole) - 1]
        except (CannotInfer, KeyError):  # it may cut no columns
            return source, views
        rows = (product(whole[:-2]), *whole[-2:])
        sliced = (*rows[:-1], shape[-1])
        after = written_from(sliced, (View(None, shape), *views))
        merged = None if after is None else self._viewed(node.inputs[0], View(None, rows))
        if after is None or merged is None:
            return source, views
        stem, dtype = f"{source.name}_merged", self.shapes.dtype(source)
        range_of_columns = [integers(self.graph, stem, [number]) for number in (first, first + count, 2)]
        return emit(self.graph, self.shapes, "Slice", [merged, *range_of_columns], stem, sliced, dtype), after

    def _viewed(self, tensor: Tensor, *views: View) -> Tensor | None:
        return write_views(self.graph, self.shapes, tensor, views, f"{tensor.name}_merged")


def _joined(shape: Shape, at: int) -> Shape:
    """Return a shape with the axes `at` and `at + 1` as one."""
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
