"""The plans of causal_conv_with_state.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.tensors import (
    STORAGE,
    Defines,
    int32,
    int64,
    mixed_dtypes,
    operand_pointer,
    required_spec,
    shaped_pointer,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, NoAlias, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import maximum

MAX_SIZE: Final = 32  # elements of a filter, which a thread keeps in registers
MIN_COLUMNS: Final = 8  # columns that a thread computes at least: the widest access of 16-bit elements
THREADS: Final = 128


def unsupported(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs the node; None if one does."""
    refusal = unsupported_dtype(node, input_dtypes) or mixed_dtypes(node, input_dtypes)
    if refusal is None and not 0 < node.integer("size", 0) <= MAX_SIZE:
        refusal = f"{node.fusion}: filters have {node.integer('size', 0)} elements; the kernel takes 1 to {MAX_SIZE}"
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for these shapes.  Raises ValueError if they do not fit."""
    x, size = required_spec(node, inputs, "x"), node.integer("size")
    batch, channels, length = x.shape
    shaped_pointer(node, inputs, "weight", (channels, 1, size))
    shaped_pointer(node, inputs, "bias", (channels,))
    shaped_pointer(node, inputs, "past_state", (batch, channels, size - 1))
    y = TensorSpec(x.shape, x.dtype, x.aligned)
    present = TensorSpec((batch, channels, size - 1), x.dtype, x.aligned)
    rows, past = batch * channels, node.input_index("past_state")
    aliases = () if past is None else (NoAlias(past, 1, same_start=True),)
    if rows == 0:
        return [Plan((y, present), (), (), aliases)]
    width = vector_width([x, y], length)
    columns = max(MIN_COLUMNS, -(-(size - 1) // width) * width)
    parts = maximum(1, -(-length // columns))
    defines: Defines = {
        "T": STORAGE[x.dtype], "SIZE": size, "COLUMNS": columns, "WIDTH": width,
        "BIAS": int("bias" in node.operands), "PAST": int(past is not None),
        "SILU": int(node.text("activation", "none") != "none"),
    }  # fmt: skip
    operands = (operand_pointer(node, name) for name in ("x", "weight", "bias", "past_state"))
    launch = Launch(
        Kernel("causal_conv_with_state", "causal_conv_with_state", defines),
        (-(-rows * parts // THREADS), 1, 1), (THREADS, 1, 1),
        (
            Struct((*operands, Pointer("output", 0), Pointer("output", 1))), *int64(rows),
            *int32(length, channels, parts),
        ),
        pdl=device.has_pdl,
    )  # fmt: skip
    return [Plan((y, present), (launch,), (), aliases)]
