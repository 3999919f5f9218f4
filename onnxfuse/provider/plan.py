"""A Plan says how a fused node runs for one combination of input shapes: data, that C++ follows without Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype ("float32", "float16", "bfloat16", "bool", "int64" …) of an input or output."""

    shape: tuple[int, ...]
    dtype: str
    aligned: bool = True  # the data begins at a multiple of 16 bytes; where an output does not, every input says no


@dataclass(frozen=True)
class Device:
    """What a plan may depend on: the GPU it is made for."""

    name: str
    arch: int  # compute capability as a number: 75, 80, 90, 120
    multiprocessors: int
    shared_per_block: int  # bytes of dynamic shared memory that a block may opt in to


@dataclass(frozen=True)
class FusedNode:
    """A fused node as its kernel sees it."""

    fusion: str
    name: str
    operands: tuple[str, ...]  # the names of the inputs that are present, in order
    attributes: Mapping[str, Any]
    output_dtypes: tuple[str, ...]

    def place(self, operand: str) -> int | None:
        """The position of an operand among the inputs; None where it is absent."""
        return self.operands.index(operand) if operand in self.operands else None


@dataclass(frozen=True)
class Kernel:
    """A CUDA entry point: a .cu file of onnxfuse.kernels with its compile-time constants."""

    source: str  # the file's stem
    entry: str
    defines: Mapping[str, int | float | str] = field(default_factory=dict)
    arch_specific: bool = False  # needs the architecture's own instructions: sm_90a


@dataclass(frozen=True)
class Pointer:
    """The address of an input, an output or a piece of scratch memory, `offset` bytes in."""

    kind: Literal["input", "output", "scratch"]
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed by value."""

    value: int | float
    type: Literal["int32", "int64", "float32"]


Argument: TypeAlias = Pointer | Scalar


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1  # blocks in a cluster, along x


@dataclass(frozen=True)
class Plan:
    """Output shapes, scratch sizes in bytes, and the launches in order; no launch where nothing is to be computed."""

    outputs: tuple[TensorSpec, ...]
    steps: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()
