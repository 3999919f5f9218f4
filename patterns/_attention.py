"""Terms that the attention patterns share: memory layouts, masks, and softmax(scores) values."""

from typing import Final, NamedTuple

from onnxfuse.dsl import (
    Term,
    cast_like,
    causal,
    choose,
    either,
    full,
    op,
    packed_slice,
    rearrange,
    require,
    scaled,
    shared,
    size,
    stored,
    unrounded,
    when,
)

SCORES: Final = "batch? heads? queries? keys??"
SLOPES: Final = "heads 1 1"
SINKS: Final = "1 heads 1 1"
POSITIONS: Final = "batch? 1 queries? keys??"
BIASED: Final = ("slopes", "position")  # the labels of the choice `bias_kind` that add a bias
INFINITY: Final = float("inf")
SWALLOWS_SCORES: Final = -1e30  # in float32, adding a score to a number below this does not change the number
MAX_CAP: Final = 1e9  # kernels and ONNX's Attention multiply scores by the cap; the results must stay finite
LOWEST_FLOAT16: Final = -65504.0
LOWEST: Final = {"float16": LOWEST_FLOAT16, "bfloat16": -3.3895313892515355e38}  # a Cast makes lower values -inf
NO_WEIGHT: Final = "a masked score is -65504 or less, so that its key has no weight beside others; it is {masked_score}"
SWALLOWS: Final = "the mask adds -inf where it is false, or in float32 less than -1e30; it adds {masked_score}"
IN_RANGE: Final = "a masked score is -inf, or a number that {dtype} has; it is {masked_score}"


class Scores(NamedTuple):
    """The parameters of attention that change the scores before the softmax: all except queries, keys and values."""

    mask: Term
    bias: Term
    slopes: Term
    positions: Term
    scale: Term
    masked_score: Term
    is_causal: Term
    softcap: Term
    cap: Term
    sinks: Term


def require_grouped_heads() -> None:
    """Require that each key head serves `repeats` query heads, or that the products broadcast a single key head."""
    require(
        "there are {heads} query heads; required {kv_heads} key heads times {repeats}, or one key head for all",
        lambda heads, kv_heads, repeats: (
            heads == kv_heads * repeats or (isinstance(heads, int) and kv_heads == 1 == repeats)
        ),
    )


# --- layouts -----------------------------------------------------------------------------------------------------


def layouts(name: str, x: Term, rows: str, heads: str, size: str, result: str) -> dict[str, Term]:
    """Return, by label, a term for each layout of x that kernels read without a copy.

    Each term rearranges x to the axes `result`; `rows`, `heads` and `size` name the dimensions of x.  In the first two
    layouts, x can be a slice of a packed product, such as one product of queries, keys and values; `name` is the
    prefix of the slice's attributes.
    """
    return {
        "packed": rearrange(packed_slice(x, name), f"batch {rows} ({heads} {size}) -> {result}"),
        "seq_first": rearrange(packed_slice(x, name), f"{rows} batch ({heads} {size}) -> {result}"),
        "bshd": rearrange(x, f"batch {rows} {heads} {size} -> {result}"),
        "bhsd": rearrange(x, f"batch {heads} {rows} {size} -> {result}"),
    }


def by_layout(name: str, x: Term, rows: str, heads: str, size: str, result: str) -> Term:
    """Return x, rearranged from any known layout to the axes `result`; the choice `<name>_layout` names the layout."""
    return choose(f"{name}_layout", **layouts(name, x, rows, heads, size, result))


def query_rows(q: Term, result: str) -> Term:
    """Return the queries, which may have any layout, rearranged to the axes `result`."""
    return by_layout("q", q, "queries", "heads", "size", result)


def key_rows(k: Term, result: str, rows: str = "keys") -> Term:
    """Return the keys, which may have any layout, rearranged to the axes `result`; `rows` names their row axis."""
    return by_layout("k", k, rows, "kv_heads", "size", result)


def value_rows(v: Term, result: str, rows: str = "keys") -> Term:
    """Return the values, which may have any layout, rearranged to the axes `result`; `rows` names their row axis."""
    return by_layout("v", v, rows, "kv_heads", "value_size", result)


def in_layout(context: Term, axes: str) -> Term:
    """Return `context`, whose axes are `axes`, in any layout that consumers read; `out_layout` names the layout."""
    return choose(
        "out_layout",
        packed=rearrange(context, f"{axes} -> batch queries (heads value_size)"),
        rows=rearrange(context, f"{axes} -> (batch queries) (heads value_size)"),
        bshd=rearrange(context, f"{axes} -> batch queries heads value_size"),
        seq_first=rearrange(context, f"{axes} -> queries batch (heads value_size)"),
        seq_first_rows=rearrange(context, f"{axes} -> (queries batch) (heads value_size)"),
        bhsd=rearrange(context, f"{axes} -> batch heads queries value_size"),
    )


def axis_size(x: Term, axis: int) -> Term:
    """Return the size of an axis as a scalar tensor."""
    return op.Gather(op.Shape(x), axis)


# --- masks -------------------------------------------------------------------------------------------------------


def causal_bias(queries: Term, keys: Term, mask: Term, like: Term, masked_score: Term) -> Term:
    """Return the bias of a causal mask: 0 where a query attends to a key, `masked_score` where it does not.

    `queries` and `keys` are the numbers of queries and keys.  The last query is aligned with the last key.  A query
    attends to the keys that do not come after it.  If there is a boolean `mask`, the query attends only to those of
    these keys for which the mask is true.
    """
    alone = causal(op.Where(_up_to_diagonal(queries, keys), 0.0, masked_score), "queries keys", masked_score)
    return cast_like(either(op.Where(_causal_and(queries, keys, mask), 0.0, masked_score), alone), like=like)


def causal_mask(queries: Term, keys: Term, mask: Term) -> Term:
    """Return a boolean tensor that is true where a query attends to a key, by the rule of `causal_bias`."""
    return either(_causal_and(queries, keys, mask), causal(_up_to_diagonal(queries, keys), "queries keys"))


def _causal_and(queries: Term, keys: Term, mask: Term) -> Term:
    return op.And(causal(_up_to_diagonal(queries, keys), "queries keys"), mask)


def _up_to_diagonal(queries: Term, keys: Term) -> Term:
    """Return a (queries, keys) boolean tensor, true for query i and key j if j <= i + keys - queries."""
    last_key = op.Unsqueeze(op.Range(keys - queries, keys, 1), axes=[1])
    return op.LessOrEqual(op.Range(0, keys, 1), last_key)


def survives_cast(masked_score: float, dtype: str) -> bool:
    """Return whether a masked score is the same number after a Cast to `dtype`."""
    return masked_score == -INFINITY or masked_score >= LOWEST.get(dtype, -INFINITY)


def _swallows(masked_score: float, dtype: str) -> bool:
    """Return whether adding `masked_score` to any score gives `masked_score`."""
    return masked_score < SWALLOWS_SCORES and survives_cast(masked_score, dtype)


def masked(biased: Term, queries: Term, columns: Term, scores: Scores) -> Term:
    """Return the masked scores; the choice `mask_kind` says which kind of mask it is, or none.

    A boolean mask is true where a query attends to a key, and an inverted mask is false there.  A causal mask adds
    `masked_score` above the diagonal and, if there is a boolean mask too, where the boolean mask is false.
    """
    mask, masked_score = scores.mask, scores.masked_score
    keep = shared(op.Where(mask, 0.0, masked_score))
    behind = shared(causal_bias(axis_size(queries, 2), axis_size(columns, 3), mask, biased, masked_score))
    return choose(
        "mask_kind",
        causal=when(biased + behind, IN_RANGE, survives_cast),
        boolean=either(
            when(op.Where(mask, biased, masked_score), IN_RANGE, survives_cast),
            when(
                when(biased + keep, SWALLOWS, _swallows),
                "a bias under a mask that adds {masked_score} is not a mask itself: both would be -inf, one is not",
                lambda masked_score, bias, slopes, positions, is_ordinary: (
                    masked_score == -INFINITY
                    or is_ordinary(*(each for each in (bias, slopes, positions) if each is not None))
                ),
            ),
        ),
        inverted=when(op.Where(mask, masked_score, biased), IN_RANGE, survives_cast),
        none=when(biased, "what is added alone is a mask", lambda bias_kind: bias_kind != "position"),
        additive=biased + mask,
    )


# --- attention ---------------------------------------------------------------------------------------------------


def attend(queries: Term, columns: Term, keys: Term, values: Term, scores: Scores) -> Term:
    """Return softmax(scale * queries columns + bias + mask) values, in operators or as ONNX's own Attention.

    Queries, keys and values are (batch, heads, rows, size); `columns` are the keys transposed: (batch, heads, size,
    rows).

    The fused node's attributes say which form matched.  If `capped` is "tanh", the scores before bias and mask are
    cap * tanh(scale * queries columns).  If `bias_kind` is "slopes", the bias is slopes * positions: one number per
    head times one number per key, or per query and key.  If `fully_masked` is "zero", NaN probabilities become 0; if it
    is "cleared", probabilities of masked keys become 0, so that a row in which all keys are masked is 0.  If it is
    "sinks", the sink of a head is one more score of each of its rows, and its probability is left out.
    """
    uncapped = scaled(op.MatMul(queries, columns), scores.scale)
    capped = scores.cap * op.Tanh(uncapped)
    capped = when(capped, "scores are capped by a number above 0, up to 1e9, not {cap}", lambda cap: 0 < cap <= MAX_CAP)
    products = choose("capped", none=uncapped, tanh=capped)
    sloped = products + unrounded(shared(scores.slopes * scores.positions))
    biased = choose("bias_kind", slopes=sloped, position=products + scores.bias, none=products)
    seen = masked(biased, queries, columns, scores)
    probabilities = op.Softmax(seen, axis=-1)
    attributes = {"scale": scores.scale, "is_causal": scores.is_causal, "softcap": scores.softcap}
    diagonal = shared(causal_mask(axis_size(queries, 2), axis_size(keys, 2), scores.mask))
    cleared = either(
        _where("causal", op.Where(diagonal, probabilities, 0.0)),
        _where("inverted", op.Where(scores.mask, 0.0, probabilities)),
        _where("boolean", op.Where(scores.mask, probabilities, 0.0)),
    )
    weights = choose(
        "fully_masked",
        zero=op.Where(op.IsNaN(probabilities), 0.0, probabilities),
        cleared=when(cleared, NO_WEIGHT, lambda masked_score: masked_score <= LOWEST_FLOAT16),
        sinks=_beside_sinks(seen, queries, scores.sinks),
        softmax=probabilities,
    )
    return choose(
        "form",
        softmax=op.MatMul(cast_like(weights, like=values), values),
        causal_operator=op.Attention(queries, keys, values, diagonal, **attributes),
        operator=op.Attention(queries, keys, values, scores.mask, **attributes),
    )


def _beside_sinks(seen: Term, queries: Term, sinks: Term) -> Term:
    """Return the probabilities of scores in rows that have one more score, the sink of their head."""
    sizes = op.Concat(op.Slice(op.Shape(queries), starts=[0], ends=[3], axes=[0]), full(1, "1"), axis=0)
    column = stored(rearrange(sinks, f"{SINKS} -> batch heads queries 1"), every=op.Expand(sinks, sizes))
    weights = op.Softmax(op.Concat(seen, column, axis=-1), axis=-1)
    return either(*(op.Slice(weights, starts=[0], ends=[end], axes=[-1], steps=[1]) for end in (-1, size("keys"))))


def _where(kind: str, cleared: Term) -> Term:
    """Return `cleared`, the probabilities with 0 for masked keys; it matches only with a mask of this kind."""
    return when(cleared, f"the mask is {kind}", lambda mask_kind: mask_kind == kind)
