"""Scaled dot-product attention: multi-head and grouped-query, with any mask."""

from onnxfuse.dsl import Term, attribute, either, fusion, scalar, stored, tensor, weight
from onnxfuse.patterns._attention import (
    POSITIONS,
    SCORES,
    SINKS,
    SLOPES,
    Scores,
    attend,
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


@fusion(out="batch queries (heads value_size)", casts=True, epilogue=True, example={"is_causal": 1, "softcap": 2.0})
def attention(
    q: Term = tensor(),
    k: Term = tensor(),
    v: Term = tensor(),
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
) -> Term:
    """softmax(scale * q k^T + bias + mask) v, for each head (Vaswani et al. 2017, arXiv:1706.03762)

    Each key and value head serves `repeats` query heads (Ainslie et al. 2023, arXiv:2305.13245).

    `mask_kind` causal adds `masked_score` where a key comes after its query; the last query is aligned with the last
    key.  A causal node may also have a boolean mask, and then adds `masked_score` where that is false.  `form` operator
    is ONNX's own Attention, whose scale is 1 / sqrt(size) by default; causal_operator is the same under a causal mask.

    With `--fallback ort` the body is com.microsoft.MultiHeadAttention or, with softcap, GroupQueryAttention, where
    these compute the same; docs/decisions/fallback-ort.md lists the forms that they do not take.  `--emit standard`
    writes ONNX's Attention; docs/decisions/standard-operators.md lists the forms that this operator does not take.

    The body of `--fallback ort` adds masks, so it gives NaN for rows in which a masked score is NaN or infinite.  Where
    `fully_masked` is zero, as after a softmax whose NaNs are replaced by 0, that body gives 0 for fully masked rows,
    whatever keys and values are, and NaN for rows in which a score is NaN.  Where `fully_masked` is cleared,
    probabilities of masked keys are 0, so that fully masked rows give 0 as well.
    """
    require_grouped_heads()
    scores = Scores(mask, bias, slopes, positions, scale, masked_score, is_causal, softcap, cap, sinks)
    queries = query_rows(q, "batch heads queries size")
    columns = key_rows(k, "batch (kv_heads repeats) size keys")
    keys = key_rows(k, "batch (kv_heads repeats) keys size")
    values = value_rows(v, "batch (kv_heads repeats) keys value_size")
    context = attend(queries, columns, keys, values, scores)
    packed_queries = query_rows(q, QUERIES)
    multi_head = multi_head_attention(packed_queries, key_rows(k, KEYS), value_rows(v, VALUES), scores)
    grouped_keys = key_rows(k, GROUPED_KEYS.format(rows="keys"))
    grouped_values = value_rows(v, GROUPED_VALUES.format(rows="keys"))
    grouped, *_ = group_query_attention(packed_queries, grouped_keys, grouped_values, scores)
    by_heads = queries, key_rows(k, "batch kv_heads keys size"), value_rows(v, "batch kv_heads keys value_size")
    (standard,) = standard_attention(by_heads, scores)
    written = in_layout(context, "batch heads queries value_size")
    return stored(written, ort=either(multi_head, grouped), standard=standard)
