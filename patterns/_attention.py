"""How queries, keys, values and results lie in memory, and attention as onnxruntime's own operators compute it."""

from typing import Any

from onnx import TensorProto

from onnxfuse.dsl import (
    Term,
    causal,
    choose,
    contrib,
    either,
    filled,
    given,
    narrow,
    op,
    part,
    rearrange,
    results,
    size,
)

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
    return narrow(either(op.Where(_seen(queries, keys, mask), 0.0, masked_score), alone), like=like)


def seen(queries: Term, keys: Term, mask: Any) -> Term:
    """Where a key is not behind its query, and a boolean mask, if there is one, leaves it."""
    return either(_seen(queries, keys, mask), causal(_before(queries, keys), "queries keys"))


def _seen(queries: Term, keys: Term, mask: Any) -> Term:
    return op.And(causal(_before(queries, keys), "queries keys"), mask)


def _before(queries: Term, keys: Term) -> Term:
    rows = op.Unsqueeze(op.Range(keys - queries, keys, 1), axes=[1])
    return op.LessOrEqual(op.Range(0, keys, 1), rows)


def length(x: Term, axis: int) -> Term:
    """The size of an axis, as a number of no axes."""
    return op.Gather(op.Shape(x), axis)


# --- attention of onnxruntime's own -------------------------------------------------------------------------------
#
# MultiHeadAttention takes (batch, length, heads * size), as many heads of keys as of queries, and a bias of four axes
# of which the last two are not broadcast.  onnxruntime's CUDA provider runs it through cuDNN or FlashAttention where
# these are and no bias is: it is told of a triangle instead of being given one.
#
# GroupQueryAttention does not repeat heads of keys, and takes the past of a cache apart: over 4096 rows that is half to
# a third of the time (8 of 32 heads, float16, an H200: 32 us and not 64 for one image, d64; 243 and 777 for 8, d128).
# Without a past it writes caches that nobody reads, and takes longer (134 and 77 us for 2048 queries, d64).  It is
# causal, leaves keys out by -inf and has no mask: padding it takes as lengths of rows that end early, but what a mask
# holds is known when the model runs.  So it serves decoders that were exported without a padding mask.  (A bias, which
# onnxruntime 1.23 refuses on CUDA, later releases add to scores that all lie in memory.)  The CUDA provider has no
# kernel of float32, the CPU provider none of bfloat16.  Without queries it fails, an empty batch ends the process on
# the CPU, and behind a past it takes several queries of one batch only: batch and queries must be known, the past not.

PACKED = "batch queries (heads value_size)"
QUERIES, KEYS = "batch queries (heads size)", "batch keys (kv_heads repeats size)"
VALUES = "batch keys (kv_heads repeats value_size)"
GROUPED_KEYS, GROUPED_VALUES = "batch {rows} (kv_heads size)", "batch {rows} (kv_heads value_size)"
HALF = -65504.0  # the lowest float16: what it is added to weighs nothing beside a score that is not 65,000 less
LARGEST_HEAD = 256  # of FlashAttention
TRIANGLE = "the last query sees all keys, each one before it one less"
BEFORE = {"cos", "sin", "q_scale", "k_scale"}  # operands that turn and scale queries and keys, in their own dtype


def group_query_attention(
    queries: Term, keys: Term, values: Term, scale: Any, softcap: Any, past: tuple[Any, Any] = (None, None)
) -> tuple[Term, Term, Term]:
    """The result, keys and values of GroupQueryAttention, where that computes the fused attention of QUERIES.

    `keys` and `values` are GROUPED_KEYS and GROUPED_VALUES, new ones where there is a past; that and what comes back
    are (batch, kv_heads, rows, size).
    """
    rows = length(queries, 1) if past[0] is None else length(past[0], 2) + length(queries, 1)
    total = op.Cast(rows, to=TensorProto.INT32)
    last = op.Expand(op.Range(total - 1, total, 1), shape=[size("batch")])  # by Range, which leaves it on the GPU
    node = contrib.GroupQueryAttention(
        queries, keys, values, *past, last, total,
        num_heads=size("heads"), kv_num_heads=size("kv_heads"), scale=scale, softcap=softcap,
    )  # fmt: skip
    result, *present = (_where_exact(value) for value in results(node, 3))
    return in_layout(result, PACKED), *present


def _where_exact(value: Term) -> Term:
    sees = given(value, TRIANGLE, _is_causal)
    fits = given(sees, "sizes are known and ones that GroupQueryAttention takes", _fits)
    return given(fits, "float16 throughout, and a scale that is not 0, which would stand for the default", _is_half)


def _is_half(dtypes: dict[str, str], dtype: str, scale: float | None) -> bool:
    return _of_scores(dtypes) == {"float16"} == {dtype} and scale != 0


def _fits(
    batch: Any, queries: Any, keys: Any, new: Any, size: Any, value_size: Any, cache_layout: str | None
) -> bool:
    known = isinstance(batch, int) and isinstance(queries, int) and batch > 0 and queries > 0
    shaped = isinstance(size, int) and size == value_size and size % 8 == 0 and size <= LARGEST_HEAD
    if new is None:
        return known and shaped and keys == queries
    return known and shaped and new == queries and 1 in (batch, queries) and cache_layout == "bhsd"


def _is_causal(
    form: str, mask_kind: str, bias_kind: str, masked_score: float, dtype: str, mask: Any, is_causal: Any,
    queries: Any, keys: Any,
) -> bool:  # fmt: skip
    """Whether the last query sees all keys, and each one before it one less."""
    if mask is not None or bias_kind == "position":
        return False
    if is_causal or queries == 1:
        return not is_causal or queries == keys
    return form == "causal_operator" or (mask_kind == "causal" and _weighs_nothing(masked_score, dtype))


def _is_full(form: str, mask_kind: str, bias_kind: str, mask: Any, is_causal: Any, queries: Any) -> bool:
    """Whether every query sees every key."""
    below_diagonal = mask_kind == "causal" or form == "causal_operator"
    return mask is None and bias_kind != "position" and not is_causal and (queries == 1 or not below_diagonal)


def _weighs_nothing(masked_score: float, dtype: str) -> bool:
    """Whether a score to which this is added counts for nothing in a row that has another score."""
    return masked_score <= HALF if dtype == "float16" else masked_score < LOWEST


def _of_scores(dtypes: dict[str, str]) -> set[str]:
    """The floating dtypes of what attention itself reads."""
    return {dtype for name, dtype in dtypes.items() if name not in BEFORE} - {"bool"}


def multi_head_attention(
    queries: Term, keys: Term, values: Term, mask: Any, bias: Any, scale: Any, masked_score: Any
) -> Term:
    """The fused attention of QUERIES, KEYS and VALUES as MultiHeadAttention, where that computes the same."""

    def attended(*more: Any, **attributes: Any) -> Term:
        return contrib.MultiHeadAttention(
            queries, keys, values, *more, num_heads=size("heads"), scale=scale, **attributes
        )

    added = _of_all_pairs(_added(queries, keys, mask, bias, masked_score), queries, keys)
    with_bias = attended(None, None, added)
    triangle = given(attended(unidirectional=1), TRIANGLE, _is_causal)
    context = either(
        given(attended(), "every query sees every key", _is_full),
        given(triangle, "queries and keys are equally many", lambda queries, keys: queries == keys),
        given(
            choose("fully_masked", softmax=with_bias, zero=_guarded(with_bias, added)),
            "a mask that is added does what a replacing one does",
            _adding_is_exact,
        ),
    )
    capless = given(in_layout(context, PACKED), "no softcap", lambda softcap: not softcap)
    return given(
        capless,
        "float32 or float16 throughout, and a scale that is not 0, which would stand for the default",
        lambda dtypes, dtype, scale: _of_scores(dtypes) == {dtype} and dtype != "bfloat16" and scale != 0,
    )


def _adding_is_exact(form: str, mask_kind: str, masked_score: float, dtype: str) -> bool:
    if form != "softmax" or mask_kind not in ("boolean", "inverted"):
        return form == "softmax"
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
