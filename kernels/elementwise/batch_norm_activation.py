"""The plan of batch_norm_activation for channels-last tensors: batch_norm_activation.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
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
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate, is_symbolic

LANES: Final = 32  # largest number of threads per pixel
THREADS: Final = 256  # largest number of threads per block
MAX_PIXELS: Final = 8  # largest number of pixels per thread
BUSY_THREADS: Final = 1024  # threads per multiprocessor below which threads get fewer pixels
WEIGHTS: Final = ("scale", "bias", "mean", "var")


def batch_norm_plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for x (n, *spatial, channels) and four vectors of `channels` elements.

    The operands before the vectors are x, or several tensors whose channels make up those of x.

    Raises ValueError if a vector has another number of elements, or if axes of these tensors before the last differ.
    """
    count = len(node.operands) - len(WEIGHTS)
    parts, weights = inputs[:count], [required_spec(node, inputs, name) for name in WEIGHTS]
    x, sizes = parts[0], [part.shape[-1] for part in parts]
    for name, part in zip(node.operands, parts, strict=False):
        if part.shape[:-1] != x.shape[:-1]:
            required = [*x.shape[:-1], "channels"]
            raise ValueError(f"{node.fusion}: {name} has shape {list(part.shape)}; required {required}")
    channels, pixels = element_count(weights[0]), math.prod(x.shape[:-1])
    for name, weight in zip(WEIGHTS, weights, strict=True):
        check_element_count(node, name, weight, sum(sizes))
    y = TensorSpec((*x.shape[:-1], channels), node.output_dtypes[0], all(part.aligned for part in parts))
    if not pixels * channels:
        return [Plan((y,), ())]
    width = vector_width([*parts, y], *sizes, weights=weights)
    vectors = channels // width
    lanes_c = math.ceil(vectors / math.ceil(vectors / LANES))
    lanes_p, blocks_c = THREADS // lanes_c, math.ceil(vectors / lanes_c)
    each = MAX_PIXELS
    step = 4 if is_symbolic(pixels) else 2  # symbolic sizes get fewer choices: each is a kernel to compile
    while each > 1 and estimate(pixels * vectors) < each * BUSY_THREADS * device.multiprocessors:
        each = max(1, each // step)
    blocks = blocks_c * math.ceil(pixels / (lanes_p * each))
    pixel_bytes = channels * sum(ITEM_BYTES[tensor.dtype] for tensor in (x, y))
    streamed = is_streamed([*parts, y], f"pixels > {STREAMED_FROM_BYTES // pixel_bytes}")
    begins = accumulate(sizes[:-1], initial=0)
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype], "STREAMED": streamed, "WIDTH": width,
        **{f"{name.upper()}_T": STORAGE[weight.dtype] for name, weight in zip(WEIGHTS, weights, strict=True)},
        "CHANNELS": channels, "PARTS": count, "BEGINS": ",".join(map(str, begins)),
        "LANES_C": lanes_c, "LANES_P": lanes_p, "PIXELS": each,
        "WEIGHTS_CONSTANT": all_constant(weights), "RELEASE": is_released(blocks, device),
        "ACTIVATION": node.text("activation", "none"), "PRECISE": int(y.dtype == "float32"),
    }  # fmt: skip
    x_parts = Struct(tuple(Pointer("input", i) for i in range(count)))
    pointers = (x_parts, *(operand_pointer(node, name) for name in WEIGHTS), Pointer("output", 0))
    numbers = (Scalar(node.number("epsilon", 1e-5), "float32"), *activation_arguments(node), Scalar(pixels, "int64"))
    kernel = Kernel("batch_norm_activation", "batch_norm_activation", defines)
    block = (lanes_c * lanes_p, 1, 1)
    return [Plan((y,), (Launch(kernel, (blocks, 1, 1), block, (*pointers, *numbers), pdl=device.has_pdl),))]
