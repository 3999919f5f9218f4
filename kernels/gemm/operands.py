"""Converts a fused node to a Gemm: its sizes and operands' addresses; checks that shapes and dtypes fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.elementwise.elements import activation_parameters
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.tensors import operand_spec, required_spec, unsupported_choice, unsupported_dtype
from onnxfuse.runtime.plan import Device, FusedNode, Pointer, TensorSpec

WEIGHT_LAYOUTS: Final = ("kn", "nk")
BF16_ARCH: Final = 80  # the first compute capability with bf16 in matrix units and conversions


@dataclass(frozen=True)
class GemmShape:
    """The sizes of a node's product, and the shape and dtype of its result."""

    m: int
    n: int
    k: int
    y: TensorSpec


def unsupported(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel computes this product on this device; None if one does."""
    return (
        unsupported_dtype(node, input_dtypes)
        or unsupported_choice(node, "weight_layout", WEIGHT_LAYOUTS, "kn")
        or unsupported_choice(node, "activation", (*ACTIVATIONS, PRELU), "none")
        or _mixed_dtypes(node, input_dtypes)
        or _bf16_without_matrix_units(node, input_dtypes[0], device)
    )


def _mixed_dtypes(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    for name, dtype in (*zip(node.operands, input_dtypes, strict=True), ("the output", node.output_dtypes[0])):
        if dtype != input_dtypes[0]:
            return f"{node.fusion}: {name} is {dtype}; required {input_dtypes[0]}, as {node.operands[0]}"
    return None


def _bf16_without_matrix_units(node: FusedNode, dtype: str, device: Device) -> str | None:
    if dtype != "bfloat16" or device.arch >= BF16_ARCH:
        return None
    return f"{node.fusion}: x is bfloat16; products of it need compute capability {BF16_ARCH}, found {device.arch}"


def is_transposed(node: FusedNode) -> bool:
    """Return whether weights are n x k."""
    return node.text("weight_layout", "kn") == "nk"


def gemm_shape(node: FusedNode, inputs: Sequence[TensorSpec], weight: str) -> GemmShape:
    """Return the sizes of x times the operand `weight`.  Raises ValueError if they do not multiply."""
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, weight)
    layout = "(n, k)" if is_transposed(node) else "(k, n)"
    if len(w.shape) != 2:
        raise ValueError(f"{_name(node)}: {weight} has shape {list(w.shape)}; required two dimensions, {layout}")
    n, k = w.shape if is_transposed(node) else w.shape[::-1]
    if not x.shape or x.shape[-1] != k:
        raise ValueError(
            f"{_name(node)}: x of shape {list(x.shape)} does not multiply with {weight} of shape {list(w.shape)}, "
            f"which is {layout}; required {k} as the last dimension of x"
        )
    if w.dtype != x.dtype:
        raise ValueError(f"{_name(node)}: {weight} of shape {list(w.shape)} is {w.dtype}; required {x.dtype}, as x")
    m = math.prod(x.shape[:-1])
    if m * n and not k:
        raise ValueError(f"{_name(node)}: x has shape {list(x.shape)}; required a last dimension of at least 1")
    y = TensorSpec((*x.shape[:-1], n), node.output_dtypes[0], all(tensor.aligned for tensor in inputs))
    return GemmShape(m, n, k, y)


def gemm_of(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, suffix: str = "", output: int = 0
) -> tuple[Gemm, TensorSpec]:
    """Return the product that a node computes, and its y, which is the node's output with index `output`.

    `suffix` is appended to the names of w and bias if the node computes several products.

    Raises ValueError if shapes do not fit.
    """
    shape = gemm_shape(node, inputs, f"w{suffix}")
    if node.input_index("up") is not None and (up := gemm_shape(node, inputs, "up")).n != shape.n:
        raise ValueError(f"{_name(node)}: up has {up.n} columns; required {shape.n}, as w")
    n, y = (shape.n,), shape.y
    alpha, beta = activation_parameters(node)
    gemm = Gemm(
        shape.m, shape.n, shape.k, y.dtype, is_transposed(node), y.aligned,
        x=_required_pointer(node, "x"), w=_required_pointer(node, f"w{suffix}"), y=Pointer("output", output),
        bias=_optional_pointer(node, inputs, f"bias{suffix}", n),
        up=_required_pointer(node, "up") if node.input_index("up") is not None else None,
        up_bias=_optional_pointer(node, inputs, "up_bias", n),
        slope=_optional_pointer(node, inputs, "slope", n),
        column_scale=_optional_pointer(node, inputs, "column_scale", n),
        residual=_optional_pointer(node, inputs, "residual", y.shape),
        activation=node.text("activation", "none"), alpha=alpha, beta=beta,
        tf32=device.tf32, weights_constant=_are_constant(node, inputs, f"w{suffix}", "up"),
    )  # fmt: skip
    if (gemm.activation == PRELU) != (gemm.slope is not None):
        raise ValueError(f"{_name(node)}: activation is {gemm.activation}; required a slope for prelu alone")
    return gemm, y


def _required_pointer(node: FusedNode, name: str) -> Pointer:
    index = node.input_index(name)
    if index is None:
        raise ValueError(f"{_name(node)}: operand {name} is missing; present are {', '.join(node.operands)}")
    return Pointer("input", index)


def _optional_pointer(
    node: FusedNode, inputs: Sequence[TensorSpec], name: str, shape: tuple[int, ...]
) -> Pointer | None:
    """Return the address of an operand; None if it is absent.  Raises ValueError if its shape is not `shape`."""
    found = operand_spec(node, inputs, name)
    if found is None:
        return None
    if found.shape != shape:
        raise ValueError(f"{_name(node)}: {name} has shape {list(found.shape)}; required {list(shape)}")
    return _required_pointer(node, name)


def _are_constant(node: FusedNode, inputs: Sequence[TensorSpec], *weights: str) -> bool:
    return all(inputs[index].constant for name in weights if (index := node.input_index(name)) is not None)


def _name(node: FusedNode) -> str:
    return f"{node.fusion} '{node.name}'"
