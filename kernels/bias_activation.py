"""A bias along the last axis and an activation on the GPU: bias_activation.cu."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels._elementwise import ACTIVATIONS, element_plan, parameters
from onnxfuse.kernels._types import STORAGE, operand, refuse_choice, refuse_dtypes, require_size, required
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse_dtypes(node, input_dtypes) or refuse_choice(node, "activation", tuple(ACTIVATIONS), "none")


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where the bias is not of the last axis."""
    x, bias = required(node, inputs, "x"), required(node, inputs, "bias")
    require_size(node, "bias", bias, x.shape[-1])
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    defines = {"X_T": STORAGE[x.dtype], "BIAS_T": STORAGE[bias.dtype], "Y_T": STORAGE[y.dtype], "ROW": x.shape[-1]}
    arguments = [operand(node, "x"), operand(node, "bias"), Pointer("output", 0), *parameters(node)]
    return element_plan(node, inputs, y, defines, arguments, device)
