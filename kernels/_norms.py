"""What the hosts of layer_norm, rms_norm, add_layer_norm and add_rms_norm have in common: see norm.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._rows import USUAL_THREADS, USUAL_VALUES, Tiling, looping, loops_win, row_launch, tiling
from onnxfuse.kernels._types import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    constant,
    operand,
    product,
    require_size,
    required,
    spec,
    streamed,
    width,
)
from onnxfuse.provider.plan import Argument, Device, FusedNode, Plan, Pointer, Scalar, TensorSpec

# Of a block that computes mean and variance, which is more work between barriers than a sum of squares: 8192x8192 fp16
# takes 67 us on an H200 with 256 threads, 81 with 512.  With a residual in front, loads hide it: 131 us both ways.
MOMENTS_THREADS: Final = 256


def norm_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How a norm runs where nothing was measured.  Raises ValueError where shapes do not fit together."""
    return norm_candidates(node, inputs, device)[0]


def norm_candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run a norm, what is expected to be fastest first.

    Kernels take the operands that the fusion has, then y, the sum where a fusion adds, epsilon and the number of rows.
    """
    x = required(node, inputs, "x")
    length, rows = x.shape[-1], product(x.shape[:-1])
    _check(node, inputs, x, length)
    outputs = tuple(TensorSpec(x.shape, dtype, x.aligned) for dtype in node.output_dtypes)
    if rows * length == 0:
        return [Plan(outputs, ())]
    whole = present(node, inputs, "x", "residual")
    moved, item_bytes = [*whole, *outputs], [ITEM_BYTES[tensor.dtype] for tensor in whole]
    defines = {
        **_types(node, inputs, outputs), "ROW": length, "STREAMED": streamed(moved),
        "WEIGHTS_CONSTANT": constant(present(node, inputs, "scale", "bias")),
    }  # fmt: skip
    arguments = _arguments(node, len(outputs), len(whole) > 1, rows)
    wide, weight_bytes = width(moved, length, weights=inputs), weight_item_bytes(node, inputs)
    most_threads = MOMENTS_THREADS if node.fusion == "layer_norm" else USUAL_THREADS
    return [
        Plan(outputs, (row_launch(node.fusion, tiles, rows, defines, arguments, item_bytes, device),))
        for tiles in norm_tilings(rows, length, wide, item_bytes, weight_bytes, most_threads, device)
    ]


def norm_tilings(
    rows: int,
    length: int,
    wide: int,
    item_bytes: Sequence[int],
    weight_bytes: int,
    most_threads: int,
    device: Device,
) -> list[Tiling]:
    """Blocks for all rows, or resident ones that take their rows in a loop, the next one being loaded meanwhile.

    Chained on an H200 in fp16, with all rows in blocks and in a loop: 6304x768 layer_norm 4.7 and 3.8 us, 2048x2048
    add_rms_norm 6.2 and 5.0, but 4096x768 add_layer_norm 4.3 and 4.2, and from memory 7.5 and 8.3.
    """
    usual = tiling(rows, length, wide, device, item_bytes, weight_bytes, most_threads)
    loop = looping(usual, rows, length, device, item_bytes, weight_bytes)
    if loop is None or usual.width * usual.chunks < USUAL_VALUES:
        return [usual]
    return [loop, usual] if loops_win(usual, loop, rows, device) else [usual, loop]


def weight_item_bytes(node: FusedNode, inputs: Sequence[TensorSpec]) -> int:
    """Bytes of scale and bias for an element of a row."""
    return sum(ITEM_BYTES[tensor.dtype] for tensor in present(node, inputs, "scale", "bias"))


def present(node: FusedNode, inputs: Sequence[TensorSpec], *names: str) -> list[TensorSpec]:
    """Shapes and dtypes of those inputs that are there."""
    return [found for name in names if (found := spec(node, inputs, name)) is not None]


def _check(node: FusedNode, inputs: Sequence[TensorSpec], x: TensorSpec, length: int) -> None:
    residual = spec(node, inputs, "residual")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{node.fusion}: residual has shape {list(residual.shape)}; required {list(x.shape)}, as x")
    for name in ("scale", "bias"):
        weight = spec(node, inputs, name)
        if weight is not None:
            require_size(node, name, weight, length)


def _types(node: FusedNode, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Defines:
    """Storage types; an absent operand gets any."""
    x, scale = required(node, inputs, "x"), required(node, inputs, "scale")
    residual, bias = spec(node, inputs, "residual"), spec(node, inputs, "bias")
    return {
        "X_T": STORAGE[x.dtype],
        "RESIDUAL_T": STORAGE[(residual or x).dtype],
        "SCALE_T": STORAGE[scale.dtype],
        "BIAS_T": STORAGE[(bias or scale).dtype],
        "Y_T": STORAGE[outputs[0].dtype],
        "SUM_T": STORAGE[outputs[-1].dtype],
        "RESIDUAL": int(residual is not None),
        "BIAS": int(bias is not None),
        "SUM": int(len(outputs) > 1),
    }


def _arguments(node: FusedNode, outputs: int, adds: bool, rows: int) -> list[Argument]:
    names = ["x", *(["residual"] if adds else []), "scale", *([] if node.fusion == "rms_norm" else ["bias"])]
    written: list[Argument] = [Pointer("output", i) for i in range(outputs)]
    if adds and outputs == 1:
        written.append(Scalar(0, "int64"))
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    return [*(operand(node, name) for name in names), *written, Scalar(epsilon, "float32"), Scalar(rows, "int64")]
