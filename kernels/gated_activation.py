"""Gated activations on the GPU: gated_activation.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._elementwise import element_plan
from onnxfuse.kernels._types import STORAGE, operand, refuse_choice, refuse_dtypes, required
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, TensorSpec

ACTIVATIONS: Final = ("none", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid", "tanh", "mish")


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse_dtypes(node, input_dtypes) or refuse_choice(node, "activation", ACTIVATIONS, "none")


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where gate and up differ in shape."""
    gate, up = required(node, inputs, "gate"), required(node, inputs, "up")
    if gate.shape != up.shape:
        raise ValueError(f"gated_activation: up has shape {list(up.shape)}; required {list(gate.shape)}, as gate")
    y = TensorSpec(gate.shape, node.output_dtypes[0], gate.aligned)
    defines = {"GATE_T": STORAGE[gate.dtype], "UP_T": STORAGE[up.dtype], "Y_T": STORAGE[y.dtype]}
    arguments = [operand(node, "gate"), operand(node, "up"), Pointer("output", 0)]
    return element_plan(node, inputs, y, defines, arguments, device)
