"""Encode plans for the native library, and decode the inputs and attributes of nodes that it sends."""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

from onnxfuse.ir.dtypes import DTYPE_NAMES, DTYPE_NUMBERS
from onnxfuse.runtime.plan import (
    Attribute,
    Convolution,
    Dtype,
    Kernel,
    Matmul,
    Plan,
    Scalar,
    TensorSpec,
)
from onnxfuse.runtime.symint import float_word
from onnxfuse.runtime.word_reader import WordReader

PLAN_MARK: Final = 0x6F6E66780007  # kPlanMark in native/plan.h
TFLOAT32: Final = 1000  # kTfloat32 in native/steps.cc: a dtype of tensor maps that ONNX does not have
ALGORITHM_WORDS: Final = 8  # 64-bit words of a cublasLtMatmulAlgo_t
SCALAR_TYPES: Final = {"int32": 0, "int64": 1, "float32": 2}
MAX_RANK: Final = 64  # kMaxRank in native/plan.h
MAX_ENGINE_WORDS: Final = 129  # kMaxEngineWords in native/convolution.h
ALIGNED: Final = 1  # ALIGNED and CONSTANT are flags in the words of an input
CONSTANT: Final = 2


Writer: TypeAlias = Callable[[Any], Iterable[Any]]  # yields words: integers, symbolic or not, and Kernels


def plan_bytes(plan: Plan, functions: Sequence[int]) -> bytes:
    """Return a plan as 64-bit words; `functions` are the CUfunction handles of its launches, in order.

    Raises ValueError if there are more or fewer handles than launches.
    """
    words, handles = plan_words(plan), iter(functions)
    if (launches := sum(isinstance(word, Kernel) for word in words)) != len(functions):
        raise ValueError(f"a plan of {launches} launches needs as many functions, found {len(functions)}")
    return packed([next(handles) if isinstance(word, Kernel) else word for word in words])


def plan_words(plan: Plan) -> list[Any]:
    """Return the words of a plan: symbolic integers where they depend on sizes, Kernels in place of CUfunctions."""
    return [PLAN_MARK, *_writer(Plan)(plan)]


def matmul_bytes(matmul: Matmul) -> bytes:
    """Return a product alone as 64-bit words, for a query to cuBLASLt."""
    return packed(_writer(Matmul)(matmul))


def convolution_bytes(convolution: Convolution) -> bytes:
    """Return a convolution alone as 64-bit words, for a query to cuDNN."""
    return packed(_writer(Convolution)(convolution))


def packed(words: Iterable[int]) -> bytes:
    """Return words of 64 bits, signed or not, as bytes."""
    return b"".join(struct.pack("<q" if word < 1 << 63 else "<Q", word) for word in map(operator.index, words))


@functools.cache
def _writer(kind: Any) -> Writer:
    """Return the function that writes a value of a type, as native/steps.cc reads it.

    It writes a dataclass as its fields, in order; a tuple of any length as its length and its items; a value that may
    be None as 1 and the value, or as 0; and a value of one of several dataclasses as the index of its type and the
    value.
    """
    if kind in WRITERS:
        return WRITERS[kind]
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        parts = [(attrgetter(name), _writer(hints[name])) for name in getattr(kind, "WORD_ORDER", hints)]
        return lambda value: [word for get, write in parts for word in write(get(value))]
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        return lambda value: (choices.index(value) if isinstance(value, str) else value,)
    if get_origin(kind) is tuple and choices[-1] is not Ellipsis:
        return lambda value: value  # a tuple of integers
    if get_origin(kind) is tuple:
        each = _writer(choices[0])
        return lambda value: [len(value), *(word for one in value for word in each(one))]
    if type(None) in choices:
        present = _writer(choices[0])
        return lambda value: (0,) if value is None else (1, *present(value))
    return functools.partial(_one_of, {each: (i, _writer(each)) for i, each in enumerate(choices)})


def _one_of(choices: Mapping[type, tuple[int, Writer]], value: object) -> Iterable[Any]:
    if type(value) not in choices:
        names = ", ".join(each.__name__ for each in choices)
        raise ValueError(f"a plan has a {type(value).__name__} where it may have one of {names}")
    number, write = choices[type(value)]
    return number, *write(value)


def _scalar(scalar: Scalar) -> tuple[int, Any]:
    return SCALAR_TYPES[scalar.type], float_word(scalar.value) if scalar.type == "float32" else scalar.value


WRITERS: Final[dict[Any, Writer]] = {
    int: lambda value: (value,),
    bool: lambda value: (value,),
    float: lambda value: (float_word(value),),
    Dtype: lambda value: (TFLOAT32 if value == "tfloat32" else DTYPE_NUMBERS[value],),
    Kernel: lambda value: (value,),
    TensorSpec: lambda value: input_words([value]),
    Scalar: _scalar,
}


def input_words(inputs: Sequence[TensorSpec]) -> list[int]:
    """Return the words of a node's inputs, which identify its plan: dtype, flags, rank and dims of each."""
    return [word for i in inputs for word in (DTYPE_NUMBERS[i.dtype], _flags(i), len(i.shape), *i.shape)]


def _flags(spec: TensorSpec) -> int:
    return ALIGNED * spec.aligned | CONSTANT * spec.constant


def read_input(reader: WordReader) -> TensorSpec:
    """Return the next input of a node or a template.  Raises ValueError if its words are missing or not allowed."""
    dtype, flags = reader.word(), reader.index("the flags of an input", (ALIGNED | CONSTANT) + 1)
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"the dtype of an input is {dtype}")
    shape = reader.words(reader.index("the rank of an input", MAX_RANK + 1))
    return TensorSpec(shape, DTYPE_NAMES[dtype], bool(flags & ALIGNED), bool(flags & CONSTANT))


def read_inputs(words: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a node from their words."""
    reader, inputs = WordReader(packed(words)), list[TensorSpec]()
    while not reader.at_end:
        inputs.append(read_input(reader))
    return tuple(inputs)


def attribute_bytes(name: str, value: Attribute) -> bytes:
    """Return an attribute in the bytes that `read_attributes` reads."""
    head = struct.pack("<I", len(name.encode())) + name.encode()
    if isinstance(value, str):
        data = value.encode()
        return head + b"s" + struct.pack("<I", len(data)) + data
    several = value if isinstance(value, list) else [value]
    real = any(isinstance(each, float) for each in several)
    kind = ("F" if real else "I") if isinstance(value, list) else ("f" if real else "i")
    return head + kind.encode() + struct.pack(f"<I{len(several)}{'f' if real else 'q'}", len(several), *several)


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
