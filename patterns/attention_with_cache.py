"""Attention over the keys and values of earlier steps and of this one; the caches with both are outputs, too."""

from typing import Final

from onnxfuse.dsl import (
    Term,
    attribute,
    choose,
    either,
    fusion,
    op,
    rearrange,
    require,
    scalar,
    stored,
    tensor,
    weight,
    when,
)
from onnxfuse.patterns._attention import (
    POSITIONS,
    SCORES,
    SINKS,
    SLOPES,
    Scores,
    attend,
    by_layout,
    in_layout,
    key_rows,
    query_rows,
    require_grouped_heads,
    value_rows,
)
from onnxfuse.patterns._attention_ort import (
    GROUPED_KEYS,
    GROUPED_VALUES,
    KEYS,
    QUERIES,
    VALUES,
    group_query_attention,
    multi_head_attention,
)
from onnxfuse.patterns._attention_standard import standard_attention

HEADS_FIRST: Final = "batch kv_heads {rows} {size}"
ROWS_FIRST: Final = "batch {rows} kv_heads {size}"


def appended(past: Term, new: Term, name: str, size: str) -> Term:
    """Return a cache after this step: the past's rows, then `new`, whose layout the choice `<name>_layout` names."""

    def cache(axes: str, axis: int) -> Term:
        old = axes.format(rows="past", size=size)
        rows = by_layout(name, new, "new", "kv_heads", size, axes.format(rows="new", size=size))
        return op.Concat(rearrange(past, f"{old} -> {old}"), rows, axis=axis)

    return choose("cache_layout", bhsd=cache(HEADS_FIRST, -2), bshd=cache(ROWS_FIRST, -3))


def cache_rows(cache: Term, size: str, result: str) -> Term:
    """Return all rows of a cache, with the axes `result`."""
    return choose(
        "cache_layout",
        bhsd=rearrange(cache, f"{HEADS_FIRST.format(rows='keys', size=size)} -> {result}"),
        bshd=rearrange(cache, f"{ROWS_FIRST.format(rows='keys', size=size)} -> {result}"),
    )


def standard_outputs(
    q: Term, k: Term, v: Term, past: tuple[Term, Term], present: tuple[Term, Term], scores: Scores
) -> tuple[Term, ...]:
    """Return the outputs with ONNX's Attention: it appends rows to bhsd caches, and reads bshd caches as a whole."""
    queries = query_rows(q, "batch heads queries size")
    keys, values = (HEADS_FIRST.format(rows="{rows}", size=size) for size in ("size", "value_size"))
    new = key_rows(k, keys.format(rows="new"), "new"), value_rows(v, values.format(rows="new"), "new")
    whole = (
        cache_rows(present[0], "size", keys.format(rows="keys")),
        cache_rows(present[1], "value_size", values.format(rows="keys")),
    )
    appended_by_it = (
        when(x, "caches are bhsd", lambda cache_layout: cache_layout == "bhsd")
        for x in standard_attention((queries, *new), scores, past, rows="new")
    )
    (result,) = standard_attention((queries, *whole), scores)
    return tuple(either(x, y) for x, y in zip(appended_by_it, (result, *present), strict=True))


@fusion(
    out=("batch queries (heads value_size)", "past_key, followed by k", "past_value, followed by v"),
    casts=True,
    example={"is_causal": 1, "softcap": 2.0},
)
def attention_with_cache(
    q: Term = tensor(),
    k: Term = tensor(),
    v: Term = tensor(),
    past_key: Term = tensor(),
    past_value: Term = tensor(),
    mask: Term = tensor(SCORES, optional=True),
    bias: Term = tensor(SCORES, optional=True),
    slopes: Term = weight(SLOPES, optional=True),
    positions: Term = tensor(POSITIONS, optional=True),
    sinks: Term = tensor(SINKS, optional=True),
    scale: Term = scalar(optional=True),
    masked_score: Term = scalar(optional=True),
    cap: Term = scalar(optional=True),
    is_causal: Term = attribute(),
    softcap: Term = attribute(),
) -> tuple[Term, Term, Term]:
    """attention(q, present_key, present_value): present_key is past_key followed by k, and present_value likewise

    Caches are (batch, kv_heads, rows, size) with `cache_layout` bhsd, and (batch, rows, kv_heads, size) with bshd.  A
    caller may bind a past and its present to one address.  If the rows of the past then stay where they are (one batch,
    and one key head or bshd), only new rows are written; a node refuses other overlaps when it runs.  A cache of fixed
    size, into which rows are scattered, is not fused.

    With `--fallback ort` the body is com.microsoft.GroupQueryAttention, where that computes the same, and otherwise
    the body of attention(); docs/decisions/fallback-ort.md lists the forms that GroupQueryAttention does not take.
    """
    require_grouped_heads()
    require(
        "there are {keys} keys; required {past} of the past and {new} more", lambda keys, past, new: keys == past + new
    )
    scores = Scores(mask, bias, slopes, positions, scale, masked_score, is_causal, softcap, cap, sinks)
    queries = query_rows(q, "batch heads queries size")
    present_key, present_value = appended(past_key, k, "k", "size"), appended(past_value, v, "v", "value_size")
    columns = cache_rows(present_key, "size", "batch (kv_heads repeats) size keys")
    keys = cache_rows(present_key, "size", "batch (kv_heads repeats) keys size")
    values = cache_rows(present_value, "value_size", "batch (kv_heads repeats) keys value_size")
    context = attend(queries, columns, keys, values, scores)
    packed_queries = query_rows(q, QUERIES)
    packed_keys, packed_values = cache_rows(present_key, "size", KEYS), cache_rows(present_value, "value_size", VALUES)
    multi_head = multi_head_attention(packed_queries, packed_keys, packed_values, scores)
    new_keys = key_rows(k, GROUPED_KEYS.format(rows="new"), "new")
    new_values = value_rows(v, GROUPED_VALUES.format(rows="new"), "new")
    past = past_key, past_value
    grouped, *present = group_query_attention(packed_queries, new_keys, new_values, scores, past)
    standard, *appended_by_it = standard_outputs(q, k, v, past, (present_key, present_value), scores)
    written = in_layout(context, "batch heads queries value_size")
    return (
        stored(written, ort=either(grouped, multi_head), standard=standard),
        stored(present_key, ort=present[0], standard=appended_by_it[0]),
        stored(present_value, ort=present[1], standard=appended_by_it[1]),
    )
