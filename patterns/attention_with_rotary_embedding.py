"""Attention whose queries and keys are rotated by their positions first, as in Llama, and may be normalized before."""

from onnxfuse.dsl import (
    Term,
    attribute,
    cast_like,
    choose,
    either,
    fusion,
    op,
    rearrange,
    require,
    scalar,
    size,
    stored,
    tensor,
    weight,
)
from onnxfuse.dsl.terms import AttributeValue
from onnxfuse.patterns._attention import (
    POSITIONS,
    SCORES,
    SINKS,
    SLOPES,
    Scores,
    attend,
    in_layout,
    layouts,
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
from onnxfuse.patterns._attention_standard import for_batch, packed, rotated_by_operator, standard_attention
from onnxfuse.patterns._norms import rms_normalized
from onnxfuse.patterns._rotary import is_sum, require_cos_batch, rotated, rotated_rows

Q_AXES, K_AXES = "batch heads queries size", "batch kv_heads keys size"


def normalized_heads(name: str, x: Term, rows: str, heads: str, scale: Term, epsilon: Term) -> Term:
    """Return queries or keys as (batch heads rows size), normalized by an RMS norm per head if the graph has one."""
    heads_first, rows_first = f"batch {heads} {rows} size", f"batch {rows} {heads} size"
    by_heads, by_rows = (layouts(name, x, rows, heads, "size", axes) for axes in (heads_first, rows_first))

    def normalized(layout: str) -> Term:
        after = cast_like(rms_normalized(by_heads[layout], scale, epsilon), like=x)
        if layout == "bhsd":
            return after
        before = cast_like(rms_normalized(by_rows[layout], scale, epsilon), like=x)
        return either(rearrange(before, f"{rows_first} -> {heads_first}"), after)

    return choose(
        "norm",
        rms=choose(f"{name}_layout", **{layout: normalized(layout) for layout in by_heads}),
        none=choose(f"{name}_layout", **by_heads),
    )


def by_rotary(x: Term, cos: Term, sin: Term, axes: str, interleaved: Term, num_heads: Term) -> Term:
    """Return x, whose axes are `axes`, rotated in several operators or by ONNX's RotaryEmbedding.

    RotaryEmbedding reads tables that have one column for each pair of a head's elements: half as many columns as a head
    has elements.
    """
    rows = axes.split()[2]
    tables = (rearrange(table, f"cos_batch {rows} half -> cos_batch {rows} half") for table in (cos, sin))
    operator = op.RotaryEmbedding(x, *tables, interleaved=interleaved, num_heads=num_heads)
    forms = rotated_rows(x, axes, lambda rows, own: rotated(rows, cos, sin, own))
    return choose("rotary", **forms, operator=operator)


def by_operator(
    x: Term, plain: Term, cos: Term, sin: Term, axes: str, interleaved: Term, **heads: AttributeValue
) -> Term:
    """Return `plain`, which is x rotated in several operators.

    If a model is written with `--emit standard`, ONNX's RotaryEmbedding of x replaces `plain` wherever it can be
    written.  `axes` are the axes of x.
    """
    at, rows = next((i, name) for i, name in enumerate(axes.split()) if name in ("queries", "keys"))
    tables = (for_batch(rearrange(t, f"cos_batch {rows} half -> cos_batch {rows} half"), x) for t in (cos, sin))
    operator = op.RotaryEmbedding(x, *tables, interleaved=interleaved, **heads)
    kinds = rotated_rows(x, axes, lambda part, own: rotated_by_operator(part, cos, sin, own.split()[at], **heads))
    return cast_like(stored(plain, standard=choose("rotary", **kinds, operator=operator)), like=x)


def by_operators(
    by_heads: tuple[Term, Term, Term],
    rotated_heads: tuple[Term, Term],
    cos: Term,
    sin: Term,
    interleaved: Term,
    scores: Scores,
) -> Term:
    """Return the attention as ONNX's Attention; if possible, ONNX's RotaryEmbedding rotates its queries and keys."""
    q, k, v = by_heads
    rotated_q, rotated_k = rotated_heads
    apart = (
        by_operator(q, rotated_q, cos, sin, Q_AXES, interleaved),
        by_operator(k, rotated_k, cos, sin, K_AXES, interleaved),
        v,
    )
    q, k, v = packed(*by_heads)
    rotated_q, rotated_k, _ = packed(*rotated_heads, by_heads[2])
    side_by_side = (
        by_operator(q, rotated_q, cos, sin, QUERIES, interleaved, num_heads=size("heads")),
        by_operator(k, rotated_k, cos, sin, KEYS, interleaved, num_heads=size("kv_heads")),
        v,
    )
    return standard_attention(apart, scores, side_by_side=side_by_side)[0]


@fusion(
    out="batch queries (heads value_size)",
    casts=True,
    epilogue=True,
    example={"is_causal": 1, "softcap": 2.0, "interleaved": 1},
)
def attention_with_rotary_embedding(
    q: Term = tensor(),
    k: Term = tensor(),
    v: Term = tensor(),
    cos: Term = tensor(),
    sin: Term = tensor(),
    q_scale: Term = weight("size", optional=True),
    k_scale: Term = weight("size", optional=True),
    mask: Term = tensor(SCORES, optional=True),
    bias: Term = tensor(SCORES, optional=True),
    slopes: Term = weight(SLOPES, optional=True),
    positions: Term = tensor(POSITIONS, optional=True),
    sinks: Term = tensor(SINKS, optional=True),
    scale: Term = scalar(optional=True),
    masked_score: Term = scalar(optional=True),
    cap: Term = scalar(optional=True),
    epsilon: Term = scalar(if_absent=1e-5),
    is_causal: Term = attribute(),
    softcap: Term = attribute(),
    interleaved: Term = attribute(),
    num_heads: Term = attribute(),
    kv_num_heads: Term = attribute(),
) -> Term:
    """attention(rotary_embedding(q), rotary_embedding(k), v); where q or k has a scale, its RMS norm is rotated

    No other node reads the rotated values: keys that also go to a cache are rotated by a rotary_embedding node.  If the
    choice `first_rows` is "kept", the first `kept` rows of queries and keys are not rotated: they are class tokens,
    which have no position.

    With `--fallback ort`, NaN and infinite inputs spread to the same elements of the result as in attention().
    """
    require_grouped_heads()
    require("{queries} queries and {keys} keys are rotated; required as many", lambda queries, keys: queries == keys)
    require_cos_batch()
    require(
        "there are {queries} rows; required {kept} that stay and {patches} more",
        lambda queries, kept, patches: is_sum(queries, kept, patches),
    )
    scores = Scores(mask, bias, slopes, positions, scale, masked_score, is_causal, softcap, cap, sinks)
    q_heads = normalized_heads("q", q, "queries", "heads", q_scale, epsilon)
    k_heads = normalized_heads("k", k, "keys", "kv_heads", k_scale, epsilon)
    q_rotated = by_rotary(q_heads, cos, sin, Q_AXES, interleaved, num_heads)
    k_rotated = by_rotary(k_heads, cos, sin, K_AXES, interleaved, kv_num_heads)
    q_cast, k_cast = cast_like(q_rotated, like=q), cast_like(k_rotated, like=k)  # tables may be in float32
    queries = rearrange(q_cast, f"{Q_AXES} -> {Q_AXES}")
    columns = rearrange(k_cast, f"{K_AXES} -> batch (kv_heads repeats) size keys")
    keys = rearrange(k_cast, f"{K_AXES} -> batch (kv_heads repeats) keys size")
    context = attend(queries, columns, keys, value_rows(v, "batch (kv_heads repeats) keys value_size"), scores)
    packed_queries, packed_keys = rearrange(q_cast, f"{Q_AXES} -> {QUERIES}"), rearrange(k_cast, f"{K_AXES} -> {KEYS}")
    multi_head = multi_head_attention(packed_queries, packed_keys, value_rows(v, VALUES), scores)
    grouped_keys = rearrange(k_cast, f"{K_AXES} -> {GROUPED_KEYS.format(rows='keys')}")
    grouped_values = value_rows(v, GROUPED_VALUES.format(rows="keys"))
    grouped, *_ = group_query_attention(packed_queries, grouped_keys, grouped_values, scores)
    by_heads = q_heads, k_heads, value_rows(v, "batch kv_heads keys value_size")
    standard = by_operators(by_heads, (q_cast, k_cast), cos, sin, interleaved, scores)
    written = in_layout(context, "batch heads queries value_size")
    return stored(written, ort=either(multi_head, grouped), standard=standard)
