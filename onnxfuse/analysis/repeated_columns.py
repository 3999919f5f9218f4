"""Detects tables that hold each column twice, like the cosines and sines of rotary embeddings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer

# How columns repeat: the second half equals the first, or each pair of neighbours is equal.
HALVES, PAIRS = "halves", "pairs"
COLUMNS = "_columns"  # a fused node's attribute `<operand>_columns` says how the columns of that operand repeat
ELEMENTWISE: Final = frozenset({"Add", "Cast", "Cos", "Div", "Identity", "Mul", "Neg", "Sin", "Sub"})
MOVING: Final = VIEWS | {"Gather", "Slice"}
MAX_DEPTH: Final = 24  # maximum number of nodes between a table and the node that repeats its columns


def repeated_columns(shapes: ShapeInfo, tensor: Tensor) -> str:
    """Return how the columns of a table provably repeat: HALVES, PAIRS, both joined by a space, or ""."""
    size = _last_size(shapes, tensor)
    if not isinstance(size, int) or size % 2:
        return ""
    return " ".join(kind for kind in (HALVES, PAIRS) if _repeats(shapes, tensor, kind, MAX_DEPTH))


def repeat_columns(value: Array, columns: str) -> Array:
    """Overwrite the second copy of each column of `value` by the first, and return `value`."""
    for kind in columns.split():
        first, second = _parts(value, kind)
        second[...] = first
    return value


def _repeats(shapes: ShapeInfo, tensor: Tensor, kind: str, depth: int) -> bool:
    """Return whether the columns repeat as `kind` says; a single column counts as repeated, because it broadcasts."""
    if is_constant(tensor):
        return _constant_repeats(shapes, tensor, kind)
    node, size = producer(tensor), _last_size(shapes, tensor)
    if size == 1:
        return True
    if node is None or not depth or not isinstance(size, int) or size % 2:
        return False
    recurse = functools.partial(_repeats, shapes, kind=kind, depth=depth - 1)
    op = op_of(node)
    if op in ELEMENTWISE:
        return all(map(recurse, node.inputs))
    if op == "Concat" and _is_last(shapes, node):
        half = len(node.inputs) // 2
        return kind == HALVES and [*map(id, node.inputs[:half])] == [*map(id, node.inputs[half:])]
    if op == "Gather" and _is_last(shapes, node):
        return is_constant(node.inputs[1]) and _constant_repeats(shapes, node.inputs[1], kind)
    if op == "Reshape" and _last_size(shapes, node.inputs[0]) == 2:
        return kind == PAIRS and _is_doubled(shapes, producer(node.inputs[0]))
    return op in MOVING and _keeps_rows(shapes, node, size) and recurse(node.inputs[0])


def _constant_repeats(shapes: ShapeInfo, tensor: Constant, kind: str) -> bool:
    if not tensor.shape or tensor.shape[-1] == 1:
        return True
    if tensor.shape[-1] % 2:
        return False
    value = constant_value(shapes.graph, tensor)
    first, second = _parts(value, kind)
    return bool((first == second).all())


def _parts(value: Array, kind: str) -> tuple[Array, Array]:
    """Return views of the first and the second copies of the columns of a table."""
    half = value.shape[-1] // 2
    return (value[..., :half], value[..., half:]) if kind == HALVES else (value[..., 0::2], value[..., 1::2])


def _is_doubled(shapes: ShapeInfo, node: Node | None) -> bool:
    """Return whether a node fills a last axis of size 2 with two copies of a column."""
    if node is None:
        return False
    if op_of(node) == "Expand":
        return _last_size(shapes, node.inputs[0]) == 1
    return op_of(node) == "Concat" and _is_last(shapes, node) and node.inputs[0] is node.inputs[-1]


def _keeps_rows(shapes: ShapeInfo, node: Node, size: int) -> bool:
    """Return whether a node that moves elements keeps the rows of its first input intact."""
    source = node.inputs[0]
    if _last_size(shapes, source) != size:
        return op_of(node) == "Expand"  # the Expand repeats the only column, so all columns are equal
    perm = node.attrs.get("perm")
    return op_of(node) != "Transpose" or (isinstance(perm, Sequence) and perm[-1] == len(perm) - 1)


def _is_last(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node's `axis` is the last axis of its first input."""
    rank, axis = shapes.rank(node.inputs[0]), int_attribute(node, "axis", 0)
    return rank is not None and axis in (-1, rank - 1)


def _last_size(shapes: ShapeInfo, tensor: Tensor) -> object:
    shape = shapes.shape(tensor)
    return shape[-1] if shape else 1 if shape == () else None
