"""The operators and dtypes that the programs of regions can contain: kernels can be generated for them.

A region is a fused node made of connected operators that no pattern names.  Its program lists these operators.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import (
    ARITHMETIC,
    BITWISE,
    COMPARISONS,
    DISCONTINUOUS,
    EXTREMES,
    LOGIC,
    SOFTMAXES,
)

HALVES: Final = ("float16", "bfloat16")
FLOATS: Final = (*HALVES, "float32", "float64")
PRODUCTS: Final = (*HALVES, "float32")  # dtypes of products whose kernels can run the consumers, too
FLOAT8: Final = "float8_e4m3fn"
FLOAT8_E5M2: Final = "float8_e5m2"
INTEGERS: Final = ("int8", "uint8", "int32", "int64")
COMPUTED: Final = (*FLOATS, *INTEGERS, "bool")
SIXTEEN_BITS: Final = ("int16", "uint16")
# Float8 and integers of 16 bits are quantized to, moved and dequantized.
DTYPES: Final = (*COMPUTED, FLOAT8, FLOAT8_E5M2, *SIXTEEN_BITS)

SHIFTS: Final = ("BitShift",)
ACTIVATION_OF: Final = {  # operators that are computed by a function of onnxfuse/activations.py
    "Sigmoid": "sigmoid", "LeakyRelu": "leaky_relu", "Elu": "elu", "HardSigmoid": "hard_sigmoid",
    "HardSwish": "hard_swish", "Softplus": "softplus", "Mish": "mish", "Gelu": "gelu",
}  # fmt: skip
OF_FLOATS: Final = (
    "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sin", "Cos", "Floor", "Ceil", "Round", "Reciprocal", "Selu", "Softsign",
    "IsNaN", "IsInf",
)  # fmt: skip
OF_ALL: Final = ("Relu", "Neg", "Abs", "Sign", "Where", "Cast", "Identity")
QUANTIZED: Final = ("int8", "uint8", FLOAT8, FLOAT8_E5M2)  # dtypes of 8 bits of QuantizeLinear's result
QUANTIZERS: Final = {  # operator -> the dtypes of its first input
    "QuantizeLinear": (*HALVES, "float32"), "DequantizeLinear": (*QUANTIZED, *SIXTEEN_BITS, "int32"),
}  # fmt: skip
ELEMENTWISE: Final = frozenset(
    (*ARITHMETIC, *COMPARISONS, *LOGIC, *BITWISE, *SHIFTS, *ACTIVATION_OF, *OF_FLOATS, *OF_ALL, *QUANTIZERS)
)
GATHERS: Final = ("Gather", "GatherElements")
MAPS: Final = frozenset(
    ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice", "Concat", "Split", "Pad", "Tile", *GATHERS)
)
# Operators whose output elements are elements of one input.  An epilogue, the operators that run in the kernel of the
# product before them, can read its operands through them.
VIEWS: Final = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split")
SUMS: Final = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceL2",
    "ReduceLogSumExp",
)  # fmt: skip
REDUCTIONS: Final = frozenset((*SUMS, *EXTREMES, *SOFTMAXES))
# Axes in the program of a scan: STEPS is the sequence, and reductions of a step are over REDUCED.  Along the axes from
# FIRST_FREE on, elements are independent of each other.  An axis of one element is BROADCAST.
BROADCAST, STEPS, REDUCED, FIRST_FREE = -1, 0, 1, 2
SUMS_OF_STEPS: Final = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")  # reductions in a step of a scan
MAX_REDUCED: Final = 256  # elements of the axis REDUCED, which the threads of a group keep in registers
MAX_STEP_OPERATIONS: Final = 100  # operators of a step: longer code takes too long to compile
# Operators whose results are exact if their inputs are: each result is an input, its negative, or an integer.
EXACT: Final = frozenset(
    (*DISCONTINUOUS, "Max", "Min", "Neg", "Abs", "Where", "Identity", "Relu", "Cast", "ReduceMax", "ReduceMin", *MAPS)
)


def dtypes_of(operator: str) -> tuple[str, ...]:
    """Return the dtypes that region programs allow for an operator's first input; none for any other operator.

    Region programs can also contain a Constant.  It has no input, so callers treat it separately.
    """
    if operator in ACTIVATION_OF:
        return FLOATS[:-1]
    if operator in (*OF_FLOATS, *SOFTMAXES, "ReduceLogSumExp", "ReduceL2"):
        return FLOATS
    if operator in BITWISE:
        return INTEGERS
    if operator in QUANTIZERS:
        return QUANTIZERS[operator]
    if operator in SHIFTS:
        return ("uint8",)  # BitShift takes unsigned integers only
    if operator in REDUCTIONS:
        return (*FLOATS, "int32", "int64")
    if operator in ELEMENTWISE - {"Identity"}:
        return COMPUTED
    return DTYPES if operator in MAPS | {"Identity"} else ()
