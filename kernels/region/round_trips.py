"""Remove operators that a QuantizeLinear makes useless.

One is a DequantizeLinear before it whose integers it gives back: quantizers write such pairs around operators that only
move elements, such as Reshape and Transpose.  Another is a Relu, if the lowest integer represents 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.region.operators import LOWEST
from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.region_operators import SIXTEEN_BITS

MOVES: Final = ("Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice")
# The largest scale with which no integer of 8 bits overflows, nor 448, the largest float8, by dtype.  bfloat16 is
# missing, because it can round 255 * scale to about 254 * scale.
MAX_SCALES: Final[Mapping[str, float]] = {"float32": 7e35, "float16": 128.0}


def without_round_trips(program: Program) -> Program:
    """Return a program in which an Identity of integers replaces each QuantizeLinear that restores these integers.

    A DequantizeLinear with the same scale comes before such a QuantizeLinear.  The operators between the two only move
    elements; copies of them move the integers.  A QuantizeLinear reads past a Relu that changes none of its integers.
    """
    made, dtypes = list[Operation](), dict(program.dtypes)
    for operation in program.operations:
        moves = _moves_before(program, operation)
        if moves is None:
            made.append(_past_relu(program, operation))
            continue
        dequantize, *others = moves
        value = dequantize.inputs[0]
        for each in others:
            name = next(f"r{i}" for i in range(len(dtypes)) if f"r{i}" not in dtypes)
            dtypes[name] = dtypes[value]
            made.append(replace(each, inputs=(value, *each.inputs[1:]), outputs=(name,)))
            value = name
        made.append(Operation("Identity", (value,), operation.outputs, {}))
    return Program(tuple(made), program.outputs, dtypes)


def _moves_before(program: Program, operation: Operation) -> list[Operation] | None:
    """Return a DequantizeLinear, whose integers `operation` restores, and the operators between the two.

    Returns None if `operation` is not a QuantizeLinear that restores integers.  The scale must be one known
    number: with a scale of 0, or if numbers overflow, the QuantizeLinear would not restore them.
    """
    if operation.name != "QuantizeLinear":
        return None
    found = list[Operation]()
    source = program.producers.get(operation.inputs[0])
    while source is not None and source.name in MOVES:
        found.insert(0, source)
        source = program.producers.get(source.inputs[0])
    if source is None or source.name != "DequantizeLinear" or source.inputs[1:] != operation.inputs[1:]:
        return None
    scale, stored = _number(program, source.inputs[1]), program.dtypes[source.inputs[0]]
    has_dtype = stored == program.dtypes[operation.outputs[0]]
    largest = MAX_SCALES.get(program.dtypes[source.inputs[1]], 0.0) / (256 if stored in SIXTEEN_BITS else 1)
    if stored not in LOWEST and program.dtypes[source.inputs[1]] != "float32":
        return None  # the smallest numbers of float8 would lose digits, and so would 16 bits
    is_exact = operation.attributes.get("precision") in MAX_SCALES
    if scale is None or not (has_dtype and is_exact and 1e-30 < abs(scale) < largest):
        return None
    return [source, *found]


def _past_relu(program: Program, operation: Operation) -> Operation:
    """Return a QuantizeLinear that reads what the Relu before it reads, if the lowest integer represents 0.

    All numbers below 0 then become this integer, as does NaN.  Other operations are returned as they are.
    """
    relu = program.producers.get(operation.inputs[0]) if operation.name == "QuantizeLinear" else None
    if relu is None or relu.name != "Relu":
        return operation
    scale, zero = (_number(program, name) for name in operation.inputs[1:])
    if scale is None or scale <= 0 or zero is None or zero != LOWEST.get(program.dtypes[operation.outputs[0]]):
        return operation
    return replace(operation, inputs=(relu.inputs[0], *operation.inputs[1:]))


def _number(program: Program, name: str) -> float | None:
    """Return the value of a Constant that is one number; None for other values."""
    made = program.producers.get(name)
    value = made.attributes["value"] if made is not None and made.name == "Constant" else None
    return value if isinstance(value, int | float) else None
