"""The bodies of attention with ONNX's own Attention, of opset 23, after a RotaryEmbedding if there is one.

A body is the ONNX function that a fused node runs where no kernel can.

Attention reads key heads without repeating them, and a cache's past as separate inputs.  Two forms that its definition
allows are not written, because onnxruntime's CPU kernel refuses them: a scale that is not positive, and masks that
broadcast along queries or keys.  If a row's mask is entirely the lowest number of its dtype, that kernel gives 0
instead of the mean of all values, so masks are limited to higher numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from onnx import TensorProto

from onnxfuse.dsl import Term, cast_like, choose, either, full, op, rearrange, results, size, when
from onnxfuse.dsl.terms import AttributeValue, as_term
from onnxfuse.patterns._attention import (
    BIASED,
    INFINITY,
    LOWEST_FLOAT16,
    SWALLOWS_SCORES,
    Scores,
    causal_mask,
    in_layout,
)
from onnxfuse.patterns._attention_ort import (
    FINITE,
    GROUPED_KEYS,
    GROUPED_VALUES,
    PACKED,
    QUERIES,
    adding_is_exact,
    attention_dtypes,
    has_no_weight,
    mask_and_bias,
    masks_are_finite,
    of_all_pairs,
    sees_all,
    without_sinks,
)

SMALLEST_SCALE: Final = 2.0**-126  # the smallest normal number of float32
HEADS: Final = "batch heads queries size"
RESULT: Final = "batch heads queries value_size"
LOWEST_ADDED: Final = {"float32": -1e38, "float16": -65472.0}  # added in place of the dtype's lowest number
ADDED: Final = "a score to which the mask is added becomes what the mask replaces it by"


def packed(queries: Term, keys: Term, values: Term, rows: str = "keys") -> tuple[Term, Term, Term]:
    """Return queries, keys and values of (batch, heads, rows, size) as (batch, rows, heads * size)."""
    return (
        rearrange(queries, f"{HEADS} -> {QUERIES}"),
        rearrange(keys, f"batch kv_heads {rows} size -> {GROUPED_KEYS.format(rows=rows)}"),
        rearrange(values, f"batch kv_heads {rows} value_size -> {GROUPED_VALUES.format(rows=rows)}"),
    )


def standard_attention(
    by_heads: tuple[Term, Term, Term],
    scores: Scores,
    past: tuple[Term, ...] = (),
    *,
    rows: str = "keys",
    side_by_side: tuple[Term, Term, Term] | None = None,
) -> tuple[Term, ...]:
    """Return the result of the fused attention, computed by ONNX's Attention.

    With a past, also return the keys and values of all steps, to which the operator appends those of this step.

    by_heads      queries, keys and values of (batch, heads, rows, size); `rows` names the number of keys
    past          keys and values of earlier steps, also (batch, heads, rows, size)
    side_by_side  queries, keys and values of (batch, rows, heads * size), used if the fused node's queries are
                  (batch, rows, ...); by default they are rearranged from `by_heads`
    """
    counts = {"q_num_heads": size("heads"), "kv_num_heads": size("kv_heads")}
    four = _attended(by_heads, 2, scores, past, {})
    three = _attended(side_by_side or packed(*by_heads, rows), 1, scores, past, counts)
    found = zip((in_layout(three[0], PACKED), *three[1:]), (in_layout(four[0], RESULT), *four[1:]), strict=True)
    return tuple(either(when(x, "queries of a known size lie by rows", _lies_by_rows), y) for x, y in found)


def _lies_by_rows(q_layout: str, size: object = None, value_size: object = None) -> bool:
    """Return whether queries are (batch, rows, ...) and the size of heads is known: a Reshape can then join heads."""
    return q_layout != "bhsd" and all(each is None or isinstance(each, int) for each in (size, value_size))


def _attended(
    inputs: Sequence[Term], axis: int, scores: Scores, past: Sequence[Term], heads: Mapping[str, AttributeValue]
) -> tuple[Term, ...]:
    """Return the outputs of an Attention whose inputs have the rows on axis `axis`."""
    queries, keys, _ = inputs
    rows = _size(queries, axis), _size(keys, axis)
    if past:
        rows = rows[0], _size(past[0], 2) + rows[1]
    # The operator computes softcap * tanh(scores / softcap), so the scale contains `cap`, too.  Absent parameters are
    # left out of these products.
    attributes = {"scale": scores.scale * scores.cap, "softcap": scores.softcap * scores.cap, **heads}
    precision = when(
        as_term(TensorProto.FLOAT), "a softmax in float32", lambda dtypes, dtype: _is_in("float16", dtypes, dtype)
    )
    found = []
    for mask in _masks(queries, rows, scores, bool(past)):
        node = op.Attention(
            *inputs, mask.mask, *past, softmax_precision=precision, is_causal=mask.is_causal, **attributes
        )
        outputs = results(node, 3 if past else 1)
        found.append([when(output, mask.sentence, mask.holds) for output in outputs])
    return tuple(_where_exact(either(*options)) for options in zip(*found, strict=True))


def _where_exact(value: Term) -> Term:
    # The attribute is scale * cap, in float32, and onnxruntime treats numbers below SMALLEST_SCALE as 0.
    scaled = when(
        without_sinks(value),
        "a scale that is positive",
        lambda scale, cap=None: scale is None or scale * (1.0 if cap is None else cap) >= SMALLEST_SCALE,
    )
    return when(
        scaled,
        "float32 or float16, for which onnxruntime has a kernel",
        lambda dtypes, dtype: {dtype, *attention_dtypes(dtypes)} <= {*LOWEST_ADDED},
    )


def _is_in(wanted: str, dtypes: dict[str, str], dtype: str) -> bool:
    """Return whether Attention computes in the dtype `wanted`: float16 if all operands are float16, else float32."""
    return (wanted == "float16") == ({dtype, *attention_dtypes(dtypes)} == {"float16"})


def _size(x: Term, axis: int) -> Term:
    """Return the size of an axis as a tensor of one element."""
    return op.Shape(x, start=axis, end=axis + 1)


# --- masks -------------------------------------------------------------------------------------------------------


class _Mask(NamedTuple):
    """The mask and the attribute is_causal of an Attention, and the condition under which they fit the fused node."""

    mask: Term | None
    is_causal: AttributeValue
    sentence: str
    holds: Callable[..., bool]


def _masks(queries: Term, rows: tuple[Term, Term], scores: Scores, has_past: bool) -> Iterator[_Mask]:
    """Yield the masks that Attention may have; `rows` are the numbers of queries and keys, as tensors of shape (1,)."""
    counts = op.Squeeze(rows[0], axes=[0]), op.Squeeze(rows[1], axes=[0])
    keep, added = _kept(counts, scores), _added(queries, counts, scores)
    yield _Mask(None, None, "every query sees every key", sees_all)
    yield _Mask(None, 1, "each query sees the keys up to its own", _ends_level if has_past else _is_square)
    yield _Mask(scores.mask, scores.is_causal, "an Attention that is not causal and has a past", _is_operator(has_past))
    counted = of_all_pairs(keep, *rows)
    yield _Mask(counted, scores.is_causal, "a mask that is true where a key counts", _is_kept(has_past))
    yield _Mask(of_all_pairs(added, *rows), None, ADDED, adding_is_exact)


def _is_operator(has_past: bool) -> Callable[..., bool]:
    """Return the condition that the fused node replaces an Attention, and can be written with its mask and is_causal.

    With a past, is_causal must be 0, because the past would shift a causal mask.
    """
    return lambda form, is_causal: form == "operator" and not (has_past and is_causal)


def _is_square(
    form: str, mask_kind: str, bias_kind: str, masked_score: float, dtype: str, mask: object, queries: object,
    keys: object,
) -> bool:  # fmt: skip
    """Return whether the only mask is a causal one, with as many queries as keys."""
    below = form == "causal_operator" or (mask_kind == "causal" and has_no_weight(masked_score, dtype))
    return below and mask is None and bias_kind not in BIASED and queries == keys


def _ends_level(
    form: str, mask_kind: str, bias_kind: str, masked_score: float, dtype: str, mask: object, queries: object,
    new: object,
) -> bool:  # fmt: skip
    """Return whether the only mask is a causal one, with as many queries as new keys (keys that the past lacks)."""
    return _is_square(form, mask_kind, bias_kind, masked_score, dtype, mask, queries, new)


def _kept(rows: tuple[Term, Term], scores: Scores) -> Term:
    """Return a boolean mask, true where a query attends to a key."""
    diagonal = causal_mask(*rows, scores.mask)
    below = when(diagonal, "the mask is causal", lambda form, mask_kind: "causal" in (form.split("_")[0], mask_kind))
    inverted = when(op.Not(scores.mask), "the mask is inverted", lambda mask_kind: mask_kind == "inverted")
    return either(below, inverted, scores.mask)


def _is_kept(has_past: bool) -> Callable[..., bool]:
    """Return the condition under which Attention with a boolean mask, and no bias, computes the same."""

    def holds(
        form: str, mask_kind: str, bias_kind: str, fully_masked: str, masked_score: float, is_causal: object
    ) -> bool:
        has_no_weight = masked_score == -INFINITY or fully_masked == "cleared"
        is_boolean = mask_kind in ("boolean", "inverted", "causal") and has_no_weight
        is_softmax = form == "softmax" and is_boolean and bias_kind not in BIASED
        return is_softmax or (form == "causal_operator" and not (has_past and is_causal))

    return holds


def _added(queries: Term, rows: tuple[Term, Term], scores: Scores) -> Term:
    """Return the additive mask of scores, with each finite number above the lowest number of the dtype."""
    swallowing = cast_like(op.Where(_kept(rows, scores), 0.0, LOWEST_ADDED["float32"]), like=queries)
    whole = mask_and_bias(queries, rows, scores)
    clipped = (
        when(_above_lowest(whole, lowest), f"masks are {dtype}", _may_be_lowest(dtype))
        for dtype, lowest in LOWEST_ADDED.items()
    )
    return either(when(swallowing, "the mask replaces scores", _is_swallowing), *clipped, whole)


def _above_lowest(added: Term, above: float) -> Term:
    """Return the additive mask with `above` in place of lower finite numbers.

    An element of -inf stays: it is the sum of two masks that both hold the lowest number, and the row has other keys,
    which have all the weight.
    """
    limited = op.Max(added, above)
    finite_alone = op.Where(op.Greater(added, -INFINITY), limited, added)
    return either(when(limited, FINITE, masks_are_finite), finite_alone)


def _is_swallowing(
    mask_kind: str, bias_kind: str, fully_masked: str, masked_score: float, dtypes: dict[str, str], dtype: str
) -> bool:
    """Return whether the mask uses a finite number so low that adding a score does not change it."""
    is_finite = (
        fully_masked != "cleared"
        and mask_kind in ("boolean", "inverted", "causal")
        and -INFINITY < masked_score < SWALLOWS_SCORES
    )
    return is_finite and _is_in("float32", dtypes, dtype) and bias_kind not in BIASED


def _may_be_lowest(wanted: str) -> Callable[..., bool]:
    """Return the condition under which a mask may contain the lowest number of the dtype `wanted`."""

    def holds(dtypes: dict[str, str], dtype: str, mask_kind: str, masked_score: float) -> bool:
        known = mask_kind in ("boolean", "inverted", "causal") and not -INFINITY < masked_score <= LOWEST_FLOAT16
        return _is_in(wanted, dtypes, dtype) and mask_kind != "none" and not known

    return holds


# --- rotary embedding --------------------------------------------------------------------------------------------


def rotated_by_operator(x: Term, cos: Term, sin: Term, rows: str, **heads: AttributeValue) -> dict[str, Term]:
    """Return x, of (batch, heads, rows, size) or with heads side by side, rotated by RotaryEmbedding.

    The result has the same labels as the result of `_rotary.rotated`.  The operator's tables hold each column once, and
    their rows are not broadcast.  If heads lie side by side, `heads` must hold the attribute num_heads.
    """
    if rows == "patches":
        x = when(
            x,
            "the tables of cos and sin have {patches} rows; required {seq} - {kept}, as many as are rotated",
            lambda seq, kept, patches: seq == kept + patches,
        )
    part: dict[str, AttributeValue] = {"rotary_embedding_dim": size("rotated")}
    kinds: dict[str, tuple[str, str, dict[str, AttributeValue]]] = {
        "rotate_half": ("size", "halves", {}),
        "rotate_part": ("rotated", "halves", part),
        "rotate_pairs": ("size", "pairs", {"interleaved": 1}),
        "rotate_part_of_pairs": ("rotated", "pairs", {"interleaved": 1, **part}),
    }
    found = {}
    for label, (width, columns, attributes) in kinds.items():
        tables = (for_batch(_once(_rows_of(table, rows, width), width, columns), x) for table in (cos, sin))
        operator = op.RotaryEmbedding(x, *tables, **heads, **attributes)
        found[label] = when(
            operator, f"the columns of cos and sin are known to repeat, in {columns}", _repeat_in(columns)
        )
    for label, interleaved in (("complex_halves", 0), ("complex_pairs", 1)):
        tables = (for_batch(_rows_of(table, rows, "half"), x) for table in (cos, sin))
        found[label] = op.RotaryEmbedding(x, *tables, interleaved=interleaved, **heads)
    found["complex_pairs_to_halves"] = when(x, "pairs that stay side by side", lambda: False)
    return found


def _repeat_in(columns: str) -> Callable[..., bool]:
    return lambda cos_columns, sin_columns: columns in (cos_columns or "") and columns in (sin_columns or "")


def _rows_of(table: Term, rows: str, width: str) -> Term:
    """Return a table that heads share, of any layout, as (cos_batch or 1, rows, width)."""
    own, common = f"cos_batch {rows} {width}", f"{rows} {width}"
    of_heads = when(table, "heads share a table", lambda: False)
    return choose(
        "table",
        bsd=rearrange(table, f"{own} -> {own}"),
        sd=rearrange(table, f"{common} -> 1 {common}"),
        b1sd=rearrange(table, f"cos_batch 1 {common} -> {own}"),
        bs1d=rearrange(table, f"cos_batch {rows} 1 {width} -> {own}"),
        bhsd=of_heads,
        hsd=of_heads,
    )


def _once(table: Term, width: str, columns: str) -> Term:
    """Return a table without its repeated columns."""
    if columns == "halves":
        return op.Slice(table, starts=[0], ends=[size(width) // 2], axes=[-1], steps=[1])
    return op.Slice(table, starts=[0], ends=[size(width)], axes=[-1], steps=[2])


def for_batch(table: Term, x: Term) -> Term:
    """Return a table with rows for each batch element of x, as onnxruntime's kernel requires."""
    return either(
        when(table, "a table for each batch element", lambda batch, cos_batch: cos_batch == batch),
        op.Expand(table, shape=[size("batch"), 1, 1]),
        op.Expand(table, op.Concat(_size(x, 0), full(1, "2"), axis=0)),
    )
