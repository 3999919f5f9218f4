"""Gated activations on the GPU: gated_activation.cu."""

from __future__ import annotations

import math
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
    gate, up = (required(node, inputs, name) for name in ("gate", "up"))
    shapes = {name: _part(node, name, tensor) for name, tensor in (("gate", gate), ("up", up))}
    if shapes["gate"] != shapes["up"]:
        raise ValueError(
            f"gated_activation: up has shape {list(shapes['up'])}; required {list(shapes['gate'])}, as gate"
        )
    y = TensorSpec(shapes["gate"], node.output_dtypes[0], gate.aligned)
    row = math.prod(y.shape[-1:])
    places = {"GATE": _place(node, "gate", gate, row), "UP": _place(node, "up", up, row)}
    defines = {"GATE_T": STORAGE[gate.dtype], "UP_T": STORAGE[up.dtype], "Y_T": STORAGE[y.dtype], "ROW": row}
    for name, (whole, offset) in places.items():
        defines |= {f"{name}_ROW": whole, f"{name}_OFFSET": offset}
    extents = [extent for place in places.values() if place[0] != row for extent in (row, *place)]
    arguments = [operand(node, "gate"), operand(node, "up"), Pointer("output", 0)]
    return element_plan(node, inputs, y, defines, arguments, device, extents)


def _part(node: FusedNode, name: str, tensor: TensorSpec) -> tuple[int, ...]:
    """The shape of the part of an operand that is meant."""
    offset = node.attributes.get(f"{name}_offset")
    if offset is None:
        return tensor.shape
    size = int(node.attributes["d"])
    if not 0 <= offset <= tensor.shape[-1] - size:
        raise ValueError(
            f"gated_activation: {name} has shape {list(tensor.shape)}; required rows of {offset} + {size} elements"
        )
    return (*tensor.shape[:-1], size)


def _place(node: FusedNode, name: str, tensor: TensorSpec, row: int) -> tuple[int, int]:
    """Elements of a row of the operand, and how many are in front of the part."""
    if f"{name}_offset" not in node.attributes:
        return row, 0
    return tensor.shape[-1], int(node.attributes[f"{name}_offset"])
