"""Attention over the keys and values of earlier steps and of this one; the grown caches are outputs, too."""

from onnxfuse.dsl import attribute, choose, either, fusion, op, rearrange, require, scalar, stored, tensor
from onnxfuse.patterns._attention import (
    GROUPED_KEYS,
    GROUPED_VALUES,
    KEYS,
    QUERIES,
    VALUES,
    by_layout,
    group_query_attention,
    in_layout,
    multi_head_attention,
)
from onnxfuse.patterns.attention import SCORES, attended

HEADS_FIRST, ROWS_FIRST = "batch kv_heads {rows} {size}", "batch {rows} kv_heads {size}"


def grown(past, new, layout, size):
    """A cache with the rows of this step behind those that it had."""

    def cache(axes, axis):
        old = axes.format(rows="past", size=size)
        rows = by_layout(layout, new, "new", "kv_heads", size, axes.format(rows="new", size=size))
        return op.Concat(rearrange(past, f"{old} -> {old}"), rows, axis=axis)

    return choose("cache_layout", bhsd=cache(HEADS_FIRST, -2), bshd=cache(ROWS_FIRST, -3))


def read(cache, size, result):
    """All rows of a cache."""
    return choose(
        "cache_layout",
        bhsd=rearrange(cache, f"{HEADS_FIRST.format(rows='keys', size=size)} -> {result}"),
        bshd=rearrange(cache, f"{ROWS_FIRST.format(rows='keys', size=size)} -> {result}"),
    )


@fusion(
    out=("batch queries (heads value_size)", "past_key, with k behind it", "past_value, with v behind it"),
    casts=True,
    example={"is_causal": 1, "softcap": 2.0},
)
def attention_with_cache(
    q=tensor(),
    k=tensor(),
    v=tensor(),
    past_key=tensor(),
    past_value=tensor(),
    mask=tensor(SCORES, optional=True),
    bias=tensor(SCORES, optional=True),
    scale=scalar(optional=True),
    masked_score=scalar(optional=True),
    is_causal=attribute(),
    softcap=attribute(),
):
    """attention(q, present_key, present_value), where present_key is past_key and k, present_value is past_value and v

    Past and present caches are (batch, kv_heads, rows, size), or with rows before heads: `cache_layout` bhsd or bshd.
    Where a caller gives a past and its present one address, and rows of the past lie in both at the same place (one
    batch, and one key head or rows before heads), only the new rows are written; memory that overlaps otherwise is
    refused when the node runs.  A cache of fixed size, into which rows are scattered, stays outside.

    With `--fallback ort` result and caches come from com.microsoft.GroupQueryAttention, where that computes the same:
    causal attention in float16 without mask and bias, of one query or of several in a batch of one, where both numbers
    are known and heads have 8, 16, ... or 256 elements; `cache_layout` bhsd.  Else it is as in attention().
    """
    require(
        "{heads} query heads are {kv_heads} key heads times {repeats}",
        lambda heads, kv_heads, repeats: heads == kv_heads * repeats,
    )
    require("{keys} keys are {past} of the past and {new} more", lambda keys, past, new: keys == past + new)
    queries = by_layout("q_layout", q, "queries", "heads", "size", "batch heads queries size")
    present_key = grown(past_key, k, "k_layout", "size")
    present_value = grown(past_value, v, "v_layout", "value_size")
    columns = read(present_key, "size", "batch (kv_heads repeats) size keys")
    keys = read(present_key, "size", "batch (kv_heads repeats) keys size")
    values = read(present_value, "value_size", "batch (kv_heads repeats) keys value_size")
    context = attended(queries, columns, keys, values, mask, bias, scale, masked_score, is_causal, softcap)
    ready = (
        by_layout("q_layout", q, "queries", "heads", "size", QUERIES),
        read(present_key, "size", KEYS),
        read(present_value, "value_size", VALUES),
    )
    new = (
        by_layout("k_layout", k, "new", "kv_heads", "size", GROUPED_KEYS.format(rows="new")),
        by_layout("v_layout", v, "new", "kv_heads", "value_size", GROUPED_VALUES.format(rows="new")),
    )
    by_groups, *present = group_query_attention(ready[0], *new, scale, softcap, (past_key, past_value))
    result = stored(
        in_layout(context, "batch heads queries value_size"),
        ort=either(by_groups, multi_head_attention(*ready, mask, bias, scale, masked_score)),
    )
    return result, stored(present_key, ort=present[0]), stored(present_value, ort=present[1])
