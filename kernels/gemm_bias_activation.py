"""A matrix product with bias, activation, column scale and residual on the GPU: the candidates for a node's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels._gemm_candidates import plans
from onnxfuse.kernels._gemm_operands import gemm_of, refuse
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse(node, input_dtypes, device)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    return plans(*gemm_of(node, inputs, device), device)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]
