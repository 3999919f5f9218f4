"""The plans of elementwise fusions; each fusion has a .cu file of its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.elementwise.batch_norm_activation import batch_norm_plans
from onnxfuse.kernels.elementwise.channel_scale import channel_scale_plan
from onnxfuse.kernels.elementwise.elements import activation_arguments, element_plan
from onnxfuse.kernels.tensors import (
    STORAGE,
    Defines,
    check_element_count,
    element_count,
    operand_pointer,
    required_spec,
    unsupported_choice,
    unsupported_dtype,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import is_symbolic

CHANNELS_LAST: Final = ("channel_scale", "batch_norm_activation")  # fusions whose x is (n, spatial..., channels)
WITHOUT_PARAMETERS: Final = tuple(a.name for a in ACTIVATIONS.values() if not a.parameters)


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    known = WITHOUT_PARAMETERS if node.fusion == "gated_activation" else tuple(ACTIVATIONS)
    refusal = unsupported_dtype(node, input_dtypes) or unsupported_choice(node, "activation", known, "none")
    if refusal is None and node.fusion in CHANNELS_LAST:
        refusal = unsupported_choice(node, "layout", ("nhwc",), "nchw")
    if refusal is None and node.fusion == "channel_scale":
        refusal = unsupported_choice(node, "residual_position", ("before",), "before")
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion == "channel_scale":
        return [channel_scale_plan(node, inputs, device)]
    if node.fusion == "batch_norm_activation":
        return batch_norm_plans(node, inputs, device)
    if node.fusion == "gated_activation":
        return [_gated_plan(node, inputs, device)]
    x = required_spec(node, inputs, "x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    defines: Defines = {"X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype]}
    read: list[Argument] = [operand_pointer(node, "x")]
    if node.fusion == "bias_activation":
        bias = required_spec(node, inputs, "bias")
        check_element_count(node, "bias", bias, x.shape[-1])
        defines |= {"BIAS_T": STORAGE[bias.dtype], "ROW": element_count(bias)}
        read.append(operand_pointer(node, "bias"))
    arguments = [*read, Pointer("output", 0), *activation_arguments(node)]
    return [element_plan(node, inputs, y, defines, arguments, device)]


def _gated_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan of gated_activation; gate and up can each be a slice of the rows of an operand."""
    operands = {name: required_spec(node, inputs, name) for name in ("gate", "up")}
    shapes = {name: _sliced_shape(node, name, tensor) for name, tensor in operands.items()}
    if shapes["gate"] != shapes["up"]:
        raise ValueError(
            f"gated_activation: up has shape {list(shapes['up'])}; required {list(shapes['gate'])}, as gate"
        )
    y = TensorSpec(shapes["gate"], node.output_dtypes[0], operands["gate"].aligned)
    row = math.prod(y.shape[-1:])
    if is_symbolic(row) and not any(f"{name}_offset" in node.attributes for name in operands):
        row = 1  # without slices, row boundaries do not matter
    defines: Defines = {"Y_T": STORAGE[y.dtype], "ROW": row}
    multiples: list[int] = []  # the vector width divides these numbers, so that no vector crosses a slice boundary
    for name, tensor in operands.items():
        operand_row, offset = _operand_row(node, name, tensor, row)
        define = name.upper()
        defines |= {f"{define}_T": STORAGE[tensor.dtype], f"{define}_ROW": operand_row, f"{define}_OFFSET": offset}
        if operand_row != row:
            multiples += [row, operand_row, offset]
    arguments = [operand_pointer(node, "gate"), operand_pointer(node, "up"), Pointer("output", 0)]
    return element_plan(node, inputs, y, defines, arguments, device, multiples)


def _sliced_shape(node: FusedNode, name: str, tensor: TensorSpec) -> tuple[int, ...]:
    """Return the shape of an operand's slice; its whole shape if the node has no offset for it."""
    if f"{name}_offset" not in node.attributes:
        return tensor.shape
    offset, size = node.integer(f"{name}_offset"), node.integer("d")
    if not 0 <= offset <= tensor.shape[-1] - size:
        raise ValueError(
            f"gated_activation: {name} has shape {list(tensor.shape)}; required rows of {offset} + {size} elements"
        )
    return (*tensor.shape[:-1], size)


def _operand_row(node: FusedNode, name: str, tensor: TensorSpec, row: int) -> tuple[int, int]:
    """Return the numbers of elements in a row of the operand, and in that row before the slice."""
    if f"{name}_offset" not in node.attributes:
        return row, 0
    return tensor.shape[-1], node.integer(f"{name}_offset")
