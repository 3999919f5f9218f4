"""Converts reductions to steps, the operators of a region's program (see `steps.py`).

Among them are operators that combine a reduction with elementwise operators, such as Softmax and ReduceLogSum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from onnx import TensorProto

from onnxfuse.algebra.operators import EXTREMES, SOFTMAXES
from onnxfuse.ir.dtypes import FLOATS
from onnxfuse.region_operators import SUMS
from onnxfuse.regions.steps import StaysOut, Steps, Writer, axis_of

LAST_FLATTENING_OPSET: Final = 12  # up to this opset, Softmax reduces all axes from `axis` on


def _reduce(op: str, s: Steps) -> None:
    axes, rank = s.ints("axes"), s.rank()
    if not axes:
        if s.integer("noop_with_empty_axes", 0):
            s.end("Identity", [s.data(0)])
            return
        axes = list(range(rank))
    axes = sorted(axis_of(axis, rank) for axis in axes)
    attributes: dict[str, Any] = {"axes": axes, "keepdims": s.integer("keepdims", 1)}
    if op == "ReduceLogSum":
        s.end("Log", [s.emit("ReduceSum", [s.data(0)], **attributes)])
    else:
        s.end(op, [s.data(0)], **attributes)


def _softmax(op: str, s: Steps) -> None:
    rank, flattening = s.rank(), s.shapes.graph.opset <= LAST_FLATTENING_OPSET
    axis = axis_of(s.integer("axis", 1 if flattening else -1), rank)
    if flattening and axis != rank - 1:
        raise StaysOut("before opset 13 it is over all axes from one on")
    s.end(op, [s.data(0)], axis=axis)


def _arg(op: str, s: Steps) -> None:
    s.end(
        op, [s.data(0)], axis=axis_of(s.integer("axis", 0), s.rank()), keepdims=s.integer("keepdims", 1),
        select_last_index=s.integer("select_last_index", 0),
    )  # fmt: skip


def _pool(op: str, s: Steps) -> None:
    """Write a global pool as a reduction over the spatial axes."""
    if s.dtype() not in FLOATS:
        raise StaysOut("it pools integers")
    s.end(op, [s.data(0)], axes=list(range(2, s.rank())), keepdims=1)


def _dynamic_quantize(s: Steps) -> None:
    """Write a DynamicQuantizeLinear: the minimum and the maximum of all elements and 0 give the scale and zero point.

    The scale is 1 if all elements are 0.  The zero point is -minimum / scale, rounded.
    """
    axes, x, origin = list(range(s.rank())), s.data(0), s.number(0, TensorProto.FLOAT)
    low, high = (
        s.emit(op, [s.emit(f"Reduce{op}", [x], axes=axes, keepdims=1, may_be_empty=1), origin]) for op in ("Min", "Max")
    )
    part = s.emit("Div", [s.emit("Sub", [high, low]), s.number(255, TensorProto.FLOAT)])
    is_empty = s.emit("Equal", [low, high], TensorProto.BOOL)
    scale = s.emit("Where", [is_empty, s.number(1, TensorProto.FLOAT), part])

    def quantized(value: str, zero: str) -> str:
        return s.emit("QuantizeLinear", [value, scale, zero], TensorProto.UINT8, precision="float32")

    zero = quantized(s.emit("Neg", [low]), s.number(0, TensorProto.UINT8))
    s.give("Identity", quantized(x, zero), 0)
    s.give("Squeeze", scale, 1, axes=axes)
    s.give("Squeeze", zero, 2, axes=axes)


REDUCTIONS: Final[Mapping[str, Writer]] = {
    **{op: functools.partial(_reduce, op) for op in (*SUMS, "ReduceLogSum")},
    **{op: functools.partial(_softmax, op) for op in SOFTMAXES},
    **{op: functools.partial(_arg, op) for op in EXTREMES},
    "GlobalAveragePool": functools.partial(_pool, "ReduceMean"),
    "GlobalMaxPool": functools.partial(_pool, "ReduceMax"),
    "DynamicQuantizeLinear": _dynamic_quantize,
}
