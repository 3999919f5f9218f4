"""Rotary position embedding on the GPU: rotary_embedding.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._types import STORAGE, operand, refuse_dtypes, required, streamed, width
from onnxfuse.provider.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

THREADS: Final = 128
HEADS_EACH: Final = 4  # heads of a thread, which reads its piece of the tables once: 128 bytes in flight
THREADS_EACH: Final = 512  # per multiprocessor, before a thread takes a second head
LAYOUTS: Final = ("packed", "bshd", "bhsd")


@dataclass(frozen=True)
class Geometry:
    """The axes of x and y, whatever their order."""

    batch: int
    seq: int
    heads: int
    size: int
    rotated: int
    x_heads_first: bool
    y_heads_first: bool
    y_shape: tuple[int, ...]


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    layout = node.attributes.get("layout", "bhsd")
    if layout not in LAYOUTS:
        return f"rotary_embedding: layout is {layout}; the kernel has {', '.join(LAYOUTS)}"
    if node.attributes.get("size", 0) % 2:
        return f"rotary_embedding: heads have {node.attributes['size']} elements; the kernel takes an even number"
    return refuse_dtypes(node, input_dtypes)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where shapes do not fit together."""
    x, cos, sin = (required(node, inputs, name) for name in ("x", "cos", "sin"))
    operator = node.attributes.get("form", "rotate_half") == "operator"
    axes = _operator(node, x, cos) if operator else _rotate_half(node, x, cos)
    table_row = axes.rotated // 2 if operator else axes.rotated
    _check(cos, sin, axes, table_row)
    y = TensorSpec(axes.y_shape, node.output_dtypes[0], x.aligned)
    if 0 in y.shape:
        return Plan((y,), ())
    wide = width([x, y], axes.rotated // 2, axes.size - axes.rotated, weights=[cos, sin])
    pieces = axes.rotated // 2 // wide + (axes.size - axes.rotated) // wide
    each = HEADS_EACH
    while each > 1 and axes.batch * axes.seq * pieces * -(-axes.heads // each) < THREADS_EACH * device.multiprocessors:
        each //= 2
    count = axes.batch * axes.seq * pieces * -(-axes.heads // each)
    defines = {
        "X_T": STORAGE[x.dtype], "COS_T": STORAGE[cos.dtype], "SIN_T": STORAGE[sin.dtype], "Y_T": STORAGE[y.dtype],
        "SIZE": axes.size, "ROTATED": axes.rotated, "HEADS": axes.heads, "HEADS_EACH": each, "WIDTH": wide,
        "INTERLEAVED": int(operator and bool(node.attributes.get("interleaved", 0))),
        "WHOLE_TABLE": int(not operator), "TABLE_BATCHED": int(cos.shape[0] > 1), "THREADS": THREADS,
        "X_HEADS_FIRST": int(axes.x_heads_first), "Y_HEADS_FIRST": int(axes.y_heads_first),
        "STREAMED": streamed([x, y]),
        "INDEX": "u32" if axes.batch * axes.seq * axes.heads * axes.size < 2**31 else "u64",
    }  # fmt: skip
    pointers = [*(operand(node, name) for name in ("x", "cos", "sin")), Pointer("output", 0)]
    arguments = (*pointers, Scalar(axes.seq, "int64"), Scalar(count, "int64"))
    kernel = Kernel("rotary_embedding", "rotary_embedding", defines)
    return Plan((y,), (Launch(kernel, (-(-count // THREADS), 1, 1), (THREADS, 1, 1), arguments),))


def _rotate_half(node: FusedNode, x: TensorSpec, cos: TensorSpec) -> Geometry:
    """The whole head is rotated; y is (batch, heads, seq, size)."""
    size, layout = cos.shape[-1], node.attributes.get("layout", "bhsd")
    if layout == "packed":
        (batch, seq, hidden) = x.shape
        heads = hidden // size
    elif layout == "bshd":
        batch, seq, heads, _ = x.shape
    else:
        batch, heads, seq, _ = x.shape
    return Geometry(batch, seq, heads, size, size, layout == "bhsd", True, (batch, heads, seq, size))


def _operator(node: FusedNode, x: TensorSpec, cos: TensorSpec) -> Geometry:
    """ONNX's RotaryEmbedding: y is like x, (batch, heads, seq, size) or (batch, seq, heads * size)."""
    if len(x.shape) == 4:
        batch, heads, seq, size = x.shape
    else:
        batch, seq, hidden = x.shape
        heads = int(node.attributes["num_heads"])
        size = hidden // heads
    first = len(x.shape) == 4
    return Geometry(batch, seq, heads, size, 2 * cos.shape[-1], first, first, x.shape)


def _check(cos: TensorSpec, sin: TensorSpec, axes: Geometry, table_row: int) -> None:
    if axes.size % 2 or axes.rotated > axes.size:
        raise ValueError(f"rotary_embedding: {axes.rotated} of {axes.size} elements cannot be rotated in pairs")
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_embedding: sin has shape {list(sin.shape)}; required {list(cos.shape)}, as cos")
    if cos.shape[0] not in (1, axes.batch) or cos.shape[-2:] != (axes.seq, table_row):
        raise ValueError(
            f"rotary_embedding: cos has shape {list(cos.shape)}; required (1 or {axes.batch}, {axes.seq}, {table_row})"
        )
