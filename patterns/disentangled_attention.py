"""Disentangled attention: attention whose scores have two more products, with vectors of relative positions."""

from onnxfuse.dsl import (
    Term,
    cast_like,
    choose,
    either,
    full,
    fusion,
    op,
    rearrange,
    require,
    scalar,
    scaled,
    stored,
    tensor,
    when,
)
from onnxfuse.patterns._attention import IN_RANGE, SCORES, by_layout, in_layout, survives_cast


def by_layouts(name: str, x: Term, rows: str, size: str, *axes: str) -> tuple[Term, ...]:
    """Return an operand, whose layout is any, rearranged to each of the given axes."""
    return tuple(by_layout(name, x, rows, "heads", size, each) for each in axes)


def scores_of_positions(
    table: Term, columns: Term, merged_rows: Term, index: Term, sizes: Term, of: str, to: str
) -> Term:
    """Return the products of rows, of one axis, with the vectors of a table that an index picks for them and another.

    `columns` and `merged_rows` are the same rows as (batch, heads, size, rows) and as (batch * heads, rows, size), and
    `sizes` is the vector (batch, heads, 1, 1).
    """
    count = {"queries": "key_count", "keys": "query_count"}[of]
    products = rearrange(op.MatMul(table, columns), f"batch heads {count} {of} -> batch heads {of} {count}")
    merged_products = op.MatMul(merged_rows, rearrange(table, f"heads {count} size -> (batch heads) size {count}"))
    places, merged_places = (
        rearrange(index, f"1 {of} {to} -> {heads} {of} {to}") for heads in ("batch heads", "(batch heads)")
    )
    found = op.GatherElements(products, stored(places, every=op.Expand(index, sizes)), axis=3)
    merged_found = op.GatherElements(merged_products, merged_places, axis=2)
    return either(
        rearrange(found, f"batch heads {of} {to} -> batch heads queries keys"),
        rearrange(merged_found, f"(batch heads) {of} {to} -> batch heads queries keys"),
    )


@fusion(out="batch queries (heads value_size)")
def disentangled_attention(
    q: Term = tensor(),
    k: Term = tensor(),
    v: Term = tensor(),
    key_positions: Term = tensor("heads key_count size"),
    query_positions: Term = tensor("heads query_count size"),
    key_index: Term = tensor(),
    query_index: Term = tensor(),
    mask: Term = tensor(SCORES, optional=True),
    scale: Term = scalar(optional=True),
    key_positions_scale: Term = scalar(),
    query_positions_scale: Term = scalar(),
    masked_score: Term = scalar(optional=True),
) -> Term:
    """softmax(scale * q k^T + scores of positions + mask) v, for each head (He et al. 2021, arXiv:2006.03654)

    Each query is multiplied by the vector of `key_positions` that `key_index` picks for the query and a key, and each
    key by the vector of `query_positions` that `query_index` picks for the key and a query. Both indices depend on the
    distance between the query and the key alone.
    """
    require(
        "the indices of positions depend on the distance between query and key alone",
        lambda key_index, query_index, is_of_distance: is_of_distance(key_index) and is_of_distance(query_index),
    )
    axes = "batch heads {0} size", "(batch heads) {0} size", "batch heads size {0}"
    of_queries, of_keys = ([each.format(rows) for each in axes] for rows in ("queries", "keys"))
    queries, merged_queries, query_columns = by_layouts("q", q, "queries", "size", *of_queries)
    columns, merged_keys, key_columns = by_layouts("k", k, "keys", "size", of_keys[2], *of_keys[1:])
    (values,) = by_layouts("v", v, "keys", "value_size", "batch heads keys value_size")
    products = scaled(op.MatMul(queries, columns), scale)
    sizes = op.Concat(op.Slice(op.Shape(products), starts=[0], ends=[2], axes=[0]), full(1, "2"), axis=0)
    near_keys = scores_of_positions(key_positions, query_columns, merged_queries, key_index, sizes, "queries", "keys")
    near_queries = scores_of_positions(query_positions, key_columns, merged_keys, query_index, sizes, "keys", "queries")
    scores = products + key_positions_scale * near_keys + query_positions_scale * near_queries
    seen = choose(
        "mask_kind",
        boolean=when(op.Where(mask, scores, masked_score), IN_RANGE, survives_cast),
        inverted=when(op.Where(mask, masked_score, scores), IN_RANGE, survives_cast),
        additive=scores + mask,
        none=scores,
    )
    weights = cast_like(op.Softmax(seen, axis=-1), like=v)
    return in_layout(op.MatMul(weights, values), "batch heads queries value_size")
