"""Convert a fused node to an Attention: read sizes, strides and masks for all layouts, and check that they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from onnxfuse.kernels.attention.mma import MAX_HEAD_DIM
from onnxfuse.kernels.attention.problem import Attention, HeadNumbers, MaskKind, ScoreTensor
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    differs_along,
    operand_spec,
    required_pointer,
    required_spec,
    unsupported_choice,
)
from onnxfuse.runtime.plan import Device, FusedNode, Pointer, TensorSpec
from onnxfuse.runtime.symint import always, expect_equal, minimum

LAYOUTS: Final = ("packed", "seq_first", "bshd", "bhsd")
OUT_LAYOUTS: Final = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
CHOICES: Final = (  # (attribute, known values, default)
    *((f"{name}_layout", LAYOUTS, "packed") for name in "qkv"),
    ("out_layout", OUT_LAYOUTS, "packed"),
    ("mask_kind", ("none", "boolean", "inverted", "additive", "causal"), "none"),
    ("bias_kind", ("none", "position", "slopes"), "none"),
    ("fully_masked", ("zero", "cleared", "sinks", "softmax"), "softmax"),
    ("form", ("softmax", "operator", "causal_operator"), "softmax"),
)


@dataclass(frozen=True)
class Operand:
    """A tensor viewed as (batch, length, heads, head_dim); the strides of the first three axes are in elements."""

    batch: int
    length: int
    heads: int
    head_dim: int
    strides: tuple[int, int, int]  # strides of batch, length and heads, in elements
    offset: int = 0  # elements before the first element of the first head

    def at(self, pointer: Pointer, item_bytes: int) -> HeadTensor:
        """Return the HeadTensor with these strides at `pointer`."""
        batch, row, head = self.strides
        return HeadTensor(replace(pointer, offset=self.offset * item_bytes), batch, head, row)


def unsupported(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel computes the attention of this node; None if one does."""
    for choice, known, default in CHOICES:
        if why := unsupported_choice(node, choice, known, default):
            return why
    for name in ("size", "value_size"):
        if not 0 < (found := node.integer(name, 1)) <= MAX_HEAD_DIM:
            return f"attention: {name} is {found}; the kernels take 1 to {MAX_HEAD_DIM}"
    return _unsupported_dtypes(node, dict(zip(node.operands, input_dtypes, strict=True)))


def _unsupported_dtypes(node: FusedNode, dtypes: dict[str, str]) -> str | None:
    missing = [name for name in "qkv" if name not in dtypes]
    if missing:
        return f"attention: operand {missing[0]} is missing; present are {', '.join(node.operands)}"
    found = {**{name: dtypes[name] for name in "qkv"}, "the output": node.output_dtypes[0]}
    for name, dtype in found.items():
        if dtype not in STORAGE:
            return f"attention: {name} is {dtype}; the kernels take {', '.join(STORAGE)}"
        if dtype != dtypes["q"] and name in dtypes:
            return f"attention: {name} is {dtype}, q is {dtypes['q']}; required one dtype"
    kind = _mask_kind(node, dtypes.get("mask"))
    known = {"mask": ("bool",) if kind in ("boolean", "inverted", "causal") else tuple(STORAGE)}
    known |= dict.fromkeys(("bias", "slopes", "positions", "sinks"), tuple(STORAGE))
    for name, accepted in known.items():
        if name in dtypes and dtypes[name] not in accepted:
            return f"attention: {name} of kind {kind} is {dtypes[name]}; the kernels take {', '.join(accepted)}"
    return None


def operands_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> tuple[Operand, Operand, Operand]:
    """Return queries, keys and values.  Raises ValueError if shapes do not fit."""
    tensors = {name: required_spec(node, inputs, name) for name in "qkv"}
    heads, kv_heads = _heads(node, tensors)
    q = _operand(node, "q", tensors["q"], heads)
    k, v = (_operand(node, name, tensors[name], kv_heads) for name in "kv")
    _check(node, tensors, q, k, v)
    return q, k, v


def attention_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Attention, TensorSpec]:
    """Return the attention that the node computes, and its output.  Raises ValueError if shapes do not fit."""
    q, k, v = operands_of(node, inputs)
    tensors, heads, kv_heads = {name: required_spec(node, inputs, name) for name in "qkv"}, q.heads, k.heads
    out = Operand(q.batch, q.length, heads, v.head_dim, (0, 0, 0))
    shape, strides = _out_shape(node, out)
    y = TensorSpec(shape, node.output_dtypes[0], tensors["q"].aligned)
    operator = _is_operator(node)
    mask = operand_spec(node, inputs, "mask")
    # The mask of ONNX's Attention operator can be shorter than the keys; the keys beyond its end do not count.
    kind = _mask_kind(node, mask.dtype if mask else None)
    keys = k.length
    if operator and mask and mask.shape and kind != "causal" and not expect_equal(mask.shape[-1], keys):
        keys = min(keys, mask.shape[-1])
    item, out_item = ITEM_BYTES[tensors["q"].dtype], ITEM_BYTES[y.dtype]
    full = (q.batch, heads, q.length, keys)
    cleared = node.attributes.get("fully_masked") == "cleared"  # masked keys have no weight in any row
    masked_score = -math.inf if operator or cleared else node.number("masked_score", -math.inf)
    bias = "positions" if node.attributes.get("bias_kind") == "slopes" else "bias"
    cap = node.number("cap", 0.0) if node.attributes.get("capped") == "tanh" else 0.0
    problem = Attention(
        q.batch, heads, kv_heads, q.length, keys, q.head_dim, v.head_dim, tensors["q"].dtype,
        all(tensor.aligned for tensor in tensors.values()),
        q.at(required_pointer(node, "q"), item),
        k.at(required_pointer(node, "k"), item),
        v.at(required_pointer(node, "v"), item),
        Operand(q.batch, q.length, heads, v.head_dim, strides).at(Pointer("output", 0), out_item),
        scale=node.number("scale", 1 / math.sqrt(max(1, q.head_dim)) if operator else 1.0) * (cap or 1.0),
        mask_kind=kind if kind != "causal" else "boolean" if mask else "none",
        mask=score_tensor(node, "mask", mask, full),
        masked_score=masked_score,
        bias=score_tensor(node, bias, operand_spec(node, inputs, bias), full),
        slopes=_head_numbers(node, inputs, "slopes", (heads, 1, 1)),
        sinks=_head_numbers(node, inputs, "sinks", (1, heads, 1, 1)),
        causal=_causal(node, kind, q.length, keys),
        add_masked_score=kind == "causal",
        softcap=node.number("softcap", 0.0) if operator else cap,
        # ONNX's Attention gives 0 for rows without a key. If there are no keys at all, every product with v is 0.
        zero_masked_rows=operator or node.attributes.get("fully_masked") in ("zero", "cleared", "sinks") or keys == 0,
        tf32=device.tf32, out_dtype=y.dtype if y.dtype != tensors["q"].dtype else "",
    )  # fmt: skip
    return problem, y


def _is_operator(node: FusedNode) -> bool:
    return node.attributes.get("form") in ("operator", "causal_operator")


def _causal(node: FusedNode, kind: str, queries: int, keys: int) -> int | None:
    """Return the value of `Attention.causal`.

    With is_causal of ONNX's Attention, the first query sees only the first key. Under a causal mask, the last query
    sees the last key.
    """
    bounds = [keys - queries] if kind == "causal" and not always(lambda: queries <= 1, queries) else []
    bounds += [0] if _is_operator(node) and node.integer("is_causal", 0) else []
    return minimum(*bounds) if bounds else None


def _mask_kind(node: FusedNode, dtype: str | None) -> MaskKind | Literal["causal"]:
    """Return the kind of the node's mask of dtype `dtype`; "none" without a mask.

    The dtype decides whether the mask of ONNX's Attention is boolean or additive.
    """
    if node.attributes.get("form") == "operator":
        return "none" if dtype is None else "boolean" if dtype == "bool" else "additive"
    return "causal" if _is_operator(node) else cast(MaskKind, node.text("mask_kind", "none"))


def _heads(node: FusedNode, tensors: dict[str, TensorSpec]) -> tuple[int, int]:
    """Return the number of query heads and key heads: from the attributes if they are static, else from the shapes."""
    counts = {"q": "heads", "k": "kv_heads"}
    found = {name: node.integer(count) if count in node.attributes else None for name, count in counts.items()}
    for name in found:
        tensor, layout = tensors[name], _layout(node, name)
        axis = {"bshd": 2, "bhsd": 1}.get(layout)
        if found[name] is None and axis is not None and len(tensor.shape) == 4:
            found[name] = tensor.shape[axis]
        elif found[name] is None and (size := node.integer("size", 0)):
            found[name] = tensor.shape[-1] // size
    repeats, q, k = node.integer("repeats", 0), found["q"], found["k"]
    if repeats and q is None and k is not None:
        q = k * repeats
    if repeats and k is None and q is not None:
        k = q // repeats
    if q is None or k is None:
        raise ValueError(f"{node.label}: the number of heads is in no attribute and in no shape ({_shapes(tensors)})")
    return q, k


def _layout(node: FusedNode, name: str) -> str:
    return node.text(f"{name}_layout", "packed")


def _operand(node: FusedNode, name: str, tensor: TensorSpec, heads: int) -> Operand:
    layout, shape, offset = _layout(node, name), tensor.shape, 0
    rank = 4 if layout in ("bshd", "bhsd") else 3
    if len(shape) != rank:
        raise ValueError(f"{node.label}: {name} has shape {list(shape)}; required rank {rank} in layout {layout}")
    if layout == "bhsd":
        batch, found, length, size = shape
        strides = (found * length * size, size, length * size)
    elif layout == "bshd":
        batch, length, found, size = shape
        strides = (length * found * size, found * size, size)
    else:
        batch, length, width = shape if layout == "packed" else (shape[1], shape[0], shape[2])
        size, offset, pitch = _packed_heads(node, name, width, heads)
        inside = offset >= 0 and 0 < size <= pitch and offset + (heads - 1) * pitch + size <= width
        found = heads if inside else -1
        strides = (length * width, width, pitch) if layout == "packed" else (width, batch * width, pitch)
    if found != heads:
        raise ValueError(f"{node.label}: {name} has shape {list(shape)} in layout {layout}; required {heads} heads")
    return Operand(batch, length, heads, size, strides, offset)


def _packed_heads(node: FusedNode, name: str, width: int, heads: int) -> tuple[int, int, int]:
    """Return (head_dim, offset of the first head, stride between heads) in elements, for packed rows of `width`."""
    if f"{name}_offset" not in node.attributes:
        size = width // max(1, heads)
        return (size if heads * size == width else -1), 0, size
    size = node.integer("value_size" if name == "v" else "size")
    return size, node.integer(f"{name}_offset"), node.integer(f"{name}_pitch", size)


def _check(node: FusedNode, tensors: dict[str, TensorSpec], q: Operand, k: Operand, v: Operand) -> None:
    wrong = None
    if not (expect_equal(k.batch, q.batch) and expect_equal(v.batch, q.batch)):
        wrong = f"batches of {q.batch}, {k.batch} and {v.batch}; required equal ones"
    elif q.head_dim != k.head_dim:
        wrong = f"heads of {q.head_dim} and {k.head_dim} elements in q and k; required equal ones"
    elif not expect_equal(v.length, k.length):
        wrong = f"{k.length} keys and {v.length} values; required as many"
    elif k.heads < 1 or q.heads % k.heads:
        wrong = f"{q.heads} query heads and {k.heads} key heads; required a multiple"
    elif max(q.head_dim, v.head_dim) > MAX_HEAD_DIM:
        wrong = f"heads of {q.head_dim} and {v.head_dim} elements; the kernels take up to {MAX_HEAD_DIM}"
    if wrong:
        raise ValueError(f"{node.label}: {wrong} ({_shapes(tensors)})")


def _out_shape(node: FusedNode, out: Operand) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return the shape and strides (batch, length, heads) of the result in the node's output layout."""
    layout, hidden = node.text("out_layout", "packed"), out.heads * out.head_dim
    batch, length = out.batch, out.length
    shapes = {
        "packed": (batch, length, hidden),
        "rows": (batch * length, hidden),
        "bshd": (batch, length, out.heads, out.head_dim),
        "seq_first": (length, batch, hidden),
        "seq_first_rows": (length * batch, hidden),
        "bhsd": (batch, out.heads, length, out.head_dim),
    }
    if layout == "bhsd":
        return shapes[layout], (length * hidden, out.head_dim, length * out.head_dim)
    if layout.startswith("seq_first"):
        return shapes[layout], (hidden, batch * hidden, out.head_dim)
    return shapes[layout], (length * hidden, hidden, out.head_dim)


def score_tensor(
    node: FusedNode, name: str, tensor: TensorSpec | None, full: tuple[int, int, int, int]
) -> ScoreTensor | None:
    """Return the mask or bias `tensor` broadcast to `full`: (batch, heads, queries, keys).  None stays None."""
    if tensor is None:
        return None
    shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
    differs = [differs_along(*pair) for pair in zip(shape, full, strict=True)] if len(shape) == 4 else [None]
    if None in differs:
        raise ValueError(
            f"{node.label}: {name} has shape {list(tensor.shape)}; required one that broadcasts to {list(full)}"
        )
    batch, head, query, key = (math.prod(shape[axis + 1 :]) if differs[axis] else 0 for axis in range(4))
    pointer = Pointer("input", node.operands.index(name))
    return ScoreTensor(pointer, tensor.dtype, batch, head, query, key, tensor.aligned)


def _head_numbers(
    node: FusedNode, inputs: Sequence[TensorSpec], name: str, shape: tuple[int, ...]
) -> HeadNumbers | None:
    """Return the operand `name`, which has a number for each head; None if the node has none."""
    tensor = operand_spec(node, inputs, name)
    if tensor is None:
        return None
    if tensor.shape != shape:
        raise ValueError(f"{node.label}: {name} have shape {list(tensor.shape)}; required {list(shape)}")
    return HeadNumbers(required_pointer(node, name), tensor.dtype)


def _shapes(tensors: dict[str, TensorSpec]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
