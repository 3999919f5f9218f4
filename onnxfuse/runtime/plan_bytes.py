"""Encode plans for the native library, and decode the inputs and attributes of nodes that it sends."""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Final, cast, get_args

from onnxfuse.ir.dtypes import DTYPE_NUMBERS, dtype_name
from onnxfuse.runtime.plan import (
    Argument,
    Attribute,
    Convolution,
    ConvolutionActivation,
    Launch,
    Matmul,
    Matrix,
    Plan,
    Pointer,
    Scalar,
    Struct,
    TensorMap,
    TensorSpec,
)
from onnxfuse.runtime.symint import float_word, is_symbolic

PLAN_MARK: Final = 0x6F6E66780006  # kPlanMark in native/plan.h
MEMORY_KINDS: Final = {"input": 0, "output": 1, "scratch": 2}
SCALAR: Final = 3  # of 64 bits
TENSOR_MAP: Final = 4
SCALAR_32: Final = 5  # of 32 bits
STRUCT: Final = 6
TFLOAT32: Final = 1000  # kTfloat32 in native/steps.cc: the number of a tensor map's dtype that ONNX has not
LAUNCH: Final = 0
MATMUL: Final = 1
CONVOLUTION: Final = 2
ACTIVATION_NUMBERS: Final = {"none": 0, "relu": 1, "gelu_tanh": 2}
CONVOLUTION_ACTIVATION_NUMBERS: Final = {name: i for i, name in enumerate(get_args(ConvolutionActivation))}
ALGORITHM_WORDS: Final = 8  # of a cublasLtMatmulAlgo_t
MAX_ENGINE_WORDS: Final = 129  # kMaxEngineWords in native/convolution.h
ALIGNED: Final = 1  # flags of an input
CONSTANT: Final = 2


def plan_bytes(plan: Plan, functions: Sequence[int]) -> bytes:
    """Return a plan as 64-bit words; `functions` are the CUfunction handles of its launches, in order.

    Raises ValueError if there are not as many, or if a step contradicts itself.
    """
    return packed(plan_words(plan, functions))


def plan_words(plan: Plan, functions: Sequence[int]) -> list[int]:
    """Return the words of a plan, of which those that depend on symbolic sizes are symbolic; raises as `plan_bytes`."""
    words = [PLAN_MARK, len(plan.outputs)]
    for output in plan.outputs:
        words += [DTYPE_NUMBERS[output.dtype], len(output.shape), *output.shape]
    words += [len(plan.scratch), *plan.scratch, len(plan.steps)]
    if (launches := sum(isinstance(step, Launch) for step in plan.steps)) != len(functions):
        raise ValueError(f"a plan of {launches} launches needs as many functions, found {len(functions)}")
    handles = iter(functions)
    for step in plan.steps:
        words += [LAUNCH, next(handles), *_launch(step)] if isinstance(step, Launch) else _library_call(step)
    words.append(len(plan.no_alias))
    return words + [word for pair in plan.no_alias for word in (pair.input, pair.output, pair.same_start)]


def matmul_bytes(matmul: Matmul) -> bytes:
    """Return a product alone as 64-bit words, for a question to cuBLASLt."""
    return packed(_matmul(matmul))


def convolution_bytes(convolution: Convolution) -> bytes:
    """Return a convolution alone as 64-bit words, for a question to cuDNN."""
    return packed(_convolution(convolution))


def _library_call(step: Matmul | Convolution) -> list[int]:
    return [MATMUL, *_matmul(step)] if isinstance(step, Matmul) else [CONVOLUTION, *_convolution(step)]


def packed(words: Sequence[int]) -> bytes:
    """Return words of 64 bits, signed or not, as bytes."""
    return b"".join(struct.pack("<q" if word < 1 << 63 else "<Q", word) for word in map(operator.index, words))


def _launch(step: Launch) -> list[int]:
    words = [*step.grid, *step.block, step.shared, step.cluster, int(step.pdl), len(step.arguments)]
    for argument in step.arguments:
        words += _argument(argument)
    return words


def _argument(argument: Argument) -> Sequence[int]:
    if isinstance(argument, Pointer):
        return _pointer(argument)
    if isinstance(argument, TensorMap):
        return _tensor_map(argument)
    if isinstance(argument, Struct):
        return [STRUCT, len(argument.fields), *(word for field in argument.fields for word in _argument(field))]
    return _scalar(argument)


def _scalar(scalar: Scalar) -> tuple[int, int]:
    if scalar.type == "float32":
        return SCALAR_32, float_word(scalar.value)
    value = cast(int, scalar.value)
    if scalar.type == "int64":
        return SCALAR, value
    return SCALAR_32, value if is_symbolic(value) else value & 0xFFFFFFFF


def _pointer(pointer: Pointer) -> tuple[int, int, int]:
    return MEMORY_KINDS[pointer.kind], pointer.index, pointer.offset


def _tensor_map(argument: TensorMap) -> list[int]:
    rank, walk = len(argument.sizes), argument.im2col
    box = 2 if walk else rank
    if (len(argument.strides), len(argument.box)) != (rank - 1, box):
        raise ValueError(
            f"a tensor map of {rank} dimensions has {rank - 1} strides and a box of {box}, "
            f"found {len(argument.strides)} and {len(argument.box)}"
        )
    pointer = _pointer(argument.pointer)
    dtype = TFLOAT32 if argument.dtype == "tfloat32" else DTYPE_NUMBERS[argument.dtype]
    words = [TENSOR_MAP, *pointer, dtype, rank, *argument.sizes, *argument.strides, int(walk is not None)]
    if walk:
        if any(len(of) != rank - 2 for of in (walk.lower, walk.upper, walk.steps)):
            raise ValueError(f"a tensor map of {rank} dimensions walks over {rank - 2} spatial axes, found {walk}")
        words += [*walk.lower, *walk.upper, *walk.steps]
    return [*words, *argument.box, argument.swizzle]


def _matmul(step: Matmul) -> list[int]:
    if len(step.algorithm) not in (0, ALGORITHM_WORDS):
        raise ValueError(f"a matmul's algorithm has {ALGORITHM_WORDS} words or none, found {len(step.algorithm)}")
    words = [*_matrix(step.x), *_matrix(step.w), *_matrix(step.y), step.transposed, step.batch, step.aligned]
    words += [1, *_matrix(step.c)] if step.c else [0]
    words += [1, *_pointer(step.bias)] if step.bias else [0]
    words += [ACTIVATION_NUMBERS[step.activation], step.tf32]
    words += [1, *_pointer(step.workspace)] if step.workspace else [0]
    return [*words, step.workspace_bytes, int(bool(step.algorithm)), *step.algorithm]


def _convolution(step: Convolution) -> list[int]:
    by_axis = (step.sizes, step.y_sizes, step.kernel, step.strides, step.dilations, step.pads_begin, step.pads_end)
    if any(len(values) != len(step.sizes) for values in by_axis):
        raise ValueError(f"a convolution of {len(step.sizes)} spatial axes has as many of each size, found {by_axis}")
    words = [DTYPE_NUMBERS[step.dtype], step.n, step.c, step.m, step.group, len(step.sizes)]
    words += [value for values in by_axis for value in values]
    words += [step.transposed, step.channels_last, step.w_channels_last, step.tf32, step.aligned]
    words += [CONVOLUTION_ACTIVATION_NUMBERS[step.activation]]
    words += [float_word(step.alpha), float_word(step.beta)]
    words += [*_pointer(step.x), *_pointer(step.w), *_pointer(step.y)]
    words += [1, *_pointer(step.bias)] if step.bias else [0]
    words += [1, *_pointer(step.residual)] if step.residual else [0]
    words += [step.residual_first]
    words += [1, *_pointer(step.workspace)] if step.workspace else [0]
    return [*words, step.workspace_bytes, len(step.engine), *step.engine]


def _matrix(matrix: Matrix) -> tuple[int, ...]:
    sizes = (matrix.rows, matrix.columns, matrix.stride, matrix.batch_stride)
    return (*_pointer(matrix.pointer), DTYPE_NUMBERS[matrix.dtype], *sizes)


def input_words(inputs: Sequence[TensorSpec]) -> list[int]:
    """Return the words of a node's inputs, which identify its plan: dtype, flags, rank and dims of each."""
    return [word for i in inputs for word in (DTYPE_NUMBERS[i.dtype], _flags(i), len(i.shape), *i.shape)]


def _flags(spec: TensorSpec) -> int:
    return ALIGNED * spec.aligned | CONSTANT * spec.constant


def read_inputs(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a node from their words."""
    inputs, position = [], 0
    while position < len(words):
        dtype, flags, rank = words[position : position + 3]
        position += 3 + rank
        shape = tuple(words[position - rank : position])
        inputs.append(TensorSpec(shape, dtype_name(dtype), bool(flags & ALIGNED), bool(flags & CONSTANT)))
    return tuple(inputs)


def read_attributes(data: bytes) -> dict[str, Attribute]:
    """Return a node's attributes from the bytes that native/attributes.cc writes."""
    return dict(_attributes(data))


def _attributes(data: bytes) -> Iterator[tuple[str, Attribute]]:
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        name, kind = data[position : position + size].decode(), chr(data[position + size])
        position += size + 1
        (count,) = struct.unpack_from("<I", data, position)
        position += 4
        if kind == "s":
            yield name, data[position : position + count].decode()
            position += count
            continue
        values = struct.unpack_from(f"<{count}{'q' if kind in 'iI' else 'f'}", data, position)
        position += count * (8 if kind in "iI" else 4)
        yield name, values[0] if kind in "if" else list(values)
