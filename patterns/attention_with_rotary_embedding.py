"""Attention whose queries and keys are turned by their places first, as in Llama, and may have norms of their own."""

from onnxfuse.dsl import (
    attribute,
    choose,
    either,
    fusion,
    narrow,
    op,
    rearrange,
    require,
    scalar,
    stored,
    tensor,
    weight,
)
from onnxfuse.patterns._attention import (
    GROUPED_KEYS,
    GROUPED_VALUES,
    KEYS,
    QUERIES,
    VALUES,
    by_layout,
    group_query_attention,
    in_layout,
    layouts,
    multi_head_attention,
)
from onnxfuse.patterns._norms import rms_normalized
from onnxfuse.patterns._rotary import turned
from onnxfuse.patterns.attention import SCORES, attended


def prepared(name, x, length, heads, scale, epsilon, cos, sin, operator):
    """Queries or keys as (batch heads length size), normalized where the graph does that, and turned."""
    heads_first, rows_first = f"batch {heads} {length} size", f"batch {length} {heads} size"
    plain, rows = (layouts(name, x, length, heads, "size", axes) for axes in (heads_first, rows_first))

    def normal(value):
        return narrow(rms_normalized(value, scale, epsilon), like=x)

    def before_or_after(layout):
        if layout == "bhsd":
            return normal(plain[layout])
        return either(rearrange(normal(rows[layout]), f"{rows_first} -> {heads_first}"), normal(plain[layout]))

    ready = choose(
        "norm",
        rms=choose(f"{name}_layout", **{layout: before_or_after(layout) for layout in plain}),
        none=choose(f"{name}_layout", **plain),
    )
    return choose("rotary", **turned(ready, cos, sin, length), operator=operator(ready))


@fusion(
    out="batch queries (heads value_size)",
    casts=True,
    example={"is_causal": 1, "softcap": 2.0, "interleaved": 1},
)
def attention_with_rotary_embedding(
    q=tensor(),
    k=tensor(),
    v=tensor(),
    cos=tensor(),
    sin=tensor(),
    q_scale=weight("size", optional=True),
    k_scale=weight("size", optional=True),
    mask=tensor(SCORES, optional=True),
    bias=tensor(SCORES, optional=True),
    scale=scalar(optional=True),
    masked_score=scalar(optional=True),
    epsilon=scalar(default=1e-5),
    is_causal=attribute(),
    softcap=attribute(),
    interleaved=attribute(),
    num_heads=attribute(),
    kv_num_heads=attribute(),
):
    """attention(rotary_embedding(q), rotary_embedding(k), v), for q and k or, where they have scales, their RMS norms

    Nothing else reads what is turned: keys that go to a cache, too, are turned by a node of their own.
    """
    require(
        "{heads} query heads are {kv_heads} key heads times {repeats}",
        lambda heads, kv_heads, repeats: heads == kv_heads * repeats,
    )
    require("{queries} queries are turned as {keys} keys are", lambda queries, keys: queries == keys)
    require(
        "cos has the batch size {batch}, or 1; it has {cos_batch}",
        lambda batch, cos_batch: cos_batch is None or cos_batch in (1, batch),
    )

    require("a table has {half} columns for heads of {size}: half", lambda half, size: half is None or 2 * half == size)

    def by_operator(length, heads_attribute):
        def apply(x):
            tables = (rearrange(table, f"cos_batch {length} half -> cos_batch {length} half") for table in (cos, sin))
            return op.RotaryEmbedding(x, *tables, interleaved=interleaved, num_heads=heads_attribute)

        return apply

    q_turned = prepared("q", q, "queries", "heads", q_scale, epsilon, cos, sin, by_operator("queries", num_heads))
    k_turned = prepared("k", k, "keys", "kv_heads", k_scale, epsilon, cos, sin, by_operator("keys", kv_num_heads))
    of_q, of_k = "batch heads queries size", "batch kv_heads keys size"
    queries = rearrange(q_turned, f"{of_q} -> {of_q}")
    columns = rearrange(k_turned, f"{of_k} -> batch (kv_heads repeats) size keys")
    keys = rearrange(k_turned, f"{of_k} -> batch (kv_heads repeats) keys size")
    values = by_layout("v_layout", v, "keys", "kv_heads", "value_size", "batch (kv_heads repeats) keys value_size")
    context = attended(queries, columns, keys, values, mask, bias, scale, masked_score, is_causal, softcap)
    q_ready, k_ready = narrow(q_turned, like=q), narrow(k_turned, like=k)  # tables may be in float32
    ready = (
        rearrange(q_ready, f"{of_q} -> {QUERIES}"),
        rearrange(k_ready, f"{of_k} -> {KEYS}"),
        by_layout("v_layout", v, "keys", "kv_heads", "value_size", VALUES),
    )
    grouped = (
        rearrange(k_ready, f"{of_k} -> {GROUPED_KEYS.format(rows='keys')}"),
        by_layout("v_layout", v, "keys", "kv_heads", "value_size", GROUPED_VALUES.format(rows="keys")),
    )
    by_groups, *_ = group_query_attention(ready[0], *grouped, scale, softcap)
    return stored(
        in_layout(context, "batch heads queries value_size"),
        ort=either(multi_head_attention(*ready, mask, bias, scale, masked_score), by_groups),
    )
