"""What passes between Python and the native library, as bytes: plans one way, inputs and attributes the other."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from onnxfuse.provider.dtypes import NUMBERS, dtype_name
from onnxfuse.provider.plan import Argument, Plan, Pointer, TensorSpec

MARK: Final = 0x6F6E66780001  # kPlanMark in native/plan.h
PLACES: Final = {"input": 0, "output": 1, "scratch": 2}
SCALAR: Final = 3

Attribute = int | float | str | list[int] | list[float]


def plan_bytes(plan: Plan, functions: Sequence[int]) -> bytes:
    """A plan as 64-bit words; `functions` are the CUfunction handles of its steps."""
    words = [MARK, len(plan.outputs)]
    for output in plan.outputs:
        words += [NUMBERS[output.dtype], len(output.shape), *output.shape]
    words += [len(plan.scratch), *plan.scratch, len(functions)]
    for step, function in zip(plan.steps, functions, strict=bool(functions)):
        words += [function, *step.grid, *step.block, step.shared, step.cluster, len(step.arguments)]
        for argument in step.arguments:
            words += _argument(argument)
    return b"".join(struct.pack("<q" if word < 1 << 63 else "<Q", word) for word in words)


def _argument(argument: Argument) -> tuple[int, ...]:
    if isinstance(argument, Pointer):
        return PLACES[argument.kind], argument.index, argument.offset
    match argument.type:
        case "float32":
            bits = struct.pack("<fi", argument.value, 0)
        case "int32":
            bits = struct.pack("<ii", argument.value, 0)
        case "int64":
            bits = struct.pack("<q", argument.value)
    return SCALAR, struct.unpack("<q", bits)[0]


def read_inputs(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The inputs of a node, from the words that identify a plan: per input dtype, aligned, rank, dimensions."""
    inputs, at = [], 0
    while at < len(words):
        dtype, aligned, rank = words[at : at + 3]
        at += 3 + rank
        inputs.append(TensorSpec(tuple(words[at - rank : at]), dtype_name(dtype), bool(aligned)))
    return tuple(inputs)


def read_attributes(data: bytes) -> dict[str, Attribute]:
    """A node's attributes, as native/attributes.cc writes them."""
    return dict(_attributes(data))


def _attributes(data: bytes) -> Iterator[tuple[str, Attribute]]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        name, kind = data[at + 4 : at + 4 + size].decode(), chr(data[at + 4 + size])
        (count,) = struct.unpack_from("<I", data, at + 5 + size)
        at += 9 + size
        if kind == "s":
            yield name, data[at : at + count].decode()
            at += count
            continue
        values = struct.unpack_from(f"<{count}{'q' if kind in 'iI' else 'f'}", data, at)
        at += count * (8 if kind in "iI" else 4)
        yield name, values[0] if kind in "if" else list(values)
