"""Write rotations of pairs (both halves of a head, or adjacent elements) in the two forms that patterns match.

These are `x * cos + turned(x) * sin`, where turned(x) is `-second, first`, and the product of complex numbers
`a cos - b sin, b cos + a sin`.  Models that rotate the other way, with `second, -first`, get a table of `-sin`.  Where
a tensor is multiplied by two tables, such as cos and the scale of xPos, the tables are multiplied first.  Where pairs
have an axis of size 1 for their columns, the axis is added after the products.  A turned tensor that is cast to
float32 is cast before it is turned instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from onnxfuse.algebra.operators import REARRANGING, SLICING
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, is_exact_cast
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass

MOVING: Final = REARRANGING | {"Concat", "Neg", "Slice"}
MAX_REARRANGING: Final = 4  # views between the slices of a head and its rotation
RANK: Final = 4  # of x: batch, heads and rows, in any order, and the size of a head


class Term(NamedTuple):
    """A product that is an addend of a sum; `sign` is 1 if it is added and -1 if it is subtracted."""

    sign: int
    factors: tuple[Tensor, Tensor]


class Rotation(NamedTuple):
    """`a cos - b sin, b cos + a sin`, with the signs of both tables."""

    a: Tensor
    b: Tensor
    cos: Tensor
    sin: Tensor
    signs: tuple[int, int]


@graph_pass(opset=13)  # from this opset on, the axes of Squeeze and Unsqueeze are an input
def canonicalize_rotations(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite rotations that are in another form; return the number of changes."""
    count = sum(_take_joined(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Slice")
    for node in list(graph.nodes):
        if op_of(node) == "Concat" and _is_along_last_axis(shapes, node):
            count += _turn_back(graph, shapes, node) or _canonicalize_complex(graph, shapes, node)
        elif op_of(node) in ("Add", "Sub"):
            count += _canonicalize_sum(graph, shapes, node)
        elif op_of(node) == "Cast":
            count += _cast_first(graph, shapes, node)
    return count


# --- tables --------------------------------------------------------------------------------------------------------


def _take_joined(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Replace a Slice that takes exactly one input of a Concat by this input; return whether it does."""
    concat, made = producer(node.inputs[0]), node.outputs[0]
    shape = shapes.shape(node.inputs[0])
    if concat is None or op_of(concat) != "Concat" or shape is None:
        return False
    axis, end = int_attribute(concat, "axis", 0) % len(shape), 0
    try:
        ranges = slice_ranges(shapes, node, made)
    except CannotInfer:
        return False
    if set(ranges) != {axis}:
        return False
    for part in concat.inputs:
        sizes = shapes.shape(part)
        width = None if sizes is None else sizes[axis]
        if not isinstance(width, int):
            return False
        if ranges[axis] == (end, width):
            return graph.replace(made, part)
        end += width
    return False


def _negative(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return a tensor negated before its views, so that both tables of a rotation keep the same views."""
    view, shape, dtype = producer(tensor), shapes.shape(tensor), shapes.dtype(tensor)
    if view is not None and op_of(view) == "Neg":
        return view.inputs[0]
    if view is None or op_of(view) not in REARRANGING:
        return emit(graph, shapes, "Neg", [tensor], f"{tensor.name}_negative", shape, dtype)
    inputs = [_negative(graph, shapes, view.inputs[0]), *view.inputs[1:]]
    return emit(graph, shapes, op_of(view), inputs, f"{tensor.name}_negative", shape, dtype, view.attrs)


def _has_axis_of_heads(shapes: ShapeInfo, table: Tensor) -> bool:
    """Return whether a table has three axes, the first of size 1; without it, the table broadcasts alike."""
    shape = shapes.shape(table)
    return shape is not None and len(shape) == RANK - 1 and shape[0] == 1


def _of_heads(graph: Graph, shapes: ShapeInfo, table: Tensor) -> Tensor:
    """Return a table without its axis of size 1 before rows and columns."""
    if not _has_axis_of_heads(shapes, table):
        return table
    axes, shape = graph.constant(f"{table.name}_axes", np.array([0], np.int64)), shapes.shape(table)
    known = None if shape is None else shape[1:]
    return emit(graph, shapes, "Squeeze", [table, axes], f"{table.name}_rows", known, shapes.dtype(table))


def _is_table(shapes: ShapeInfo, tensor: Tensor, x: Tensor) -> bool:
    """Return whether a tensor with the last axis of x and an axis of rows broadcasts with x, and is smaller."""
    shape, of_x = shapes.shape(tensor), shapes.shape(x)
    if shape is None or of_x is None or len(shape) < 2 or len(shape) > len(of_x) or shape[-1] != of_x[-1]:
        return False
    sizes = of_x[len(of_x) - len(shape) :]
    return shape != of_x and all(size in (1, other) for size, other in zip(shape, sizes, strict=True))


# --- x * cos + turned(x) * sin -------------------------------------------------------------------------------------


def _turn_back(graph: Graph, shapes: ShapeInfo, concat: Node) -> bool:
    """Write `second, -first` times a table as `-second, first` times the negated table."""
    product = _product_of(graph, concat.outputs[0])
    if len(concat.inputs) != 2 or product is None or shapes.dtype(concat.outputs[0]) not in FUSIBLE_FLOATS:
        return False
    second, signed = (_below_unsqueeze(each) for each in concat.inputs)
    negation, (turned, end) = producer(signed), product
    at = int(end.inputs[0] is turned)
    if negation is None or op_of(negation) != "Neg" or _is_negated(second):
        return False
    first = negation.inputs[0]
    if not _are_of_one(second, first) or not _is_table(shapes, end.inputs[at], turned):
        return False
    parts = zip((_negative(graph, shapes, second), first), concat.inputs, strict=True)
    concat.inputs = [_unsqueezed_like(graph, shapes, part, before) for part, before in parts]
    end.inputs[at] = _negative(graph, shapes, end.inputs[at])
    return True


def _below_unsqueeze(tensor: Tensor) -> Tensor:
    node = producer(tensor)
    return node.inputs[0] if node is not None and op_of(node) == "Unsqueeze" else tensor


def _unsqueezed_like(graph: Graph, shapes: ShapeInfo, tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` after an Unsqueeze like the one that computes `like`; unchanged if none does."""
    node = producer(like)
    if node is None or op_of(node) != "Unsqueeze":
        return tensor
    inputs, shape, dtype = [tensor, node.inputs[1]], shapes.shape(like), shapes.dtype(like)
    return emit(graph, shapes, "Unsqueeze", inputs, f"{tensor.name}_column", shape, dtype)


def _product_of(graph: Graph, tensor: Tensor) -> tuple[Tensor, Node] | None:
    """Return (operand, Mul) if only this Mul reads the tensor, perhaps through views that end in the operand."""
    for _ in range(MAX_REARRANGING):
        reader = graph.sole_consumer(tensor)
        if reader is None:
            return None
        if op_of(reader) == "Mul":
            return tensor, reader
        if op_of(reader) not in REARRANGING:
            return None
        tensor = reader.outputs[0]
    return None


def _are_of_one(*tensors: Tensor) -> bool:
    """Return whether tensors are slices of the same one."""
    sources = [_sliced(each) for each in tensors]
    return sources[0] is not None and all(each is sources[0] for each in sources)


def _sliced(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a slicing operator took this one from, perhaps with views after it; None if none did."""
    for _ in range(MAX_REARRANGING):
        node = producer(tensor)
        if node is None or op_of(node) not in REARRANGING | SLICING:
            return None
        if op_of(node) in SLICING:
            return node.inputs[0]
        tensor = node.inputs[0]
    return None


def _canonicalize_sum(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write `x * cos * scale - turned(x) * sin * scale` as `x * table + turned(x) * table`, which patterns match."""
    end = node.outputs[0]
    shape, dtype, is_sub = shapes.shape(end), shapes.dtype(end), op_of(node) == "Sub"
    if shape is None or len(shape) != RANK or dtype not in FUSIBLE_FLOATS:
        return False
    sides = [found for each in node.inputs if (found := _factors(graph, shapes, each))]
    if len(sides) < len(node.inputs):
        return False
    if not any(_is_turned(sides[i][0], sides[1 - i][0]) for i in (1, 0)):
        return False
    many = any(len(tables) > 1 or _has_axis_of_heads(shapes, tables[0]) for _, tables in sides)
    if not many and not is_sub:
        return False
    tables = [_of_heads(graph, shapes, _product(graph, shapes, tables)) for _, tables in sides]
    if is_sub:
        tables[1] = _negative(graph, shapes, tables[1])
    pairs = [(side[0], table) for side, table in zip(sides, tables, strict=True)]
    parts = [emit(graph, shapes, "Mul", pair, f"{end.name}_part", shape, dtype) for pair in pairs]
    return graph.replace(end, emit(graph, shapes, "Add", parts, f"{end.name}_rotated", shape, dtype))


def _is_turned(turned: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is a Concat of two slices of x, one of them negated."""
    for _ in range(MAX_REARRANGING):
        node = producer(turned)
        if node is None or op_of(node) not in REARRANGING | {"Concat"}:
            return False
        if op_of(node) == "Concat":
            return len(node.inputs) == 2 and _sliced_of_signed(node.inputs) is x
        turned = node.inputs[0]
    return False


def _cast_first(graph: Graph, shapes: ShapeInfo, cast: Node) -> bool:
    """Cast x before it is turned, where the turned x is cast to a wider dtype; return whether it was."""
    end, tensor = cast.outputs[0], cast.inputs[0]
    node = producer(tensor)
    while node is not None and op_of(node) in REARRANGING and graph.sole_consumer(tensor) is not None:
        tensor = node.inputs[0]
        node = producer(tensor)
    if node is None or op_of(node) != "Concat" or len(node.inputs) != 2 or graph.sole_consumer(tensor) is None:
        return False
    x = _sliced_of_signed(node.inputs)
    if x is None or not is_exact_cast(shapes.dtype(x), shapes.dtype(end)) or not _is_moved(cast.inputs[0], x):
        return False
    wide = emit(graph, shapes, "Cast", [x], f"{x.name}_wide", shapes.shape(x), shapes.dtype(end), cast.attrs)
    return graph.replace(end, _moved(graph, shapes, cast.inputs[0], x, wide))


def _is_moved(tensor: Tensor, x: Tensor) -> bool:
    """Return whether only Slice, Neg, Concat and views compute the tensor from x."""
    node = producer(tensor)
    if tensor is x or node is None or op_of(node) not in MOVING:
        return tensor is x
    return all(_is_moved(each, x) for each in _moved_inputs(node))


def _moved_inputs(node: Node) -> list[Tensor]:
    """Return the inputs of a node that are data, not axes or sizes."""
    return list(node.inputs) if op_of(node) == "Concat" else node.inputs[:1]


def _moved(graph: Graph, shapes: ShapeInfo, tensor: Tensor, x: Tensor, wide: Tensor) -> Tensor:
    """Copy the nodes that compute `tensor` from x, reading `wide` instead of x; return their result."""
    node = producer(tensor)
    if tensor is x or node is None:
        return wide
    sources = [_moved(graph, shapes, each, x, wide) for each in _moved_inputs(node)]
    inputs, shape = [*sources, *node.inputs[len(sources) :]], shapes.shape(tensor)
    return emit(graph, shapes, op_of(node), inputs, f"{tensor.name}_wide", shape, shapes.dtype(wide), node.attrs)


def _sliced_of_signed(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that two tensors are slices of, if exactly one of them is negated; else None."""
    sources, signs = [], 0
    for tensor in tensors:
        node = producer(tensor)
        while node is not None and op_of(node) in REARRANGING | {"Neg"}:
            signs += op_of(node) == "Neg"
            tensor = node.inputs[0]
            node = producer(tensor)
        sources.append(_sliced(tensor))
    return sources[0] if signs == 1 and sources[0] is sources[1] else None


def _factors(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> tuple[Tensor, list[Tensor]] | None:
    """Return x and its tables (at least one) where the tensor is a product of x and tables; else None."""
    tables: list[Tensor] = []
    while (node := producer(tensor)) is not None and op_of(node) == "Mul":
        at = next((i for i in (1, 0) if _is_table(shapes, node.inputs[i], node.outputs[0])), None)
        if at is None or (tables and graph.sole_consumer(tensor) is None):
            break
        tables.append(node.inputs[at])
        tensor = node.inputs[1 - at]
    return (tensor, tables[::-1]) if tables else None


def _product(graph: Graph, shapes: ShapeInfo, tables: Sequence[Tensor]) -> Tensor:
    """Return the product of tables, all of which broadcast with the first."""
    result = tables[0]
    for table in tables[1:]:
        shape = _broadcast(shapes.shape(result), shapes.shape(table))
        result = emit(graph, shapes, "Mul", [result, table], f"{result.name}_scaled", shape, shapes.dtype(result))
    return result


def _broadcast(one: Sequence[Size] | None, other: Sequence[Size] | None) -> tuple[Size, ...] | None:
    """Return the shape that two tables broadcast to; on each axis, their sizes are equal or one of them is 1."""
    if one is None or other is None:
        return None
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + tuple(one), (1,) * (rank - len(other)) + tuple(other), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


# --- a cos - b sin, b cos + a sin ----------------------------------------------------------------------------------


def _is_along_last_axis(shapes: ShapeInfo, concat: Node) -> bool:
    rank = shapes.rank(concat.outputs[0])
    return rank is not None and int_attribute(concat, "axis", 0) in (-1, rank - 1)


def _canonicalize_complex(graph: Graph, shapes: ShapeInfo, concat: Node) -> bool:
    """Write the last two inputs of a Concat in the form of patterns if they are a complex product in another form."""
    if len(concat.inputs) < 2:
        return False
    *rest, real, imaginary = concat.inputs
    below = _below_unsqueeze(real), _below_unsqueeze(imaginary)
    shape, dtype = shapes.shape(below[0]), shapes.dtype(below[0])
    found = _rotation(shapes, *below)
    if found is None or shape is None or dtype not in FUSIBLE_FLOATS or shapes.shape(below[1]) != shape:
        return False
    has_column = shape[-1] == 1 and len(shape) == RANK + 1 and below == (real, imaginary)
    if has_column:
        a, b, cos, sin = (_plain(graph, shapes, each) for each in found[:-1])
        found = Rotation(a, b, cos, sin, found.signs)
        shape = shape[:-1]
    elif _is_in_order(shapes, *below) and not any(_has_axis_of_heads(shapes, each) for each in (found.cos, found.sin)):
        return False
    results = _complex_product(graph, shapes, found, f"{concat.outputs[0].name}_rotated", shape)
    if has_column:
        axes = graph.constant(f"{concat.outputs[0].name}_axes", np.array([-1], np.int64))
        stem, column = f"{concat.outputs[0].name}_column", shapes.shape(real)
        made = [emit(graph, shapes, "Unsqueeze", [each, axes], stem, column, dtype) for each in results]
    else:
        befores = zip(results, (real, imaginary), strict=True)
        made = [_unsqueezed_like(graph, shapes, each, before) for each, before in befores]
    concat.inputs = [*rest, *made]
    return True


def _complex_product(
    graph: Graph, shapes: ShapeInfo, found: Rotation, stem: str, shape: Sequence[Size]
) -> tuple[Tensor, Tensor]:
    """Return `a cos - b sin` and `b cos + a sin`, with the signs of the rotation in the tables."""
    dtype, signed = shapes.dtype(found.a), zip((found.cos, found.sin), found.signs, strict=True)
    tables = [_of_heads(graph, shapes, table) for table, _ in signed]
    cos, sin = (
        table if sign == 1 else _negative(graph, shapes, table) for table, sign in zip(tables, found.signs, strict=True)
    )

    def joined(op: str, *products: tuple[Tensor, Tensor]) -> Tensor:
        sides = [emit(graph, shapes, "Mul", pair, f"{stem}_part", shape, dtype) for pair in products]
        return emit(graph, shapes, op, sides, stem, shape, dtype)

    a, b = found.a, found.b
    return joined("Sub", (a, cos), (b, sin)), joined("Add", (b, cos), (a, sin))


def _plain(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return a tensor without its last axis, whose size is 1."""
    axes, shape = graph.constant(f"{tensor.name}_axes", np.array([-1], np.int64)), shapes.shape(tensor)
    known = None if shape is None else shape[:-1]
    return emit(graph, shapes, "Squeeze", [tensor, axes], f"{tensor.name}_plain", known, shapes.dtype(tensor))


def _is_in_order(shapes: ShapeInfo, real: Tensor, imaginary: Tensor) -> bool:
    """Return whether the tensors are the Sub and the Add of products that patterns match, without other signs."""
    operators = [op_of(node) for each in (real, imaginary) if (node := producer(each)) is not None]
    found = _rotation(shapes, real, imaginary, signs_of_factors=False)
    return operators == ["Sub", "Add"] and found is not None and found.signs == (1, 1)


def _is_negated(tensor: Tensor) -> bool:
    node = producer(tensor)
    return node is not None and op_of(node) == "Neg"


def _rotation(shapes: ShapeInfo, real: Tensor, imaginary: Tensor, *, signs_of_factors: bool = True) -> Rotation | None:
    """Return the rotation whose real and imaginary parts the tensors are; None if they are not a complex product.

    With `signs_of_factors`, a factor may be the result of a Neg.
    """
    of_real, of_imaginary = (list(_terms(each, 1, signs_of_factors)) for each in (real, imaginary))
    if len(of_real) != 2 or len(of_imaginary) != 2:
        return None
    for first, second in (of_real, of_real[::-1]):
        for third, fourth in (of_imaginary, of_imaginary[::-1]):
            found = _assigned(shapes, first, second, third, fourth)
            if found is not None:
                return found
    return None


def _assigned(shapes: ShapeInfo, first: Term, second: Term, third: Term, fourth: Term) -> Rotation | None:
    """Return the rotation if the terms are `a cos`, `b sin`, `b cos` and `a sin`, in this order; else None."""
    for a, cos in (first.factors, first.factors[::-1]):
        for b, sin in (second.factors, second.factors[::-1]):
            if {id(b), id(cos)} != set(map(id, third.factors)) or {id(a), id(sin)} != set(map(id, fourth.factors)):
                continue
            if not _are_of_one(a, b) or not (_is_table(shapes, cos, a) and _is_table(shapes, sin, a)):
                continue
            if first.sign == third.sign and fourth.sign == -second.sign:
                return Rotation(a, b, cos, sin, (first.sign, fourth.sign))
    return None


def _terms(tensor: Tensor, sign: int, signs_of_factors: bool) -> Iterator[Term]:
    """Yield the products that a tensor sums up, with their signs; `signs_of_factors` includes a Neg of a factor."""
    node = producer(tensor)
    if node is None:
        return
    op = op_of(node)
    if op in ("Add", "Sub"):
        yield from _terms(node.inputs[0], sign, signs_of_factors)
        yield from _terms(node.inputs[1], -sign if op == "Sub" else sign, signs_of_factors)
    elif op == "Neg":
        yield from _terms(node.inputs[0], -sign, signs_of_factors)
    elif op == "Mul":
        factors = []
        for factor in node.inputs:
            negation = producer(factor)
            if signs_of_factors and negation is not None and op_of(negation) == "Neg":
                sign, factor = -sign, negation.inputs[0]
            factors.append(factor)
        yield Term(sign, (factors[0], factors[1]))
