"""A gated matrix product, activation(x w + bias) * (x up + up_bias), on the GPU: the candidates for a node's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels import gemm_bias_activation
from onnxfuse.kernels._types import required
from onnxfuse.kernels.gemm_bias_activation import supports as supports
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    required(node, inputs, "up")
    return gemm_bias_activation.candidates(node, inputs, device)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]
