"""The plans of depth_to_space and space_to_depth of channels-last tensors: pixel_blocks.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    is_released,
    is_streamed,
    operand_pointer,
    required_spec,
    unsupported_choice,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

# The order of the channels that hold blocks of pixels: by position in the block and then by channel, or the reverse.
MODES: Final = ("DCR", "CRD")
MAX_BLOCK: Final = 8
MAX_HELD: Final = 64  # elements per thread
THREADS: Final = 128  # threads per block


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    refusal = (
        unsupported_dtype(node, input_dtypes)
        or unsupported_choice(node, "layout", ("nhwc",), "nchw")
        or unsupported_choice(node, "mode", MODES, "DCR")
    )
    if refusal is not None:
        return refusal
    if len({*input_dtypes, *node.output_dtypes}) > 1:
        return f"{node.fusion}: x is {input_dtypes[0]} and y is {node.output_dtypes[0]}; the kernel takes one dtype"
    if not 1 <= node.integer("blocksize", 0) <= MAX_BLOCK:
        return f"{node.fusion}: blocksize is {node.integer('blocksize', 0)}; the kernel takes 1 to {MAX_BLOCK}"
    return None


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for x (n, height, width, channels).

    Raises ValueError if x has another rank, or if the block size does not divide its axes.
    """
    x, block = required_spec(node, inputs, "x"), node.integer("blocksize")
    to_space, pixels = node.fusion == "depth_to_space", block * block
    divided = x.shape[-1:] if to_space else x.shape[1:3]
    divisor = pixels if to_space else block
    if len(x.shape) != 4 or any(size % divisor for size in divided):
        raise ValueError(
            f"{node.fusion}: x has shape {list(x.shape)}; required four axes, and multiples of {divisor} "
            f"{'channels' if to_space else 'rows and columns'}"
        )
    n, height, width, channels = x.shape
    if to_space:
        channels //= pixels
        y_shape = (n, height * block, width * block, channels)
    else:
        height, width = height // block, width // block
        y_shape = (n, height, width, channels * pixels)
    y = TensorSpec(y_shape, node.output_dtypes[0], x.aligned)
    if not math.prod(y_shape):
        return [Plan((y,), ())]
    by_channel = to_space and node.text("mode", "DCR") == "CRD"
    vector = vector_width([x, y], channels)
    while vector > 1 and vector * pixels > MAX_HELD:
        vector //= 2
    threads = n * height * width * (channels // vector)
    blocks = math.ceil(threads / THREADS)
    if blocks > 2**31 - 1:
        raise ValueError(f"{node.fusion}: y has shape {list(y_shape)}, which is more than one launch can compute")
    thread_bytes = 2 * vector * pixels * ITEM_BYTES[x.dtype]
    streamed = is_streamed([x, y], f"count > {STREAMED_FROM_BYTES // thread_bytes}")
    defines: Defines = {
        "T": STORAGE[x.dtype], "BLOCK": block, "CHANNELS": channels, "WIDTH": vector, "TO_SPACE": int(to_space),
        "BY_CHANNEL": int(by_channel), "DEEP_WIDTH": vector_width([x, y], vector * pixels) if by_channel else vector,
        "THREADS": THREADS, "STREAMED": streamed, "RELEASE": is_released(blocks, device),
    }  # fmt: skip
    arguments = (operand_pointer(node, "x"), Pointer("output", 0), Scalar(width, "int32"), Scalar(threads, "int64"))
    launch = Launch(
        Kernel("pixel_blocks", "pixel_blocks", defines), (blocks, 1, 1), (THREADS, 1, 1), arguments,
        pdl=device.has_pdl,
    )  # fmt: skip
    return [Plan((y,), (launch,))]
