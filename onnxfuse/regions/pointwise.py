"""Converts elementwise operators to steps, the operators of a region's program (see `steps.py`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import ml_dtypes
from onnx import TensorProto, helper

from onnxfuse.ir.dtypes import FLOATS, INTEGER_RANGES, LARGEST_FLOAT8, dtype_name
from onnxfuse.ir.node import is_constant
from onnxfuse.region_operators import QUANTIZED, SIXTEEN_BITS
from onnxfuse.regions.steps import StaysOut, Steps, Writer, axis_of

SAME: Final = (
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sin", "Cos", "Floor", "Ceil",
    "Round", "Sign", "Reciprocal", "Relu", "Sigmoid", "HardSwish", "Softplus", "Softsign", "Mish", "Where", "Equal",
    "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "Identity",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
)  # fmt: skip
# Operators with numeric attributes, and the attributes' defaults.
WITH_NUMBERS: Final[Mapping[str, Mapping[str, float]]] = {
    "LeakyRelu": {"alpha": 0.01},
    "Elu": {"alpha": 1.0},
    "Selu": {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
}


def _same(op: str, s: Steps) -> None:
    s.end(op, s.elementwise(range(len(s.node.inputs))))


def _with_numbers(op: str, s: Steps) -> None:
    s.end(op, s.elementwise([0]), **{name: s.real(name, default) for name, default in WITH_NUMBERS[op].items()})


def _chain(op: str, s: Steps) -> None:
    """Write an operator with any number of inputs as a chain of binary operators."""
    values = s.elementwise(range(len(s.node.inputs)))
    if len(values) == 1:
        s.end("Identity", values)
        return
    result = values[0]
    for value in values[1:-1]:
        result = s.emit(op, [result, value])
    s.end(op, [result, values[-1]])


def _power(s: Steps) -> None:
    """Write a Pow, with the exponent cast to the base's dtype."""
    x, exponent = s.elementwise([0, 1])
    if s.dtype(0) != s.dtype(1):
        if s.dtype(0) not in FLOATS:
            raise StaysOut(f"it raises {dtype_name(s.dtype(0))} to {dtype_name(s.dtype(1))}; required is one dtype")
        exponent = s.emit("Cast", [exponent], s.dtype(0), to=dtype_name(s.dtype(0)))
    s.end("Pow", [x, exponent])


def _range(dtype: int) -> tuple[float, float]:
    """Return the smallest and the largest finite number of a dtype."""
    if dtype in INTEGER_RANGES:
        return INTEGER_RANGES[dtype]
    limits = ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype))  # type: ignore[no-untyped-call]
    return float(limits.min), float(limits.max)


def _clip(s: Steps) -> None:
    """Write a Clip as Max and Min; before opset 11, its bounds are attributes, whose default is the dtype's range."""
    least, largest = (
        s.data(index, s.rank()) if s.has(index) else s.number(s.node.attrs.get(name, limit), s.dtype())
        for index, name, limit in zip((1, 2), ("min", "max"), _range(s.dtype()), strict=True)
    )
    s.end("Min", [s.emit("Max", [s.data(0), least]), largest])


def _cast(s: Steps) -> None:
    if dtype_name(s.out_dtype) in LARGEST_FLOAT8:
        raise StaysOut(f"it gives {dtype_name(s.out_dtype)}; required is a QuantizeLinear")
    s.end("Cast", s.elementwise([0]), to=dtype_name(s.out_dtype))


def _is_inf(s: Steps) -> None:
    flags = {name: s.integer(name, 1) for name in ("detect_positive", "detect_negative")}
    s.end("IsInf", s.elementwise([0]), **flags)


def _gelu(s: Steps) -> None:
    s.end("Gelu", s.elementwise([0]), approximate=str(s.parameter("approximate") or "none"))


def _mod(s: Steps) -> None:
    s.end("Mod", s.elementwise([0, 1]), fmod=s.integer("fmod", 0))


def _bit_shift(s: Steps) -> None:
    s.end("BitShift", s.elementwise([0, 1]), direction=str(s.parameter("direction")))


def _prelu(s: Steps) -> None:
    x, slope = s.elementwise([0, 1])
    negative = s.emit("Less", [x, s.number(0, s.dtype())], TensorProto.BOOL)
    s.end("Where", [negative, s.emit("Mul", [x, slope]), x])


def _swish(s: Steps) -> None:
    (x,) = s.elementwise([0])
    scaled = s.emit("Mul", [x, s.number(s.real("alpha", 1.0), s.dtype())])
    s.end("Mul", [x, s.emit("Sigmoid", [scaled])])


def _per_channel(s: Steps, index: int) -> str:
    """Return the name of the value of a scale or a zero point, reshaped to broadcast with the first input."""
    tensor, value = s.node.inputs[index], s.data(index, rank_beside=1)
    if value.startswith("#") or not s.rank(index):
        return value
    if s.shape(tensor) == (1,):
        return s.emit("Squeeze", [value], s.dtype(index), axes=[0])
    if not is_constant(tensor):
        raise StaysOut(f"'{tensor.name}' has a number per channel and is computed; required is a constant")
    axis = axis_of(s.integer("axis", 1), s.rank())
    shape = [tensor.shape[0], *[1] * (s.rank() - axis - 1)]
    return value if len(shape) == 1 else s.emit("Reshape", [value], s.dtype(index), shape=shape)


def _quantizing(s: Steps, integers: int, **attributes: str) -> None:
    """Write a QuantizeLinear or DequantizeLinear with a zero point of dtype `integers`."""
    if size := s.integer("block_size", 0):
        raise StaysOut(f"its scales are given per block of {size}; required is one for all, or one per channel")
    is_float8 = dtype_name(integers) in LARGEST_FLOAT8
    if is_float8 and s.has(2) and s.constant(s.node.inputs[2]).any():
        raise StaysOut(f"its zero point '{s.node.inputs[2].name}' is not 0, which it has to be in float8")
    zero = _per_channel(s, 2) if s.has(2) and not is_float8 else s.number(0, integers)
    s.end(s.node.op, [s.data(0), _per_channel(s, 1), zero], **attributes)


def _quantize(s: Steps) -> None:
    """Write a QuantizeLinear; the step's attribute `precision` is the dtype to which kernels round the quotient.

    Before opset 23, onnxruntime rounds the quotient to float32.  From opset 23 on, it follows ONNX, and rounds the
    quotient to the dtype that the node's attribute `precision` names, by default to the dtype of the scale.
    """
    if dtype_name(s.out_dtype) not in (taken := (*QUANTIZED, *SIXTEEN_BITS)):
        raise StaysOut(f"it gives {dtype_name(s.out_dtype)}; kernels quantize to {', '.join(taken)}")
    if not s.integer("saturate", 1) and dtype_name(s.out_dtype) in LARGEST_FLOAT8:
        raise StaysOut(f"it does not saturate numbers beyond the range of {dtype_name(s.out_dtype)}")
    precision = s.integer("precision", 0) or s.dtype(1) if s.shapes.graph.opset >= 23 else TensorProto.FLOAT
    _quantizing(s, s.out_dtype, precision=dtype_name(precision))


def _dequantize(s: Steps) -> None:
    if s.dtype(1) != s.out_dtype:
        raise StaysOut(f"its scale is {dtype_name(s.dtype(1))} and its result {dtype_name(s.out_dtype)}")
    _quantizing(s, s.dtype(0))


POINTWISE: Final[Mapping[str, Writer]] = {
    **{op: functools.partial(_same, op) for op in SAME},
    **{op: functools.partial(_with_numbers, op) for op in WITH_NUMBERS},
    "Min": functools.partial(_chain, "Min"),
    "Max": functools.partial(_chain, "Max"),
    "Sum": functools.partial(_chain, "Add"),
    "Pow": _power,
    "Clip": _clip,
    "Cast": _cast,
    "IsInf": _is_inf,
    "Gelu": _gelu,
    "Mod": _mod,
    "BitShift": _bit_shift,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "PRelu": _prelu,
    "Swish": _swish,
}
