"""The plan of resize of channels-last tensors: resize.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from onnxfuse.kernels.image_quantizers import MAX_WIDTH, is_quantized, quantizer_pointers, unsupported_dtypes
from onnxfuse.kernels.tensors import (
    INTEGERS,
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    float32,
    int32,
    is_streamed,
    macro,
    operand_pointer,
    operand_spec,
    required_spec,
    unsupported_choice,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate, is_symbolic, maximum

LIKE: Final = "like"  # an operand whose shape gives the sizes of y, if nodes of the graph compute these sizes
MODES: Final = ("nearest", "linear")
COORDINATES: Final = ("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
NEAREST: Final = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
DEFAULTS: Final = {"antialias": 0, "exclude_outside": 0, "keep_aspect_ratio_policy": "stretch", "axes": []}
RANKS: Final = (3, 4, 5)  # supported ranks of x
MAX_THREADS: Final = 256  # threads per block
DYNAMIC_THREADS: Final = (64, 128)  # choices of threads per block, if rows of y are dynamic
BLOCKS: Final = "static_cast<u64>(gridDim.x) * gridDim.y"  # number of blocks, as an expression in the kernel
SPLIT: Final = 2.0**29 + 1  # factor of Dekker's splitting, which keeps the upper 24 of 53 bits
MAX_ROW_BLOCKS: Final = 65535  # largest number of blocks along y of a grid


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    moved = INTEGERS if node.text("mode", "nearest") == "nearest" else ()
    refusal = (
        unsupported_dtypes(node, input_dtypes, (*STORAGE, *moved))
        or unsupported_choice(node, "layout", ("nhwc",), "nchw")
        or unsupported_choice(node, "mode", MODES, "nearest")
        or unsupported_choice(node, "coordinate_transformation_mode", COORDINATES, "half_pixel")
        or unsupported_choice(node, "nearest_mode", NEAREST, "round_prefer_floor")
    )
    if refusal is not None:
        return refusal
    for name, default in DEFAULTS.items():
        if node.attributes.get(name, default) != default:
            return f"resize: {name} is {node.attributes[name]}; the kernel has {default}"
    if LIKE in node.operands:
        return None
    given = node.attributes.get("scales") or node.attributes.get("sizes")
    if not isinstance(given, list | tuple):
        return f"resize: it has neither scales nor sizes nor an operand {LIKE}; the kernel needs one of them"
    if len(given) not in RANKS:
        return f"resize: x has {len(given)} axes; the kernel takes {' or '.join(map(str, RANKS))}"
    scales = node.attributes.get("scales")
    if isinstance(scales, list | tuple) and (scales[0] != 1 or scales[-1] != 1):
        return f"resize: scales are {list(scales)}; the kernel leaves the first and last axis as they are"
    return None


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for x (n, *spatial, channels); only the shape of the operand `like`, (0, *spatial), is used.

    Raises ValueError if scales, sizes or `like` have the wrong rank, or change n or channels.
    """
    x, like = required_spec(node, inputs, "x"), operand_spec(node, inputs, LIKE)
    scales, y_shape = _resized(node, x.shape) if like is None else _resized_as(like.shape, x.shape)
    if (y_shape[0], y_shape[-1]) != (x.shape[0], x.shape[-1]):
        raise ValueError(f"resize: x has shape {list(x.shape)} and y {list(y_shape)}; required the same n and channels")
    y = TensorSpec(y_shape, node.output_dtypes[0], x.aligned)
    if not math.prod(y_shape):
        return [Plan((y,), ())]
    if not math.prod(x.shape):
        raise ValueError(f"resize: x has shape {list(x.shape)}; required elements")
    channels, width = x.shape[-1], vector_width([x, y], x.shape[-1])
    if is_quantized(node):
        width = min(width, MAX_WIDTH)
    sizes, y_sizes, scaled = ((1, 1, *of[1:-1])[-3:] for of in (x.shape, y_shape, scales))
    y_depth, y_height, y_columns = y_sizes
    vectors = y_columns * (channels // width)
    threads = _threads(vectors)
    across, rows = -(-vectors // threads), y_shape[0] * y_depth * y_height
    if across > MAX_ROW_BLOCKS or rows > 2**31 - 1:
        raise ValueError(f"resize: y has shape {list(y_shape)}, which is more than one launch can compute")
    linear = node.text("mode", "nearest") == "linear"
    few_blocks, block_bytes = 2 * device.multiprocessors, 2 * threads * width * ITEM_BYTES[x.dtype]
    defines: Defines = {
        "T": {**STORAGE, **INTEGERS}[x.dtype], "CHANNELS": channels, "WIDTH": width, "THREADS": threads,
        "LINEAR": int(linear), "HAS_DEPTH": int(len(x.shape) == 5),
        "COORDINATE": node.text("coordinate_transformation_mode", "half_pixel"),
        "NEAREST": node.text("nearest_mode", "round_prefer_floor"),
        "STREAMED": is_streamed([x, y], f"{BLOCKS} > {STREAMED_FROM_BYTES // block_bytes}"),
        "RELEASE": macro(lambda: across * rows <= few_blocks, f"{BLOCKS} <= {few_blocks}", across * rows),
    }  # fmt: skip
    if is_quantized(node):
        defines["QUANTIZED"] = 1
    axes = zip(sizes, y_sizes, scaled, strict=True)
    structs = (Struct((*int32(size, y_size), *float32(scale))) for size, y_size, scale in axes)
    arguments = (operand_pointer(node, "x"), *quantizer_pointers(node), Pointer("output", 0), *structs)
    kernel = Kernel("resize", "resize", defines)
    launch = Launch(kernel, (rows, across, 1), (threads, 1, 1), arguments, pdl=device.has_pdl)
    return [Plan((y,), (launch,))]


def _threads(vectors: int) -> int:
    """Return the threads per block for rows of `vectors` vectors; for dynamic rows, one of DYNAMIC_THREADS."""
    if is_symbolic(vectors):
        return min(DYNAMIC_THREADS) if estimate(vectors) <= min(DYNAMIC_THREADS) else max(DYNAMIC_THREADS)
    return min(MAX_THREADS, -(-vectors // 32) * 32)


def _scaled(size: int, scale: float) -> int:
    """Return floor(size * scale), with the product in float32 as onnxruntime computes it.

    Expressions of dynamic sizes (below 2^24) use float64, so the exact product is rounded to the 24 bits of float32 by
    Dekker's splitting.
    """
    if not is_symbolic(size):
        return int(np.float32(scale) * np.float32(size))
    if scale.is_integer():
        return size * int(scale)
    product = size * scale
    shifted = product * SPLIT
    rounded: int = math.floor(shifted - (shifted - product))
    return rounded


def _resized(node: FusedNode, shape: Sequence[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the scale of each axis, and the shape of y, computed in float32 as onnxruntime does."""
    scales, sizes = node.attributes.get("scales"), node.attributes.get("sizes")
    given = scales or sizes
    if not isinstance(given, list | tuple) or len(given) != len(shape):
        raise ValueError(
            f"resize: x has shape {list(shape)}, and the scales or sizes are {given}; required one an axis"
        )
    if scales:
        exact = [float(np.float32(each)) for each in given]
        return tuple(exact), tuple(_scaled(size, scale) for scale, size in zip(exact, shape, strict=True))
    n, *spatial, channels = (int(each) for each in given)
    y_shape = (n or shape[0], *spatial, channels or shape[-1])  # 0: the model does not give the size, which is x's
    return tuple(_ratio(to, size) for to, size in zip(y_shape, shape, strict=True)), y_shape


def _resized_as(like: Sequence[int], shape: Sequence[int]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the scale of each axis, and the shape of y, given the shape of an operand with the spatial sizes of y."""
    if len(like) != len(shape) - 1 or len(shape) not in RANKS:
        raise ValueError(f"resize: x has shape {list(shape)} and {LIKE} {list(like)}; required one axis less, for n")
    y_shape = (shape[0], *like[1:], shape[-1])
    return tuple(_ratio(to, size) for to, size in zip(y_shape, shape, strict=True)), y_shape


def _ratio(to: int, size: int) -> float:
    """Return to / size as a float32; for dynamic sizes, as a float64 that rounds to the same float32 later."""
    if is_symbolic(to, size):
        ratio: float = to / maximum(size, 1)
        return ratio
    return float(np.float32(to) / np.float32(size)) if size else 1.0
