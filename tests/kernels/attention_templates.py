"""Attention nodes as models have them, with dynamic dims; the tests of templates compile and run them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxfuse.runtime.plan import FusedNode, TensorSpec

HALF, FULL = "float16", "float32"
# The numbers of sizes, as dims of a template.  Of a cache: batch, new rows, past rows, and all of them.
BATCH, QUERIES, KEYS, TOTAL = -1, -2, -3, -4
PAST = KEYS

Sizes = Callable[[int], Sequence[int]]
Mask = tuple[str, tuple[int, ...], str]  # kind, shape, dtype


@dataclass(frozen=True)
class Case:
    """A node, its inputs, and which sizes go together: of a seed, or any."""

    name: str
    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    sizes: Sizes | None = None


def some_sizes(count: int, largest: int = 1 << 12) -> Sizes:
    """Return sizes from 2 on: a size of 1 makes strides irrelevant, for which a static plan then has other numbers."""

    def of(seed: int) -> Sequence[int]:
        chance = random.Random(seed)
        return [max(2, int(largest ** chance.random())) for _ in range(count)]

    return of


def cache_sizes(*, batch: bool, new: bool, total: bool) -> Sizes:
    """Return the dynamic ones of batch, new rows and past rows, and their sum; the past is empty now and then."""

    def of(seed: int) -> Sequence[int]:
        chance = random.Random(seed)
        past = 0 if seed % 5 == 0 else int(8192 ** chance.random())
        added = max(2, int((70, 1000)[seed % 2] ** chance.random())) if new else 1
        if past == 0 and not new:
            past = 1
        found = [max(2, int(100 ** chance.random()))] * batch + [added] * new + [past]
        return [*found, past + added] if total else found

    return of


def _node(
    name: str, fusion: str, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], dtype: str,
    heads: tuple[int, int], sizes: Sizes | None, outputs: int = 1, aligned: bool = True, **given: Any,
) -> Case:  # fmt: skip
    attributes = {"heads": heads[0], "kv_heads": heads[1], "repeats": heads[0] // heads[1], "form": "softmax", **given}
    tensors = tuple(TensorSpec(shape, dtypes.get(operand, dtype), aligned) for operand, shape in shapes.items())
    node = FusedNode(fusion, "n", tuple(shapes), {"scale": 0.125, **attributes}, (dtype,) * outputs)
    return Case(name, node, tensors, sizes)


def _masked(shapes: dict[str, tuple[int, ...]], mask: Mask | None, given: dict[str, Any]) -> dict[str, str]:
    """Add a mask to the operands and attributes, and return its dtype by its name."""
    if mask is None:
        return {}
    shapes["mask"], given["mask_kind"] = mask[1], mask[0]
    given.setdefault("masked_score", -math.inf)
    return {"mask": mask[2]}


def plain(
    name: str, lengths: tuple[int, int, int], heads: tuple[int, int] = (12, 12), size: int = 64, dtype: str = HALF,
    mask: Mask | None = None, bias: tuple[int, ...] | None = None, positions: tuple[int, ...] | None = None,
    aligned: bool = True, **given: Any,
) -> Case:  # fmt: skip
    """Return attention of packed operands; `lengths` are batch, queries and keys."""
    batch, queries, keys = lengths
    shapes = {"q": (batch, queries, heads[0] * size)} | dict.fromkeys("kv", (batch, keys, heads[1] * size))
    dtypes = _masked(shapes, mask, given)
    if bias:
        shapes["bias"], given["bias_kind"] = bias, "position"
    if positions:
        shapes |= {"slopes": (heads[0], 1, 1), "positions": positions}
        dtypes, given["bias_kind"] = {**dtypes, "slopes": FULL, "positions": FULL}, "slopes"
    count = -min(lengths)
    return _node(name, "attention", shapes, dtypes, dtype, heads, some_sizes(count), aligned=aligned, **given)


def one_tensor(name: str, lengths: tuple[int, int, int]) -> Case:
    """Return attention whose queries, keys and values of each head of 64 elements lie side by side in one tensor."""
    case = plain(name, lengths, size=3 * 64)
    places = {f"{operand}_offset": 64 * i for i, operand in enumerate("qkv")}
    pitches = {f"{operand}_pitch": 3 * 64 for operand in "qkv"}
    attributes = {**case.node.attributes, "size": 64, "value_size": 64, **places, **pitches}
    return dataclasses.replace(case, node=dataclasses.replace(case.node, attributes=attributes))


def with_cache(
    name: str, lengths: tuple[int, int, int], heads: tuple[int, int] = (32, 8), size: int = 128, dtype: str = HALF,
    mask: Mask | None = None, layout: str = "bhsd", **given: Any,
) -> Case:  # fmt: skip
    """Return attention over a cache; `lengths` are batch, new rows and past rows."""
    batch, new, past = lengths

    def shape(count: int, rows: int) -> tuple[int, ...]:
        return (batch, count, rows, size) if layout == "bhsd" else (batch, rows, count, size)

    shapes = {"q": (batch, heads[0], new, size), "k": shape(heads[1], new), "v": shape(heads[1], new)}
    shapes |= {"past_key": shape(heads[1], past), "past_value": shape(heads[1], past)}
    dtypes = _masked(shapes, mask, given)
    sizes = cache_sizes(batch=batch < 0, new=new < 0, total=mask is not None)
    given |= {"q_layout": "bhsd", "k_layout": layout, "v_layout": layout, "cache_layout": layout}
    return _node(name, "attention_with_cache", shapes, dtypes, dtype, heads, sizes, 3, **given)


def rotated(name: str, lengths: tuple[int, int], heads: tuple[int, int] = (32, 8), tables: int = 1, norm: bool = False,
            dtype: str = HALF, **given: Any) -> Case:  # fmt: skip
    """Return attention after rotary embedding; `lengths` are batch and length."""
    batch, length = lengths
    size = 128
    shapes: dict[str, tuple[int, ...]] = {"q": (batch, length, heads[0] * size)}
    shapes |= dict.fromkeys("kv", (batch, length, heads[1] * size))
    shapes |= dict.fromkeys(("cos", "sin"), (tables, length, size))
    if norm:
        shapes |= {"q_scale": (size,), "k_scale": (size,)}
    dtypes = _masked(shapes, given.pop("mask", None), given)
    return _node(
        name, "attention_with_rotary_embedding", shapes, dtypes, dtype, heads, some_sizes(-min(lengths)), **given
    )


def group_query(name: str, new: int, size: int = 128, quantized: str = "") -> Case:
    """Return GroupQueryAttention of packed operands, in which batch, past rows and total length are dynamic.

    `quantized` is the dtype of quantized caches.
    """
    heads, kv_heads = 32, 8
    cache, table = (BATCH, kv_heads, PAST, size), (4096, size // 2)
    shapes = {
        "query": (BATCH, new, (heads + 2 * kv_heads) * size), "seqlens_k": (BATCH,), "total_sequence_length": (TOTAL,),
        "past_key": cache, "past_value": cache, "cos_cache": table, "sin_cache": table,
    }  # fmt: skip
    dtypes = dict.fromkeys(("seqlens_k", "total_sequence_length"), "int32")
    given = {"num_heads": heads, "kv_num_heads": kv_heads, "size": size, "do_rotary": 1}
    if quantized:
        dtypes |= dict.fromkeys(("past_key", "past_value"), quantized) | dict.fromkeys(("k_scale", "v_scale"), FULL)
        shapes |= dict.fromkeys(("k_scale", "v_scale"), (1,))
    found = _node(name, "group_query_attention", shapes, dtypes, HALF, (heads, kv_heads), some_sizes(4), 3, **given)
    cache = quantized or HALF
    return dataclasses.replace(found, node=dataclasses.replace(found.node, output_dtypes=(HALF, cache, cache)))


B, S, K, N, P = BATCH, QUERIES, KEYS, TOTAL, PAST
CASES = [
    plain("no mask", (B, S, S)),
    plain("images", (B, 197, 197)),
    plain("length alone", (1, B, B), mask=("boolean", (1, 1, 1, B), "bool")),
    plain("padding", (B, S, S), mask=("boolean", (B, 1, 1, S), "bool")),
    plain("padding, inverted", (B, S, S), mask=("inverted", (B, 1, 1, S), "bool"), masked_score=-65504.0),
    plain("padding, additive", (B, S, S), mask=("additive", (B, 1, 1, S), HALF)),
    plain("no mask, float32", (B, S, S), dtype=FULL),
    plain("padding, float32", (B, S, S), size=80, mask=("additive", (B, 1, 1, S), FULL), dtype=FULL),
    plain("mask of queries", (B, S, S), mask=("additive", (B, 1, S, S), HALF)),
    plain("mask of queries, bfloat16", (B, S, S), (16, 4), 128, "bfloat16", ("additive", (B, 1, S, S), "bfloat16")),
    plain("window", (B, S, S), mask=("boolean", (1, 1, S, S), "bool")),
    plain("bias", (B, S, S), bias=(12, S, S)),
    plain("bias and mask", (B, S, S), (8, 8), bias=(1, 8, S, S), mask=("additive", (B, 1, 1, S), HALF)),
    plain("slopes", (B, S, S), positions=(B, 1, 1, S), mask_kind="causal", masked_score=-65504.0),
    plain("causal", (B, S, S), (32, 8), 128, mask_kind="causal", masked_score=-math.inf),
    plain("causal and padding", (B, S, S), (32, 8), 128, mask=("causal", (B, 1, 1, S), "bool"), masked_score=-65504.0),
    plain("causal operator", (B, S, S), (32, 8), 128, form="operator", is_causal=1, softcap=30.0),
    plain("cross", (B, S, K), (16, 16)),
    plain("cross, one query", (B, 1, S), (16, 16), mask=("boolean", (B, 1, 1, S), "bool")),
    plain("odd sizes", (B, S, K), (6, 3), 33),
    plain("large heads", (B, S, S), (8, 8), 256, mask=("boolean", (B, 1, 1, S), "bool")),
    plain("misaligned", (B, S, S), mask=("additive", (B, 1, S, S), HALF), aligned=False),
    one_tensor("one tensor", (B, S, S)),
]
CACHES = [
    with_cache("step", (1, 1, B)),
    with_cache("steps", (B, 1, S), mask=("additive", (B, 1, 1, K), HALF)),
    with_cache("steps, small heads", (B, 1, S), (12, 12), 64, mask=("boolean", (B, 1, 1, K), "bool")),
    with_cache("steps, one key head", (B, 1, S), (8, 1), 64, FULL, ("additive", (B, 1, 1, K), FULL), "bshd"),
    with_cache("prefill", (B, S, P), mask=("additive", (B, 1, S, N), HALF)),
    with_cache("prefill, small heads", (B, S, P), (12, 12), 64, mask=("additive", (B, 1, S, N), HALF)),
    with_cache("prefill, no mask", (B, S, P)),
    with_cache("prefill, causal", (B, S, P), mask_kind="causal", masked_score=-65504.0),
    with_cache("prefill, causal and padding", (B, S, P), mask=("causal", (B, 1, 1, N), "bool"), masked_score=-math.inf),
    with_cache("prefill, operator", (B, S, P), mask=("boolean", (B, 1, S, N), "bool"), form="operator"),
    with_cache("prefill, causal operator", (B, S, P), form="operator", is_causal=1),
    group_query("group query", QUERIES),
    group_query("group query, int8", QUERIES, quantized="int8"),
]
ROTATED = [
    rotated("rotated", (B, S), mask_kind="causal", masked_score=-math.inf),
    rotated("rotated, padding", (B, S), tables=B, mask=("boolean", (B, 1, 1, S), "bool")),
    rotated("rotated, norm", (1, B), norm=True, mask_kind="causal", masked_score=-65504.0, epsilon=1e-6),
]
