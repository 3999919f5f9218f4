"""Replace every Einsum that equals a Transpose or matrix products by Transpose, MatMul and Reshape nodes.

An Einsum of several operands multiplies the first two first, as onnxruntime does.

The axes of a product of two operands are of four kinds: *batch* axes are in both operands and the result, *rows* in the
left operand and the result, *columns* in the right operand and the result, and *inner* axes are summed up.  MatMul has
any number of *leading* axes: batch axes, and rows other than the last, over which the right operand broadcasts.
Leading axes keep their order in the result.  If there are batch axes, the operand that has the result's last axis
becomes the right operand.  Then the product needs no Transpose if the last two axes of the result are a row and a
column.  Several inner axes, or several columns of an operand without batch axes, are merged, and the product is
reshaped back.  The number of axes that an ellipsis stands for follows from the operands' ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.analysis.scores import computes_probabilities
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.passes.compose_views import View, write_views
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass


@dataclass(frozen=True)
class Axes:
    """The axes of a product by kind, as letters of the equation, in the order that they have in the result."""

    batch: str
    leading: str  # batch axes, and all row axes but the last
    row: str  # the last row axis
    columns: str
    inner: str

    @property
    def left(self) -> str:
        """The left operand's axes in the order in which MatMul takes them."""
        return self.leading + self.row + self.inner

    @property
    def right(self) -> str:
        """The right operand's axes in the order in which MatMul takes them."""
        return self.batch + self.inner + self.columns

    @property
    def right_leading(self) -> str:
        """The leading axes from the first batch axis on; row axes among them have size 1 in the right operand."""
        first = min((self.leading.index(axis) for axis in self.batch), default=len(self.leading))
        return self.leading[first:]

    @property
    def result(self) -> str:
        """The axes of the MatMul's result, in order."""
        return self.leading + self.row + self.columns


@graph_pass(opset=12)  # the first opset with Einsum
def einsum_to_matmul(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite every Einsum that can be rewritten; return how many were rewritten."""
    einsums = [node for node in graph.nodes if op_of(node) == "Einsum"]
    return sum(_rewrite(graph, shapes, node) for node in einsums)


def _rewrite(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    found = [shapes.shape(each) for each in node.inputs]
    known = [shape for shape in found if shape is not None]
    equation = str_attribute(node, "equation", "").replace(" ", "")
    letters, result = _letters(equation, [len(shape) for shape in known]) if len(known) == len(found) else ([], "")
    if not letters or len(letters) != len(known) or len(set(result)) < len(result):
        return False
    if any(len(set(axes)) < len(axes) or len(axes) != len(shape) for axes, shape in zip(letters, known, strict=True)):
        return False
    writer = _Writer(shapes, f"{node.outputs[0].name}_product")
    written = None
    if len(known) == 1 and set(letters[0]) == set(result):
        written = writer.transposed(node.inputs[0], letters[0], result)
    elif shapes.dtype(node.outputs[0]) in FUSIBLE_FLOATS and len(known) == 2:
        written = _product(writer, node.inputs, (letters[0], letters[1]), (known[0], known[1]), result)
    elif shapes.dtype(node.outputs[0]) in FUSIBLE_FLOATS and len(known) > 2:
        written = _pairwise(writer, node, letters, known, result)
    return written is not None and graph.replace(node.outputs[0], written)


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the axes of the operands and of the result; the axes of an ellipsis get letters of their own.

    Both are empty for two kinds of valid equations: without an arrow, where the result's axes are in alphabetical
    order, and with an ellipsis whose axes are summed up.
    """
    operands, arrow, result = equation.partition("->")
    axes = operands.split(",")
    if not arrow or len(axes) != len(ranks) or equation.replace("...", "").count("."):
        return [], ""
    counts = {rank - len(each.replace("...", "")) for each, rank in zip(axes, ranks, strict=True) if "..." in each}
    if len(counts) > 1 or min(counts, default=0) < 0 or (counts - {0} and "..." not in result):
        return [], ""  # all ellipses must have the same number of axes, and the result must keep them
    free = sorted(set(ascii_letters).difference(equation))
    dots = "".join(free[: max(counts, default=0)])
    return [each.replace("...", dots) for each in axes], result.replace("...", dots)


def _product(
    writer: _Writer, inputs: Sequence[Tensor], letters: tuple[str, str], shapes: tuple[Shape, Shape], result: str
) -> Tensor | None:
    """Write an Einsum of two operands as a MatMul; None where it is not a matrix product."""
    left, right = letters
    sizes = dict(zip(left, shapes[0], strict=True))
    if any(sizes.setdefault(axis, size) != size for axis, size in zip(right, shapes[1], strict=True)):
        return None  # an axis broadcasts, or its sizes are not known to be equal
    shared = [axis for axis in left if axis in right]
    if len(missing := [axes for axes in letters if {*axes}.intersection(result) <= {*shared}]) == 1 and shared:
        return _product_of_vectors(writer, inputs, letters, result, sizes, letters.index(missing[0]))
    if result[-1:] in left and any(axis in result for axis in shared):  # the left operand must become the right one
        return _product_in_order(writer, inputs[::-1], (right, left), result, sizes)
    return _product_in_order(writer, inputs, letters, result, sizes)


def _product_of_vectors(
    writer: _Writer, inputs: Sequence[Tensor], letters: tuple[str, str], result: str, sizes: dict[str, Size], at: int
) -> Tensor | None:
    """Write an Einsum whose operand `at` lacks a row axis, such as a single query, as a MatMul with one row there."""
    row = next(letter for letter in ascii_letters if letter not in sizes)
    sizes = sizes | {row: 1}
    axes, result_with_row = [*letters], f"{result[:-1]}{row}{result[-1:]}"
    axes[at] = f"{letters[at][:-1]}{row}{letters[at][-1:]}"
    shapes = [tuple(sizes[axis] for axis in each) for each in axes]
    operands = [writer.reshaped(*each) for each in zip(inputs, shapes, strict=True)]
    if operands[0] is None or operands[1] is None:
        return None
    both = operands[0], operands[1]
    made = _product(writer, both, (axes[0], axes[1]), (shapes[0], shapes[1]), result_with_row)
    return None if made is None else writer.reshaped(made, tuple(sizes[axis] for axis in result))


def _pairwise(
    writer: _Writer, node: Node, letters: Sequence[str], shapes: Sequence[Shape], result: str
) -> Tensor | None:
    """Write an Einsum of several operands as a MatMul of the first two and an Einsum of the product with the others.

    Returns None where the first two make no matrix product.
    """
    (left, right, *others), needed = letters, result + "".join(letters[2:])
    kept = "".join(dict.fromkeys(axis for axis in needed if axis in left + right))
    first = _product(writer, node.inputs[:2], (left, right), (shapes[0], shapes[1]), kept)
    if first is None:
        return None
    equation = f"{','.join([kept, *others])}->{result}"
    inputs, attributes = [first, *node.inputs[2:]], {"equation": equation}
    return write(writer.shapes, "Einsum", inputs, writer.stem, attributes)


def _product_in_order(
    writer: _Writer, inputs: Sequence[Tensor], letters: tuple[str, str], result: str, sizes: dict[str, Size]
) -> Tensor | None:
    """Write an Einsum as a MatMul with the first input on the left; None where it is not a matrix product."""
    left, right = letters
    shared = [axis for axis in left if axis in right]
    # Probabilities are large, so the result is transposed instead.
    order = left if computes_probabilities(inputs[0]) else result
    kept = [axis for axis in order if axis in left and axis in result]
    rows = [axis for axis in kept if axis not in shared]
    axes = Axes(
        batch="".join(axis for axis in kept if axis in shared),
        leading="".join(axis for axis in kept if axis not in rows[-1:]),
        row="".join(rows[-1:]),
        columns="".join(axis for axis in result if axis in right and axis not in shared),
        inner="".join(axis for axis in shared if axis not in result),
    )
    if not (axes.row and axes.columns and axes.inner) or len(axes.left + axes.columns) != len({*left, *right}):
        return None
    if axes.batch and len(axes.columns) > 1:
        return None
    a = writer.merged(writer.transposed(inputs[0], left, axes.left), axes.left, (axes.inner,), sizes)
    b = writer.merged(writer.transposed(inputs[1], right, axes.right), axes.right, (axes.inner, axes.columns), sizes)
    if b is not None and axes.right_leading != axes.batch:
        b = writer.with_ones(b, axes)
    if a is None or b is None:
        return None
    made = writer.reshaped(writer("MatMul", [a, b]), tuple(sizes[axis] for axis in axes.result))
    return None if made is None else writer.transposed(made, axes.result, result)


@dataclass(frozen=True)
class _Writer:
    """Writes the nodes that replace one Einsum."""

    shapes: ShapeInfo
    stem: str

    def __call__(self, op: str, inputs: Sequence[Tensor], **attributes: list[int]) -> Tensor:
        return write(self.shapes, op, inputs, self.stem, attributes)

    def transposed(self, tensor: Tensor, axes: str, wanted: str) -> Tensor:
        """Return a tensor with its `axes` in the order `wanted`."""
        return tensor if axes == wanted else self("Transpose", [tensor], perm=[axes.index(axis) for axis in wanted])

    def merged(self, tensor: Tensor, axes: str, groups: Sequence[str], sizes: dict[str, Size]) -> Tensor | None:
        """Merge the axes of each group into one axis; the groups are adjacent and are the tensor's last axes."""
        behind = [product(sizes[axis] for axis in group) for group in groups]
        return self.reshaped(tensor, (*(sizes[axis] for axis in axes[: -len("".join(groups))]), *behind))

    def reshaped(self, tensor: Tensor, wanted: Sequence[Size]) -> Tensor | None:
        """Return a tensor with the wanted shape; None where a Reshape would need a computed target."""
        if self.shapes.shape(tensor) == tuple(wanted):
            return tensor
        return write_views(self.shapes, tensor, (View(None, tuple(wanted)),), self.stem)

    def with_ones(self, tensor: Tensor, axes: Axes) -> Tensor | None:
        """Return the right operand with an axis of size 1 inserted for each row axis in `axes.right_leading`."""
        shape = self.shapes.shape(tensor)
        assert shape is not None
        kept = iter(shape)
        ones = tuple(next(kept) if axis in axes.batch else 1 for axis in axes.right_leading)
        return self.reshaped(tensor, (*ones, *kept))
