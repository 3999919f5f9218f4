"""The bodies of attention in onnxruntime's own operators, MultiHeadAttention and GroupQueryAttention.

A body is the ONNX function that a fused node runs where no kernel can.

MultiHeadAttention takes (batch, length, heads * size), as many key heads as query heads, and a bias of four axes whose
last two are not broadcast; a causal mask is an attribute.

GroupQueryAttention takes key heads without repeating them, and the past of a cache as separate inputs.  It is
causal, masks keys by -inf, and has no mask operand.  It takes padding as the length of each row, which cannot be had
from a mask whose contents are known only when the model runs.  So GroupQueryAttention serves decoders that were
exported without a padding mask.  onnxruntime 1.23 refuses a bias on CUDA.  The CUDA provider has no kernel for float32,
the CPU provider none for bfloat16.  The operator fails if there are no queries, and an empty batch ends the process on
the CPU.  With a past, it takes several queries only if the batch size is 1.  So the batch size and the number of
queries must be known; the length of the past need not be.
"""

from typing import Final

from onnx import TensorProto

from onnxfuse.dsl import Term, cast_like, choose, contrib, either, full, op, rearrange, results, size, when
from onnxfuse.patterns._attention import (
    BIASED,
    INFINITY,
    LOWEST_FLOAT16,
    SWALLOWS_SCORES,
    Scores,
    axis_size,
    causal_bias,
    in_layout,
)

PACKED: Final = "batch queries (heads value_size)"
QUERIES: Final = "batch queries (heads size)"
KEYS: Final = "batch keys (kv_heads repeats size)"
VALUES: Final = "batch keys (kv_heads repeats value_size)"
GROUPED_KEYS: Final = "batch {rows} (kv_heads size)"
GROUPED_VALUES: Final = "batch {rows} (kv_heads value_size)"
MAX_HEAD_SIZE: Final = 256  # the largest head that GroupQueryAttention takes
IS_CAUSAL: Final = "the last query sees all keys, each one before it one less"
FINITE: Final = "masked scores are finite, so that every row has a softmax"
BEFORE_ATTENTION: Final = {"cos", "sin", "q_scale", "k_scale"}  # operands of rotations and norms that precede attention


# --- GroupQueryAttention -----------------------------------------------------------------------------------------


def group_query_attention(
    queries: Term, keys: Term, values: Term, scores: Scores, past: tuple[Term | None, Term | None] = (None, None)
) -> tuple[Term, Term, Term]:
    """Return result, keys and values of GroupQueryAttention, where that operator computes the fused attention.

    `queries`, `keys` and `values` have the axes QUERIES, GROUPED_KEYS and GROUPED_VALUES; with a past, `keys` and
    `values` hold only this step's rows.

    The past and the returned caches are (batch, kv_heads, rows, size).
    """
    rows = axis_size(queries, 1) if past[0] is None else axis_size(past[0], 2) + axis_size(queries, 1)
    total = op.Cast(rows, to=TensorProto.INT32)
    # `last` holds total - 1 for each row.  onnxruntime moves arithmetic on sizes to the CPU, but leaves a Range on the
    # GPU, where GroupQueryAttention reads `last`.
    last = op.Expand(op.Range(total - 1, total, 1), shape=[size("batch")])
    node = contrib.GroupQueryAttention(
        queries, keys, values, *past, last, total,
        num_heads=size("heads"), kv_num_heads=size("kv_heads"), scale=scores.scale, softcap=scores.softcap,
    )  # fmt: skip
    result, present_keys, present_values = (_where_grouped_is_exact(value) for value in results(node, 3))
    return in_layout(result, PACKED), present_keys, present_values


def _where_grouped_is_exact(value: Term) -> Term:
    uncapped = when(without_sinks(value), "no softcap in several operators", lambda capped: capped != "tanh")
    causal = when(uncapped, IS_CAUSAL, _is_causal)
    sized = when(causal, "sizes are known and ones that GroupQueryAttention takes", _has_grouped_sizes)
    return when(
        sized,
        "float16 throughout, and a scale that is not 0, which would stand for the default",
        lambda dtypes, dtype, scale: attention_dtypes(dtypes) == {"float16"} == {dtype} and scale != 0,
    )


def _has_grouped_sizes(
    batch: object,
    queries: object,
    keys: object,
    new: object,
    size: object,
    value_size: object,
    cache_layout: str | None,
) -> bool:
    known = isinstance(batch, int) and isinstance(queries, int) and batch > 0 and queries > 0
    head = isinstance(size, int) and size == value_size and size % 8 == 0 and size <= MAX_HEAD_SIZE
    if new is None:
        return known and head and bool(keys == queries)
    return known and head and bool(new == queries) and 1 in (batch, queries) and cache_layout == "bhsd"


def _is_causal(
    form: str, mask_kind: str, bias_kind: str, masked_score: float, dtype: str, mask: object, is_causal: object,
    queries: object, keys: object,
) -> bool:  # fmt: skip
    """Return whether the last query sees all keys, and each earlier query one key fewer than the next."""
    if mask is not None or bias_kind in BIASED:
        return False
    if is_causal or queries == 1:
        return not is_causal or bool(queries == keys)
    return form == "causal_operator" or (mask_kind == "causal" and has_no_weight(masked_score, dtype))


def without_sinks(value: Term) -> Term:
    """Return `value` for attention without sinks, which the operators of the bodies do not have."""
    return when(value, "no sinks", lambda fully_masked: fully_masked != "sinks")


def has_no_weight(masked_score: float, dtype: str) -> bool:
    """Return whether a key whose mask adds `masked_score` has probability 0 if another key of the row is unmasked.

    In float16, the lowest number suffices, because the scores of a row differ by less than 65,000.
    """
    return masked_score <= LOWEST_FLOAT16 if dtype == "float16" else masked_score < SWALLOWS_SCORES


def attention_dtypes(dtypes: dict[str, str]) -> set[str]:
    """Return the floating dtypes of all operands except those of rotations and norms before the attention."""
    return {dtype for name, dtype in dtypes.items() if name not in BEFORE_ATTENTION} - {"bool"}


# --- MultiHeadAttention ------------------------------------------------------------------------------------------


def multi_head_attention(queries: Term, keys: Term, values: Term, scores: Scores) -> Term:
    """Return the fused attention as MultiHeadAttention, where that computes the same.

    `queries`, `keys` and `values` have the axes QUERIES, KEYS and VALUES.
    """

    def operator(*inputs: Term | None, **attributes: int) -> Term:
        return contrib.MultiHeadAttention(
            queries, keys, values, *inputs, num_heads=size("heads"), scale=scores.scale, **attributes
        )

    rows = axis_size(queries, 1), axis_size(keys, 1)
    bias = of_all_pairs(mask_and_bias(queries, rows, scores), *map(_rows, (queries, keys)))
    with_bias = operator(None, None, bias)
    causal = when(operator(unidirectional=1), IS_CAUSAL, _is_causal)
    context = either(
        when(operator(), "every query sees every key", sees_all),
        when(causal, "queries and keys are equally many", lambda queries, keys: queries == keys),
        when(
            choose(
                "fully_masked",
                softmax=with_bias,
                zero=_zero_where_all_masked(with_bias, bias),
                cleared=_zero_where_all_masked(with_bias, bias),
            ),
            "a mask that is added does what a replacing one does",
            adding_is_exact,
        ),
    )
    packed = in_layout(context, PACKED)
    without_cap = when(without_sinks(packed), "no softcap", lambda softcap, capped: not softcap and capped != "tanh")
    repeated = when(
        without_cap,
        "as many heads of keys, with their repeats, as of queries",
        lambda heads, kv_heads, repeats: heads == 1 or not kv_heads == 1 == repeats,
    )
    sized = when(
        repeated,
        "known numbers and sizes of heads: a Reshape of nothing cannot find them out",
        lambda heads, size, value_size: all(isinstance(each, int) for each in (heads, size, value_size)),
    )
    return when(
        sized,
        "float32 or float16 throughout, and a scale that is not 0, which would stand for the default",
        lambda dtypes, dtype, scale: attention_dtypes(dtypes) == {dtype} and dtype != "bfloat16" and scale != 0,
    )


def sees_all(form: str, mask_kind: str, bias_kind: str, mask: object, is_causal: object, queries: object) -> bool:
    """Return whether every query sees every key."""
    below_diagonal = mask_kind == "causal" or form == "causal_operator"
    return mask is None and bias_kind not in BIASED and not is_causal and (queries == 1 or not below_diagonal)


def adding_is_exact(form: str, mask_kind: str, fully_masked: str, masked_score: float, dtype: str) -> bool:
    """Return whether the body (ONNX function) can add the mask to scores without changing the result.

    If the model replaces a masked score by `masked_score`, the sum of any score and `masked_score` must be
    `masked_score`.
    """
    if fully_masked == "cleared" and masked_score > -INFINITY:
        return False  # the added number would give equal weights, not 0, to the keys of a fully masked row
    if form != "softmax" or mask_kind not in ("boolean", "inverted"):
        return form == "softmax"
    return masked_score == -INFINITY or (dtype == "float32" and masked_score < SWALLOWS_SCORES)


def mask_and_bias(queries: Term, rows: tuple[Term, Term], scores: Scores) -> Term:
    """Return the mask plus the bias; where a boolean mask hides a key, `masked_score` replaces the bias.

    `rows` are the numbers of queries and keys.
    """
    mask, masked_score = scores.mask, scores.masked_score
    masks = {
        "boolean": cast_like(op.Where(mask, 0.0, masked_score), like=queries),
        "inverted": cast_like(op.Where(mask, masked_score, 0.0), like=queries),
        "additive": mask,
        "causal": causal_bias(*rows, mask, queries, masked_score),
    }
    biases = {"slopes": scores.slopes * scores.positions, "position": scores.bias}
    with_bias = {
        label: choose(
            "mask_kind",
            boolean=cast_like(op.Where(mask, bias, masked_score), like=queries),
            inverted=cast_like(op.Where(mask, masked_score, bias), like=queries),
            additive=bias + masks["additive"],
            causal=bias + masks["causal"],
            none=bias,
        )
        for label, bias in biases.items()
    }
    return choose("bias_kind", **with_bias, none=choose("mask_kind", **masks, none=mask))


def of_all_pairs(bias: Term, queries: Term, keys: Term) -> Term:
    """Return the bias of scores, expanded to (batch or 1, heads or 1, queries, keys).

    `queries` and `keys` are the numbers of queries and keys, as tensors of shape (1,).
    """
    return either(
        op.Expand(bias, shape=[1, 1, size("queries"), size("keys")]),
        op.Expand(bias, op.Concat(full(1, "2"), queries, keys, axis=0)),
    )


def _rows(x: Term) -> Term:
    return op.Slice(op.Shape(x), starts=[1], ends=[2], axes=[0])


def _zero_where_all_masked(context: Term, bias: Term) -> Term:
    """Return `context` with 0 for each query whose `bias` is -inf for all keys; its softmax would be NaN.

    The Slice is needed only in onnxruntime 1.31, which keeps the size of the reduced axis if a tensor is empty.
    """
    largest = op.Slice(op.ReduceMax(bias, axes=[-1]), starts=[0], ends=[1], axes=[-1], steps=[1])
    counts = op.Transpose(op.Greater(largest, -INFINITY), perm=[0, 2, 1, 3])
    heads = rearrange(context, f"{PACKED} -> batch queries heads value_size")
    cleared = rearrange(op.Where(counts, heads, 0.0), f"batch queries heads value_size -> {PACKED}")
    return either(
        when(context, FINITE, masks_are_finite),
        cleared,
    )


def masks_are_finite(masked_score: float, mask_kind: str, bias_kind: str) -> bool:
    """Return whether all mask and bias values that are added to scores are finite."""
    return bias_kind == "none" and mask_kind in ("boolean", "inverted", "causal") and masked_score > -INFINITY
