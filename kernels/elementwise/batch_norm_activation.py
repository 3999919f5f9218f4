"""The plan of batch_norm_activation for channels-last tensors: batch_norm_activation.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.elementwise.elements import activation_arguments
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    all_constant,
    check_element_count,
    element_count,
    is_released,
    is_streamed,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import estimate, is_symbolic

LANES: Final = 32  # largest number of threads per pixel
THREADS: Final = 256  # largest number of threads per block
MAX_PIXELS: Final = 8  # largest number of pixels per thread
BUSY_THREADS: Final = 1024  # threads per multiprocessor below which threads get fewer pixels
WEIGHTS: Final = ("scale", "bias", "mean", "var")


def batch_norm_plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for x (n, *spatial, channels) and four vectors of `channels` elements.

    Raises ValueError if a vector has another number of elements.
    """
    x, *weights = (required_spec(node, inputs, name) for name in ("x", *WEIGHTS))
    channels, pixels = element_count(weights[0]), math.prod(x.shape[:-1])
    for name, weight in zip(WEIGHTS, weights, strict=True):
        check_element_count(node, name, weight, x.shape[-1])
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    if not pixels * channels:
        return [Plan((y,), ())]
    width = vector_width([x, y], channels, weights=weights)
    vectors = channels // width
    lanes_c = math.ceil(vectors / math.ceil(vectors / LANES))
    lanes_p, blocks_c = THREADS // lanes_c, math.ceil(vectors / lanes_c)
    each = MAX_PIXELS
    step = 4 if is_symbolic(pixels) else 2  # symbolic sizes get fewer choices: each is a kernel to compile
    while each > 1 and estimate(pixels * vectors) < each * BUSY_THREADS * device.multiprocessors:
        each = max(1, each // step)
    blocks = blocks_c * math.ceil(pixels / (lanes_p * each))
    pixel_bytes = channels * sum(ITEM_BYTES[tensor.dtype] for tensor in (x, y))
    streamed = is_streamed([x, y], f"pixels > {STREAMED_FROM_BYTES // pixel_bytes}")
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype], "STREAMED": streamed, "WIDTH": width,
        **{f"{name.upper()}_T": STORAGE[weight.dtype] for name, weight in zip(WEIGHTS, weights, strict=True)},
        "CHANNELS": channels, "LANES_C": lanes_c, "LANES_P": lanes_p, "PIXELS": each,
        "WEIGHTS_CONSTANT": all_constant(weights), "RELEASE": is_released(blocks, device),
        "ACTIVATION": node.text("activation", "none"), "PRECISE": int(y.dtype == "float32"),
    }  # fmt: skip
    pointers = (*(operand_pointer(node, name) for name in ("x", *WEIGHTS)), Pointer("output", 0))
    numbers = (Scalar(node.number("epsilon", 1e-5), "float32"), *activation_arguments(node), Scalar(pixels, "int64"))
    kernel = Kernel("batch_norm_activation", "batch_norm_activation", defines)
    block = (lanes_c * lanes_p, 1, 1)
    return [Plan((y,), (Launch(kernel, (blocks, 1, 1), block, (*pointers, *numbers), pdl=device.has_pdl),))]
