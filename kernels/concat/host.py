"""The plans of concat and split of channels-last tensors along their channels: concat.cu and split.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    element_count,
    int64,
    is_released,
    is_streamed,
    required_spec,
    unsupported_choice,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate

MAX_PARTS: Final = 32  # parts per node: a thread compares its channel with the first channel of each part
THREADS: Final = 128  # threads per block
RESIDENT_THREADS: Final = 2048  # threads that fit on a multiprocessor
# Choices of vectors per thread: the smallest for which all threads are resident at once is taken, or else the largest.
CHUNKS: Final = (1, 2, 4)


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    refusal = unsupported_dtype(node, input_dtypes) or unsupported_choice(node, "layout", ("nhwc",), "nchw")
    if refusal is not None:
        return refusal
    if len(dtypes := {*input_dtypes, *node.output_dtypes}) > 1:
        return f"{node.fusion}: its tensors are {', '.join(sorted(dtypes))}; the kernel takes one dtype"
    if node.attributes.get("axis") != -1:
        return f"{node.fusion}: axis is {node.attributes.get('axis')}; the kernel has -1"
    parts = len(node.operands) if node.fusion == "concat" else len(node.output_dtypes)
    if parts > MAX_PARTS:
        return f"{node.fusion}: {parts} tensors are the parts of one; the kernel takes {MAX_PARTS}"
    return None


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan of a concat or split, in a list.

    concat: each operand is (*pixels, its channels), and y is (*pixels, all channels).  split: x is (*pixels, channels),
    and the attribute `split` has the channels of each output.

    Raises ValueError if axes other than the last differ, or if `split` does not add up to the channels of x.
    """
    if node.fusion == "concat":
        y = _joined(node, inputs)
        parts = Struct(tuple(Pointer("input", i) for i in range(len(inputs))))
        return [_plan(node, inputs, y, (y,), (parts, Pointer("output", 0)), device)]
    x = required_spec(node, inputs, "x")
    outputs = _divided(node, x)
    parts = Struct(tuple(Pointer("output", i) for i in range(len(outputs))))
    return [_plan(node, outputs, x, outputs, (Pointer("input", 0), parts), device)]


def _joined(node: FusedNode, inputs: Sequence[TensorSpec]) -> TensorSpec:
    """Return the spec of y.  Raises ValueError if the pixel axes of inputs differ."""
    pixels = inputs[0].shape[:-1]
    for name, tensor in zip(node.operands, inputs, strict=True):
        if not tensor.shape or tensor.shape[:-1] != pixels:
            required = f"{[*pixels, 'channels']}, by {node.operands[0]}"
            raise ValueError(f"concat: {name} has shape {list(tensor.shape)}; required {required}")
    channels = sum(tensor.shape[-1] for tensor in inputs)
    return TensorSpec((*pixels, channels), node.output_dtypes[0], all(tensor.aligned for tensor in inputs))


def _divided(node: FusedNode, x: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return the specs of the outputs.  Raises ValueError if their channels do not add up to those of x."""
    sizes = node.attributes.get("split")
    count = len(node.output_dtypes)
    if not isinstance(sizes, list | tuple) or len(sizes) != count or not x.shape or sum(sizes) != x.shape[-1]:
        raise ValueError(
            f"split: x has shape {list(x.shape)} and split is {sizes}; required {count} sizes of its channels"
        )
    return tuple(
        TensorSpec((*x.shape[:-1], int(size)), dtype, x.aligned)
        for size, dtype in zip(sizes, node.output_dtypes, strict=True)
    )


def _plan(
    node: FusedNode, parts: Sequence[TensorSpec], whole: TensorSpec, outputs: tuple[TensorSpec, ...],
    arguments: Sequence[Argument], device: Device,
) -> Plan:  # fmt: skip
    """Return the plan that copies between `parts` and `whole`, which has the channels of all parts in order."""
    count = element_count(whole)
    if not count:
        return Plan(outputs, ())
    sizes, pixels = [part.shape[-1] for part in parts], math.prod(whole.shape[:-1])
    width = vector_width([*parts, whole], *sizes)
    row = whole.shape[-1] // width
    resident = RESIDENT_THREADS * device.multiprocessors
    chunks = next((each for each in CHUNKS if estimate(math.ceil(pixels / each) * row) <= resident), CHUNKS[-1])
    blocks = math.ceil(math.ceil(pixels / chunks) * row / THREADS)
    pixel_bytes = 2 * whole.shape[-1] * ITEM_BYTES[whole.dtype]
    streamed = is_streamed([*parts, whole], f"pixels > {STREAMED_FROM_BYTES // pixel_bytes}")
    defines: Defines = {
        "T": STORAGE[whole.dtype], "CHANNELS": whole.shape[-1], "PARTS": len(parts), "WIDTH": width,
        "BEGINS": ",".join(map(str, accumulate(sizes[:-1], initial=0))), "THREADS": THREADS, "CHUNKS": chunks,
        "STREAMED": streamed, "INDEX": "u32" if count < 2**31 else "u64",
        "RELEASE": is_released(blocks, device),
    }  # fmt: skip
    kernel = Kernel(node.fusion, node.fusion, defines)
    every = (*arguments, *int64(pixels))
    return Plan(outputs, (Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), every, pdl=device.has_pdl),))
