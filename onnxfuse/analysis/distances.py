"""Find tensors whose elements depend on the difference of their last two indices alone: of a query and of a key."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.algebra.indices import Atom, Index
from onnxfuse.algebra.operators import BROADCASTING, REGROUPING, UNARY
from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.mask_values import MAX_INDEX_ELEMENTS, IndexAnalysis
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Tensor, is_constant, op_of, producer

ELEMENTWISE: Final = (UNARY | BROADCASTING) - {"Dropout"}


def depends_on_distance(analysis: IndexAnalysis, tensor: Tensor) -> bool:
    """Return whether all elements whose last two indices have the same difference are known to be equal.

    All other axes must have size 1.  Return False if this is not known.
    """
    return _depends(analysis, tensor, {})


def _depends(analysis: IndexAnalysis, tensor: Tensor, known: dict[str, bool]) -> bool:
    if tensor.name not in known:
        known[tensor.name] = _found(analysis, tensor, known)
    return known[tensor.name]


def _found(analysis: IndexAnalysis, tensor: Tensor, known: dict[str, bool]) -> bool:
    shape, node = analysis.shapes.shape(tensor), producer(tensor)
    if shape is None or any(size != 1 for size in shape[:-2]):
        return False
    if all(size == 1 for size in shape):
        return True
    value = analysis.value(tensor)
    if isinstance(value, Index):
        return _is_of_difference(value, shape)
    if is_constant(tensor):
        return 1 < math.prod(tensor.shape) <= MAX_INDEX_ELEMENTS and _is_even(constant_value(analysis.graph, tensor))
    if node is None:
        return False
    if op_of(node) in ELEMENTWISE:
        return all(
            _depends(analysis, each, known) and _repeats_nothing(analysis, each, shape)
            for each in node.inputs
            if each.name
        )
    before = analysis.shapes.shape(node.inputs[0]) if op_of(node) in REGROUPING | {"Expand"} else None
    return before is not None and before[-2:] == shape[-2:] and _depends(analysis, node.inputs[0], known)


def _repeats_nothing(analysis: IndexAnalysis, operand: Tensor, shape: Shape) -> bool:
    """Return whether an operand has one element, or the last two sizes of `shape`: no axis is broadcast alone."""
    own = analysis.shapes.shape(operand)
    return own is not None and (all(size == 1 for size in own) or own[-2:] == shape[-2:])


def _is_of_difference(value: Index, shape: Shape) -> bool:
    """Return whether a formula is a number, or a multiple of the difference of the last two indices plus a number.

    An index of fewer elements than its axis has is broadcast along the axis if its own axis has one element.
    """
    factors = dict(value.terms)
    last = {Atom("variable", shape[axis], str(axis)) for axis in (-2, -1) if len(shape) > 1}
    return not factors or (factors.keys() == last and sum(factors.values()) == 0)


def _is_even(value: Array) -> bool:
    """Return whether each element of a table equals the one before it on its diagonal."""
    table = value.reshape(value.shape[-2:]) if value.ndim > 1 else None
    return table is not None and bool((table[1:, 1:] == table[:-1, :-1]).all())
