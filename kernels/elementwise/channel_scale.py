"""The plan of channel_scale, which multiplies the channels of each image by a gate: channel_scale.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxfuse.kernels.elementwise.elements import activation_arguments, element_plan
from onnxfuse.kernels.tensors import STORAGE, Defines, operand_pointer, operand_spec, required_spec
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec


def channel_scale_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan for x (n, *spatial, channels), gate (n, 1, ..., channels) and a residual of the shape of x.

    Raises ValueError if the gate or the residual has another shape.
    """
    x, gate = (required_spec(node, inputs, name) for name in ("x", "gate"))
    expected = (*x.shape[:1], *(1,) * (len(x.shape) - 2), *x.shape[-1:])
    if gate.shape != expected or len(x.shape) < 2:
        raise ValueError(f"channel_scale: gate has shape {list(gate.shape)}; required {list(expected)}, by x")
    residual = operand_spec(node, inputs, "residual")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"channel_scale: residual has shape {list(residual.shape)}; required {list(x.shape)}, as x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    channels, image = x.shape[-1], math.prod(x.shape[1:])
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "GATE_T": STORAGE[gate.dtype], "Y_T": STORAGE[y.dtype], "CHANNELS": channels,
        "HAS_RESIDUAL": int(residual is not None), "RESIDUAL_T": STORAGE[(residual or x).dtype],
    }  # fmt: skip
    pointers = [operand_pointer(node, name) for name in ("x", "gate", "residual")]
    arguments = [*pointers, Pointer("output", 0), *activation_arguments(node), Scalar(image, "int64")]
    return element_plan(node, inputs, y, defines, arguments, device, (channels,))
