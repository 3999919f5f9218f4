"""The plans of global_average_pool and global_max_pool: the host side of global_pool.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.image_quantizers import MAX_WIDTH, is_quantized, quantizer_pointers
from onnxfuse.kernels.tensors import (
    INTEGERS,
    ITEM_BYTES,
    STORAGE,
    Defines,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import estimate, is_symbolic, maximum

CLUSTER_ARCH: Final = 90  # the lowest compute capability with thread block clusters
LINE_BYTES: Final = 128  # maximum bytes of a pixel that one block reads
MIN_THREADS, MAX_THREADS = 128, 512  # threads per block
PIXELS_PER_THREAD: Final = 4  # block size grows while each thread has more pixels than this
DYNAMIC_THREADS: Final = 256  # threads per block, if the number of pixels is dynamic
BUSY_THREADS: Final = 1024  # threads per multiprocessor below which several blocks share an image
MAX_CLUSTER: Final = 8
MAX_PARTS: Final = 32  # blocks per image, if another launch merges their results
LOADS: Final = 4


@dataclass(frozen=True)
class GlobalTiling:
    """The threads of a block along channels and pixels, and the number of blocks that share an image."""

    lanes_c: int
    lanes_p: int
    parts: int = 1


def global_tiling(
    images: int, pixels: int, vectors: int, vector_bytes: int, max_parts: int, device: Device
) -> GlobalTiling:
    """Return how threads divide `images` images of `pixels` pixels, each with `vectors` vectors of channels."""
    lanes_c = min(32, LINE_BYTES // vector_bytes, 1 << (vectors - 1).bit_length())
    columns, parts = images * math.ceil(vectors / lanes_c), 1
    while True:
        lanes_p = (DYNAMIC_THREADS if is_symbolic(pixels) else MIN_THREADS) // lanes_c
        while (
            not is_symbolic(pixels) and lanes_p * lanes_c < MAX_THREADS and lanes_p * PIXELS_PER_THREAD * parts < pixels
        ):
            lanes_p *= 2
        threads = columns * parts * lanes_c * lanes_p
        enough = parts >= max_parts or estimate(threads) >= BUSY_THREADS * device.multiprocessors
        if enough or estimate(pixels) <= 2 * parts * lanes_p * PIXELS_PER_THREAD:
            return GlobalTiling(lanes_c, lanes_p, parts)
        parts *= 2


def global_plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for x (n, *spatial, channels); y is (n, 1, ..., channels), or (n, channels) with keepdims 0.

    For images without pixels the mean is 0 and the maximum -inf, as in onnxruntime's reductions.  Raises ValueError if
    x has no spatial axis.
    """
    x = required_spec(node, inputs, "x")
    if len(x.shape) < 3:
        raise ValueError(f"{node.fusion}: x has shape {list(x.shape)}; required axes between n and channels")
    images, channels, pixels = x.shape[0], x.shape[-1], math.prod(x.shape[1:-1])
    ones = (1,) * (len(x.shape) - 2) if node.integer("keepdims", 1) else ()
    y = TensorSpec((images, *ones, channels), node.output_dtypes[0], x.aligned)
    if not images * channels:
        return [Plan((y,), ())]
    share = 1 / maximum(pixels, 1)
    source, target = operand_pointer(node, "x"), (*quantizer_pointers(node), Pointer("output", 0))
    width = min(vector_width([x], channels), MAX_WIDTH)
    vectors, vector_bytes = channels // width, width * ITEM_BYTES[x.dtype]
    clusters = device.arch >= CLUSTER_ARCH
    tiling = global_tiling(images, pixels, vectors, vector_bytes, MAX_CLUSTER if clusters else MAX_PARTS, device)
    stored = {**STORAGE, **INTEGERS}
    of_y: Defines = {"Y_T": stored[y.dtype], **({"QUANTIZED": 1, "T": stored[y.dtype]} if is_quantized(node) else {})}
    defines: Defines = {"X_T": stored[x.dtype], "CHANNELS": channels, "WIDTH": width}
    if tiling.parts == 1 or clusters:
        step = _launch(
            node, tiling, images, pixels, share, {**defines, **of_y}, (source, *target), tiling.parts, device
        )
        return [Plan((y,), (step,))]
    parts, buffer = TensorSpec((images, tiling.parts, channels), "float32"), Pointer("scratch", 0)
    width = vector_width([parts], channels)
    rest = global_tiling(images, tiling.parts, channels // width, width * 4, 1, device)
    second: Defines = {"X_T": "f32", "CHANNELS": channels, "WIDTH": width, **of_y}
    first = _launch(node, tiling, images, pixels, 1.0, {**defines, "Y_T": "f32"}, (source, buffer), 1, device)
    last = _launch(node, rest, images, tiling.parts, share, second, (buffer, *target), 1, device)
    return [Plan((y,), (first, last), (math.prod(parts.shape) * 4,))]


def _launch(
    node: FusedNode,
    tiling: GlobalTiling,
    images: int,
    pixels: int,
    factor: float,
    defines: Defines,
    pointers: Sequence[Argument],
    cluster: int,
    device: Device,
) -> Launch:
    """Return one launch of the pool; global_average_pool multiplies its sums by `factor`."""
    width = int(defines["WIDTH"])
    constants = {"LANES_C": tiling.lanes_c, "LANES_P": tiling.lanes_p, "LOADS": LOADS, "CLUSTER": cluster}
    kernel = Kernel(node.fusion, node.fusion, {**defines, **constants})
    threads = tiling.lanes_c * tiling.lanes_p
    blocks = images * math.ceil(int(defines["CHANNELS"]) // width / tiling.lanes_c) * tiling.parts
    shared = (threads // 32 + cluster) * tiling.lanes_c * width * 4
    factors = [Scalar(factor, "float32")] if node.fusion == "global_average_pool" else []
    numbers = (*factors, Scalar(pixels, "int32"), Scalar(tiling.parts, "int32"))
    return Launch(kernel, (blocks, 1, 1), (threads, 1, 1), (*pointers, *numbers), shared, cluster, pdl=device.has_pdl)
