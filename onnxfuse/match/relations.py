"""Functions of tensors that the conditions of patterns can call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from onnxfuse.algebra.operators import REARRANGING, SLICING
from onnxfuse.algebra.sizes import Size, symbols
from onnxfuse.analysis.distances import depends_on_distance
from onnxfuse.analysis.index_formulas import AtMostZero
from onnxfuse.analysis.magnitudes import holds_zero_or_one, is_bounded, is_ordinary
from onnxfuse.dsl.guards import Relation
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Tensor, is_constant, op_of, producer, tensor_before
from onnxfuse.match.context import MatchContext


def is_multiple(value: Tensor, of: Tensor) -> bool:
    """Return whether `value` is `of` multiplied or divided by a constant."""
    makers = [node for node in value.inputs if node.op in ("Mul", "Div")]
    return any(t is of for node in makers for t in node.inputs) and any(map(is_constant, makers[0].inputs))


def share_symbols(left: Size, right: Size) -> bool:
    """Return whether two dims share a symbol, so that they can be equal, like s and the size min(512, s) of a slice."""
    return not {*symbols(left)}.isdisjoint(symbols(right))


def is_finite(m: MatchContext, value: Tensor) -> bool:
    """Return whether a value is a constant without NaN and infinity."""
    return is_constant(value) and bool(np.isfinite(constant_value(m.graph, value)).all())


def broadcasts_to(m: MatchContext, value: Tensor, to: Tensor) -> bool:
    """Return whether a value broadcasts to another one without changing the other's shape."""
    shape, whole = m.shapes.shape(value), m.shapes.shape(to)
    if shape is None or whole is None or len(shape) > len(whole):
        return False
    return all(size in (1, other) for size, other in zip(shape, whole[len(whole) - len(shape) :], strict=True))


def is_table(m: MatchContext, value: Tensor, of: Tensor) -> bool:
    """Return whether a value, which broadcasts to `of`, has at least two axes and another shape than `of`."""
    shape = m.shapes.shape(value)
    return shape is not None and len(shape) > 1 and shape != m.shapes.shape(of)


def are_slices_of_one(*values: Tensor, of: Tensor | None = None) -> bool:
    """Return whether values are slices of one tensor (`of`, if given), or views of such slices."""
    sources = [_sliced(each) for each in values]
    whole = sources[0] if of is None else of
    return whole is not None and all(each is whole for each in sources)


def _sliced(value: Tensor) -> Tensor | None:
    """Return the tensor that `value` is a slice of, or a view of a slice of; None for any other value."""
    node = producer(tensor_before(value, REARRANGING))
    return None if node is None or op_of(node) not in SLICING else node.inputs[0]


def begins_with_one(m: MatchContext, value: Tensor) -> bool:
    """Return whether a value has several axes, the first of them of size 1."""
    shape = m.shapes.shape(value)
    return shape is not None and len(shape) > 1 and shape[0] == 1


def is_triangle(m: MatchContext, value: Tensor) -> bool:
    """Return whether a boolean value is known to be true up to a diagonal, and false above it."""
    return isinstance(m.index_analysis.value(value), AtMostZero)


def is_of_distance(m: MatchContext, value: Tensor) -> bool:
    """Return whether the elements of a value are known to depend on the difference of their last two indices alone."""
    return depends_on_distance(m.index_analysis, value)


def is_made_by(value: Tensor, *ops: str) -> bool:
    """Return whether one of these operators computes a value."""
    return any(op_of(node) in ops for node in value.inputs)


def has_readers(value: Tensor) -> bool:
    """Return whether a value has readers besides the matched one, which means that more than one node reads it."""
    return len(value.outputs) > 1


def is_read_once(m: MatchContext, value: Tensor) -> bool:
    """Return whether one node reads a value, and neither a subgraph nor an output of the graph needs it."""
    return len(value.outputs) == 1 and not m.graph.is_kept(value)


def relations(m: MatchContext) -> Mapping[str, Relation]:
    """Return the functions that conditions can call, by name."""
    return {
        "is_multiple": is_multiple,
        "share_symbols": share_symbols,
        "is_ordinary": partial(is_ordinary, m.shapes),
        "is_bounded": partial(is_bounded, m.shapes),
        "is_finite": partial(is_finite, m),
        "broadcasts_to": partial(broadcasts_to, m),
        "is_table": partial(is_table, m),
        "are_slices_of_one": are_slices_of_one,
        "begins_with_one": partial(begins_with_one, m),
        "holds_zero_or_one": partial(holds_zero_or_one, m.shapes),
        "is_triangle": partial(is_triangle, m),
        "is_of_distance": partial(is_of_distance, m),
        "is_made_by": is_made_by,
        "has_readers": has_readers,
        "is_read_once": partial(is_read_once, m),
    }
