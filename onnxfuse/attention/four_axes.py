"""Give every attention four axes: (batch, heads, rows, columns).

Vision models compute attention in windows, groups or units of pooled queries, with q, k and v of (batch, windows,
heads, rows, size).  This file merges two of the three axes before the rows, usually the first two.  It merges the
second and the third axis if a Transpose of the result moves the second axis, or both, next to the last axis.  In the
first case, the second axis is the axis of heads; in the other case, both are heads, in groups that share keys.  Tensors
that the computation reads are reshaped, and so is its result; these Reshapes compose with the views around them.

Attention of one head is often written as softmax(q k^T) v of (batch, rows, size), as in the middle of a variational
autoencoder, or with a module for each head.  Such an attention gets an axis of size 1 for heads, and one for the batch
if there is none.  These axes are added only once no other pass changes anything, because another pass splits
(batch * heads, rows, size) if the model states the number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from onnxfuse.algebra.operators import SLICING
from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.analysis.scores import RANK, computes_probabilities, is_batched_product
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.attention.new_axes import NewAxes, attention_before
from onnxfuse.ir.attributes import ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.compose_views import View, farthest_view, write_scalings, write_views, written_from
from onnxfuse.passes.emit import ALLOWZERO_OPSET, integers, joined_sizes, sizes_along, write
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size

AxesOf: TypeAlias = "Callable[[ShapeInfo, Node, Shape], MergedAxes | OneHead]"


@graph_pass(opset=13)  # from this opset on, Softmax is over one axis
def merge_window_axes(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge two axes of every attention with more than four axes.  Returns the number of attentions."""
    return _rewrite_all(graph, shapes, lambda rank: rank > RANK, MergedAxes)


@graph_pass(opset=7)  # from this opset on, broadcasting aligns the last axes
def add_heads_axis(graph: Graph, shapes: ShapeInfo) -> int:
    """Add axes to every attention with two or three axes, so that it has four.  Returns the number of attentions."""
    return _rewrite_all(graph, shapes, lambda rank: rank < RANK, OneHead)


def _rewrite_all(graph: Graph, shapes: ShapeInfo, has_rank: Callable[[int], bool], axes_of: AxesOf) -> int:
    """Rewrite the attentions whose products have a rank that `has_rank` accepts; return how many were rewritten."""
    products = [node for node in graph.nodes if is_batched_product(shapes, node)]
    found = [node for node in products if has_rank(shapes.rank(node.outputs[0]) or RANK)]
    return sum(_rewrite(graph, shapes, node, axes_of) for node in found if computes_probabilities(node.inputs[0]))


def _rewrite(graph: Graph, shapes: ShapeInfo, last: Node, axes_of: AxesOf) -> bool:
    """Add or merge axes in the attention that ends in the product `last`; return whether that was possible."""
    end = last.outputs[0]
    shape, inside = shapes.shape(end), attention_before(graph, shapes, last)
    if shape is None or inside is None:
        return False
    axes = axes_of(shapes, last, shape)
    result = NewAxes(shapes, inside, axes).of(end)
    made = None if result is None else axes.back(result)
    return made is not None and graph.replace(end, made)


@dataclass(frozen=True)
class OneHead:
    """Adds an axis of size 1 before the last two, and another one for the batch where there is none."""

    shapes: ShapeInfo
    last: Node
    result: Shape  # the shape of the attention's result

    def shape(self, shape: Shape) -> Shape:
        """Return a shape of two or three axes with the new axes added."""
        batch: Shape = (1,) if len(shape) < RANK - 1 else shape[:1]
        return (*batch, 1, *shape[-2:])

    def operand(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with the new axes.

        A tensor of fewer axes is returned unchanged, because it broadcasts.  Queries or keys that all of the batch
        shares, as the weight of a patch merger (Renggli et al. 2022, arXiv:2202.12015), are expanded to the batch.
        """
        sizes = self.shapes.shape(tensor)
        if sizes is None or 0 in sizes:  # in a Reshape target, 0 would copy the size of another axis
            return None
        if len(sizes) == len(self.result):
            return self._viewed(tensor, self.shape(sizes))
        return self._expanded(tensor) if any(op_of(each) == "MatMul" for each in consumers(tensor)) else tensor

    def _expanded(self, tensor: Tensor) -> Tensor | None:
        """Return a matrix with the new axes and the batch of the values; None if the values have another batch."""
        values, stem = self.last.inputs[1], f"{tensor.name}_of_batch"
        if len(self.result) < RANK - 1 or (self.shapes.shape(values) or (None,))[0] != self.result[0]:
            return None
        target = joined_sizes(self.shapes, [sizes_along(self.shapes, values, [0], stem), 1, 1, 1], stem)
        return write(self.shapes, "Expand", [tensor, target], stem)

    def back(self, result: Tensor) -> Tensor | None:
        """Return the result without the new axes."""
        return self._viewed(result, self.result)

    def _viewed(self, tensor: Tensor, shape: Shape) -> Tensor | None:
        return write_views(self.shapes, tensor, (View(None, shape),), f"{tensor.name}_of_one_head")


@dataclass(frozen=True)
class MergedAxes:
    """Merges two axes in all tensors of an attention: the axes that are `axis` and `axis + 1` in its result."""

    shapes: ShapeInfo
    last: Node
    result: Shape  # the shape of the attention's result

    @cached_property
    def axis(self) -> int:
        """The first merged axis: 1 if a Transpose moves axis 1 (or 1 and 2) of the result next to the last; else 0."""
        for reader in consumers(self.last.outputs[0]):
            perm = ints_attribute(reader, "perm", ()) if op_of(reader) == "Transpose" else []
            if len(perm) == RANK + 1 and perm[-1] == RANK and (perm[-2] == 1 or perm[-3:-1] == [1, 2]):
                return 1
        return 0

    def shape(self, shape: Shape) -> Shape:
        """Return a shape with the two axes merged."""
        return _joined(shape, self.axis)

    def operand(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with the two axes merged; without these axes, it is returned unchanged and broadcasts."""
        shape = self.shapes.shape(tensor)
        if shape is None:
            return None
        at = self.axis + len(shape) - len(self.result)  # the first of the two axes in this tensor
        if at < -1 or (at == -1 and shape[0] == 1):
            return tensor
        full, at = ((1, *shape), 0) if at == -1 else (shape, at)
        found, wanted = full[at : at + 2], self.result[self.axis : self.axis + 2]
        if found in (wanted, (1, 1)):
            return self._reshaped(tensor, _joined(full, at)) or self._reshaped_to_sizes(tensor, full, at)
        expanded = self._expanded(tensor, full, at, wanted)
        full = (*full[:at], *wanted, *full[at + 2 :])
        made = None if expanded is None else self._reshaped(expanded, _joined(full, at))
        made = made or self._repeated_last(tensor, shape, at, wanted)
        return made if made or expanded is None else self._reshaped_to_sizes(expanded, full, at)

    def _repeated_last(self, tensor: Tensor, shape: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Expand a tensor along the two axes and merge them.

        The axes are moved to the end, where a Reshape can merge them, and the merged axis is moved back.  Returns None
        if one of the wanted sizes is dynamic, or if the tensor has fewer axes than the result.
        """
        others = [axis for axis in range(len(shape)) if axis not in (at, at + 1)]
        count, order = product(wanted), (*others, at, at + 1)
        if not isinstance(count, int) or len(shape) < len(self.result):
            return None
        rows = tuple(shape[axis] for axis in others)
        moved = self._viewed(tensor, View(order, (*rows, *shape[at : at + 2])))
        expanded = None if moved is None else self._expanded(moved, (*rows, *shape[at : at + 2]), len(rows), wanted)
        made = None if expanded is None else self._reshaped(expanded, (*rows, count))
        back = View((*range(at), len(rows), *range(at, len(rows))), (*shape[:at], count, *shape[at + 2 :]))
        return None if made is None else self._viewed(made, back)

    def _expanded(self, tensor: Tensor, full: Shape, at: int, wanted: Shape) -> Tensor | None:
        """Return a tensor of shape `full` with its axes `at` and `at + 1` expanded to the two sizes `wanted`.

        If a wanted size is dynamic, it is read at run time from the shape of V, the operand of values.  Returns None if
        V does not have this size.
        """
        values, stem = self.last.inputs[1], f"{tensor.name}_merged"
        shape, target = self.shapes.shape(values), list[int | Tensor]([1] * len(full))
        for i, (size, found) in enumerate(zip(wanted, full[at : at + 2], strict=True)):
            if isinstance(size, int):
                target[at + i] = size
            elif size != found:
                if shape is None or shape[self.axis + i] != size:
                    return None
                source, axis = origin_of_size(self.shapes, values, self.axis + i)
                target[at + i] = sizes_along(self.shapes, source, [axis], stem)
        return write(self.shapes, "Expand", [tensor, joined_sizes(self.shapes, target, stem)], stem)

    def back(self, result: Tensor) -> Tensor | None:
        """Return the result with the merged axes split again; None if a size is dynamic and not a size of V."""
        made, sizes = self._reshaped(result, self.result), self.result[self.axis : self.axis + 2]
        if made is not None:
            return made
        if not all(isinstance(size, int) for size in sizes):
            return self._split(result)
        others = [axis for axis in range(len(self.result) - 1) if axis != self.axis]
        rows = tuple(self.shape(self.result)[axis] for axis in others)
        order = (*range(self.axis), len(rows), len(rows) + 1, *range(self.axis, len(rows)))
        moved = View((*others, self.axis), (*rows, product(sizes)))  # a Reshape keeps the axes before the merged one
        return self._viewed(result, moved, View(None, (*rows, *sizes)), View(order, self.result))

    def _split(self, result: Tensor) -> Tensor | None:
        """Write a Reshape that splits the merged axes; read their sizes from V, and the others from the result."""
        values, stem = self.last.inputs[1], f"{result.name}_split"
        shape, axes = self.shapes.shape(values), (self.axis, self.axis + 1)
        if shape is None or len(shape) != len(self.result) or any(shape[axis] != self.result[axis] for axis in axes):
            return None

        def size_along(axis: int) -> int | Tensor:
            source, place = (values, axis) if axis in axes else (result, axis - (axis > self.axis))
            size = self.result[axis]
            return size if isinstance(size, int) else sizes_along(self.shapes, source, [place], stem)

        target = joined_sizes(self.shapes, [size_along(axis) for axis in range(len(self.result))], stem)
        zeros = {"allowzero": 1} if self.shapes.graph.opset >= ALLOWZERO_OPSET else {}
        return write(self.shapes, "Reshape", [result, target], stem, zeros)

    def _reshaped(self, tensor: Tensor, wanted: Shape) -> Tensor | None:
        """Return a tensor with the wanted shape; None where a Reshape would need a computed target."""
        if (found := farthest_view(self.shapes, tensor, View(None, wanted))) is not None:
            source, views = self._merged_before_slice(*found[:2])
            made = self._viewed(source, *views)
            return None if made is None else write_scalings(self.shapes, made, found[2])
        return None if 0 in wanted else self._viewed(tensor, View(None, wanted))

    def _reshaped_to_sizes(self, tensor: Tensor, full: Shape, at: int) -> Tensor | None:
        """Merge the axes `at` and `at + 1` by a Reshape whose target has sizes that are read at run time.

        Global keys of LongT5 make the number of keys dynamic, beside a dynamic number of blocks.  Returns None if the
        tensor has fewer axes than `full`, or if the opset has no `allowzero`.
        """
        if self.shapes.shape(tensor) != full or self.shapes.graph.opset < ALLOWZERO_OPSET:
            return None
        stem = f"{tensor.name}_merged"
        read = [size if isinstance(size, int) else sizes_along(self.shapes, tensor, [axis], stem)
                for axis, size in enumerate(full)]  # fmt: skip
        both = [
            integers(self.shapes.graph, stem, [each]) if isinstance(each, int) else each for each in read[at : at + 2]
        ]
        target = joined_sizes(self.shapes, [*read[:at], write(self.shapes, "Mul", both, stem), *read[at + 2 :]], stem)
        return write(self.shapes, "Reshape", [tensor, target], stem, {"allowzero": 1})

    def _merged_before_slice(self, source: Tensor, views: tuple[View, ...]) -> tuple[Tensor, tuple[View, ...]]:
        """Move a Slice of a packed product's last axis after a Reshape of the product to three axes.

        Patterns can read a slice of a tensor of three axes without a copy.  Returns the new source and views, or the
        given ones if `source` is not such a slice.
        """
        node, shape = producer(source), self.shapes.shape(source)
        whole = None if node is None or op_of(node) not in SLICING else self.shapes.shape(node.inputs[0])
        if node is None or whole is None or shape is None or len(whole) < RANK or shape[:-1] != whole[:-1]:
            return source, views
        try:
            first, count = slice_ranges(self.shapes, node, source)[len(whole) - 1]
        except (CannotInfer, KeyError):  # the node slices another axis, or its ranges are unknown
            return source, views
        rows = (product(whole[:-2]), *whole[-2:])
        sliced = (*rows[:-1], shape[-1])
        after = written_from(sliced, (View(None, shape), *views))
        merged = None if after is None else self._viewed(node.inputs[0], View(None, rows))
        if after is None or merged is None:
            return source, views
        stem = f"{source.name}_merged"
        range_of_columns = [integers(self.shapes.graph, stem, [number]) for number in (first, first + count, 2)]
        return write(self.shapes, "Slice", [merged, *range_of_columns], stem), after

    def _viewed(self, tensor: Tensor, *views: View) -> Tensor | None:
        return write_views(self.shapes, tensor, views, f"{tensor.name}_merged")


def _joined(shape: Shape, at: int) -> Shape:
    """Return a shape with the axes `at` and `at + 1` merged."""
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
