"""Sets of ONNX operators: those that move elements, compute element by element, reduce, or multiply.

Each set holds for every opset.  A module that needs a slightly different set adds or removes operators where it uses
the set.
"""

from __future__ import annotations

from typing import Final

# --- operators that move elements ----------------------------------------------------------------------------------

# These operators change the axes, but not the order of elements in memory.
REGROUPING: Final = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
REARRANGING: Final = REGROUPING | {"Transpose"}  # each input element occurs exactly once in the result
VIEWS: Final = REARRANGING | {"Expand", "Identity"}  # each element of the result is an element of the only data input
SLICING: Final = frozenset({"Gather", "Slice", "Split"})
GATHERS: Final = frozenset({"Gather", "GatherElements", "GatherND"})
SELECTING: Final = VIEWS | SLICING | GATHERS | {"Tile"}  # each element of the result is an element of the first input
# Each element of the result is an element of an input, or a fill value.
MOVES: Final = SELECTING | {"Concat", "Pad", "ScatterND", "Trilu"}
FREE: Final = REGROUPING | {"Constant", "Identity", "Shape", "Size"}  # these operators move no element

# Inputs that are float32 scales, gates or states in every precision, by operator.
FLOAT32_SCALES: Final = {
    "com.microsoft::GroupQueryAttention": (12, 13), "com.microsoft::GatedDeltaNet": (4, 5, 6, 7, 8),
}  # fmt: skip

# --- operators that compute element by element ---------------------------------------------------------------------

ARITHMETIC: Final = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max")
ORDERINGS: Final = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
COMPARISONS: Final = ("Equal", *ORDERINGS)
LOGIC: Final = ("And", "Or", "Xor", "Not")
BITWISE: Final = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
TRUTHS: Final = frozenset((*COMPARISONS, *LOGIC, "IsInf", "IsNaN"))  # operators with boolean results
COMMUTATIVE: Final = frozenset({"Add", "And", "Equal", "Max", "Min", "Mul", "Or"})
UNARY: Final = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
})  # fmt: skip
BROADCASTING: Final = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min",
    "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
LIMITS: Final = frozenset({"Clip", "Relu"})  # operators that only limit numbers to a range
# Operators whose results are never negative.
NONNEGATIVE: Final = frozenset({"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softplus"})

# --- reductions and products ---------------------------------------------------------------------------------------

REDUCTIONS: Final = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
EXTREMES: Final = ("ArgMax", "ArgMin")
SOFTMAXES: Final = ("Softmax", "LogSoftmax")
MATRIX_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})
CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})
LINEAR: Final = MATRIX_PRODUCTS | CONVOLUTIONS  # linear in the first input; the second input holds the weights
PRODUCTS: Final = LINEAR | {"Einsum"}
RECURRENCES: Final = frozenset({"GRU", "LSTM", "RNN"})

# --- sets for the analysis of results ------------------------------------------------------------------------------

# Discontinuous operators: like a Cast to integers or bool, they can turn a rounding error of their input into a jump.
DISCONTINUOUS: Final = frozenset(
    (*COMPARISONS, *EXTREMES, "IsNaN", "IsInf", "Floor", "Ceil", "Round", "Sign", "Mod", "QuantizeLinear")
)
RANDOM: Final = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
