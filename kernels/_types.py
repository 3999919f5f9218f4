"""How tensors are stored, as kernels and their hosts see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from onnxfuse.provider.plan import Argument, FusedNode, Pointer, Scalar, TensorSpec

Defines: TypeAlias = dict[str, int | float | str]  # compile-time constants of a kernel

STORAGE: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # types.cuh's names
ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
VECTOR_BYTES: Final = 16  # the widest access that every architecture has
EARLY_ARCH: Final = 90  # from which a launch may start before the one in front of it ends
ABSENT: Final = Scalar(0, "int64")  # the address of an operand that is not there

# Outputs that with their inputs exceed this do not stay in L2 for the next operator (50 MB on an H100 or H200). Smaller
# ones are kept: a norm, four operators on its result and one on theirs take 28.3 us so at 2048x2048 fp16, where 34 MB
# pass through the norm, and 29.7 where its result leaves L2 first; at 4096x4096, 134 MB, 141.6 and 137.8.
STREAMED_FROM_BYTES: Final = 48 << 20


def refuse_dtypes(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Why there is no kernel for these dtypes; None where there is."""
    for name, dtype in (
        *zip(node.operands, input_dtypes, strict=True),
        *((f"output {i}", dtype) for i, dtype in enumerate(node.output_dtypes)),
    ):
        if dtype not in STORAGE:
            return f"{node.fusion}: {name} is {dtype}; the kernel takes {', '.join(STORAGE)}"
    return None


def refuse_choice(node: FusedNode, choice: str, known: Sequence[str], default: str) -> str | None:
    """Why there is no kernel for the node's variant; None where there is."""
    found = node.attributes.get(choice, default)
    return None if found in known else f"{node.fusion}: {choice} is {found}; the kernel has {', '.join(known)}"


def width(tensors: Sequence[TensorSpec], *extents: int, weights: Sequence[TensorSpec] = ()) -> int:
    """Elements of a vector access: at most 16 bytes of each tensor, a divisor of every extent, 1 if misaligned.

    Weights, which come from a cache, may take two accesses.
    """
    if not all(tensor.aligned for tensor in (*tensors, *weights)):
        return 1
    widest = VECTOR_BYTES // max(ITEM_BYTES[tensor.dtype] for tensor in tensors)
    while any(extent % widest for extent in extents):
        widest //= 2
    return widest


def streamed(tensors: Sequence[TensorSpec]) -> int:
    """1 where the tensors are too large to be kept in L2."""
    return int(sum(size(t) * ITEM_BYTES[t.dtype] for t in tensors) > STREAMED_FROM_BYTES)


def constant(tensors: Sequence[TensorSpec]) -> int:
    """1 where the model holds all of them, so that no kernel writes them."""
    return int(all(tensor.constant for tensor in tensors))


def size(tensor: TensorSpec) -> int:
    """The number of elements."""
    return product(tensor.shape)


def product(numbers: Sequence[int]) -> int:
    """1 for none."""
    result = 1
    for number in numbers:
        result *= number
    return result


def operand(node: FusedNode, name: str) -> Argument:
    """The address of an input; 0 where it is absent."""
    place = node.place(name)
    return ABSENT if place is None else Pointer("input", place)


def spec(node: FusedNode, inputs: Sequence[TensorSpec], name: str) -> TensorSpec | None:
    """Shape and dtype of an input; None where it is absent."""
    place = node.place(name)
    return None if place is None else inputs[place]


def required(node: FusedNode, inputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """Shape and dtype of an input.  Raises ValueError where it is absent."""
    found = spec(node, inputs, name)
    if found is None:
        raise ValueError(f"{node.fusion}: operand {name} is missing; present are {', '.join(node.operands)}")
    return found


def require_size(node: FusedNode, name: str, tensor: TensorSpec, expected: int) -> None:
    """Raises ValueError unless the tensor has that many elements."""
    if size(tensor) != expected:
        raise ValueError(f"{node.fusion}: {name} has shape {list(tensor.shape)}; required {expected} elements")
