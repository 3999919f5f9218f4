"""Rotary position embedding on the GPU: rotary_embedding.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._attention import Heads
from onnxfuse.kernels._rotary import Rotary, Turned, launch
from onnxfuse.kernels._types import ITEM_BYTES, operand, refuse_dtypes, required
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, TensorSpec

LAYOUTS: Final = ("packed", "bshd", "bhsd")


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    layout = node.attributes.get("layout", "bhsd")
    if layout not in LAYOUTS:
        return f"rotary_embedding: layout is {layout}; the kernel has {', '.join(LAYOUTS)}"
    if node.attributes.get("rotated", node.attributes.get("size", 0)) % 2:
        return f"rotary_embedding: {node.attributes['size']} elements are rotated; the kernel takes an even number"
    return refuse_dtypes(node, input_dtypes)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where shapes do not fit together."""
    x, cos, sin = (required(node, inputs, name) for name in ("x", "cos", "sin"))
    operator = node.attributes.get("form", "rotate_half") == "operator"
    rotated = cos.shape[-1] * (2 if operator else 1)
    layout = ("bhsd" if len(x.shape) == 4 else "packed") if operator else node.attributes.get("layout", "bhsd")
    size = int(node.attributes.get("size", 0)) or (x.shape[-1] if len(x.shape) == 4 else rotated)
    if operator and len(x.shape) == 3:
        size = x.shape[-1] // int(node.attributes["num_heads"])
    axes, places = _axes(node, x, layout, size)
    batch, length, heads = axes
    check(cos, sin, batch, length, size, rotated, rotated // 2 if operator else rotated)
    shape = x.shape if operator else (batch, heads, length, size)
    y = TensorSpec(shape, node.output_dtypes[0], x.aligned)
    if 0 in y.shape:
        return Plan((y,), ())
    result = _places("packed" if operator and layout == "packed" else "bhsd", axes, size)
    problem = Rotary(
        batch, length, size, rotated, (Turned(heads, places, result),),
        operand(node, "cos"), operand(node, "sin"), cos, sin.dtype, x.dtype, y.dtype,
        all(tensor.aligned for tensor in (x, cos, sin)), whole_table=not operator,
        interleaved=operator and bool(node.attributes.get("interleaved", 0)),
    )  # fmt: skip
    return Plan((y,), (launch(problem, device),))


def _axes(node: FusedNode, x: TensorSpec, layout: str, size: int) -> tuple[tuple[int, int, int], Heads]:
    """((batch, length, heads), where x lies)."""
    if layout == "bhsd":
        batch, heads, length, _ = x.shape
    elif layout == "bshd":
        batch, length, heads, _ = x.shape
    else:
        batch, length, width = x.shape
        offset = node.attributes.get("x_offset")
        if offset is not None:
            heads, pitch = int(node.attributes["heads"]), int(node.attributes.get("x_pitch", size))
            if offset + (heads - 1) * pitch + size > width:
                raise ValueError(f"rotary_embedding: x has shape {list(x.shape)}; required {heads} heads in {offset}…")
            pointer = Pointer("input", node.operands.index("x"), int(offset) * ITEM_BYTES[x.dtype])
            return (batch, length, heads), Heads(pointer, length * width, pitch, width)
        heads = width // max(1, size)
    axes = batch, length, heads
    found = _places(layout, axes, size)
    return axes, Heads(Pointer("input", node.operands.index("x")), found.batch, found.head, found.row)


def _places(layout: str, axes: tuple[int, int, int], size: int) -> Heads:
    """Where the heads of an output lie that has nothing else in it."""
    _, length, heads = axes
    head, row = (length * size, size) if layout == "bhsd" else (size, heads * size)
    return Heads(Pointer("output", 0), length * heads * size, head, row)


def check(cos: TensorSpec, sin: TensorSpec, batch: int, length: int, size: int, rotated: int, row: int) -> None:
    """Raises ValueError where the tables do not fit (batch, length) and the `rotated` of `size` elements of a head."""
    if rotated % 2 or rotated > size:
        raise ValueError(f"rotary_embedding: {rotated} of {size} elements cannot be rotated in pairs")
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_embedding: sin has shape {list(sin.shape)}; required {list(cos.shape)}, as cos")
    if cos.shape[0] not in (1, batch) or cos.shape[-2:] != (length, row):
        raise ValueError(f"rotary_embedding: cos has shape {list(cos.shape)}; required (1 or {batch}, {length}, {row})")
