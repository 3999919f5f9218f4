"""The table of ONNX's operators: which of them move elements, compute element by element, reduce, or multiply.

Each set says what an operator does in every opset; rooms that need fewer or more operators say so beside the set.
"""

from __future__ import annotations

from typing import Final

# --- operators that move elements ----------------------------------------------------------------------------------

REGROUPING: Final = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})  # other axes, the same order in memory
REARRANGING: Final = REGROUPING | {"Transpose"}  # each element is in the result once
VIEWS: Final = REARRANGING | {"Expand", "Identity"}  # each element of the result is one of the only tensor
SLICING: Final = frozenset({"Gather", "Slice", "Split"})
GATHERS: Final = frozenset({"Gather", "GatherElements", "GatherND"})
SELECTING: Final = VIEWS | SLICING | GATHERS | {"Tile"}  # each element of the result is one of the first input
MOVES: Final = SELECTING | {"Concat", "Pad", "ScatterND", "Trilu"}  # each element is one of any input, or a fill
FREE: Final = REGROUPING | {"Constant", "Identity", "Shape", "Size"}  # no element is moved

# --- operators that compute element by element ---------------------------------------------------------------------

ARITHMETIC: Final = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max")
ORDERINGS: Final = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
COMPARISONS: Final = ("Equal", *ORDERINGS)
LOGIC: Final = ("And", "Or", "Xor", "Not")
BITWISE: Final = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
TRUTHS: Final = frozenset((*COMPARISONS, *LOGIC, "IsInf", "IsNaN"))  # their results are booleans
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
NONNEGATIVE: Final = frozenset({"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softplus"})  # their results are

# --- reductions and products ---------------------------------------------------------------------------------------

REDUCTIONS: Final = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
EXTREMES: Final = ("ArgMax", "ArgMin")
SOFTMAXES: Final = ("Softmax", "LogSoftmax")
MATRIX_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})
CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})
LINEAR: Final = MATRIX_PRODUCTS | CONVOLUTIONS  # linear in the first input; the weights are the second
PRODUCTS: Final = LINEAR | {"Einsum"}

# --- what follows for their results --------------------------------------------------------------------------------

# Operators that are not continuous, like a Cast to integers or bool: all that they depend on is rounded.
DISCONTINUOUS: Final = frozenset((*COMPARISONS, *EXTREMES, "IsNaN", "IsInf", "Floor", "Ceil", "Round", "Sign", "Mod"))
RANDOM: Final = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
