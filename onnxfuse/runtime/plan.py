"""Plans: data from which C++ runs a fused node for one combination of input shapes, without Python.

The host of a kernel, which is a Python module (see hosts.py), makes the plans of the fused nodes that the kernel runs.

plan_bytes.py writes the fields of steps as words, in the order in which they are declared here and native/steps.cc
reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from onnxfuse.errors import ModelError
from onnxfuse.ir.dtypes import dtype_name

RESERVED_ATTRIBUTES: Final = ("fusion", "operands", "output_types", "attributes")  # not in FusedNode.attributes
PDL_ARCH: Final = 90  # the first compute capability with programmatic dependent launch
NO_GPU: Final = -1  # the ordinal of a GPU that this machine need not have
Aim: TypeAlias = Literal["latency", "throughput"]  # a session's aim: fast single runs, or many runs at once
Dtype = Annotated[str, "dtype"]  # a tensor's dtype: "float32", "float16", "bfloat16", "bool", "int64", ...
Attribute: TypeAlias = int | float | str | list[int] | list[float]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype ("float32", "float16", "bfloat16", "bool", "int64", ...) of an input or output."""

    shape: tuple[int, ...]
    dtype: str
    # The data starts at a multiple of 16 bytes.  If an output's data does not, all inputs are marked as unaligned.
    aligned: bool = True
    # The model holds the values, which are then rarely in the L2 cache, because each node has constants of its own.
    constant: bool = False
    # For a tensor of integers, such as lengths: the value that all elements get when plans are timed on made-up inputs.
    drawn: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True)
class Device:
    """A GPU and the settings of a session on it: all that plans depend on besides the node and its inputs."""

    name: str
    arch: int  # compute capability as a number: 75, 80, 90, 120
    multiprocessors: int
    shared_per_block: int  # bytes of dynamic shared memory that a block may opt in to
    tf32: bool = True  # the session allows float32 matrix products to round their operands to TF32
    shared: bool = False  # other runs use the GPU at the same time, so plans should leave much of the GPU to them
    # The GPU's number on this machine, for queries to cuBLASLt and cuDNN; NO_GPU if this machine need not have the GPU.
    ordinal: int = field(default=0, compare=False)

    @property
    def has_pdl(self) -> bool:
        """Whether the GPU has programmatic dependent launch: see Launch."""
        return self.arch >= PDL_ARCH

    @property
    def is_here(self) -> bool:
        """Whether this machine has the GPU."""
        return self.ordinal != NO_GPU


@dataclass(frozen=True)
class FusedNode:
    """A fused node as its host, the Python module that makes its plans, sees it."""

    fusion: str
    name: str
    operands: tuple[str, ...]  # the names of the inputs that are present, in order
    attributes: Mapping[str, Attribute]
    output_dtypes: tuple[str, ...]

    @classmethod
    def read(cls, name: str, attributes: Mapping[str, Any]) -> FusedNode:
        """Return the node with these attributes.  Raises ModelError if one is missing or of the wrong type."""
        required = (("fusion", str, "a string"), ("operands", str, "a string"), ("output_types", list, "ints"))
        for attribute, kind, what in required:
            if not isinstance(attributes.get(attribute), kind):
                found = repr(attributes[attribute]) if attribute in attributes else "nothing"
                raise ModelError(f"fused node '{name}': attribute {attribute} must be {what}, found {found}")
        named = str(attributes.get("attributes", "")).split()  # files of older versions do not have this attribute
        if missing := [attribute for attribute in named if attribute not in attributes]:
            raise ModelError(
                f"fused node '{name}': attribute {missing[0]} is missing; register the model that runs with its "
                "session options, or optimize it again if the file was changed"
            )
        own = {key: value for key, value in sorted(attributes.items()) if key not in RESERVED_ATTRIBUTES}
        dtypes = tuple(map(dtype_name, attributes["output_types"]))
        return cls(attributes["fusion"], name, tuple(attributes["operands"].split()), own, dtypes)

    @property
    def label(self) -> str:
        """The fusion and the name, for error messages."""
        return f"{self.fusion} '{self.name}'"

    def input_index(self, operand: str) -> int | None:
        """Return the index of an operand among the inputs; None if it is absent."""
        return self.operands.index(operand) if operand in self.operands else None

    def integer(self, attribute: str, default: int | None = None) -> int:
        """Return an attribute, or `default` if it is absent.

        Raises KeyError if there is no default either, TypeError if the attribute is not an integer.
        """
        value = self._value(attribute, default)
        if isinstance(value, float | str | list):
            raise TypeError(f"attribute {attribute} is {value!r}; required an integer")
        return int(value)

    def number(self, attribute: str, default: float | None = None) -> float:
        """Return an attribute, or `default` if it is absent.

        Raises KeyError if there is no default either, TypeError if the attribute is not a number.
        """
        value = self._value(attribute, default)
        if isinstance(value, str | list):
            raise TypeError(f"attribute {attribute} is {value!r}; required a number")
        return float(value)

    def text(self, attribute: str, default: str | None = None) -> str:
        """Return an attribute, or `default` if it is absent.

        Raises KeyError if there is no default either, TypeError if the attribute is not a string.
        """
        value = self._value(attribute, default)
        if not isinstance(value, str):
            raise TypeError(f"attribute {attribute} is {value!r}; required a string")
        return value

    def _value(self, attribute: str, default: Attribute | None) -> Attribute:
        return self.attributes[attribute] if default is None else self.attributes.get(attribute, default)


@dataclass(frozen=True)
class Kernel:
    """An entry point of a .cu file, of generated CUDA source or of machine code, with its compile-time constants."""

    source: str  # the stem of the .cu file, or the name that messages use for `text` and `code`
    entry: str
    defines: Mapping[str, int | float | str] = field(default_factory=dict)
    arch_specific: bool = False  # needs instructions that only one architecture has, such as sm_90a
    text: str = ""  # generated source, used instead of the .cu file; it may include onnxfuse's headers
    code: bytes = field(default=b"", repr=False)  # machine code for the device instead of a source: triton_kernels.py

    @property
    def key(self) -> str:
        """A text that is equal for equal kernels."""
        own = (hashlib.sha256(self.code or self.text.encode()).hexdigest(),) if self.code or self.text else ()
        return repr((self.source, self.entry, sorted(self.defines.items()), self.arch_specific, *own))


@dataclass(frozen=True)
class Pointer:
    """A pointer to an input, an output or a scratch buffer, plus `offset` bytes."""

    kind: Literal["input", "output", "scratch"]
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Scalar:
    """A number passed by value."""

    value: int | float
    type: Literal["int32", "int64", "float32"]


@dataclass(frozen=True)
class Im2col:
    """The walk of a tensor map over the pixels of a convolution, as in cuTensorMapEncodeIm2col.

    The dimensions of the map are channels, one to three spatial axes, images.  Every field has a value for each spatial
    axis, the innermost first.  Along an axis, a load visits the pixels from `lower` to the size plus `upper`, `steps`
    apart; after a row or an image, it continues with the next one.  The load adds the offset of one element of the
    filter to the position of each pixel.
    """

    lower: tuple[int, ...]  # the first pixel: minus the padding at the beginning
    upper: tuple[int, ...]  # relative to the last pixel: the padding at the end minus (filter size - 1) * dilation
    steps: tuple[int, ...]  # distances between visited pixels: the convolution's strides, 1 to 8


@dataclass(frozen=True)
class TensorMap:
    """A CUtensorMap that is passed by value, as `const __grid_constant__`; a run supplies the address.

    Sizes, strides and box begin with the innermost dimension, as in cuTensorMapEncodeTiled. `strides` are in bytes; the
    innermost dimension is left out, because its stride is one element. Elements outside `sizes` are read as zero.
    """

    pointer: Pointer
    dtype: Dtype  # float16, bfloat16, float32, uint8, or tfloat32: float32, rounded to TF32 by loads
    sizes: tuple[int, ...]  # elements, one to five dimensions
    strides: tuple[int, ...]  # multiples of 16
    box: tuple[int, ...]  # elements, at most 256 each; with `im2col`: how many channels and how many pixels
    swizzle: Literal[0, 32, 64, 128] = 0  # bytes; if not 0, the box's innermost dimension must not be wider
    im2col: Im2col | None = None


Value: TypeAlias = Pointer | Scalar


@dataclass(frozen=True)
class Struct:
    """A struct that is passed by value.

    The fields are laid out as in C: in order, each at a multiple of its size.  A kernel that changes no field can
    declare the struct `const __grid_constant__`, which gives fewer instructions in some kernels and more in others.
    """

    fields: tuple[Value, ...]  # at least one


Argument: TypeAlias = Value | TensorMap | Struct


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    shared: int = 0  # bytes of dynamic shared memory
    cluster: int = 1  # blocks in a cluster, along x
    # Programmatic dependent launch: the kernel may start while the one before it ends. Until the kernel has called
    # wait_for_predecessor(), it may touch nothing but constants.
    pdl: bool = False

    @property
    def values(self) -> tuple[Value, ...]:
        """The pointers and scalars of the arguments, in order: a struct has several, a tensor map has one pointer."""
        return tuple(value for argument in self.arguments for value in _values(argument))


def _values(argument: Argument) -> tuple[Value, ...]:
    if isinstance(argument, Struct):
        return argument.fields
    return (argument.pointer if isinstance(argument, TensorMap) else argument,)


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix of `rows` x `columns`, with `stride` elements from one row to the next."""

    pointer: Pointer
    dtype: Dtype
    rows: int
    columns: int
    stride: int
    batch_stride: int = 0  # elements from one product of the batch to the next; 0 if all products share the matrix


@dataclass(frozen=True)
class Matmul:
    """A product by cublasLtMatmul: y = activation(x w + c + bias)."""

    x: Matrix  # m x k
    w: Matrix  # k x n, or n x k if `transposed`
    y: Matrix  # m x n
    transposed: bool
    batch: int = 1
    c: Matrix | None = None  # added to the product before bias and activation
    bias: Pointer | None = None  # n elements of y's dtype
    activation: Literal["none", "relu", "gelu_tanh"] = "none"
    tf32: bool = False  # float32 operands are rounded to TF32
    aligned: bool = True  # all its inputs and outputs start at multiples of 16 bytes
    workspace: Pointer | None = None
    workspace_bytes: int = 0
    algorithm: tuple[int, ...] = ()  # the eight 64-bit words of a cublasLtMatmulAlgo_t; () for cuBLASLt's first choice


ConvolutionActivation: TypeAlias = Literal[
    "none",
    "relu",
    "silu",
    "gelu",
    "gelu_tanh",
    "sigmoid",
    "tanh",
    "clip",
    "leaky_relu",
    "elu",
    "softplus",
    "quick_gelu",
]


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution.

    Of the sizes of tensors, of strides and so on there is one for each spatial axis, the innermost last.
    """

    n: int
    c: int  # channels of x
    m: int  # channels of y
    sizes: tuple[int, ...]  # spatial sizes of x
    y_sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Convolution(Geometry):
    """A convolution by cuDNN 9.

    If `residual_first`, y = activation(conv(x, w) + bias + residual).  Otherwise, y = activation(conv(x, w) + bias) +
    residual.  Sums are in fp32, and y is rounded once.

    It has one to three spatial axes.  If `channels_last`, x is (n, *sizes, c), and y and residual are (n, *y_sizes, m).
    Otherwise, x is (n, c, *sizes), and y and residual are (n, m, *y_sizes).  w is (m, *kernel, c / group) if
    `w_channels_last`, else (m, c / group, *kernel).  All tensors are contiguous.  A `transposed` convolution is ONNX's
    ConvTranspose: w has c filters of m / group channels.
    """

    dtype: Dtype  # dtype of all operands: float32, float16 or bfloat16
    x: Pointer
    w: Pointer
    y: Pointer
    bias: Pointer | None = None  # m elements
    residual: Pointer | None = None
    residual_first: bool = True
    activation: ConvolutionActivation = "none"
    alpha: float = 0.0  # a parameter of the activation, as in onnxfuse.activations
    beta: float = 0.0
    channels_last: bool = True
    w_channels_last: bool = True
    transposed: bool = False
    tf32: bool = False  # float32 operands are rounded to TF32
    aligned: bool = True  # all its inputs and outputs start at multiples of 16 bytes
    workspace: Pointer | None = None
    workspace_bytes: int = 0
    # The global index of one of cuDNN's engines, and then the type and value of each of its knobs; () for cuDNN's first
    # choice.  An engine and its knobs are for one version of cuDNN and one kind of GPU.
    engine: tuple[int, ...] = ()


Step: TypeAlias = Launch | Matmul | Convolution


@dataclass(frozen=True)
class NoAlias:
    """An input and an output that must not overlap in memory; if `same_start`, they may start at the same address.

    A program that binds memory of its own may make an input and an output overlap; the node then raises an error.
    """

    input: int
    output: int
    same_start: bool


@dataclass(frozen=True)
class Plan:
    """Output shapes, steps in order, and sizes of scratch buffers in bytes; no steps if outputs have no elements."""

    WORD_ORDER: ClassVar = ("outputs", "scratch", "steps", "no_alias")  # scratch precedes steps, which refer to it

    outputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    scratch: tuple[int, ...] = ()
    no_alias: tuple[NoAlias, ...] = ()
