"""Scaled dot-product attention, as the hosts of every attention kernel see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnxfuse.provider.plan import Pointer


@dataclass(frozen=True)
class Heads:
    """Queries, keys, values or results: element (b, h, s, d) lies at b * batch + h * head + s * row + d."""

    pointer: Pointer
    batch: int  # strides in elements
    head: int
    row: int


@dataclass(frozen=True)
class Scores:
    """A mask or a bias: element (b, h, q, k) lies at the sum of index * stride; a stride of 0 broadcasts."""

    pointer: Pointer
    dtype: str  # "bool", "float32", "float16", "bfloat16"
    batch: int
    head: int
    query: int
    key: int  # 0 or 1
    aligned: bool  # the data begins at a multiple of 16 bytes


@dataclass(frozen=True)
class Attention:
    """out = softmax(mask(cap(scale q k^T) + bias)) v per head, with fp32 scores and sums.

    Query head h reads key and value head h // (heads // kv_heads). Where `mask_kind` is boolean a score counts where
    the mask is true and is `masked_score` elsewhere; inverted is the opposite; additive adds the mask. `causal` is
    None, or the number c for which query i sees the keys up to i + c and no others: scores of those are -inf. With
    `added`, `masked_score` is added to all scores that `causal` or a boolean mask, if there is one, leaves out. Where
    every score of a row is -inf the row of the result is 0 if `zero_rows`, else NaN.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    dtype: str  # of q, k and v, and of out unless `out_dtype` says another
    aligned: bool  # all four begin at multiples of 16 bytes
    q: Heads
    k: Heads
    v: Heads
    out: Heads
    scale: float
    mask_kind: Literal["none", "boolean", "inverted", "additive"] = "none"
    mask: Scores | None = None
    masked_score: float = float("-inf")
    bias: Scores | None = None
    causal: int | None = None
    added: bool = False
    softcap: float = 0.0  # cap(s) = softcap * tanh(s / softcap); 0: no cap
    zero_rows: bool = False
    tf32: bool = False  # float32 operands may be rounded to TF32
    out_dtype: str = ""
