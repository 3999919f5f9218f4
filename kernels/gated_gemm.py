"""A gated matrix product, activation(x w + bias) * (x up + up_bias), on the GPU: the candidates for a node's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels._gemm import Gemm
from onnxfuse.kernels._gemm_candidates import plans
from onnxfuse.kernels._gemm_operands import at, parameters, pointer, product_of, refuse, transposed
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse(node, input_dtypes, device)


def product(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Gemm, TensorSpec]:
    """The product that it is, and y.  Raises ValueError where shapes do not fit."""
    sizes = product_of(node, inputs, "w")
    up = product_of(node, inputs, "up")
    if up.n != sizes.n:
        raise ValueError(f"gated_gemm '{node.name}': up has {up.n} columns; required {sizes.n}, as w")
    n, y = (sizes.n,), sizes.y
    alpha, beta = parameters(node)
    what = Gemm(
        sizes.m, sizes.n, sizes.k, y.dtype, transposed(node), y.aligned,
        x=at(node, "x"), w=at(node, "w"), y=Pointer("output", 0),
        bias=pointer(node, inputs, "bias", n),
        up=at(node, "up"),
        up_bias=pointer(node, inputs, "up_bias", n),
        activation=node.attributes.get("activation", "none"), alpha=alpha, beta=beta,
        tf32=device.tf32,
    )  # fmt: skip
    return what, y


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    return plans(*product(node, inputs, device), device)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]
