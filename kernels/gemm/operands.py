"""Converts a fused node to a Gemm: reads its sizes and operands, and checks that shapes and dtypes fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.elementwise.elements import activation_parameters
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.tensors import (
    mixed_dtypes,
    required_pointer,
    required_spec,
    shaped_pointer,
    unsupported_bfloat16,
    unsupported_choice,
    unsupported_dtype,
)
from onnxfuse.runtime.plan import Device, FusedNode, Pointer, TensorSpec

WEIGHT_LAYOUTS: Final = ("kn", "nk")


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
        or mixed_dtypes(node, input_dtypes)
        or unsupported_bfloat16(node, "x", input_dtypes[0], device)
    )


def is_transposed(node: FusedNode) -> bool:
    """Return whether weights are n x k."""
    return node.text("weight_layout", "kn") == "nk"


def gemm_shape(node: FusedNode, inputs: Sequence[TensorSpec], weight: str) -> GemmShape:
    """Return the sizes of x times the operand `weight`.  Raises ValueError if they do not multiply."""
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, weight)
    layout = "(n, k)" if is_transposed(node) else "(k, n)"
    if len(w.shape) != 2:
        raise ValueError(f"{node.label}: {weight} has shape {list(w.shape)}; required two dimensions, {layout}")
    n, k = w.shape if is_transposed(node) else w.shape[::-1]
    if not x.shape or x.shape[-1] != k:
        raise ValueError(
            f"{node.label}: x of shape {list(x.shape)} does not multiply with {weight} of shape {list(w.shape)}, "
            f"which is {layout}; required {k} as the last dimension of x"
        )
    if w.dtype != x.dtype:
        raise ValueError(f"{node.label}: {weight} of shape {list(w.shape)} is {w.dtype}; required {x.dtype}, as x")
    m = math.prod(x.shape[:-1])
    if m * n and not k:
        raise ValueError(f"{node.label}: x has shape {list(x.shape)}; required a last dimension of at least 1")
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
        raise ValueError(f"{node.label}: up has {up.n} columns; required {shape.n}, as w")
    n, y = (shape.n,), shape.y
    alpha, beta = activation_parameters(node)
    gemm = Gemm(
        shape.m, shape.n, shape.k, y.dtype, is_transposed(node), y.aligned,
        x=required_pointer(node, "x"), w=required_pointer(node, f"w{suffix}"), y=Pointer("output", output),
        bias=shaped_pointer(node, inputs, f"bias{suffix}", n),
        up=required_pointer(node, "up") if node.input_index("up") is not None else None,
        up_bias=shaped_pointer(node, inputs, "up_bias", n),
        slope=shaped_pointer(node, inputs, "slope", n),
        column_scale=shaped_pointer(node, inputs, "column_scale", n),
        residual=shaped_pointer(node, inputs, "residual", y.shape),
        activation=node.text("activation", "none"), alpha=alpha, beta=beta,
        tf32=device.tf32, weights_constant=_are_constant(node, inputs, f"w{suffix}", "up"),
    )  # fmt: skip
    if (gemm.activation == PRELU) != (gemm.slope is not None):
        raise ValueError(f"{node.label}: activation is {gemm.activation}; required a slope for prelu alone")
    return gemm, y


def _are_constant(node: FusedNode, inputs: Sequence[TensorSpec], *weights: str) -> bool:
    return all(inputs[index].constant for name in weights if (index := node.input_index(name)) is not None)
