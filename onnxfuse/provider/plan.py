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
    constant: bool = False  # an input whose values the model holds: every node finds its own in memory


@dataclass(frozen=True)
class Device:
    """What a plan may depend on: the GPU that it is made for, and the session's settings."""

    name: str
    arch: int  # compute capability as a number: 75, 80, 90, 120
    multiprocessors: int
    shared_per_block: int  # bytes of dynamic shared memory that a block may opt in to
    tf32: bool = True  # the session lets float32 matrix products round their operands to TF32
    ordinal: int = field(default=0, compare=False)  # which of the machine's GPUs: for questions to its libraries


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


@dataclass(frozen=True)
class TensorMap:
    """A CUtensorMap passed by value (`const __grid_constant__`), over memory whose address a run supplies.

    Sizes, strides and box count from the innermost dimension, as cuTensorMapEncodeTiled has them; `strides` are in
    bytes and leave out the innermost, which is one element. What a box reads outside `sizes` is zero.
    """

    pointer: Pointer
    dtype: Literal["float16", "bfloat16", "float32", "uint8"]
    sizes: tuple[int, ...]  # elements, one to five dimensions
    strides: tuple[int, ...]  # multiples of 16
    box: tuple[int, ...]  # elements, at most 256 each
    swizzle: Literal[0, 32, 64, 128] = 0  # bytes; the box's innermost dimension is no wider


Argument: TypeAlias = Pointer | Scalar | TensorMap


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1  # blocks in a cluster, along x
    early: bool = False  # may start while the kernel before it ends: its code begins with wait_for_predecessor()


@dataclass(frozen=True)
class Matrix:
    """A matrix of a product: row-major, `rows` x `columns`, with `stride` elements from row to row."""

    pointer: Pointer
    dtype: str
    rows: int
    columns: int
    stride: int
    batch_stride: int = 0  # elements from one product of the batch to the next; 0 where all share it


@dataclass(frozen=True)
class Matmul:
    """One cublasLtMatmul: y = epilogue(x w + c), with w transposed where `w` is n x k."""

    x: Matrix  # m x k
    w: Matrix  # k x n, or n x k where `transposed`
    y: Matrix  # m x n
    transposed: bool
    batch: int = 1
    c: Matrix | None = None  # added to the product before bias and activation
    bias: Pointer | None = None  # n elements of y's dtype
    activation: Literal["none", "relu", "gelu_tanh"] = "none"
    tf32: bool = False  # float32 operands are rounded to TF32
    aligned: bool = True  # every input and output that it touches begins at a multiple of 16 bytes
    workspace: Pointer | None = None
    workspace_bytes: int = 0
    algorithm: tuple[int, ...] = ()  # the eight 64-bit words of a cublasLtMatmulAlgo_t; none: cuBLASLt's first choice


@dataclass(frozen=True)
class Apart:
    """An input and an output that may not overlap in memory; where `together`, both may begin at one address.

    A caller who binds memory of their own can ask for that; the node then raises an error.
    """

    input: int
    output: int
    together: bool


@dataclass(frozen=True)
class Plan:
    """Output shapes, scratch sizes in bytes, and the steps in order; no step where nothing is to be computed."""

    outputs: tuple[TensorSpec, ...]
    steps: tuple[Launch | Matmul, ...]
    scratch: tuple[int, ...] = ()
    apart: tuple[Apart, ...] = ()
