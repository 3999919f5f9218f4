"""Scaled dot-product attention: multi-head and grouped-query, with any mask."""

from onnxfuse.dsl import (
    attribute,
    choose,
    either,
    fusion,
    given,
    narrow,
    op,
    require,
    scalar,
    scaled,
    shared,
    stored,
    tensor,
)
from onnxfuse.patterns._attention import (
    GROUPED_KEYS,
    GROUPED_VALUES,
    HALF,
    INFINITY,
    KEYS,
    LOWEST,
    QUERIES,
    VALUES,
    by_layout,
    group_query_attention,
    hidden,
    in_layout,
    length,
    multi_head_attention,
    seen,
)

LEAST = {"float16": HALF, "bfloat16": -3.3895313892515355e38}  # what is below becomes -inf
SCORES = "batch? heads? queries? keys?"
IN_RANGE = "a masked score is -inf, or a number that {dtype} has; it is {masked_score}"


def stays(masked_score, dtype):
    """Whether a number that a Cast to `dtype` may follow is the same there."""
    return masked_score == -INFINITY or masked_score >= LEAST.get(dtype, -INFINITY)


def masked(scores, queries, columns, mask, masked_score):
    """The kinds of mask; a boolean one is true where a key counts (inverted: where it does not).

    A causal one adds `masked_score` behind the diagonal, and where a boolean mask beside it is false.
    """
    keep = shared(op.Where(mask, 0.0, masked_score))
    behind = shared(hidden(length(queries, 2), length(columns, 3), mask, scores, masked_score))
    return choose(
        "mask_kind",
        causal=given(scores + behind, IN_RANGE, stays),
        boolean=either(
            given(op.Where(mask, scores, masked_score), IN_RANGE, stays),
            given(
                scores + keep,
                "the mask adds -inf where it is false, or in float32 less than -1e30; it adds {masked_score}",
                lambda masked_score, dtype: masked_score < LOWEST and stays(masked_score, dtype),
            ),
        ),
        inverted=given(op.Where(mask, masked_score, scores), IN_RANGE, stays),
        additive=scores + mask,
        none=scores,
    )


def attended(queries, columns, keys, values, mask, bias, scale, masked_score, is_causal, softcap):
    """softmax(scale * queries columns + bias + mask) values, in operators or as ONNX's own Attention."""
    scores = scaled(op.MatMul(queries, columns), scale)
    biased = choose("bias_kind", position=scores + bias, none=scores)
    probabilities = op.Softmax(masked(biased, queries, columns, mask, masked_score), axis=-1)
    guarded = choose(
        "fully_masked",
        zero=op.Where(op.IsNaN(probabilities), 0.0, probabilities),
        softmax=probabilities,
    )
    attributes = {"scale": scale, "is_causal": is_causal, "softcap": softcap}
    diagonal = shared(seen(length(queries, 2), length(keys, 2), mask))
    return choose(
        "form",
        softmax=op.MatMul(narrow(guarded, like=values), values),
        causal_operator=op.Attention(queries, keys, values, diagonal, **attributes),
        operator=op.Attention(queries, keys, values, mask, **attributes),
    )


@fusion(out="batch queries (heads value_size)", casts=True, example={"is_causal": 1, "softcap": 2.0})
def attention(
    q=tensor(),
    k=tensor(),
    v=tensor(),
    mask=tensor(SCORES, optional=True),
    bias=tensor(SCORES, optional=True),
    scale=scalar(optional=True),
    masked_score=scalar(optional=True),
    is_causal=attribute(),
    softcap=attribute(),
):
    """softmax(scale * q k^T + bias + mask) v, for each head (Vaswani et al. 2017, arXiv:1706.03762)

    Key and value heads may be fewer than query heads, each serving `repeats` of these (Ainslie et al. 2023,
    arXiv:2305.13245).  `form` operator is ONNX's own Attention, whose scale is 1 / sqrt(size) where none is given.

    `mask_kind` causal adds `masked_score` where a key is behind its query, the last query being level with the last
    key, and where the mask, a boolean one, is false; without a mask only the former.  `form` causal_operator is the
    operator under such a mask.

    With `--fallback ort` the body is com.microsoft.MultiHeadAttention, where that computes the same: not in bfloat16 or
    in several dtypes, not with softcap, a scale of 0, a masked score that is finite and would have to be added (but in
    float32 below -1e30), and of ONNX's Attention only without a mask but a causal one, causal where queries and keys
    are equally many.  Such with softcap is com.microsoft.GroupQueryAttention in float16, where batch and queries are
    known and heads have 8, 16, ... or 256 elements.
    """
    require(
        "{heads} query heads are {kv_heads} key heads times {repeats}",
        lambda heads, kv_heads, repeats: heads == kv_heads * repeats,
    )
    queries = by_layout("q_layout", q, "queries", "heads", "size", "batch heads queries size")
    columns = by_layout("k_layout", k, "keys", "kv_heads", "size", "batch (kv_heads repeats) size keys")
    keys = by_layout("k_layout", k, "keys", "kv_heads", "size", "batch (kv_heads repeats) keys size")
    values = by_layout("v_layout", v, "keys", "kv_heads", "value_size", "batch (kv_heads repeats) keys value_size")
    context = attended(queries, columns, keys, values, mask, bias, scale, masked_score, is_causal, softcap)
    ready = (
        by_layout("q_layout", q, "queries", "heads", "size", QUERIES),
        by_layout("k_layout", k, "keys", "kv_heads", "size", KEYS),
        by_layout("v_layout", v, "keys", "kv_heads", "value_size", VALUES),
    )
    grouped = (
        by_layout("k_layout", k, "keys", "kv_heads", "size", GROUPED_KEYS.format(rows="keys")),
        by_layout("v_layout", v, "keys", "kv_heads", "value_size", GROUPED_VALUES.format(rows="keys")),
    )
    by_groups, *_ = group_query_attention(ready[0], *grouped, scale, softcap)
    return stored(
        in_layout(context, "batch heads queries value_size"),
        ort=either(multi_head_attention(*ready, mask, bias, scale, masked_score), by_groups),
    )
