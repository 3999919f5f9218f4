"""Elementwise operators as expressions of C++."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.ir.dtypes import FLOAT8, FLOAT8_E5M2, LARGEST_FLOAT8
from onnxfuse.kernels.region.program import Operation
from onnxfuse.region_operators import ACTIVATION_OF, FLOATS, HALVES

NUMBER: Final = {  # the C++ types in which values are computed, by dtype
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "double", "bool": "bool",
    "int8": "signed char", "uint8": "unsigned char", "int32": "int", "int64": "long long", FLOAT8: "e4m3",
    FLOAT8_E5M2: "e5m2", "int16": "short", "uint16": "unsigned short",
}  # fmt: skip
STORED: Final = {**NUMBER, "float16": "f16", "bfloat16": "bf16", "float32": "f32"}
BYTES: Final = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int8": 1, "uint8": 1,
    "int32": 4, "int64": 8, FLOAT8: 1, FLOAT8_E5M2: 1, "int16": 2, "uint16": 2,
}  # fmt: skip
INFIX: Final = {
    "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Equal": "==", "Less": "<", "LessOrEqual": "<=", "Greater": ">",
    "GreaterOrEqual": ">=", "And": "&&", "Or": "||", "Xor": "!=",
    "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^",
}  # fmt: skip
MATH: Final = {  # functions of the C library; their float variants have the suffix f
    "Sqrt": "sqrt", "Exp": "exp", "Log": "log", "Erf": "erf", "Tanh": "tanh", "Sin": "sin", "Cos": "cos",
    "Floor": "floor", "Ceil": "ceil", "Round": "rint",
}  # fmt: skip
OF_ANGLES: Final = {"Sin": "sine", "Cos": "cosine"}  # C++ functions of a float angle after range reduction
QUOTIENTS: Final = {  # C++ for floats, within 2 units in the last place; functions nearest_... are more exact
    "Div": "quotient({}, {})", "Reciprocal": "quotient({one}, {})", "Sqrt": "root({})",
    "Softsign": "quotient({0}, {one} + magnitude({0}))",
}  # fmt: skip
INSTRUCTIONS: Final = {  # estimated instructions per element; others take OTHER_INSTRUCTIONS
    "Sin": 35, "Cos": 35, "Erf": 23, "Pow": 20, "Gelu": 20, "Softplus": 16, "Tanh": 12, "Mish": 12, "Log": 12,
    "Softmax": 12, "LogSoftmax": 12, "Elu": 10, "Selu": 10, "Exp": 8, "Sigmoid": 6, "Mod": 20, "QuantizeLinear": 16,
}  # fmt: skip
OTHER_INSTRUCTIONS: Final = 2
MERGE_INSTRUCTIONS: Final = 24  # estimated instructions to merge the partial results of threads
MAX_INSTRUCTIONS: Final = 2400  # per thread: limits vectors and unrolled loops, so that kernels compile in 0.3 s
MAX_POWER: Final = 4  # largest exponent for which Pow becomes products and square roots
NUMERAL: Final = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)(?:f|ll)?")
ROUNDER: Final = 3 << 22  # of region.cuh
BYTE_ORIGIN: Final = 1 << 23  # of region.cuh
LOWEST: Final = {"int8": -128, "uint8": 0}  # integers
SELU: Final = (1.67326319217681884765625, 1.05070102214813232421875)  # ONNX's default alpha and gamma


def literal(value: Any, dtype: str) -> str:
    """Return a constant of a dtype in C++; infinities and NaN can be given as strings."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype in LARGEST_FLOAT8:
        return f"{NUMBER[dtype]}({np.asarray(value, getattr(ml_dtypes, dtype)).view(np.uint8)})"
    if dtype not in FLOATS:
        number = int(value)
        if dtype == "int64":
            return "(-9223372036854775807ll - 1)" if number == -(2**63) else f"{number}ll"
        return "(-2147483647 - 1)" if number == -(2**31) else str(number)
    real = float(value)
    if math.isfinite(real):
        return f"{real!r}{'' if dtype == 'float64' else 'f'}"
    return "NOT_A_NUMBER" if math.isnan(real) else "INFINITE" if real > 0 else "-INFINITE"


def of_equal_inputs(operation: Operation, dtype: str) -> str | int | None:
    """Return the result of an operator whose last two inputs are the same value of a dtype.

    The result is a literal, the index of an input, or None if it must be computed.
    """
    name, inputs = operation.name, operation.inputs
    if len(inputs) < 2 or inputs[-1] != inputs[-2]:
        return None
    if name in ("Min", "Max", "And", "Or", "BitwiseAnd", "BitwiseOr", "Where"):
        return len(inputs) - 1
    if name in ("Less", "Greater", "Xor"):
        return "false"
    if dtype not in FLOATS and name in ("Equal", "LessOrEqual", "GreaterOrEqual"):
        return "true"
    return literal(0, dtype) if dtype not in FLOATS and name in ("Sub", "BitwiseXor") else None


def expression(
    operation: Operation, given: Sequence[str], dtypes: Sequence[str], target: str, nearest: bool = True
) -> str:
    """Return the C++ expression of an operator; `given` are its inputs' expressions, and `dtypes` their dtypes.

    The inputs of Sin and Cos in float are reduced angles.  If `nearest`, quotients and roots of floats are correctly
    rounded, except that rare quotients are adjacent to the correctly rounded number.  Without `nearest`, they are
    within 2 units in the last place, and a Gelu has the accuracy that a result of 16 bits needs.
    """
    name, of = operation.name, dtypes[0]
    single = "f" if NUMBER[of] == "float" else ""
    if name == "Div" and number_in(given[1], of) and of != "float64":
        return _divided_by_number(given[0], number_in(given[1], of), nearest)
    if not nearest and name == "Log":
        return f"logarithm({given[0]})"
    if name == "Exp" and target in HALVES and not nearest:
        return f"exponential({given[0]})"
    if of in FLOATS and name in QUOTIENTS and (not nearest or name != "Sqrt"):
        text = QUOTIENTS[name].format(*given, one=literal(1, of))
        return f"nearest_{text}" if nearest else text
    if name == "Mul" and nearest and of in FLOATS:
        return f"product({given[0]}, {given[1]})"
    if name == "Tanh" and of in HALVES and not nearest:
        return f"activate::tanh({given[0]}, 0.0f, 0.0f)"
    if name in INFIX:
        return _of_width(f"{given[0]} {INFIX[name]} {given[1]}", target)
    if name in OF_ANGLES and single:
        return f"{OF_ANGLES[name]}({given[0]})"
    if name in MATH:
        return f"{MATH[name]}{single}({given[0]})"
    if name == "Relu":
        return f"larger<{NUMBER[of]}>({given[0]}, {literal(0, of)})"
    if name in ACTIVATION_OF:
        return _activation(operation, given[0], is_coarse=of in HALVES or not nearest)
    if name in ("Min", "Max"):
        function = "smaller" if name == "Min" else "larger"
        return f"{function}<{NUMBER[of]}>({given[0]}, {given[1]})"
    if name == "Where":
        return f"{given[0]} ? {given[1]} : {given[2]}"
    if name == "Cast":
        return _cast(given[0], of, target)
    if name == "QuantizeLinear":
        if target in LARGEST_FLOAT8:
            return f"nearest_{NUMBER[target]}({_quotient(operation, given, nearest)})"
        step = _saturated(operation, given, target, nearest)
        zero = given[2] if step is None else 0
        return f"integer_in<{NUMBER[target]}>({step or _step(operation, given, target, nearest)}, {zero})"
    if name == "DequantizeLinear":
        is_float8 = of in LARGEST_FLOAT8
        number = f"float8_number({given[0]})" if is_float8 else _number(given[0], given[2], of)
        scale = argument(given[1])
        return f"product({number}, {scale})" if nearest else f"{number} * {scale}"
    if name == "BitShift":
        return f"shifted_{operation.attributes['direction'].lower()}({given[0]}, {given[1]})"
    if name in ("Pow", "Mod"):
        return _power(given, dtypes, nearest) if name == "Pow" else _remainder(operation, given, of)
    return _others(operation, given[0], of)


def dequantized_step(quantize: Operation, given: Sequence[str], target: str, nearest: bool) -> str:
    """Return the number that integers of dtype `target`, the result of a QuantizeLinear, represent, without these."""
    step, origin = _saturated(quantize, given, target, nearest), "ROUNDER"
    if step is not None:  # the last byte is the integer, so that the zero point is subtracted, too
        origin = argument(literal(ROUNDER + int(given[2]) - 2 * LOWEST[target], "float32"))
    return f"product({step or _step(quantize, given, target, nearest)} - {origin}, {argument(given[1])})"


def argument(number: str) -> str:
    """Return the expression of a number of a quantizer, which a kernel can take as an argument (see arguments.py).

    Quantizers that differ only in scales and zero points then have one kernel.  Numbers that the code computes remain.
    """
    return f"ARGUMENT({number})" if number.endswith("f") and NUMERAL.fullmatch(number) else number


def _saturated(quantize: Operation, given: Sequence[str], target: str, nearest: bool) -> str | None:
    """Return ROUNDER + k, whose last byte is the integer that a QuantizeLinear gives; None where another way is needed.

    The scale and the zero point must be numbers.  Two multiplications compute the result, whose error is too large if
    `nearest`.
    """
    scale = number_in(given[1], "float32")
    is_half = quantize.attributes.get("precision") in HALVES
    if nearest or is_half or target not in LOWEST or not scale or not re.fullmatch(r"-?\d+", given[2]):
        return None
    steps = 1.0 / (255 * scale), (int(given[2]) - LOWEST[target]) / 255
    factor, offset = (argument(literal(float(np.float32(each)), "float32")) for each in steps)
    return f"step_in<{NUMBER[target]}>({given[0]}, {factor}, {offset})"


def _step(quantize: Operation, given: Sequence[str], target: str, nearest: bool) -> str:
    """Return ROUNDER + k, where k plus the zero point is the integer that a QuantizeLinear gives."""
    if quantize.attributes.get("precision") in HALVES:
        return f"step_of<{NUMBER[target]}>({_quotient(quantize, given, nearest)}, {given[2]})"
    return f"step_of<{NUMBER[target]}, {'true' if nearest else 'false'}>({', '.join(given)})"


def _quotient(quantize: Operation, given: Sequence[str], nearest: bool) -> str:
    """Return the quotient that a QuantizeLinear rounds."""
    precision = quantize.attributes.get("precision")
    if precision in HALVES:
        return f"rounded<{STORED[precision]}>(__fdiv_rn({given[0]}, {given[1]}))"
    return f"{'__fdiv_rn' if nearest else 'nearest_quotient'}({given[0]}, {given[1]})"


def number_in(text: str, dtype: str) -> float:
    """Return the value of a literal; 0 for other expressions, or if the reciprocal would over- or underflow."""
    try:
        number = float(text.rstrip("f")) if dtype in FLOATS else 0.0
    except ValueError:
        return 0.0
    return number if 1e-18 < abs(number) < 1e18 else 0.0


def _divided_by_number(x: str, number: float, nearest: bool) -> str:
    inverse = literal(float(np.float32(1.0 / number)), "float32")
    if not nearest or math.frexp(number)[0] in (0.5, -0.5):
        return f"{x} * {inverse}"
    return f"divided({x}, {literal(number, 'float32')}, {inverse})"


def _others(operation: Operation, x: str, of: str) -> str:
    """Return the result of a unary operator that is not a function of the C library."""
    name, number = operation.name, NUMBER[of]
    alpha, gamma = (
        literal(operation.attributes.get(key, default), of)
        for key, default in zip(("alpha", "gamma"), SELU, strict=True)
    ) if of in FLOATS else ("", "")  # fmt: skip
    above, below = (bool(operation.attributes.get(f"detect_{side}", 1)) for side in ("positive", "negative"))
    size = f"magnitude({x})" if above and below else x if above else f"-{x}"
    found = {
        "Neg": _of_width(f"-{x}", of),
        "Abs": f"magnitude<{number}>({x})" if of not in FLOATS else f"magnitude({x})",
        "Sign": f"sign<{number}>({x})",
        "Not": f"!{x}",
        "BitwiseNot": _of_width(f"~{x}", of),
        "Identity": x,
        "Reciprocal": f"{literal(1, of) if of in FLOATS else 1} / {x}",
        "Selu": f"selu<{number}>({x}, {alpha}, {gamma})",
        "Softsign": f"{x} / ({literal(1, of) if of in FLOATS else 1} + magnitude({x}))",
        "IsNaN": f"{x} != {x}",
        "IsInf": f"{size} == INFINITE" if above or below else "false",
    }
    return found[name]


def _of_width(text: str, dtype: str) -> str:
    """Return an expression that wraps around in its dtype; C++ computes integers narrower than int in int."""
    return f"({NUMBER[dtype]})({text})" if dtype in ("int8", "uint8") else text


def _number(x: str, zero: str, dtype: str) -> str:
    """Return x - zero in float."""
    if dtype not in LOWEST or not re.fullmatch(r"-?\d+", zero):
        return f"converted({x} - {zero})"
    origin = argument(literal(BYTE_ORIGIN + int(zero) - LOWEST[dtype], "float32"))
    return f"(byte_number<{NUMBER[dtype]}>({x}) - {origin})"


def _activation(operation: Operation, x: str, is_coarse: bool) -> str:
    attributes = operation.attributes
    is_tanh = attributes.get("approximate", "none") == "tanh"  # Gelu's approximation
    function = ACTIVATIONS["gelu_tanh" if is_tanh else ACTIVATION_OF[operation.name]]
    if function.name == "gelu" and is_coarse:  # an error of 2e-5 is 0.005 steps of a quantizer to 8 bits
        return f"activate::gelu_16({x})"
    alpha, beta = (
        literal(attributes.get(key, default), "float32")
        for key, default in (("alpha", function.alpha), ("beta", function.beta))
    )
    return f"activate::{function.name}({x}, {alpha}, {beta})"


def _power(given: Sequence[str], dtypes: Sequence[str], nearest: bool) -> str:
    base, number = dtypes[0], NUMBER[dtypes[0]]
    found = NUMERAL.fullmatch(given[1])
    twice = 2 * float(found[1]) if found else math.nan
    if twice == 4 and nearest and base in FLOATS:
        return f"product({given[0]}, {given[0]})"
    is_product = twice in (2, 4, 6, 8)
    if (is_product or (number == "float" and abs(twice) in range(2 * MAX_POWER + 1))) and not nearest:
        return f"power<{int(twice)}>({given[0]})"
    if base not in FLOATS:
        return f"power_of_integer<{number}>({given[0]}, double({given[1]}))"
    return f"pow{'f' if number == 'float' else ''}({given[0]}, {number}({given[1]}))"


def _remainder(operation: Operation, given: Sequence[str], dtype: str) -> str:
    """Return a remainder; its sign is the dividend's if `fmod` is set, and the divisor's otherwise."""
    if dtype in FLOATS:
        return f"fmod{'f' if NUMBER[dtype] == 'float' else ''}({given[0]}, {given[1]})"
    if operation.attributes.get("fmod", 0):
        return f"{given[0]} % {given[1]}"
    return f"modulo<{NUMBER[dtype]}>({given[0]}, {given[1]})"


def _cast(x: str, source: str, target: str) -> str:
    if target == "bool":
        return f"{x} != 0"
    if target in HALVES:
        return f"rounded<{STORED[target]}>(float({x}))"
    return f"({NUMBER[target]})({x})"
