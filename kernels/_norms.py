"""What the hosts of layer_norm, rms_norm, add_layer_norm and add_rms_norm have in common: see norm.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._rows import USUAL_THREADS, row_launch, row_plan, tiling
from onnxfuse.kernels._types import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    leaving,
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
    """The operands that the fusion has, then y, the sum where a fusion adds, epsilon and the number of rows."""
    x = required(node, inputs, "x")
    length, rows = x.shape[-1], product(x.shape[:-1])
    _check(node, inputs, x, length)
    outputs = tuple(TensorSpec(x.shape, dtype, x.aligned) for dtype in node.output_dtypes)
    adds = node.place("residual") is not None
    if rows * length == 0:
        return Plan(outputs, ())
    whole = [inputs[place] for name in ("x", "residual") if (place := node.place(name)) is not None]
    most_threads = MOMENTS_THREADS if node.fusion == "layer_norm" else USUAL_THREADS
    item_bytes = [ITEM_BYTES[tensor.dtype] for tensor in whole]
    weights = [inputs[place] for name in ("scale", "bias") if (place := node.place(name)) is not None]
    weight_bytes = sum(ITEM_BYTES[tensor.dtype] for tensor in weights)
    wide = width([*whole, *outputs], length, weights=inputs)
    tiles = tiling(rows, length, wide, device, item_bytes, weight_bytes, most_threads)
    moved = [*whole, *outputs]
    defines = {
        **_types(node, inputs, outputs), "ROW": length, "STREAMED": leaving(moved), "SUM_STREAMED": streamed(moved),
    }  # fmt: skip
    launch = row_launch(node.fusion, tiles, rows, defines, _arguments(node, len(outputs), adds, rows), item_bytes)
    return row_plan(outputs, rows, length, launch)


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
