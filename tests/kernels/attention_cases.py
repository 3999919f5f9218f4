"""Attention nodes of every kind with random inputs, and their formula in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from described import described

from onnxfuse.runtime.plan import FusedNode, TensorSpec

LOWEST = -3.4028234663852886e38
INFINITE = -math.inf
DTYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LAYOUTS = ("packed", "seq_first", "bshd", "bhsd")
OUT_LAYOUTS = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
FLOATS = np.float64

# Half an ulp of the storage type, to which probabilities and results are rounded; for fp32 the loss of reductions too.
HALF_ULP = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}
TF32 = 2**-10  # relative, of a product whose two operands are each rounded to half of that
SMALLEST = 3e-8  # half of the smallest fp16 number: what a small probability loses when it is rounded
EXPONENT = 4e-7  # relative to a score: three fp32 roundings before the exponential


@dataclass(frozen=True)
class Case:
    """A node and the sizes of its inputs; `mask_axes` and `bias_axes` say which of (b, h, q, k) they have.

    A causal mask may be without an operand: `mask_axes` is () then.
    """

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 64
    keys: int = 64
    size: int = 64
    value_size: int = 64
    dtype: str = "float16"
    layouts: tuple[str, str, str] = ("packed", "packed", "packed")
    out_layout: str = "packed"
    mask: str = "none"
    mask_axes: tuple[int, ...] = (0, 0, 1, 1)
    mask_dtype: str = "float16"
    masked: float = INFINITE
    bias_axes: tuple[int, ...] | None = None
    sloped: bool = False  # the bias of a head is its slope times positions, without an axis for heads
    zero: bool = True
    sinks: bool = False  # each row has one more score, its head's sink
    operator: bool = False
    causal: bool = False
    softcap: float = 0.0
    scale: float | None = None
    amplitude: float = 1.0
    tf32: bool = False
    aligned: bool = True
    out_dtype: str = ""
    product: str = ""  # q, k and v are slices of one tensor: "runs", "heads" in turn, or runs at "odd" offsets

    @property
    def full(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return self.batch, self.heads, self.queries, self.keys

    def node(self) -> FusedNode:
        layouts = {f"{name}_layout": layout for name, layout in zip("qkv", self.layouts, strict=True)}
        given: dict[str, Any] = {**layouts, "out_layout": self.out_layout, "heads": self.heads}
        given |= {"kv_heads": self.kv_heads, "repeats": self.heads // self.kv_heads}
        if self.operator:
            given |= {"is_causal": int(self.causal), "softcap": self.softcap}
            given["form"] = "causal_operator" if self.mask == "causal" else "operator"
        else:
            given |= {"mask_kind": self.mask}
            given["bias_kind"] = "none" if not self.bias_axes else "slopes" if self.sloped else "position"
            full = "sinks" if self.sinks else "zero" if self.zero else "softmax"
            given |= {"form": "softmax", "fully_masked": full}
            given |= {"capped": "tanh", "cap": self.softcap} if self.softcap else {"capped": "none"}
        if self.mask in ("boolean", "inverted", "causal"):
            given["masked_score"] = self.masked
        if self.scale is not None:  # in several operators that of what Tanh reads
            given["scale"] = self.scale / (self.softcap if self.softcap and not self.operator else 1.0)
        if self.product:
            given |= {"size": self.size, "value_size": self.value_size, **self._slice_attributes()}
        return FusedNode("attention", "n", tuple(described(self)), given, (self.out_dtype or self.dtype,))

    def inputs(self) -> dict[str, np.ndarray]:
        """Return random operands; row 1 of a mask leaves no key, and neither do the first rows of a causal one."""
        random = np.random.default_rng(self.queries * 4099 + self.keys)

        def normal(shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
            return (random.standard_normal(shape, dtype=np.float32) * scale).astype(NUMPY[dtype])

        def shape(axes: Sequence[int]) -> tuple[int, ...]:
            return tuple(size if axis else 1 for size, axis in zip(self.full, axes, strict=True))

        made = {
            "q": normal(self._shape(0, self.heads, self.queries, self.size), self.dtype, self.amplitude),
            "k": normal(self._shape(1, self.kv_heads, self.keys, self.size), self.dtype),
            "v": normal(self._shape(2, self.kv_heads, self.keys, self.value_size), self.dtype),
        }
        if self.mask != "none" and self.mask_axes:
            kept = random.random(shape(self.mask_axes)) < 0.7
            if kept.shape[2] > 1:
                kept[:, :, 1] = False
            if self.mask == "causal":
                kept[..., : self.keys - self.queries + 3] = False
            if self.mask == "additive":
                added = np.where(kept, random.standard_normal(kept.shape), self.masked)
                made["mask"] = added.astype(np.float32).astype(NUMPY[self.mask_dtype])
            else:
                made["mask"] = ~kept if self.mask == "inverted" else kept
        if self.bias_axes and self.sloped:
            made["slopes"] = (2.0 ** -np.arange(1, self.heads + 1)).astype(np.float32).reshape(-1, 1, 1)
            made["positions"] = normal(shape(self.bias_axes), self.mask_dtype, 20.0)
        elif self.bias_axes:
            made["bias"] = normal(shape(self.bias_axes), self.mask_dtype)
        if self.sinks:
            made["sinks"] = normal((1, self.heads, 1, 1), self.dtype)
        return made

    def stored(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the inputs as the node gets them: q, k and v as slices of one tensor if `product` says so."""
        if not self.product:
            return inputs
        operands = [inputs[name] for name in "qkv"]
        if self.product == "heads":
            split = [x.reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads) for x in operands]
            whole = np.concatenate(split, axis=-1)
            whole = whole.reshape(*whole.shape[:2], whole.shape[2] * whole.shape[3])
        else:
            whole = np.concatenate(operands, axis=-1)
        if self.product == "odd":
            whole = np.pad(whole, [(0, 0), (0, 0), (1, 2)])
        return {**inputs, **dict.fromkeys("qkv", whole)}

    def _slice_attributes(self) -> dict[str, int]:
        if self.product == "heads":
            pitch = 2 * self.size + self.value_size
            places = {f"{name}_offset": i * self.size for i, name in enumerate("qkv")}
            return {**places, **{f"{name}_pitch": pitch for name in "qkv"}}
        first = int(self.product == "odd")
        widths = self.heads * self.size, self.kv_heads * self.size
        return {"q_offset": first, "k_offset": first + widths[0], "v_offset": first + sum(widths)}

    def _shape(self, operand: int, heads: int, length: int, size: int) -> tuple[int, ...]:
        layout = self.layouts[operand]
        shapes = {"seq_first": (length, self.batch, heads * size), "bshd": (self.batch, length, heads, size)}
        shapes |= {"packed": (self.batch, length, heads * size), "bhsd": (self.batch, heads, length, size)}
        return shapes[layout]

    def specs(self, inputs: dict[str, np.ndarray]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(value.shape, value.dtype.name, self.aligned) for value in inputs.values())


# ---- the formula ---------------------------------------------------------------------------------------------------


def split(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    """Return the tensor as (batch, heads, length, size) in float64."""
    wide = x.astype(FLOATS)
    if layout in ("packed", "seq_first"):
        wide = wide.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    order = {"packed": (0, 2, 1, 3), "bshd": (0, 2, 1, 3), "seq_first": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
    return wide.transpose(order[layout])


def joined(y: np.ndarray, layout: str) -> np.ndarray:
    """Bring a result of (batch, heads, length, size) into the layout of an output."""
    batch, heads, length, size = y.shape
    if layout == "bhsd":
        return y
    if layout == "bshd":
        return y.transpose(0, 2, 1, 3)
    if layout.startswith("seq_first"):
        rows = y.transpose(2, 0, 1, 3).reshape(length, batch, heads * size)
    else:
        rows = y.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)
    return rows.reshape(batch * length, heads * size) if layout.endswith("rows") else rows


def formula(case: Case, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the result in float64, and by how much each of its elements may differ."""
    q = split(inputs["q"], case.layouts[0], case.heads)
    k, v = (
        split(inputs[name], layout, case.kv_heads).repeat(case.heads // case.kv_heads, axis=1)
        for name, layout in zip("kv", case.layouts[1:], strict=True)
    )
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.size) if case.operator else 1.0
    scores = q @ k.swapaxes(-1, -2) * scale
    sizes = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * abs(scale)  # the roundings of a score are relative to these
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.bias_axes and case.sloped:
        scores = scores + inputs["slopes"].astype(FLOATS) * inputs["positions"].astype(FLOATS)
    elif case.bias_axes:
        scores = scores + inputs["bias"].astype(FLOATS)
    if case.mask == "additive":
        scores = scores + lengthened(case, inputs["mask"], INFINITE).astype(FLOATS)
    elif case.mask == "causal":
        kept = np.tri(case.queries, case.keys, case.keys - case.queries, dtype=bool) & inputs.get("mask", True)
        scores = np.where(kept, scores, scores + case.masked)
    elif case.mask != "none":
        kept = lengthened(case, inputs["mask"], False) == (case.mask == "boolean")
        scores = np.where(kept, scores, case.masked)
    if case.causal:
        scores = np.where(np.tri(case.queries, case.keys, dtype=bool), scores, INFINITE)
    with np.errstate(invalid="ignore"):
        sink = inputs["sinks"].astype(FLOATS) if case.sinks else np.float64(INFINITE)
        top = np.maximum(scores.max(-1, keepdims=True, initial=INFINITE), sink)
        powers = np.exp(scores - top)
        probabilities = powers / (powers.sum(-1, keepdims=True) + np.exp(sink - top))
    if case.zero or case.operator:
        probabilities = np.nan_to_num(probabilities, nan=0.0)
    tolerance = allowed(case, scores, sizes, probabilities, v)
    return joined(probabilities @ v, case.out_layout), joined(tolerance, case.out_layout)


def lengthened(case: Case, mask: np.ndarray, rest: float) -> np.ndarray:
    """Extend a mask of ONNX's operator, which may have fewer keys than there are: it leaves none of the others."""
    missing = case.keys - mask.shape[-1] if case.operator else 0
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=rest)


def allowed(case: Case, scores: np.ndarray, sizes: np.ndarray, probabilities: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the tolerance: probabilities and result are rounded to their dtype, scores before the exponential."""
    top = np.abs(scores.max(-1, keepdims=True, initial=INFINITE))  # scores far below it have no weight
    largest = np.maximum(np.where(top < 1e30, top, 0.0), sizes.max(-1, keepdims=True, initial=1.0))
    ulps = HALF_ULP[case.dtype] + HALF_ULP[case.out_dtype or case.dtype]
    relative = 1.1 * ulps + 2 * EXPONENT * largest
    if case.tf32 and case.dtype == "float32":
        relative = relative + TF32 * (1 + largest)
    lost = case.keys * SMALLEST * np.abs(v).max(initial=0.0) if case.dtype == "float16" else 0.0
    weights = np.nan_to_num(probabilities, nan=0.0) @ np.abs(v)
    return np.asarray(relative * weights + lost + 1e-7)


def generated(seed: int) -> Case:
    """Draw any combination of what a node may have; lengths and head sizes lie on and off the edges of tiles."""
    choose = random.Random(seed)
    kv_heads, dtype, operator = choose.choice((1, 2, 3)), choose.choice(DTYPES), choose.random() < 0.25
    size = choose.choice((8, 32, 64, 64, 80, 96, 128, 128, 256, choose.randint(1, 256)))
    mask = choose.choice(("none", "boolean", "additive") if operator else ("none", "boolean", "inverted", "additive"))
    masked = (INFINITE, -1e4) if mask == "additive" else (INFINITE, -1e4, -65504.0, LOWEST)

    def axes() -> tuple[int, ...]:
        return tuple(choose.randint(0, 1) for _ in range(4))

    found = Case(
        batch=choose.choice((1, 2)), kv_heads=kv_heads, heads=kv_heads * choose.choice((1, 1, 2, 4)),
        queries=choose.choice((1, 2, 5, 16, 33, 64, 100, 197, 300)),
        keys=choose.choice((1, 3, 17, 49, 64, 100, 197, 513, 1030, 4097)),
        size=size, value_size=choose.choice((size, size, size, choose.randint(1, 256))), dtype=dtype,
        layouts=(choose.choice(LAYOUTS), choose.choice(LAYOUTS), choose.choice(LAYOUTS)),
        out_layout=choose.choice(OUT_LAYOUTS), mask=mask, mask_axes=axes(),
        mask_dtype=choose.choice(("float32", dtype)), masked=INFINITE if operator else choose.choice(masked),
        bias_axes=None if operator or choose.random() < 0.6 else axes(), zero=choose.random() < 0.5,
        operator=operator, causal=operator and choose.random() < 0.6,
        softcap=choose.choice((0.0, 5.0)),
        scale=None if operator else choose.choice((1.0, 0.125, -0.2)), tf32=choose.random() < 0.5,
        aligned=choose.random() < 0.8,
    )  # fmt: skip
    if seed % 5 == 1:
        found = replace(found, sinks=not operator)
    if seed % 4:
        return found
    own = choose.choice(((), (1, 0, 0, 1), (0, 0, 0, 1), (1, 0, 1, 1), (1, 1, 1, 1), (1, 0, 1, 0))[operator:])
    masked = INFINITE if operator else choose.choice((INFINITE, -1e4, -65504.0, LOWEST))
    return replace(found, mask="causal", mask_axes=own, masked=masked)
