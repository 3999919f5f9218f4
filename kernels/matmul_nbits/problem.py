"""Matrix products of one x with quantized weights, as the host code of their kernels describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.ir.domain import OF_NORM
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.epilogue import epilogue_defines
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.prologue_node import Norm, norm_before
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    VECTOR_BYTES,
    Defines,
    operand_pointer,
    operand_spec,
    required_pointer,
    required_spec,
    unsupported_bfloat16,
    unsupported_choice,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Pointer, Scalar, Struct, TensorSpec, Value

BITS: Final = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, FLOAT8: 8}  # bits by the weight's dtype; layouts kn and nk
PACKED_BITS: Final = (2, 4, 8)  # bits of a weight in the layout nbits, which packs weights into bytes
LAYOUTS: Final = ("nbits", "kn", "nk")
MIN_BLOCK: Final = 16
PACKED_ZEROS, TYPED_ZEROS = 1, 2  # values of the macro ZEROS
WEIGHTS: Final = ("w", "w_2", "w_3", "up")


@dataclass(frozen=True)
class Weight:
    """The weight for n columns of y, with its scales and zero points, and the bias of its product."""

    n: int
    w: Pointer
    scales: Pointer
    zero_points: Value
    zeros: int  # value of the macro ZEROS of nbits.cuh
    has_one_scale: bool  # all columns and blocks share one scale
    bias: Pointer | None = None  # n elements


@dataclass(frozen=True)
class Product:
    """Products of one x, which is m x k, with one to three weights; each product is an output.

    The result of a gated product is activation(x w + bias) * (x up + up_bias), where `up` is its second weight.
    With a `norm`, the weights multiply the norm's result, and `x` is the norm's operand.
    """

    m: int
    k: int
    weights: tuple[Weight, ...]
    layout: str  # one of LAYOUTS
    bits: int
    block_size: int
    is_signed: bool  # elements and packed zero points are signed
    is_float8: bool  # elements are float8 numbers
    dtype: str  # dtype of x, the scales, the bias and y
    aligned: bool  # every pointer is a multiple of 16 bytes
    weights_constant: bool  # no kernel writes the weights, so they can be read before the previous kernel ends
    x: Pointer
    y: Pointer
    is_gated: bool = False
    activation: str = "none"
    residual: Pointer | None = None
    residual_first: bool = False
    program: EpilogueProgram | None = None  # operators fused after the product; None if there are several results
    norm: Norm | None = None

    @property
    def rows(self) -> int:
        """The rows of y."""
        return self.m

    @property
    def item(self) -> int:
        """The bytes of an element of x."""
        return ITEM_BYTES[self.dtype]

    @property
    def blocks(self) -> int:
        """The number of blocks along k."""
        return -(-self.k // self.block_size)

    def tiles(self, columns: int) -> int:
        """Return how many tiles of `columns` columns the products of one launch have together."""
        results = self.weights[:1] if self.is_gated else self.weights
        return sum(-(-weight.n // columns) for weight in results)

    def width(self, columns: int) -> int:
        """Return the elements per access to y if a block has `columns` columns."""
        widest = math.gcd(columns, VECTOR_BYTES // self.item, *(weight.n for weight in self.weights))
        return widest if self.aligned else 1

    @property
    def row_bits(self) -> int:
        """The bits of a row of w.

        A row has n elements in layout kn and k elements in nk.  In nbits, it has k elements padded to whole blocks.
        """
        if self.layout == "kn":
            return self.weights[0].n * self.bits
        return (self.blocks * self.block_size if self.layout == "nbits" else self.k) * self.bits

    @property
    def zero_bits(self) -> int:
        """The bits of the packed zero points of a column of y; layout nbits pads them to whole bytes."""
        bits = self.blocks * self.bits
        return -(-bits // 8) * 8 if self.layout == "nbits" else bits

    @property
    def parts(self) -> list[Product]:
        """One Product for each output; a gated product has one output."""
        if self.is_gated:
            return [self]
        results = (self.y, *(Pointer("output", i) for i in range(1, len(self.weights))))
        pairs = zip(self.weights, results, strict=True)
        return [replace(self, weights=(weight,), y=y) for weight, y in pairs]

    def weight_defines(self, weight: Weight) -> Defines:
        """Return the macros of nbits.cuh for one weight."""
        return {
            "GEMM_N": weight.n, "GEMM_K": self.k, "BITS": self.bits, "BLOCK_SIZE": self.block_size,
            "SIGNED": int(self.is_signed), "ZEROS": weight.zeros, "FLOAT8": int(self.is_float8),
            "ONE_SCALE": int(weight.has_one_scale),
            "ZERO": 1 << (self.bits - 1) if self.layout == "nbits" or self.is_signed else 0,
            "ZERO_BITS": self.zero_bits,
            "WEIGHTS_CONSTANT": int(self.weights_constant),
        }  # fmt: skip

    def defines(self) -> Defines:
        """Return the macros of nbits.cuh for a launch; all weights must have the same kind of zero points."""
        further = {f"GEMM_N_{i}": weight.n for i, weight in enumerate(self.weights[1:], 2)}
        count = 1 if self.is_gated else len(self.weights)
        biases = [weight.bias is not None for weight in self.weights]
        epilogue = epilogue_defines(
            self.dtype, self.activation, gated=self.is_gated, bias=biases[0] if self.is_gated else any(biases),
            up_bias=self.is_gated and biases[1], residual=self.residual is not None,
            residual_first=self.residual_first, optional_bias=count > 1,
        )  # fmt: skip
        launch = {"W_ROW_BYTES": self.row_bits // 8, "PRODUCTS": count}
        norm = self.norm.defines() if self.norm else {}
        return {**epilogue, **self.weight_defines(self.weights[0]), **further, **launch, **norm}

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of nbits_mma.cu, nbits_dot.cu and nbits_columns.cu."""
        results = [self.y, *(Pointer("output", i) for i in range(1, len(self.weights)))]
        if self.is_gated:
            results[1:] = [self.y]
        fields = tuple(
            field
            for weight, y in zip(self.weights, results, strict=True)
            for field in (weight.w, weight.scales, weight.zero_points, weight.bias or ABSENT, y)
        )
        norm = (self.norm.argument,) if self.norm else ()
        return self.x, Struct(fields), self.residual or ABSENT, Scalar(self.m, "int32"), *norm


def unsupported(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel computes this product on this device; None if one does."""
    given = dict(zip(node.operands, dtypes, strict=True))
    dtype, block_size = given["x"], _block_size(node)
    if dtype not in STORAGE:
        return f"{node.fusion}: x is {dtype}; the kernel takes {', '.join(STORAGE)}"
    if refused := unsupported_bfloat16(node, "x", dtype, device):
        return refused
    for name, found in (*given.items(), *((f"output {i}", each) for i, each in enumerate(node.output_dtypes))):
        if name not in WEIGHTS and "zero_points" not in name and found != dtype:
            return f"{node.fusion}: {name} is {found}; required {dtype}, as x"
    if block_size < MIN_BLOCK or block_size & (block_size - 1):
        return f"{node.fusion}: its blocks have {block_size} elements; required a power of two from {MIN_BLOCK} on"
    return (
        unsupported_choice(node, "weight_layout", LAYOUTS, "nbits")
        or unsupported_choice(node, "activation", tuple(ACTIVATIONS), "none")
        or _unsupported_weights(node, given)
    )


def _unsupported_weights(node: FusedNode, given: dict[str, str]) -> str | None:
    """Return why a kernel cannot read the weights or the zero points; None if it can."""
    is_packed = _layout(node) == "nbits"
    if is_packed and (bits := node.integer("bits", 4)) not in PACKED_BITS:
        return f"{node.fusion}: its weights have {bits} bits; required one of {', '.join(map(str, PACKED_BITS))}"
    for name in (name for name in given if name in WEIGHTS):
        required = ("uint8",) if is_packed else tuple(BITS)
        if given[name] not in required:
            return f"{node.fusion}: {name} is {given[name]}; the kernel takes {', '.join(required)}"
        zeros = given.get(_of_weight(name, "zero_points"))
        allowed = ("uint8", given["x"]) if is_packed else () if given[name] == FLOAT8 else (given[name],)
        if zeros and zeros not in allowed:
            return f"{node.fusion}: the zero points of {name} are {zeros}; required {' or '.join(allowed) or 'none'}"
    return None


def product_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Product, TensorSpec]:
    """Return the products that a node computes, as one `Product`, and the node's first output.

    Raises ValueError if shapes do not fit.
    """
    product, outputs = products_of(node, inputs)
    return product, outputs[0]


def products_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> tuple[Product, tuple[TensorSpec, ...]]:
    """Return the products that a node computes, as one `Product`, and the node's outputs.

    Raises ValueError if shapes do not fit.
    """
    x, first = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    names = [name for name in WEIGHTS if node.input_index(name) is not None]
    layout, k = _layout(node), node.integer("k")
    if not x.shape or x.shape[-1] != k:
        raise ValueError(f"{node.label}: x has shape {list(x.shape)}; required {k} as the last size")
    sizes = node.integer("bits", 4) if layout == "nbits" else BITS[first.dtype], _block_size(node)
    weights = tuple(_weight(node, inputs, name, k, sizes) for name in names)
    stored = [
        s for s, operand in zip(inputs, node.operands, strict=True)
        if operand not in ("x", f"{OF_NORM}residual") and "bias" not in operand
    ]  # fmt: skip
    aligned = all(spec.aligned for spec in inputs)
    product = Product(
        math.prod(x.shape[:-1]), k, weights, layout, *sizes,
        is_signed=layout != "nbits" and first.dtype.startswith("int"), is_float8=first.dtype == FLOAT8,
        dtype=x.dtype, aligned=aligned,
        weights_constant=all(spec.constant for spec in stored), x=required_pointer(node, "x"), y=Pointer("output", 0),
        is_gated="up" in names, activation=node.text("activation", "none"),
    )  # fmt: skip
    outputs = [TensorSpec((*x.shape[:-1], each.weights[0].n), x.dtype, aligned) for each in product.parts]
    norm = norm_before(node, inputs, len(outputs))
    return replace(product, norm=norm), (*outputs, *(norm.sums if norm else ()))


def _weight(node: FusedNode, inputs: Sequence[TensorSpec], name: str, k: int, sizes: tuple[int, int]) -> Weight:
    """Return a weight; `sizes` are its bits per element and its block size.  Raises ValueError if shapes do not fit."""
    (bits, block_size), layout = sizes, _layout(node)
    n, blocks = node.integer(name.replace("w", "n").replace("up", "n")), -(-k // block_size)
    is_packed = layout == "nbits"
    zeros, bias = (operand_spec(node, inputs, _of_weight(name, each)) for each in ("zero_points", "bias"))
    has_one_scale = required_spec(node, inputs, _of_weight(name, "scales")).shape == ()
    packed_zeros = zeros is not None and (not is_packed or zeros.dtype == "uint8")
    for operand, count in (
        (name, n * blocks * block_size * bits // 8 if is_packed else n * k),
        (_of_weight(name, "scales"), 1 if has_one_scale else n * blocks),
        (_of_weight(name, "zero_points"), n * (-(-blocks * bits // 8) if packed_zeros and is_packed else blocks)),
        (_of_weight(name, "bias"), n),
    ):
        spec = operand_spec(node, inputs, operand)
        if spec is not None and math.prod(spec.shape) != count:
            raise ValueError(f"{node.label}: {operand} has shape {list(spec.shape)}; required {count} elements")
    return Weight(
        n, required_pointer(node, name), required_pointer(node, _of_weight(name, "scales")),
        operand_pointer(node, _of_weight(name, "zero_points")),
        0 if zeros is None else PACKED_ZEROS if packed_zeros else TYPED_ZEROS, has_one_scale,
        None if bias is None else required_pointer(node, _of_weight(name, "bias")),
    )  # fmt: skip


def _of_weight(weight: str, operand: str) -> str:
    """Return the name of an operand that belongs to a weight: w_2 has scales_2, and up has up_scales."""
    return f"up_{operand}" if weight == "up" else f"{operand}{weight.removeprefix('w')}"


def _block_size(node: FusedNode) -> int:
    """Return the elements of a block; for weights without blocks, a power of two that holds a whole column."""
    return node.integer("block_size", 0) or max(MIN_BLOCK, 1 << (node.integer("k") - 1).bit_length())


def _layout(node: FusedNode) -> str:
    return node.text("weight_layout", "nbits")
