"""The plan of rotary_embedding: rotary_embedding.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary.rotary import Rotary, RotatedHeads, launch
from onnxfuse.kernels.tensors import ITEM_BYTES, differs_along, operand_pointer, required_spec, unsupported_dtype
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, TensorSpec

LAYOUTS: Final = ("packed", "bshd", "bhsd")
# The meanings of the letters of the attribute `table`, one for each axis of a table.
TABLE_AXES: Final = {"b": "1 or batch", "h": "heads", "s": "1 or length", "d": "row", "1": "1"}


def unsupported_rotary_embedding(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs a rotary_embedding node of these dtypes; None if one does."""
    layout = node.text("layout", "bhsd")
    if layout not in LAYOUTS:
        return f"rotary_embedding: layout is {layout}; the kernel has {', '.join(LAYOUTS)}"
    if node.integer("rotated", node.integer("size", 0)) % 2:
        return f"rotary_embedding: {node.integer('size')} elements are rotated; the kernel takes an even number"
    return unsupported_rows(node) or unsupported_dtype(node, input_dtypes)


def unsupported_rows(node: FusedNode) -> str | None:
    """Return why no kernel can leave the node's first rows unrotated; None if one can, or if all rows are rotated."""
    if node.text("first_rows", "rotated") == "kept" and "kept" not in node.attributes:
        return f"{node.fusion}: the number of rows that stay as they are is not known"
    return None


def rotary_embedding_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan for these shapes.  Raises ValueError if shapes do not fit together."""
    x, cos, sin = required_spec(node, inputs, "x"), table_spec(node, inputs, "cos"), table_spec(node, inputs, "sin")
    form = rotary_form(node, "form")
    operator = node.text("form", "rotate_half") == "operator"
    rotated = cos.shape[-1] * (1 if form.whole_table else 2)
    layout = ("bhsd" if len(x.shape) == 4 else "packed") if operator else node.text("layout", "bhsd")
    rows_first = node.text("order", "heads_first") == "rows_first"
    size = node.integer("size", 0) or (x.shape[-1] if len(x.shape) == 4 else rotated)
    if operator and len(x.shape) == 3:
        size = x.shape[-1] // node.integer("num_heads")
    axes, x_heads = _axes(node, x, layout, size)
    batch, length, heads = axes
    kept = kept_rows(node)
    cos = fitting_tables(cos, sin, (batch, heads, length - kept), size, rotated)
    shape = x.shape if operator else (batch, length, heads, size) if rows_first else (batch, heads, length, size)
    y = TensorSpec(shape, node.output_dtypes[0], x.aligned)
    if 0 in y.shape:
        return Plan((y,), ())
    y_heads = _contiguous_heads("packed" if rows_first or (operator and layout == "packed") else "bhsd", axes, size)
    problem = Rotary(
        batch, length, size, rotated, (RotatedHeads(heads, x_heads, y_heads),),
        operand_pointer(node, "cos"), operand_pointer(node, "sin"), cos, sin.dtype, x.dtype, y.dtype,
        all(tensor.aligned for tensor in (x, cos, sin)), *form, kept=kept,
    )  # fmt: skip
    return Plan((y,), (launch(problem, device),))


def kept_rows(node: FusedNode) -> int:
    """Return how many of the first rows (positions) stay unrotated."""
    return node.integer("kept", 0) if node.text("first_rows", "rotated") == "kept" else 0


def table_spec(node: FusedNode, inputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """Return the spec of a table, extended to the four axes (1 or batch, 1 or heads, 1 or length, row)."""
    spec, layout = required_spec(node, inputs, name), node.text("table", "bsd")
    sizes = dict(zip(layout, spec.shape, strict=False))
    if len(spec.shape) != len(layout) or sizes.get("1", 1) != 1:
        wanted = ", ".join(TABLE_AXES[axis] for axis in layout)
        raise ValueError(f"{node.fusion}: {name} has shape {list(spec.shape)}; required ({wanted})")
    return replace(spec, shape=tuple(sizes.get(axis, 1) for axis in "bhsd"))


class RotaryForm(NamedTuple):
    """The layout of the rotated pairs in the tables, in x and in y; the fields are those of `Rotary`."""

    whole_table: bool
    interleaved: bool
    y_interleaved: bool


def rotary_form(node: FusedNode, attribute: str) -> RotaryForm:
    """Return the RotaryForm that the node's `attribute` names."""
    found = node.text(attribute, "rotate_half")
    if found == "operator":
        interleaved = bool(node.integer("interleaved", 0))
        return RotaryForm(False, interleaved, interleaved)
    return RotaryForm(not found.startswith("complex_"), "pairs" in found, found.endswith("pairs"))


def _axes(node: FusedNode, x: TensorSpec, layout: str, size: int) -> tuple[tuple[int, int, int], HeadTensor]:
    """Return the sizes (batch, length, heads) of x, and the HeadTensor that locates its heads in memory."""
    if layout == "bhsd":
        batch, heads, length, _ = x.shape
    elif layout == "bshd":
        batch, length, heads, _ = x.shape
    else:
        batch, length, width = x.shape
        if "x_offset" in node.attributes:
            offset, heads, pitch = node.integer("x_offset"), node.integer("heads"), node.integer("x_pitch", size)
            if offset + (heads - 1) * pitch + size > width:
                raise ValueError(
                    f"rotary_embedding: x has shape {list(x.shape)}; required rows of {heads} heads of {size} elements "
                    f"from element {offset} on, {pitch} apart"
                )
            pointer = Pointer("input", node.operands.index("x"), offset * ITEM_BYTES[x.dtype])
            return (batch, length, heads), HeadTensor(pointer, length * width, pitch, width)
        heads = width // max(1, size)
    axes = batch, length, heads
    found = _contiguous_heads(layout, axes, size)
    return axes, HeadTensor(Pointer("input", node.operands.index("x")), *found.strides)


def _contiguous_heads(layout: str, axes: tuple[int, int, int], size: int) -> HeadTensor:
    """Return the HeadTensor (the layout in memory) of the heads of a contiguous tensor."""
    _, length, heads = axes
    head, row = (length * size, size) if layout == "bhsd" else (size, heads * size)
    return HeadTensor(Pointer("output", 0), length * heads * size, head, row)


def fitting_tables(cos: TensorSpec, sin: TensorSpec, axes: tuple[int, int, int], size: int, rotated: int) -> TensorSpec:
    """Return the spec of cos, with a size of 1 on the axes of the batch and of positions if it broadcasts along them.

    Raises ValueError unless both tables fit `axes` and the `rotated` of `size` elements per head.
    """
    batch, heads, length = axes
    if rotated % 2 or rotated > size:
        raise ValueError(f"rotary_embedding: {rotated} of {size} elements cannot be rotated in pairs")
    if cos.shape != sin.shape:
        found, wanted = (list(_without_one_head(table.shape)) for table in (sin, cos))
        raise ValueError(f"rotary_embedding: sin has shape {found}; required {wanted}, as cos")
    of_batch, of_heads, of_rows, row = cos.shape
    batched, by_rows = differs_along(of_batch, batch), differs_along(of_rows, length)
    if batched is None or by_rows is None or of_heads not in (1, heads):
        own = (f"1 or {batch}", 1 if of_heads == 1 else heads, f"1 or {length}", row)
        required = ", ".join(map(str, _without_one_head(own)))
        raise ValueError(f"rotary_embedding: cos has shape {list(_without_one_head(cos.shape))}; required ({required})")
    return replace(cos, shape=(of_batch if batched else 1, of_heads, of_rows if by_rows else 1, row))


def _without_one_head(shape: tuple[object, ...]) -> tuple[object, ...]:
    """Return the shape of a table without the axis of heads, if all heads share the table."""
    return (shape[0], *shape[2:]) if shape[1] == 1 else shape
