"""What passes between Python and the native library, as bytes: plans one way, inputs and attributes the other."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from onnxfuse.provider.dtypes import NUMBERS, dtype_name
from onnxfuse.provider.plan import Argument, Launch, Matmul, Matrix, Plan, Pointer, TensorMap, TensorSpec

MARK: Final = 0x6F6E66780004  # kPlanMark in native/plan.h
PLACES: Final = {"input": 0, "output": 1, "scratch": 2}
SCALAR: Final = 3
TENSOR_MAP: Final = 4
LAUNCH: Final = 0
MATMUL: Final = 1
EPILOGUES: Final = {"none": 0, "relu": 1, "gelu_tanh": 2}
ALGORITHM_WORDS: Final = 8
ALIGNED: Final = 1  # flags of an input
CONSTANT: Final = 2

Attribute = int | float | str | list[int] | list[float]


def plan_bytes(plan: Plan, functions: Sequence[int]) -> bytes:
    """A plan as 64-bit words; `functions` are the CUfunction handles of its launches, in order."""
    words = [MARK, len(plan.outputs)]
    for output in plan.outputs:
        words += [NUMBERS[output.dtype], len(output.shape), *output.shape]
    words += [len(plan.scratch), *plan.scratch, len(plan.steps)]
    if (launches := sum(isinstance(step, Launch) for step in plan.steps)) != len(functions):
        raise ValueError(f"a plan of {launches} launches needs as many functions, found {len(functions)}")
    handles = iter(functions)
    for step in plan.steps:
        words += [MATMUL, *_matmul(step)] if isinstance(step, Matmul) else [LAUNCH, next(handles), *_launch(step)]
    words += [len(plan.apart), *(int(word) for each in plan.apart for word in (each.input, each.output, each.together))]
    return _packed(words)


def matmul_bytes(matmul: Matmul) -> bytes:
    """A product alone, to ask cuBLASLt about it."""
    return _packed(_matmul(matmul))


def _packed(words: Sequence[int]) -> bytes:
    return b"".join(struct.pack("<q" if word < 1 << 63 else "<Q", word) for word in words)


def _launch(step: Launch) -> list[int]:
    words = [*step.grid, *step.block, step.shared, step.cluster, int(step.early), len(step.arguments)]
    for argument in step.arguments:
        words += _argument(argument)
    return words


def _argument(argument: Argument) -> Sequence[int]:
    if isinstance(argument, Pointer):
        return _pointer(argument)
    if isinstance(argument, TensorMap):
        return _tensor_map(argument)
    match argument.type:
        case "float32":
            bits = struct.pack("<fi", argument.value, 0)
        case "int32":
            bits = struct.pack("<ii", argument.value, 0)
        case "int64":
            bits = struct.pack("<q", argument.value)
    return SCALAR, struct.unpack("<q", bits)[0]


def _pointer(pointer: Pointer) -> tuple[int, int, int]:
    return PLACES[pointer.kind], pointer.index, pointer.offset


def _tensor_map(argument: TensorMap) -> list[int]:
    rank = len(argument.sizes)
    if (len(argument.strides), len(argument.box)) != (rank - 1, rank):
        raise ValueError(
            f"a tensor map of {rank} dimensions has {rank - 1} strides and a box of {rank}, "
            f"found {len(argument.strides)} and {len(argument.box)}"
        )
    place, dtype = _pointer(argument.pointer), NUMBERS[argument.dtype]
    return [TENSOR_MAP, *place, dtype, rank, *argument.sizes, *argument.strides, *argument.box, argument.swizzle]


def _matmul(step: Matmul) -> list[int]:
    if len(step.algorithm) not in (0, ALGORITHM_WORDS):
        raise ValueError(f"a matmul's algorithm has {ALGORITHM_WORDS} words or none, found {len(step.algorithm)}")
    words = [*_matrix(step.x), *_matrix(step.w), *_matrix(step.y), step.transposed, step.batch, step.aligned]
    words += [1, *_matrix(step.c)] if step.c else [0]
    words += [1, *_pointer(step.bias)] if step.bias else [0]
    words += [EPILOGUES[step.activation], step.tf32]
    words += [1, *_pointer(step.workspace)] if step.workspace else [0]
    return [*map(int, words), step.workspace_bytes, int(bool(step.algorithm)), *step.algorithm]


def _matrix(matrix: Matrix) -> tuple[int, ...]:
    sizes = (matrix.rows, matrix.columns, matrix.stride, matrix.batch_stride)
    return (*_pointer(matrix.pointer), NUMBERS[matrix.dtype], *sizes)


def input_words(inputs: Sequence[TensorSpec]) -> list[int]:
    """The words that identify a plan; `read_inputs` reads them."""
    return [word for i in inputs for word in (NUMBERS[i.dtype], _flags(i), len(i.shape), *i.shape)]


def _flags(spec: TensorSpec) -> int:
    return ALIGNED * spec.aligned | CONSTANT * spec.constant


def read_inputs(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """The inputs of a node, from the words that identify a plan: per input dtype, flags, rank, dimensions."""
    inputs, at = [], 0
    while at < len(words):
        dtype, flags, rank = words[at : at + 3]
        at += 3 + rank
        shape = tuple(words[at - rank : at])
        inputs.append(TensorSpec(shape, dtype_name(dtype), bool(flags & ALIGNED), bool(flags & CONSTANT)))
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
