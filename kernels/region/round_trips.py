"""Remove a DequantizeLinear and the QuantizeLinear after it that gives back the same integers.

Quantizers write such pairs around operators that only move elements, such as Reshape and Transpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from onnxfuse.ir.dtypes import LARGEST_FLOAT8
from onnxfuse.kernels.region.program import Operation, Program

MOVES: Final = ("Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice")
# The largest scale with which no integer of 8 bits overflows, nor 448, the largest float8, by dtype.  bfloat16 is
# missing, because it can round 255 * scale to about 254 * scale.
MAX_SCALES: Final[Mapping[str, float]] = {"float32": 7e35, "float16": 128.0}


def without_round_trips(program: Program) -> Program:
    """Return a program in which an Identity of integers replaces each QuantizeLinear that restores these integers.

    A DequantizeLinear with the same scale comes before such a QuantizeLinear.  The operators between the two only move
    elements; copies of them move the integers.
    """
    made, dtypes = list[Operation](), dict(program.dtypes)
    for operation in program.operations:
        moves = _moves_before(program, operation)
        if moves is None:
            made.append(operation)
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
    scale = program.producers.get(source.inputs[1])
    is_known = scale is not None and scale.name == "Constant" and isinstance(scale.attributes["value"], int | float)
    has_dtype = program.dtypes[source.inputs[0]] == program.dtypes[operation.outputs[0]]
    largest = MAX_SCALES.get(program.dtypes[source.inputs[1]], 0.0)
    if program.dtypes[source.inputs[0]] in LARGEST_FLOAT8 and program.dtypes[source.inputs[1]] != "float32":
        return None  # the smallest numbers of float8 would lose digits
    is_exact = operation.attributes.get("precision") in MAX_SCALES
    if not (is_known and has_dtype and is_exact and scale and 1e-30 < abs(scale.attributes["value"]) < largest):
        return None
    return [source, *found]
