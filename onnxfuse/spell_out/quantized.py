"""Spelling rules of operators on 8-bit integers, which onnxruntime's quantizer writes in its format QOperator.

A spelling is the operator on floats, with DequantizeLinears before it and a QuantizeLinear after it.  Where no kernel
runs a fused node, onnxruntime fuses these nodes to the operator on integers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, results
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import consumers, is_constant, op_of
from onnxfuse.ir.quantizers import is_quantized_twice
from onnxfuse.spell_out.call import Call, Rule, stay_if
from onnxfuse.spell_out.products import window_attributes

RULES = RuleTable[Rule]()
OF_INTEGERS: Final = ("QLinearMatMul", "QLinearConv", "com.microsoft::QGemm")  # operators whose input 3 is the weight
SOFTMAX_OF_AXIS_SINCE: Final = 13  # from this opset on, Softmax reduces one axis; in older ones, also all axes after it
TWICE: Final = "is quantized, dequantized and quantized again; onnxruntime would merge the two pairs of quantizers"
LARGEST_SCALE: Final = 2.0**32  # with it, dequantized numbers are below 2^40, so sums of 2^31 products stay finite
QUANTIZERS_WITH_AXES_SINCE: Final = 13
QUANTIZERS_OF_FLOAT16_SINCE: Final = 19
DYNAMIC_QUANTIZERS_SINCE: Final = 11
DEQUANTIZED: Final = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32)  # dtypes; int32 is for biases
GEMM_ATTRIBUTES: Final[Mapping[str, float]] = {"alpha": 1.0, "transA": 0, "transB": 0}


# --- products and convolutions --------------------------------------------------------------------------------------


@RULES.rule("QLinearMatMul")
def _product(call: Call) -> dict[int, Term]:
    """Spell out a product as a MatMul of floats between quantizers.

    If a node computes the second matrix, as in attention, the MatMul can remain unfused.
    """
    if not is_constant(call.tensor(3)):
        call.may_remain.add("MatMul")
    return quantized(call, op.MatMul(numbers(call, 0), numbers(call, 3, axis=-1)), 6)


@RULES.rule("QLinearConv")
def _conv(call: Call) -> dict[int, Term]:
    product = op.Conv(numbers(call, 0), numbers(call, 3, axis=0), _bias(call, 8, 0, 1.0), **window_attributes(call))
    return quantized(call, product, 6)


@RULES.rule("com.microsoft::QGemm")
def _gemm(call: Call) -> dict[int, Term]:
    """Spell out a Gemm; its result is quantized if the node has a scale for it, and is float otherwise."""
    attributes = {name: call.attribute(name, default) for name, default in GEMM_ATTRIBUTES.items()}
    bias = _bias(call, 6, (call.rank(6) or 1) - 1, attributes["alpha"])
    product = op.Gemm(numbers(call, 0), numbers(call, 3, axis=int(not attributes["transB"])), bias, **attributes)
    return quantized(call, product, 7) if call.has(7) else {0: product}


@RULES.rule("com.microsoft::MatMulIntegerToFloat")
def _product_to_float(call: Call) -> dict[int, Term]:
    return {0: _scaled_sums(call, call.input(0), call.input(2), call.optional(4), weight_scale=3)}


@RULES.rule("com.microsoft::DynamicQuantizeMatMul")
def _product_of_floats(call: Call) -> dict[int, Term]:
    since = DYNAMIC_QUANTIZERS_SINCE
    stay_if(call.graph.opset < since, f"ONNX has DynamicQuantizeLinear from opset {since} on")
    call.may_remain.add("DynamicQuantizeLinear")  # regions take it
    x, scale, zero = results(op.DynamicQuantizeLinear(call.input(0)), 3)
    return {0: _scaled_sums(call, x, scale, zero, weight_scale=2)}


def _scaled_sums(call: Call, x: Term, scale: Term, zero: Term | None, weight_scale: int) -> Term:
    """Return the product of integers x and the weight, input 1, times both scales, and the bias that is added.

    The zero point of the weight and the bias are the inputs after the zero point, if the node has one, and its scale.
    """
    stay_if(not is_constant(call.tensor(1)), "its weight is computed; kernels take constant weights")
    stay_if(call.dtype(weight_scale) != TensorProto.FLOAT, "its result is not float32")
    own = weight_scale + 1 + (op_of(call.node) == "com.microsoft::MatMulIntegerToFloat")
    sums = op.MatMulInteger(x, call.input(1), zero, call.optional(own))
    scaled = op.Mul(op.Cast(sums, to=TensorProto.FLOAT), op.Mul(scale, call.input(weight_scale)))
    return op.Add(scaled, call.input(own + 1)) if call.has(own + 1) else scaled


def _bias(call: Call, index: int, axis: int, alpha: float) -> Term | None:
    """Return the dequantized bias; its scale is the product of both operands' scales, by channel along `axis`."""
    if not call.has(index):
        return None
    scale = op.Mul(call.input(1), call.input(4))
    return op.DequantizeLinear(call.input(index), scale if alpha == 1 else scale * alpha, **_along(call, 4, axis))


# --- quantizers of com.microsoft ------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::DequantizeLinear")
def _dequantize(call: Call) -> dict[int, Term]:
    """Write ONNX's DequantizeLinear, if kernels support the integers, and the opset has the scale's dtype."""
    stay_if(call.dtype(0) not in DEQUANTIZED, f"it dequantizes {dtype_name(call.dtype(0))}; kernels take 8 bits")
    _require_float32(call)
    return {0: numbers(call, 0, axis=call.attribute("axis", 1))}


@RULES.rule("com.microsoft::QuantizeLinear")
def _quantize(call: Call) -> dict[int, Term]:
    _require_float32(call)
    return quantized(call, call.input(0), 1, **_along(call, 1, call.attribute("axis", 1)))


def _require_float32(call: Call) -> None:
    is_float32 = call.dtype(1) == TensorProto.FLOAT or call.graph.opset >= QUANTIZERS_OF_FLOAT16_SINCE
    stay_if(not is_float32, f"ONNX has quantizers of float16 from opset {QUANTIZERS_OF_FLOAT16_SINCE} on")


# --- operators that regions take ------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::QLinearAdd", "com.microsoft::QLinearMul")
def _of_two(call: Call) -> dict[int, Term]:
    apply = op.Add if op_of(call.node).endswith("Add") else op.Mul
    return in_region(call, apply(numbers(call, 0), numbers(call, 3)), 6)


@RULES.rule("com.microsoft::QLinearWhere")
def _where(call: Call) -> dict[int, Term]:
    return in_region(call, op.Where(call.input(0), numbers(call, 1), numbers(call, 4)), 7)


@RULES.rule("com.microsoft::QLinearSigmoid")
def _sigmoid(call: Call) -> dict[int, Term]:
    return in_region(call, op.Sigmoid(numbers(call, 0)), 3)


@RULES.rule("com.microsoft::QLinearLeakyRelu")
def _leaky_relu(call: Call) -> dict[int, Term]:
    return in_region(call, op.LeakyRelu(numbers(call, 0), alpha=call.attribute("alpha", 0.01)), 3)


@RULES.rule("com.microsoft::QLinearSoftmax")
def _softmax(call: Call) -> dict[int, Term]:
    """Spell out a Softmax whose 1 / scale is a whole number: onnxruntime's kernel drops the fraction of 1 / scale."""
    scale, rank, axis = call.constant(3), call.rank(0) or 0, call.attribute("axis", -1)
    is_whole = scale is not None and bool((scale > 0).all() and (1 / scale.astype(np.float32) % 1 == 0).all())
    stay_if(
        not is_whole,
        f"onnxruntime rounds the scale '{call.tensor(3).name}' to 1 / n, which it is not, or not known to be",
    )
    sides = {opset < SOFTMAX_OF_AXIS_SINCE for opset in (call.graph.opset, call.attribute("opset", 0))}
    other = "its axis is not the last one, and its opset is another one"
    stay_if(axis not in (-1, rank - 1) and len(sides) > 1, other)
    return in_region(call, op.Softmax(numbers(call, 0), axis=axis), 3)


@RULES.rule("com.microsoft::QLinearConcat")
def _concat(call: Call) -> dict[int, Term]:
    parts = [numbers(call, index) for index in range(2, len(call.node.inputs), 3)]
    return in_region(call, op.Concat(*parts, axis=call.attribute("axis", 0)), 0)


@RULES.rule("com.microsoft::QLinearGlobalAveragePool")
def _global_average_pool(call: Call) -> dict[int, Term]:
    stay_if(call.attribute("channels_last", 0), "its channels are the last axis")
    return in_region(call, op.GlobalAveragePool(numbers(call, 0)), 3)


@RULES.rule("com.microsoft::QLinearAveragePool")
def _average_pool(call: Call) -> dict[int, Term]:
    stay_if(call.attribute("channels_last", 0), "its channels are the last axis")
    attributes = window_attributes(call)
    stay_if("kernel_shape" not in attributes, "it has no kernel_shape")
    return in_region(call, op.AveragePool(numbers(call, 0), **attributes), 3)


# --- quantizers -----------------------------------------------------------------------------------------------------


def numbers(call: Call, index: int, axis: int | None = None) -> Term:
    """Return the dequantized input `index`; its scale and zero point are the next two inputs.

    If there are several scales, they differ along `axis`; if `axis` is None, several scales raise NoSpelling.
    """
    call.may_remain.add("DequantizeLinear")  # each region that reads its result contains a copy of it
    scale = call.tensor(index + 1)
    held = call.constant(index + 1)
    is_large = held is not None and not (np.abs(held) <= LARGEST_SCALE).all()
    stay_if(is_large, f"the scale '{scale.name}' is not finite, or so large that sums of the numbers may be NaN")
    stay_if(is_quantized_twice(call.tensor(index)), f"'{call.tensor(index).name}' {TWICE}")
    along = _along(call, index + 1, axis or 0)
    stay_if(axis is None and bool(along), f"'{scale.name}' has several scales, where onnxruntime takes one")
    return op.DequantizeLinear(call.input(index), call.input(index + 1), call.optional(index + 2), **along)


def _along(call: Call, scale: int, axis: int) -> dict[str, Any]:
    """Return the attribute `axis` for a quantizer with several scales; no attributes if it has one scale."""
    shape = call.axes(scale, f"the rank of '{call.tensor(scale).name}' is not 0 or 1", 0, 1)
    if shape in ((), (1,)):
        return {}
    since = QUANTIZERS_WITH_AXES_SINCE
    stay_if(call.graph.opset < since, f"it has several scales, which quantizers have from opset {since} on")
    return {"axis": axis}


def in_region(call: Call, value: Term, scale: int) -> dict[int, Term]:
    """Return `value` quantized, and note that regions, not patterns, must fuse the operators that replace the node."""
    call.of_regions = True
    return quantized(call, value, scale)


def quantized(call: Call, value: Term, scale: int, **along: Any) -> dict[int, Term]:
    """Return `value` quantized by the scale at the input with index `scale`, and the zero point at the next input."""
    stay_if(not call.has(scale + 1), "its result has no zero point")
    readers = [again for each in consumers(call.node.outputs[0]) for again in consumers(each.outputs[0])]
    for again in readers:
        stay_if(is_quantized_twice(again.outputs[0]), f"'{again.outputs[0].name}' {TWICE}")
    return {0: op.QuantizeLinear(value, call.input(scale), call.input(scale + 1), **along)}
