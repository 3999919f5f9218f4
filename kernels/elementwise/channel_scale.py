"""The plan of channel_scale, which multiplies the channels of each image by a gate: channel_scale.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxfuse.kernels.elementwise.elements import activation_arguments, element_plan
from onnxfuse.kernels.tensors import STORAGE, Defines, operand_pointer, required_spec
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec


def channel_scale_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan for x (n, *spatial, channels) and gate (n, 1, ..., channels).

    Raises ValueError if the gate has another shape.
    """
    x, gate = (required_spec(node, inputs, name) for name in ("x", "gate"))
    expected = (*x.shape[:1], *(1,) * (len(x.shape) - 2), *x.shape[-1:])
    if gate.shape != expected or len(x.shape) < 2:
        raise ValueError(f"channel_scale: gate has shape {list(gate.shape)}; required {list(expected)}, by x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    channels, image = x.shape[-1], math.prod(x.shape[1:])
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "GATE_T": STORAGE[gate.dtype], "Y_T": STORAGE[y.dtype], "CHANNELS": channels,
    }  # fmt: skip
    pointers = (operand_pointer(node, "x"), operand_pointer(node, "gate"), Pointer("output", 0))
    arguments = [*pointers, *activation_arguments(node), Scalar(image, "int64")]
    return element_plan(node, inputs, y, defines, arguments, device, (channels,))
