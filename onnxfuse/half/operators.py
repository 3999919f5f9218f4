"""Which operators compute in half precision, and which of their inputs and outputs then have that dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx

from onnxfuse.algebra.operators import CONTROL_FLOW, FLOAT32_SCALES, RANDOM
from onnxfuse.half.precision import Precision
from onnxfuse.ir.attributes import schema, str_attribute
from onnxfuse.ir.node import Node, op_of

CONTRIB: Final = frozenset({  # operators of com.microsoft whose floating-point inputs but scales all have one dtype
    "Attention", "BiasAdd", "BiasGelu", "BiasSplitGelu", "CausalConvWithState", "EmbedLayerNormalization", "FastGelu",
    "FusedConv", "FusedGemm", "FusedMatMul", "GatedDeltaNet", "Gelu", "GemmFastGelu", "GroupNorm",
    "GroupQueryAttention", "LinearAttention", "MultiHeadAttention", "NhwcConv", "QuickGelu", "RotaryEmbedding",
    "SimplifiedLayerNormalization", "SkipGroupNorm", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
WITHOUT_BFLOAT16: Final = frozenset({  # operators of CONTRIB that onnxruntime 1.31 declares only for float16
    "BiasAdd", "BiasSplitGelu", "EmbedLayerNormalization", "FusedConv", "FusedGemm", "GroupNorm", "NhwcConv",
    "SkipGroupNorm",
})  # fmt: skip
# By operator and dtype: the first opset in which the operator accepts the dtype even without a kernel in onnxruntime.
# onnxruntime then inlines the operator's ONNX definition, whose own operators accept the dtype from that opset on.
DEFINED_SINCE: Final = {
    ("Gelu", "float16"): 9, ("FastGelu", "bfloat16"): 13, ("Gelu", "bfloat16"): 13, ("QuickGelu", "bfloat16"): 13,
    ("Clip", "bfloat16"): 16, ("SoftmaxCrossEntropyLoss", "bfloat16"): 16,
}  # fmt: skip
ONNXRUNTIME_ONLY: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "Affine", "Scale"})
SEQUENCES: Final = (  # operators whose sequences and optional values keep the dtype that the model declares
    "ConcatFromSequence", "Optional", "OptionalGetElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SequenceMap", "SplitToSequence",
)  # fmt: skip
STAY: Final = {  # operators that stay in float32 whatever they read, and why
    **dict.fromkeys(RANDOM, "it draws random numbers"),
    **dict.fromkeys(CONTROL_FLOW, "its values have one dtype in all iterations and branches"),
    **dict.fromkeys(
        ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), "it reads or writes quantized numbers"
    ),
    **dict.fromkeys(
        ("QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"), "it reads or writes quantized numbers"
    ),
    **dict.fromkeys(SEQUENCES, "it has sequences or optional values"),
    "MeanVarianceNormalization": "its definition in ONNX adds a number of float32",
    "CumSum": "sums of many terms are kept exact",
    "Range": "it counts positions, which half precision would round",
    "Sign": "onnxruntime gives 0 for the sign of a NaN in float16",
    "NonMaxSuppression": "it compares boxes in float32",
    "TopK": "it selects among values that half precision would make equal",
    "ArgMax": "it selects among values that half precision would make equal",
    "ArgMin": "it selects among values that half precision would make equal",
    "GridSample": "it reads at coordinates, which half precision would round by parts of a pixel",
    "RoiAlign": "it reads at coordinates, which half precision would round by parts of a pixel",
    "MelWeightMatrix": "its table is a constant of float32",
    "STFT": "it is a transform of audio, whose powers exceed half precision",
    "DFT": "it is a transform of audio, whose powers exceed half precision",
}
# Inputs by which operators select, or which hold coordinates: the arithmetic that computes them stays in float32 too.
EXACT_INPUTS: Final = {"TopK": (0,), "ArgMax": (0,), "ArgMin": (0,), "GridSample": (1,), "RoiAlign": (1,),
                       "NonMaxSuppression": (0, 1)}  # fmt: skip
ELEMENTWISE: Final = frozenset({
    "Abs", "Add", "Cast", "Ceil", "Clip", "Div", "Exp", "Floor", "Log", "Max", "Mean", "Min", "Mod", "Mul", "Neg",
    "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Softmax", "LogSoftmax", "Sqrt", "Sub", "Sum", "Tanh",
    "Where",
})  # fmt: skip
FILLS: Final = frozenset({"Cast", "Constant", "ConstantOfShape"})  # operators with an attribute for the output dtype
BROADCAST_MAX_OPSET: Final = 8  # the first opset whose Max and Min take operands of different shapes
READS_ANY: Final = frozenset({"Cast", "Shape", "Size", "IsNaN", "IsInf"})  # results do not depend on the input's dtype


def combines(node: Node) -> bool:
    """Return whether a scatter adds, multiplies or compares updates with the data."""
    return op_of(node) in ("ScatterElements", "ScatterND") and str_attribute(node, "reduction", "none") != "none"


def keeps_dtypes(op: str) -> bool:
    """Return whether an operator that is not converted keeps the model's dtypes; all others compute in float32 then."""
    return "::" in op or op in CONTROL_FLOW or op in SEQUENCES


def half_inputs(op: str, count: int, opset: int, precision: Precision) -> frozenset[int]:
    """Return the positions of inputs that can have half precision, and possibly of inputs that are not floating-point.

    op     the operator, with its domain unless that is ONNX's, as `op_of` returns it
    count  the number of its inputs
    """
    every, name = frozenset(range(count)), op.removeprefix("com.microsoft::")
    if opset < DEFINED_SINCE.get((name, precision.name), 0):
        return frozenset()
    if "::" in op:
        known = CONTRIB if precision.name == "float16" else CONTRIB - WITHOUT_BFLOAT16
        return every.difference(FLOAT32_SCALES.get(op, ())) if name in known else frozenset()
    found = schema(op, opset)
    if found is None:
        return every if op in ONNXRUNTIME_ONLY else frozenset()
    wanted = f"tensor({precision.name})"
    return frozenset(i for i in every if wanted in _formal(found.inputs, i).types)


def half_outputs(node: Node, opset: int, precision: Precision) -> frozenset[int]:
    """Return the positions of outputs that have half precision if all of `half_inputs` do."""
    op, every = op_of(node), frozenset(range(len(node.outputs)))
    found = None if op in FILLS or "::" in op else schema(op, opset)
    if found is None:
        return every
    inputs = {_formal(found.inputs, i).type_str for i in half_inputs(op, len(node.inputs), opset, precision)}
    wanted = f"tensor({precision.name})"
    formals = {i: _formal(found.outputs, i) for i in every}
    return frozenset(
        i for i, each in formals.items() if wanted in each.types and (each.type_str in inputs or not inputs)
    )


def _formal(formals: Sequence[onnx.defs.OpSchema.FormalParameter], i: int) -> onnx.defs.OpSchema.FormalParameter:
    return formals[min(i, len(formals) - 1)]
