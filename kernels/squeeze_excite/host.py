"""The plans of squeeze_excite, the gates of squeeze-and-excite blocks: one launch, or the launches of three nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.concat_plans import chained
from onnxfuse.kernels.conv import host as conv
from onnxfuse.kernels.pooling.global_pools import CLUSTER_ARCH, global_plans
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    float32,
    int32,
    operand_pointer,
    required_spec,
    unsupported_choice,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate, expect_equal, maximum

CLUSTER: Final = 8  # blocks per cluster, which computes the gates of IMAGES images
THREADS: Final = 256  # threads per block; with 512, the launches of 18 nodes took 1.02 to 1.9 times as long
IMAGES: Final = 1  # images per cluster; with 2, reads of weights halve, but launches took 1.1 to 1.4 times as long
LOADS: Final = 4
MIN_PART: Final = 4  # least vectors of a pixel that a block reads (64 bytes), unless a pixel has fewer
# Times in microseconds on an H200, fitted to 18 nodes of EfficientNet-B0 and MobileNetV3 with 32 images.
# Three launches: PRODUCTS_US for both products; MEAN_US for the mean, plus MEAN_BYTE_US per byte above BYTES_OF_LAUNCH.
# One launch: KERNEL_US, plus BYTE_US per byte, plus ROUND_US per round of weight rows beyond two. BLOCK_BYTE_US, the
# time in which one block reads a byte of x, is an estimate.
PRODUCTS_US: Final = 5.3
MEAN_US: Final = 2.1
MEAN_BYTE_US: Final = 1.35 / 3.5e6
BYTES_OF_LAUNCH: Final = 4.4e6
KERNEL_US: Final = 3.0
BYTE_US: Final = 0.7 / 3.5e6
ROUND_US: Final = 0.42
BLOCK_BYTE_US: Final = 1 / 1.8e4


@dataclass(frozen=True)
class Problem:
    """The sizes of a squeeze_excite node, and the specs of x and the gate."""

    images: int
    pixels: int
    channels: int
    squeezed: int
    x: TensorSpec
    gate: TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    refusal = unsupported_dtype(node, input_dtypes) or unsupported_choice(node, "layout", ("nhwc",), "nchw")
    for name in ("activation", "activation_2"):
        refusal = refusal or unsupported_choice(node, name, tuple(ACTIVATIONS), "none")
    if refusal is None and len({*input_dtypes, *node.output_dtypes}) > 1:
        refusal = f"{node.fusion}: operands are {', '.join(sorted({*input_dtypes}))}; the kernel takes one dtype"
    return refusal or conv.supports(_product(node, "", 2), input_dtypes[: 2 + ("bias" in node.operands)], device)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    problem = problem_of(node, inputs)
    if not problem.images * problem.channels:
        return [Plan((problem.gate,), ())]
    several = _in_three_steps(node, inputs, device)
    if device.arch < CLUSTER_ARCH:
        return several
    one = in_one_launch(node, inputs, problem, device)
    if one is None:
        return several
    (launch,) = one.steps
    assert isinstance(launch, Launch)
    is_first = _is_expected_faster(problem, launch.kernel.defines)
    return [one, *several] if is_first else [*several, one]


def _is_expected_faster(problem: Problem, defines: Mapping[str, int | float | str]) -> bool:
    """Return whether one launch with the macros `defines` is expected to be faster than three.

    For each of the 18 nodes to which the constants were fitted, the measured times agree with the result.
    """
    image_bytes = problem.pixels * problem.channels * ITEM_BYTES[problem.x.dtype]
    every, of_block = estimate(problem.images * image_bytes), estimate(image_bytes) / CLUSTER
    rounds = sum(
        -(-rows * int(defines[lanes]) // THREADS)
        for rows, lanes in ((problem.squeezed, "LANES"), (-(-problem.channels // CLUSTER), "LANES_2"))
    )
    one = KERNEL_US + maximum(every * BYTE_US, of_block * BLOCK_BYTE_US) + ROUND_US * max(0, rounds - 2)
    three = PRODUCTS_US + MEAN_US + maximum(0.0, every - BYTES_OF_LAUNCH) * MEAN_BYTE_US
    return bool(one < three)


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> Problem:
    """Return the sizes of a node.  Raises ValueError if shapes do not fit.

    The weights have the shape of convolutions, (results, 1, ..., columns), or of matrices, (results, columns).
    """
    x, w, w_2 = (required_spec(node, inputs, name) for name in ("x", "w", "w_2"))
    rank = len(x.shape)
    if rank < 3 or len(w.shape) not in (2, rank) or len(w_2.shape) != len(w.shape):
        raise ValueError(f"{node.fusion}: x has shape {list(x.shape)}, w {list(w.shape)} and w_2 {list(w_2.shape)}; "
                         f"required at least 3 axes of x, and as many of w and w_2, or two")  # fmt: skip
    channels, squeezed, ones = x.shape[-1], w.shape[0], (1,) * (rank - 2)
    taps = ones[: len(w.shape) - 2]
    expected = {"w": (squeezed, *taps, channels), "w_2": (channels, *taps, squeezed), "bias": (squeezed,),
                "bias_2": (channels,)}  # fmt: skip
    for name, shape in expected.items():
        index = node.input_index(name)
        if index is None:
            continue
        found = inputs[index].shape
        if len(found) != len(shape) or not all(expect_equal(a, b) for a, b in zip(found, shape, strict=True)):
            raise ValueError(f"{node.fusion}: {name} has shape {list(found)}; required {list(shape)}, by x and w")
    gate = TensorSpec((x.shape[0], *ones, channels), node.output_dtypes[0], x.aligned)
    return Problem(x.shape[0], math.prod(x.shape[1:-1]), channels, squeezed, x, gate)


def in_one_launch(node: FusedNode, inputs: Sequence[TensorSpec], problem: Problem, device: Device) -> Plan | None:
    """Return the plan of one launch; None if shared memory cannot hold the values that blocks exchange."""
    channels, squeezed = problem.channels, problem.squeezed
    w, w_2 = (required_spec(node, inputs, name) for name in ("w", "w_2"))
    width, width_2 = vector_width([problem.x, w], channels), vector_width([w_2], squeezed)
    vectors = channels // width
    channel_parts = next(parts for parts in (8, 4, 2, 1) if parts == 1 or vectors >= MIN_PART * parts)
    part = -(-vectors // channel_parts)
    rows = max(1, THREADS // part)
    defines: Defines = {
        "X_T": STORAGE[problem.x.dtype], "PRECISE": int(problem.x.dtype == "float32"),
        "CHANNELS": channels, "SQUEEZED": squeezed, "WIDTH": width, "WIDTH_2": width_2,
        "LANES": min(32, _power_of_two(part)), "LANES_2": min(32, _power_of_two(squeezed // width_2)),
        "CLUSTER": CLUSTER, "CHANNEL_PARTS": channel_parts, "IMAGES": IMAGES, "THREADS": THREADS, "LOADS": LOADS,
        "ACTIVATION_1": node.text("activation", "none"), "ACTIVATION_2": node.text("activation_2", "none"),
        "HAS_BIAS": int("bias" in node.operands), "HAS_BIAS_2": int("bias_2" in node.operands),
        "PREFETCHED": int(w.constant and w_2.constant),
    }  # fmt: skip
    shared = 4 * (rows * part * width + IMAGES * (part * width + (CLUSTER + 1) * squeezed))
    if shared > device.shared_per_block:
        return None
    arguments = (
        operand_pointer(node, "x"), _operands(node, ""), _operands(node, "_2"), Pointer("output", 0),
        *float32(1 / maximum(problem.pixels, 1)), *int32(problem.images, problem.pixels),
    )  # fmt: skip
    kernel = Kernel("squeeze_excite", "squeeze_excite", defines)
    grid = (-(-problem.images // IMAGES) * CLUSTER, 1, 1)
    launch = Launch(kernel, grid, (THREADS, 1, 1), arguments, shared, CLUSTER, pdl=device.has_pdl)
    return Plan((problem.gate,), (launch,))


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not below a count."""
    return 1 << (count - 1).bit_length()


def _operands(node: FusedNode, suffix: str) -> Struct:
    """Return the struct Product of squeeze_excite.cu for the product with this suffix ("" or "_2")."""
    activation = ACTIVATIONS[node.text(f"activation{suffix}", "none")]
    alpha, beta = node.number(f"alpha{suffix}", activation.alpha), node.number(f"beta{suffix}", activation.beta)
    pointers = operand_pointer(node, f"w{suffix}"), operand_pointer(node, f"bias{suffix}")
    return Struct((*pointers, *float32(alpha, beta)))


def _in_three_steps(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans of three steps: the mean, and the two products as convolutions."""
    index, axes = {name: i for i, name in enumerate(node.operands)}, len(inputs[0].shape) - 2
    pool = FusedNode("global_average_pool", node.name, ("x",), {"layout": "nhwc"}, node.output_dtypes)
    plan, read = global_plans(pool, [inputs[index["x"]]], device)[0], [index["x"]]
    for suffix in ("", "_2"):
        product, names = _product(node, suffix, axes), [f"{name}{suffix}" for name in ("w", "bias")]
        own = [index[name] for name in names if name in index]
        specs = [plan.outputs[0], *(inputs[i] for i in own)]
        w = specs[1]
        specs[1] = replace(w, shape=(w.shape[0], *(1,) * axes, w.shape[-1]))
        behind = conv.candidates(product, specs, device)[0]
        plan = chained(plan, behind, read, [None, *own])
        read = list(range(len(node.operands)))
    return [plan]


def _product(node: FusedNode, suffix: str, rank: int) -> FusedNode:
    """Return a product as a convolution of images with one pixel and `rank` spatial axes."""
    activation = {name: node.attributes[f"{name}{suffix}"] for name in ("activation", "alpha", "beta")
                  if f"{name}{suffix}" in node.attributes}  # fmt: skip
    attributes: dict[str, Any] = {
        **activation, "layout": "nhwc", "kernel_shape": [1] * rank, "strides": [1] * rank, "pads": [0] * 2 * rank,
    }  # fmt: skip
    operands = tuple(name for name in ("x", "w", "bias") if name == "x" or f"{name}{suffix}" in node.operands)
    return FusedNode("conv_bias_activation", node.name, operands, attributes, node.output_dtypes)
