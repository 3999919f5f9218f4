"""A fused node's operands as the matrices of a product, checked: what the hosts of gemm kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._elementwise import ACTIVATIONS
from onnxfuse.kernels._gemm import Gemm
from onnxfuse.kernels._types import product, refuse_choice, refuse_dtypes, required, spec
from onnxfuse.provider.plan import Device, FusedNode, Pointer, TensorSpec

LAYOUTS: Final = ("kn", "nk")
BF16_FROM: Final = 80  # compute capability whose matrix units and conversions have bf16


@dataclass(frozen=True)
class Product:
    """The sizes of a node's product, and y."""

    m: int
    n: int
    k: int
    y: TensorSpec


def refuse(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return (
        refuse_dtypes(node, input_dtypes)
        or refuse_choice(node, "weight_layout", LAYOUTS, "kn")
        or refuse_choice(node, "activation", tuple(ACTIVATIONS), "none")
        or _refuse_mixture(node, input_dtypes)
        or _refuse_bf16(node, input_dtypes[0], device)
    )


def _refuse_mixture(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    for name, dtype in (*zip(node.operands, input_dtypes, strict=True), ("the output", node.output_dtypes[0])):
        if dtype != input_dtypes[0]:
            return f"{node.fusion}: {name} is {dtype}; required {input_dtypes[0]}, as {node.operands[0]}"
    return None


def _refuse_bf16(node: FusedNode, dtype: str, device: Device) -> str | None:
    if dtype != "bfloat16" or device.arch >= BF16_FROM:
        return None
    return f"{node.fusion}: x is bfloat16; products of it need compute capability {BF16_FROM}, found {device.arch}"


def transposed(node: FusedNode) -> bool:
    """Whether weights are n x k."""
    return bool(node.attributes.get("weight_layout", "kn") == "nk")


def product_of(node: FusedNode, inputs: Sequence[TensorSpec], weight: str) -> Product:
    """The sizes of x times a weight.  Raises ValueError where they do not multiply."""
    x, w = required(node, inputs, "x"), required(node, inputs, weight)
    layout = "(n, k)" if transposed(node) else "(k, n)"
    if len(w.shape) != 2:
        raise ValueError(f"{_who(node)}: {weight} has shape {list(w.shape)}; required two dimensions, {layout}")
    n, k = w.shape if transposed(node) else w.shape[::-1]
    if not x.shape or x.shape[-1] != k:
        raise ValueError(
            f"{_who(node)}: x of shape {list(x.shape)} does not multiply with {weight} of shape {list(w.shape)}, "
            f"which is {layout}; required {k} as the last dimension of x"
        )
    if w.dtype != x.dtype:
        raise ValueError(f"{_who(node)}: {weight} of shape {list(w.shape)} is {w.dtype}; required {x.dtype}, as x")
    m = product(x.shape[:-1])
    if m * n and not k:
        raise ValueError(f"{_who(node)}: x has shape {list(x.shape)}; required a last dimension of at least 1")
    y = TensorSpec((*x.shape[:-1], n), node.output_dtypes[0], all(tensor.aligned for tensor in inputs))
    return Product(m, n, k, y)


def gemm_of(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, number: str = "", output: int = 0
) -> tuple[Gemm, TensorSpec]:
    """The product that a node is, and y, its output of that place.  Raises ValueError where shapes do not fit.

    `number` ends the names of the operands, where the node is several products.
    """
    sizes = product_of(node, inputs, f"w{number}")
    if node.place("up") is not None and (up := product_of(node, inputs, "up")).n != sizes.n:
        raise ValueError(f"{_who(node)}: up has {up.n} columns; required {sizes.n}, as w")
    n, y = (sizes.n,), sizes.y
    alpha, beta = _parameters(node)
    gemm = Gemm(
        sizes.m, sizes.n, sizes.k, y.dtype, transposed(node), y.aligned,
        x=_at(node, "x"), w=_at(node, f"w{number}"), y=Pointer("output", output),
        bias=_pointer(node, inputs, f"bias{number}", n),
        up=_at(node, "up") if node.place("up") is not None else None,
        up_bias=_pointer(node, inputs, "up_bias", n),
        column_scale=_pointer(node, inputs, "column_scale", n),
        residual=_pointer(node, inputs, "residual", y.shape),
        activation=node.attributes.get("activation", "none"), alpha=alpha, beta=beta,
        tf32=device.tf32, constant=_constant(node, inputs, f"w{number}", "up"),
    )  # fmt: skip
    return gemm, y


def _pointer(node: FusedNode, inputs: Sequence[TensorSpec], name: str, shape: tuple[int, ...]) -> Pointer | None:
    """Where an optional operand of that shape is; None where it is absent.  Raises ValueError for another shape."""
    found = spec(node, inputs, name)
    if found is None:
        return None
    if found.shape != shape:
        raise ValueError(f"{_who(node)}: {name} has shape {list(found.shape)}; required {list(shape)}")
    place = node.place(name)
    assert place is not None
    return Pointer("input", place)


def _constant(node: FusedNode, inputs: Sequence[TensorSpec], *weights: str) -> bool:
    return all(inputs[place].constant for name in weights if (place := node.place(name)) is not None)


def _at(node: FusedNode, name: str) -> Pointer:
    """Where an operand is that is known to be there."""
    place = node.place(name)
    if place is None:
        raise ValueError(f"{_who(node)}: operand {name} is missing; present are {', '.join(node.operands)}")
    return Pointer("input", place)


def _parameters(node: FusedNode) -> tuple[float, float]:
    """alpha and beta of the node's activation."""
    alpha, beta = ACTIVATIONS[node.attributes.get("activation", "none")]
    return float(node.attributes.get("alpha", alpha)), float(node.attributes.get("beta", beta))


def _who(node: FusedNode) -> str:
    return f"{node.fusion} '{node.name}'"
