"""Write equivalent operators in one form, and remove steps that the next operator does itself."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, either, op, rearrange, scalar, shared, tensor, weight

ROWS: Final = (2, 3, 4)


@rewrite(example={"x": ROWS, "axis": -1})
def subtracted_maximum(x: Term = tensor(), axis: Term = attribute()) -> Rules:
    """A Softmax subtracts the maximum of each row itself, so an explicit subtraction is removed.

    Rows that hold infinity, or nothing but -infinity, become NaN with and without the subtraction.
    """
    require(
        "it must be over the last axis", lambda axis, rank, opset: (axis or (-1 if opset > 12 else 1)) in (-1, rank - 1)
    )
    require("x must not be wider", lambda dtypes: dtypes["x"] in ("float32", "float16", "bfloat16"))
    shifted = shared(op.Sub(x, op.ReduceMax(x, axes=[-1], keepdims=1)))
    widened = op.Cast(shifted, to=TensorProto.FLOAT)
    yield op.Softmax(either(shifted, widened), axis=axis), op.Softmax(x, axis=axis)


@rewrite(example={"x": ROWS, "v": (2, 4, 5)})
def softmax_in_steps(x: Term = tensor(), v: Term = tensor()) -> Rules:
    """`exp(x - max(x)) / sum(exp(x - max(x)))` becomes a Softmax; a MatMul with v can precede the division."""
    require("x must not be wider", lambda dtypes: dtypes["x"] in ("float32", "float16", "bfloat16"))
    powers = op.Exp(op.Sub(x, op.ReduceMax(x, axes=[-1], keepdims=1)))
    total = op.ReduceSum(powers, axes=[-1], keepdims=1)
    yield op.Div(powers, total), op.Softmax(x, axis=-1)
    yield op.Mul(powers, op.Reciprocal(total)), op.Softmax(x, axis=-1)
    yield op.Div(op.MatMul(powers, v), total), op.MatMul(op.Softmax(x, axis=-1), v)


@rewrite(out="... 1 d")
def softmax_of_one_row(x: Term = tensor("... d"), scale: Term = scalar(optional=True)) -> Rules:
    """The scores of a single query get their axis of size 1 for queries before the Softmax, not after it."""
    require("the result must have four axes", lambda rank: rank == 4)
    row = rearrange(x, "... d -> ... 1 d")
    for scores, with_axis in ((op.Mul(x, scale), op.Mul(row, scale)), (op.Div(x, scale), op.Div(row, scale)), (x, row)):
        yield rearrange(op.Softmax(scores, axis=-1), "... d -> ... 1 d"), op.Softmax(with_axis, axis=-1)


@rewrite(example={"x": ROWS, "y": ROWS})
def sum_of_two(x: Term = tensor(), y: Term = tensor()) -> Rules:
    """A Sum of two tensors becomes an Add."""
    yield op.Sum(x, y), op.Add(x, y)


@rewrite(out="batch rows size")
def scale_of_one_group(x: Term = tensor("batch rows 1 size"), scale: Term = weight("size")) -> Rules:
    """The scale of a norm over groups, as in Mamba-2, multiplies before the axis of a single group is removed."""
    require("x must be a product", lambda x, is_made_by: is_made_by(x, "Mul", "Div"))
    squeeze = "batch rows 1 size -> batch rows size"
    yield rearrange(x, squeeze) * scale, rearrange(x * scale, squeeze)


NO_OPS: Final[tuple[Rewrite, ...]] = (*subtracted_maximum, *softmax_in_steps, *softmax_of_one_row, *sum_of_two)
GROUPS: Final[tuple[Rewrite, ...]] = scale_of_one_group
