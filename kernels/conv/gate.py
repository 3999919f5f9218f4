"""Convolutions of x * gate: the gate of a squeeze-and-excite block has one number per image and channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.concat_plans import chained
from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.conv.operands import conv_of
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.elementwise.channel_scale import channel_scale_plan
from onnxfuse.kernels.epilogue_node import Planner
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ITEM_BYTES
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, TensorSpec
from onnxfuse.runtime.symint import estimate, for_later_plans

GATE: Final = "gate"
MAX_EACH: Final = 4  # maximum number of plans of one launch, and of plans of two launches
# Times in microseconds on an H200, fitted to 18 blocks of EfficientNet-B0 and MobileNetV3 with 32 images. SCALE_US is
# the fixed time of a channel_scale, SCALE_BYTE_US its time per byte of x. GATE_FLOP_US is the additional time per
# operation of a product by mma.sync with a gate, relative to the fastest kernel without one. For wgmma, clock cycles
# are estimated with and without a gate: 13 products of 224 to 1152 channels took at most 1.5 us longer with a gate in
# the kernel, and 2.9 to 11 us longer with a channel_scale before it.
SCALE_US: Final = 1.3
SCALE_BYTE_US: Final = 2 / 4.5e6
GATE_FLOP_US: Final = 7e-9
CYCLES_OF_US: Final = 1755  # clock cycles of an H200 per microsecond
FEW_COLUMNS: Final = 40  # with at most this many columns of y, memory bandwidth is the limit, and a gate costs no time


def plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device, convolution: Planner) -> list[Plan]:
    """Return the plans of a pointwise convolution with a gate: plans of one launch and plans of two launches.

    Of two launches, the first is a channel_scale, which computes x * gate, and the second is the convolution.
    `convolution` plans the convolution without a gate.  Raises ValueError if shapes do not fit.
    """
    conv, y = conv_of(node, inputs, device)
    if not conv.pixels * conv.m:
        return [Plan((y,), ())]
    ways = matrix.implementations(conv, device)[:MAX_EACH]
    one = [Plan((y,), each.steps, each.scratch) for each in ways]
    is_first = bool(ways) and _is_expected_faster(conv, ways[0], device)
    with for_later_plans(conv.pixels if is_first else 0):
        two = in_two_steps(node, inputs, device, convolution)
    return [*one, *two] if is_first else [*two, *one]


def _is_expected_faster(conv: Conv, in_front: Implementation, device: Device) -> bool:
    """Return whether `in_front`, a kernel that multiplies x by the gate itself, is expected to beat two launches."""
    step, gemm = in_front.steps[-1], matrix.as_gemm(conv)
    flops, stored = 2 * conv.c * conv.m, conv.c * ITEM_BYTES[conv.dtype]  # operations per pixel, bytes per pixel
    if conv.m <= FEW_COLUMNS:
        longer = 0.0
    elif isinstance(step, Launch) and step.kernel.source == "gemm_mma":
        longer = estimate(conv.pixels) * flops * GATE_FLOP_US
    else:
        without = hopper.least_cycles(replace(gemm, gate=None), device)
        longer = (hopper.least_cycles(gemm, device) - without) / CYCLES_OF_US
    return bool(longer < SCALE_US + estimate(conv.pixels) * stored * SCALE_BYTE_US)


def in_two_steps(node: FusedNode, inputs: Sequence[TensorSpec], device: Device, convolution: Planner) -> list[Plan]:
    """Return plans of two launches: the first writes x * gate to scratch memory, and the second convolves it."""
    names = node.operands
    x, gate = names.index("x"), names.index(GATE)
    scale = FusedNode("channel_scale", node.name, ("x", GATE), {"activation": "none", "layout": "nhwc"},
                      (inputs[x].dtype,))  # fmt: skip
    first = channel_scale_plan(scale, [inputs[x], inputs[gate]], device)
    kept = [i for i in range(len(names)) if i != gate]
    specs = [replace(inputs[i], aligned=True) if i == x else inputs[i] for i in kept]
    behind = replace(node, operands=tuple(names[i] for i in kept))
    read = [None if i == x else i for i in kept]
    return [chained(first, each, (x, gate), read) for each in convolution(behind, specs, device)[:MAX_EACH]]
