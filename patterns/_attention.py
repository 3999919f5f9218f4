"""How queries, keys, values and results lie in memory, and attention as onnxruntime's own operator computes it."""

from typing import Any

from onnxfuse.dsl import Term, causal, choose, contrib, either, filled, given, narrow, op, part, rearrange, size

LOWEST = -1e30  # in float32 a finite score added to a value below this leaves that value as it is
INFINITY = float("inf")


def by_layout(choice: str, x: Term, length: str, heads: str, size: str, result: str) -> Term:
    """The layouts in which queries, keys and values come, be they parts of one product; none of them needs a copy."""
    return choose(choice, **layouts(choice.partition("_")[0], x, length, heads, size, result))


def layouts(name: str, x: Term, length: str, heads: str, size: str, result: str) -> dict[str, Term]:
    """`x` in each layout; `name` is what it is called as a part of a product."""
    return {
        "packed": rearrange(part(x, name), f"batch {length} ({heads} {size}) -> {result}"),
        "seq_first": rearrange(part(x, name), f"{length} batch ({heads} {size}) -> {result}"),
        "bshd": rearrange(x, f"batch {length} {heads} {size} -> {result}"),
        "bhsd": rearrange(x, f"batch {heads} {length} {size} -> {result}"),
    }


def in_layout(context: Term, axes: str) -> Term:
    """The layouts in which results go on."""
    return choose(
        "out_layout",
        packed=rearrange(context, f"{axes} -> batch queries (heads value_size)"),
        rows=rearrange(context, f"{axes} -> (batch queries) (heads value_size)"),
        bshd=rearrange(context, f"{axes} -> batch queries heads value_size"),
        seq_first=rearrange(context, f"{axes} -> queries batch (heads value_size)"),
        seq_first_rows=rearrange(context, f"{axes} -> (queries batch) (heads value_size)"),
        bhsd=rearrange(context, f"{axes} -> batch heads queries value_size"),
    )


def hidden(queries: Term, keys: Term, mask: Any, like: Term, masked_score: Any) -> Term:
    """What is added to scores where a key is behind its query, or a boolean mask, if there is one, leaves it out.

    `queries` and `keys` are their numbers; the last query sees the last key.
    """
    alone = causal(op.Where(_before(queries, keys), 0.0, masked_score), "queries keys", masked_score)
    return narrow(either(op.Where(seen(queries, keys, mask), 0.0, masked_score), alone), like=like)


def seen(queries: Term, keys: Term, mask: Any) -> Term:
    """Where a key is not behind its query and a boolean mask leaves it."""
    return op.And(causal(_before(queries, keys), "queries keys"), mask)


def _before(queries: Term, keys: Term) -> Term:
    rows = op.Unsqueeze(op.Range(keys - queries, keys, 1), axes=[1])
    return op.LessOrEqual(op.Range(0, keys, 1), rows)


def length(x: Term, axis: int) -> Term:
    """The size of an axis, as a number of no axes."""
    return op.Gather(op.Shape(x), axis)


# --- com.microsoft.MultiHeadAttention ----------------------------------------------------------------------------
#
# It takes (batch, length, heads * size), as many heads of keys as of queries, and a bias of four axes of which the last
# two are not broadcast.  onnxruntime's CUDA provider runs it through cuDNN or FlashAttention where these are.
# GroupQueryAttention would save the repeated heads, but is always causal, leaves keys out by -inf, and takes padding as
# lengths: a mask of a model that is known to be causal adds a finite number, and is seldom without padding.

PACKED = "batch queries (heads value_size)"
QUERIES, KEYS = "batch queries (heads size)", "batch keys (kv_heads repeats size)"
VALUES = "batch keys (kv_heads repeats value_size)"


def multi_head_attention(
    queries: Term, keys: Term, values: Term, mask: Any, bias: Any, scale: Any, masked_score: Any, is_causal: Any
) -> Term:
    """The fused attention of QUERIES, KEYS and VALUES as MultiHeadAttention, where that computes the same."""

    def attended(*more: Any, **attributes: Any) -> Term:
        return contrib.MultiHeadAttention(
            queries, keys, values, *more, num_heads=size("heads"), scale=scale, **attributes
        )

    added = _of_all_pairs(_added(queries, keys, mask, bias, masked_score), queries, keys)
    with_bias = attended(None, None, added)
    softmax = either(
        given(
            attended(),
            "nothing is added to the scores",
            lambda mask_kind, bias_kind: mask_kind == "none" and bias_kind == "none",
        ),
        given(
            choose("fully_masked", softmax=with_bias, zero=_guarded(with_bias, added)),
            "a mask that is added does what a replacing one does",
            _adding_is_exact,
        ),
    )
    operator = given(
        attended(unidirectional=is_causal),
        "no mask, no softcap, and causal only where queries and keys are equally many",
        lambda mask, softcap, is_causal, queries, keys: mask is None
        and not softcap
        and (not is_causal or queries == keys),
    )
    return given(
        in_layout(choose("form", softmax=softmax, causal_operator=operator, operator=operator), PACKED),
        "float32 or float16 throughout, and a scale that is not 0, which would stand for the default",
        lambda dtypes, dtype, scale: {*dtypes.values()} - {"bool"} == {dtype} and dtype != "bfloat16" and scale != 0,
    )


def _adding_is_exact(mask_kind: str, masked_score: float, dtype: str) -> bool:
    if mask_kind not in ("boolean", "inverted"):
        return True
    return masked_score == -INFINITY or (dtype == "float32" and masked_score < LOWEST)


def _added(queries: Term, keys: Term, mask: Any, bias: Any, masked_score: Any) -> Term:
    """What is added to the scores."""
    masks = {
        "boolean": narrow(op.Where(mask, 0.0, masked_score), like=queries),
        "inverted": narrow(op.Where(mask, masked_score, 0.0), like=queries),
        "additive": mask,
        "causal": hidden(length(queries, 1), length(keys, 1), mask, queries, masked_score),
    }
    both = {kind: bias + term for kind, term in masks.items()}
    return choose(
        "bias_kind", position=choose("mask_kind", **both, none=bias), none=choose("mask_kind", **masks, none=mask)
    )


def _of_all_pairs(added: Term, queries: Term, keys: Term) -> Term:
    """(batch or 1, heads or 1, queries, keys)."""

    def one(x: Term) -> Term:
        return op.Slice(op.Shape(x), starts=[1], ends=[2], axes=[0])

    return either(
        op.Expand(added, shape=[1, 1, size("queries"), size("keys")]),
        op.Expand(added, op.Concat(filled(1, "2"), one(queries), one(keys), axis=0)),
    )


def _guarded(context: Term, added: Term) -> Term:
    """Zero where all of a row of scores is -inf, as after a softmax whose NaNs are replaced."""
    counts = op.Transpose(op.Greater(op.ReduceMax(added, axes=[-1]), -INFINITY), perm=[0, 2, 1, 3])
    heads = rearrange(context, f"{PACKED} -> batch queries heads value_size")
    cleared = rearrange(op.Where(counts, heads, 0.0), f"batch queries heads value_size -> {PACKED}")
    never = "finite masks leave a softmax in every row"
    return either(
        given(
            context,
            never,
            lambda masked_score, mask_kind, bias_kind: bias_kind == "none"
            and mask_kind in ("boolean", "inverted", "causal")
            and masked_score > -INFINITY,
        ),
        cleared,
    )
