"""Helpers to plan launches of kernels: storage types, element counts, vector widths, operands of a node by name.

Values that depend on dynamic dims are not compile-time constants: see `macro` and `divisor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.runtime.plan import Device, FusedNode, Pointer, Scalar, Struct, TensorSpec, Value
from onnxfuse.runtime.symint import always, expect_equal, gcd, is_symbolic

Defines: TypeAlias = dict[str, int | float | str]  # the compile-time constants (macros) of a kernel

STORAGE: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # the storage types of types.cuh, by dtype
INTEGERS: Final = {"int8": "s8", "uint8": "u8"}  # the storage types of integers, which few kernels take
EIGHT_BITS: Final = {**INTEGERS, FLOAT8: "e4m3"}
DEQUANTIZED: Final = ("int16", "uint16", "float8_e5m2")  # dtypes that no kernel multiplies
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, FLOAT8: 1}
BF16_ARCH: Final = 80  # the first compute capability with bf16 in matrix units and conversions
VECTOR_BYTES: Final = 16  # the widest load or store of a thread on every architecture
ABSENT: Final = Scalar(0, "int64")  # the argument that a kernel gets in place of an absent operand: a null pointer

# Bytes of inputs and outputs from which outputs are marked to leave L2 first. An H100 or H200 has 50 MB of L2. Measured
# in fp16 on a norm, four operators that read its result, and one operator that reads the results of these four: at
# 2048x2048 (34 MB through the norm) they take 28.3 us if the norm's result stays in L2, and 29.7 us if it leaves first;
# at 4096x4096 (134 MB), 141.6 and 137.8 us.
STREAMED_FROM_BYTES: Final = 48 << 20


def unsupported_dtype(
    node: FusedNode, input_dtypes: Sequence[str], supported: Collection[str] = tuple(STORAGE)
) -> str | None:
    """Return a message that names an input or output with an unsupported dtype; None if all are supported."""
    for name, dtype in (
        *zip(node.operands, input_dtypes, strict=True),
        *((f"output {i}", dtype) for i, dtype in enumerate(node.output_dtypes)),
    ):
        if dtype not in supported:
            return f"{node.fusion}: {name} is {dtype}; the kernel takes {', '.join(supported)}"
    return None


def mixed_dtypes(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return a message that names an input or output with another dtype than the first input's; None if all agree."""
    for name, dtype in (*zip(node.operands, input_dtypes, strict=True), ("the output", node.output_dtypes[0])):
        if dtype != input_dtypes[0]:
            return f"{node.fusion}: {name} is {dtype}; required {input_dtypes[0]}, as {node.operands[0]}"
    return None


def unsupported_bfloat16(node: FusedNode, name: str, dtype: str, device: Device) -> str | None:
    """Return a message if the tensor `name` is bfloat16 on a GPU without arithmetic in bfloat16; None if not."""
    if dtype != "bfloat16" or device.arch >= BF16_ARCH:
        return None
    return f"{node.fusion}: {name} is bfloat16, which needs compute capability {BF16_ARCH}; found {device.arch}"


def unsupported_choice(node: FusedNode, choice: str, known: Sequence[str], default: str) -> str | None:
    """Return a message if the attribute `choice` has a value outside of `known`; None if the value is known."""
    found = node.attributes.get(choice, default)
    return None if found in known else f"{node.fusion}: {choice} is {found}; the kernel has {', '.join(known)}"


def vector_width(tensors: Sequence[TensorSpec], *extents: int, weights: Sequence[TensorSpec] = ()) -> int:
    """Return the elements per vector access: a divisor of every extent, at most 16 bytes in each of `tensors`.

    The width is 1 if any tensor is misaligned.  For symbolic extents, a guard (a condition on sizes) is added to the
    plan: that the widest width divides them, or that it does not.  In the second case, the returned width divides them
    for all sizes.  `weights` must be aligned too, but their vectors may exceed 16 bytes: they come from a cache, so a
    second access costs little.
    """
    if not all(tensor.aligned for tensor in (*tensors, *weights)):
        return 1
    widest = VECTOR_BYTES // max(ITEM_BYTES[tensor.dtype] for tensor in tensors)
    while any(extent % widest for extent in extents):
        widest = gcd(widest, *extents) if is_symbolic(*extents) else widest // 2
    return widest


def known_equal(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two shapes are equal for all sizes of dynamic dims; adds no guard (a condition on sizes)."""
    return list(map(repr, first)) == list(map(repr, second))  # the repr of a symbolic dim is its expression


def differs_along(found: int, wanted: int) -> bool | None:
    """Compare `found`, the size of an operand along an axis, with the size `wanted` along this axis.

    Returns True if the two sizes are equal, False if the operand's only element is broadcast, None if neither holds.
    For equal dynamic sizes, the result is True even if both are 1, because any stride is right for one element.
    """
    if always(lambda: found == 1, found):
        return False
    if expect_equal(found, wanted):
        return is_symbolic(found) or found > 1
    return False if found == 1 else None


def macro(value: Callable[[], int | bool], expression: str, *sizes: int) -> int | str:
    """Return the value of a macro that depends on `sizes`.

    If a size is symbolic, return `expression`, over the kernel's arguments, instead of the number.  The kernel tests
    the macro by `if`, not `if constexpr`, so that one source serves both cases.
    """
    return f"({expression})" if is_symbolic(*sizes) else int(value())


def divisor(size: int) -> tuple[Scalar, Scalar]:
    """Return the arguments `u32 value, u64 multiplier`, from which a kernel makes a Divisor (types.cuh)."""
    return Scalar(size, "int32"), Scalar((1 << 62) // size + 1, "int64")


def is_released(blocks: int, device: Device) -> int | str:
    """Return the macro RELEASE: 1 if a launch of `blocks` blocks may let the next kernel start before it stores."""
    few = 2 * device.multiprocessors
    return macro(lambda: blocks <= few, f"gridDim.x <= {few}", blocks)


def is_streamed(tensors: Sequence[TensorSpec], expression: str = "0") -> int | str:
    """Return the macro STREAMED: 1 if the tensors exceed the bytes that L2 keeps for the next operator, else 0.

    If dims are symbolic, return `expression`, which the kernel evaluates over its arguments; see `store_as` of
    types.cuh.
    """
    moved = sum(element_count(tensor) * ITEM_BYTES[tensor.dtype] for tensor in tensors)
    return macro(lambda: moved > STREAMED_FROM_BYTES, expression, moved)


def all_constant(tensors: Sequence[TensorSpec]) -> int:
    """Return 1 if all of these tensors are constants of the model, which no kernel writes, else 0."""
    return int(all(tensor.constant for tensor in tensors))


def element_count(tensor: TensorSpec) -> int:
    """Return the product of the dims of a tensor."""
    return math.prod(tensor.shape)


def int32(*numbers: int) -> tuple[Scalar, ...]:
    """Return numbers as int32 arguments of a kernel."""
    return tuple(Scalar(number, "int32") for number in numbers)


def int64(*numbers: int) -> tuple[Scalar, ...]:
    """Return numbers as int64 arguments of a kernel."""
    return tuple(Scalar(number, "int64") for number in numbers)


def float32(*numbers: float) -> tuple[Scalar, ...]:
    """Return numbers as float32 arguments of a kernel."""
    return tuple(Scalar(number, "float32") for number in numbers)


def struct(*parts: Value | Struct) -> Struct:
    """Return a struct that has these fields; the structs among them are members.

    All fields of a member must have 64 bits, so that neither C nor this function pads it.  Raises ValueError for a
    member with other fields.
    """
    members = [part for part in parts if isinstance(part, Struct)]
    if any(isinstance(field, Scalar) and field.type != "int64" for member in members for field in member.fields):
        raise ValueError(f"a member of a struct has fields of 32 bits; required fields of 64 bits alone: {members}")
    return Struct(tuple(field for part in parts for field in (part.fields if isinstance(part, Struct) else (part,))))


def operand_pointer(node: FusedNode, name: str) -> Value:
    """Return the address of an input as a kernel argument; a null pointer if the node has no such input."""
    index = node.input_index(name)
    return ABSENT if index is None else Pointer("input", index)


def required_pointer(node: FusedNode, name: str) -> Pointer:
    """Return the address of an input.  Raises ValueError if the node has no such input."""
    index = node.input_index(name)
    if index is None:
        raise ValueError(f"{node.label}: operand {name} is missing; present are {', '.join(node.operands)}")
    return Pointer("input", index)


def shaped_pointer(node: FusedNode, inputs: Sequence[TensorSpec], name: str, shape: tuple[int, ...]) -> Pointer | None:
    """Return the address of an input of this shape; None if the node lacks it.  Raises ValueError for other shapes."""
    found = operand_spec(node, inputs, name)
    if found is None:
        return None
    equal = [expect_equal(size, other) for size, other in zip(found.shape, shape, strict=False)]
    if len(found.shape) != len(shape) or not all(equal):
        raise ValueError(f"{node.label}: {name} has shape {list(found.shape)}; required {list(shape)}")
    return required_pointer(node, name)


def operand_spec(node: FusedNode, inputs: Sequence[TensorSpec], name: str) -> TensorSpec | None:
    """Return the shape and dtype of an input; None if the node has no such input."""
    index = node.input_index(name)
    return None if index is None else inputs[index]


def required_spec(node: FusedNode, inputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """Return the shape and dtype of an input.  Raises ValueError if the node has no such input."""
    found = operand_spec(node, inputs, name)
    if found is None:
        raise ValueError(f"{node.fusion}: operand {name} is missing; present are {', '.join(node.operands)}")
    return found


def check_element_count(node: FusedNode, name: str, tensor: TensorSpec, expected: int) -> None:
    """Raise ValueError unless the tensor has `expected` elements."""
    if element_count(tensor) != expected:
        raise ValueError(f"{node.fusion}: {name} has shape {list(tensor.shape)}; required {expected} elements")
