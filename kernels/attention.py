"""Attention on the GPU: what a node means in strides, and which kernels can run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels import _attention_decode, _attention_hopper, _attention_mma
from onnxfuse.kernels._attention import Attention, Heads, Scores
from onnxfuse.kernels._attention_mma import LARGEST_HEAD
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._types import ITEM_BYTES, STORAGE, refuse_choice, required, spec
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, TensorSpec

LAYOUTS: Final = ("packed", "seq_first", "bshd", "bhsd")
OUT_LAYOUTS: Final = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
MASK_KINDS: Final = ("none", "boolean", "inverted", "additive", "causal")
CHOICES: Final = (
    *((f"{name}_layout", LAYOUTS, "packed") for name in "qkv"),
    ("out_layout", OUT_LAYOUTS, "packed"),
    ("mask_kind", MASK_KINDS, "none"),
    ("bias_kind", ("none", "position"), "none"),
    ("fully_masked", ("zero", "softmax"), "softmax"),
    ("form", ("softmax", "operator", "causal_operator"), "softmax"),
)
FEW_ROWS: Final = 64  # queries times the query heads of a key head that one block can have
MANY_KEYS: Final = 512  # keys from which few queries are worth several blocks
LONG_QUERIES: Final = 160  # queries from which Hopper's kernel fills its tiles
MOST: Final = 6  # candidates: each is compiled and timed when a new shape comes


@dataclass(frozen=True)
class Operand:
    """A tensor of heads as (batch, length, heads, size), with the strides of the first three in elements."""

    batch: int
    length: int
    heads: int
    size: int
    strides: tuple[int, int, int]  # of batch, length, heads
    offset: int = 0  # elements in front of the first one

    def at(self, pointer: Pointer, item_bytes: int) -> Heads:
        """Where it lies in what `pointer` points to."""
        batch, row, head = self.strides
        return Heads(replace(pointer, offset=self.offset * item_bytes), batch, head, row)


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    for choice, known, default in CHOICES:
        if why := refuse_choice(node, choice, known, default):
            return why
    for name in ("size", "value_size"):
        if not 0 < node.attributes.get(name, 1) <= LARGEST_HEAD:
            return f"attention: {name} is {node.attributes[name]}; the kernels take 1 to {LARGEST_HEAD}"
    return _refuse_dtypes(node, dict(zip(node.operands, input_dtypes, strict=True)), device)


def _refuse_dtypes(node: FusedNode, dtypes: dict[str, str], device: Device) -> str | None:
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
    known = {"mask": ("bool",) if kind in ("boolean", "inverted", "causal") else tuple(STORAGE), "bias": tuple(STORAGE)}
    for name, accepted in known.items():
        if name in dtypes and dtypes[name] not in accepted:
            return f"attention: {name} of kind {kind} is {dtypes[name]}; the kernels take {', '.join(accepted)}"
    return None


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    problem, out = attention_of(node, inputs, device)
    if 0 in out.shape:
        return [Plan((out,), ())]
    found = ways(problem, device)
    if not found:
        raise ValueError(
            f"{_name(node)}: heads of {problem.size} and {problem.value_size} elements of {problem.dtype}; "
            f"the kernels take 1 to {LARGEST_HEAD}, as far as the shared memory of {device.name} goes"
        )
    return [Plan((out,), way.steps, way.scratch) for way in found]


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]


def ways(problem: Attention, device: Device) -> list[Candidate]:
    """The candidates of all kernels, what is expected to be fastest first."""
    if math.isinf(problem.masked_score):
        problem = replace(problem, added=False)  # to add it is to put it in the score's place
    decode = _attention_decode.plans(problem, device)
    hopper = [] if problem.out_dtype else _attention_hopper.plans(problem, device)
    general = _attention_mma.plans(problem, device)
    rows = problem.queries * (problem.heads // problem.kv_heads)
    if rows <= FEW_ROWS and problem.keys >= MANY_KEYS:
        ordered = [*decode, *general[:2], *hopper[:1]]
    elif problem.queries >= LONG_QUERIES and hopper and _leaves_tiles_out(problem):
        return hopper[:1]
    elif problem.queries >= LONG_QUERIES:
        ordered = [*hopper[:4], *general[:2], *decode[:1]]
    else:
        ordered = [*general[:3], *hopper[:2], *decode[:1]]
    return ordered[:MOST]


def _leaves_tiles_out(problem: Attention) -> bool:
    """Whether the mask is one that leaves whole tiles out or as they are, of which random values say nothing.

    One that differs between heads is a bias by another name: candidates are timed with it.
    """
    mask = problem.mask
    return bool(mask and mask.query and mask.key and not mask.head)


# --- the node in numbers ---------------------------------------------------------------------------------------------


def attention_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Attention, TensorSpec]:
    """(what is to be computed, the output).  Raises ValueError where shapes do not fit."""
    tensors = {name: required(node, inputs, name) for name in "qkv"}
    heads, kv_heads = _heads(node, tensors)
    q = _operand(node, "q", tensors["q"], heads)
    k, v = (_operand(node, name, tensors[name], kv_heads) for name in "kv")
    _check(node, tensors, q, k, v)
    out = Operand(q.batch, q.length, heads, v.size, (0, 0, 0))
    shape, strides = _out_shape(node, out)
    y = TensorSpec(shape, node.output_dtypes[0], tensors["q"].aligned)
    operator = _is_operator(node)
    mask = spec(node, inputs, "mask")
    # The operator's mask may be shorter than the keys, of which the others then do not count.
    kind = _mask_kind(node, mask.dtype if mask else None)
    keys = min(k.length, mask.shape[-1]) if operator and mask and mask.shape and kind != "causal" else k.length
    item, out_item = ITEM_BYTES[tensors["q"].dtype], ITEM_BYTES[y.dtype]
    full = (q.batch, heads, q.length, keys)
    masked_score = -math.inf if operator else float(node.attributes.get("masked_score", -math.inf))
    problem = Attention(
        q.batch, heads, kv_heads, q.length, keys, q.size, v.size, tensors["q"].dtype,
        all(tensor.aligned for tensor in tensors.values()),
        q.at(_pointer(node, "q"), item), k.at(_pointer(node, "k"), item), v.at(_pointer(node, "v"), item),
        Operand(*full[:1], q.length, heads, v.size, strides).at(Pointer("output", 0), out_item),
        scale=float(node.attributes.get("scale", 1 / math.sqrt(max(1, q.size)) if operator else 1.0)),
        mask_kind=kind if kind != "causal" else "boolean" if mask else "none",  # type: ignore[arg-type]
        mask=_scores(node, "mask", mask, full),
        masked_score=masked_score,
        bias=_scores(node, "bias", spec(node, inputs, "bias"), full),
        causal=_causal(node, kind, q.length, keys),
        added=kind == "causal",
        softcap=float(node.attributes.get("softcap", 0.0)) if operator else 0.0,
        # The operator's rows without a key are 0, and a product over no keys at all is.
        zero_rows=operator or node.attributes.get("fully_masked") == "zero" or keys == 0,
        tf32=device.tf32, out_dtype=y.dtype if y.dtype != tensors["q"].dtype else "",
    )  # fmt: skip
    return problem, y


def _is_operator(node: FusedNode) -> bool:
    return node.attributes.get("form") in ("operator", "causal_operator")


def _causal(node: FusedNode, kind: str, queries: int, keys: int) -> int | None:
    """The operator's first query sees the first key; a causal mask's last query sees the last key."""
    bounds = [keys - queries] if kind == "causal" and queries > 1 else []
    bounds += [0] if _is_operator(node) and node.attributes.get("is_causal", 0) else []
    return min(bounds, default=None)


def _mask_kind(node: FusedNode, dtype: str | None) -> str:
    """The operator tells boolean from additive masks by their dtype, and none from others by presence."""
    if node.attributes.get("form") == "operator":
        return "none" if dtype is None else "boolean" if dtype == "bool" else "additive"
    return "causal" if _is_operator(node) else str(node.attributes.get("mask_kind", "none"))


def _pointer(node: FusedNode, name: str) -> Pointer:
    return Pointer("input", node.operands.index(name))


def _heads(node: FusedNode, tensors: dict[str, TensorSpec]) -> tuple[int, int]:
    """Query heads and key heads, from the attributes where they are static, else from the shapes."""
    found = {"q": node.attributes.get("heads"), "k": node.attributes.get("kv_heads")}
    for name in found:
        tensor, layout = tensors[name], _layout(node, name)
        axis = {"bshd": 2, "bhsd": 1}.get(layout)
        if found[name] is None and axis is not None and len(tensor.shape) == 4:
            found[name] = tensor.shape[axis]
        elif found[name] is None and node.attributes.get("size"):
            found[name] = tensor.shape[-1] // int(node.attributes["size"])
    repeats = node.attributes.get("repeats")
    if repeats and found["q"] is None and found["k"] is not None:
        found["q"] = found["k"] * repeats
    if repeats and found["k"] is None and found["q"] is not None:
        found["k"] = found["q"] // repeats
    if found["q"] is None or found["k"] is None:
        raise ValueError(f"{_name(node)}: the number of heads is in no attribute and in no shape ({_shapes(tensors)})")
    return int(found["q"]), int(found["k"])


def _layout(node: FusedNode, name: str) -> str:
    return str(node.attributes.get(f"{name}_layout", "packed"))


def _operand(node: FusedNode, name: str, tensor: TensorSpec, heads: int) -> Operand:
    layout, shape, offset = _layout(node, name), tensor.shape, 0
    rank = 4 if layout in ("bshd", "bhsd") else 3
    if len(shape) != rank:
        raise ValueError(f"{_name(node)}: {name} has shape {list(shape)}; required rank {rank} in layout {layout}")
    if layout == "bhsd":
        batch, found, length, size = shape
        strides = (found * length * size, size, length * size)
    elif layout == "bshd":
        batch, length, found, size = shape
        strides = (length * found * size, found * size, size)
    else:
        batch, length, width = shape if layout == "packed" else (shape[1], shape[0], shape[2])
        size, offset, pitch = _part(node, name, width, heads)
        inside = offset >= 0 and 0 < size <= pitch and offset + (heads - 1) * pitch + size <= width
        found = heads if inside else -1
        strides = (length * width, width, pitch) if layout == "packed" else (width, batch * width, pitch)
    if found != heads:
        raise ValueError(f"{_name(node)}: {name} has shape {list(shape)} in layout {layout}; required {heads} heads")
    return Operand(batch, length, heads, size, strides, offset)


def _part(node: FusedNode, name: str, width: int, heads: int) -> tuple[int, int, int]:
    """The size of a head, the elements in front of the first one and from one to the next, in rows of `width`."""
    offset = node.attributes.get(f"{name}_offset")
    if offset is None:
        size = width // max(1, heads)
        return (size if heads * size == width else -1), 0, size
    size = int(node.attributes["value_size" if name == "v" else "size"])
    return size, int(offset), int(node.attributes.get(f"{name}_pitch", size))


def _check(node: FusedNode, tensors: dict[str, TensorSpec], q: Operand, k: Operand, v: Operand) -> None:
    wrong = None
    if not q.batch == k.batch == v.batch:
        wrong = f"batches of {q.batch}, {k.batch} and {v.batch}; required equal ones"
    elif q.size != k.size:
        wrong = f"heads of {q.size} and {k.size} elements in q and k; required equal ones"
    elif k.length != v.length:
        wrong = f"{k.length} keys and {v.length} values; required as many"
    elif k.heads < 1 or q.heads % k.heads:
        wrong = f"{q.heads} query heads and {k.heads} key heads; required a multiple"
    elif max(q.size, v.size) > LARGEST_HEAD:
        wrong = f"heads of {q.size} and {v.size} elements; the kernels take up to {LARGEST_HEAD}"
    if wrong:
        raise ValueError(f"{_name(node)}: {wrong} ({_shapes(tensors)})")


def _out_shape(node: FusedNode, out: Operand) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Shape and strides of the result in its layout."""
    layout, hidden = str(node.attributes.get("out_layout", "packed")), out.heads * out.size
    batch, length = out.batch, out.length
    shapes = {
        "packed": (batch, length, hidden),
        "rows": (batch * length, hidden),
        "bshd": (batch, length, out.heads, out.size),
        "seq_first": (length, batch, hidden),
        "seq_first_rows": (length * batch, hidden),
        "bhsd": (batch, out.heads, length, out.size),
    }
    if layout == "bhsd":
        return shapes[layout], (length * hidden, out.size, length * out.size)
    if layout.startswith("seq_first"):
        return shapes[layout], (hidden, batch * hidden, out.size)
    return shapes[layout], (length * hidden, hidden, out.size)


def _scores(node: FusedNode, name: str, tensor: TensorSpec | None, full: tuple[int, int, int, int]) -> Scores | None:
    """A mask or bias, broadcast from the right to (batch, heads, queries, keys)."""
    if tensor is None:
        return None
    shape = (1,) * (4 - len(tensor.shape)) + tensor.shape
    if len(shape) > 4 or any(found not in (1, wanted) for found, wanted in zip(shape, full, strict=True)):
        raise ValueError(
            f"{_name(node)}: {name} has shape {list(tensor.shape)}; required one that broadcasts to {list(full)}"
        )
    strides = [math.prod(shape[axis + 1 :]) if shape[axis] > 1 else 0 for axis in range(4)]
    return Scores(Pointer("input", node.operands.index(name)), tensor.dtype, *strides, aligned=tensor.aligned)


def _name(node: FusedNode) -> str:
    return f"attention '{node.name}'"


def _shapes(tensors: dict[str, TensorSpec]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
