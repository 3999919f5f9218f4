"""Spelling rules of onnxruntime's attention operators: the rules write each operator as smaller ONNX operators.

The attention operators read queries, keys and values, or an input and the weights that project it to queries, keys
and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term, as_term
from onnxfuse.dsl.words import cast_like, op, rearrange, scaled
from onnxfuse.patterns._attention import axis_size, causal_bias, causal_mask
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, known, stay_if
from onnxfuse.spell_out.views import join_heads, parts_of, split_heads

RULES = RuleTable[Rule]()

MASK_FILTER: Final = -10000.0  # the number that is added to the scores of keys that padding hides
LOWEST: Final[Mapping[int, float]] = {  # by dtype: the number that a causal mask adds to the scores of later keys
    TensorProto.FLOAT: -3.4028234663852886e38,
    TensorProto.FLOAT16: -65504.0,
    TensorProto.BFLOAT16: -3.3895313892515355e38,
}


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values as (batch, heads, rows, size), and softmax parameters besides masks and biases."""

    queries: Term
    keys: Term
    values: Term
    length: Term  # the number of keys
    is_causal: bool = False
    softcap: float = 0.0


def attended(call: Call, heads: Heads, bias: int, mask: int | None = None) -> Term:
    """Return `softmax(scale * queries keys^T + masks) values` as (batch, queries, heads * value_size).

    `bias` is the index of the input that is added to the scores, and `mask` the index of the input that hides keys.
    Either input can be absent.
    """
    size = known(call.dims["size"], "the size of its heads is not known")
    scale = call.scalar("scale", call.attribute("scale", 0.0) or size**-0.5)
    columns = op.Transpose(heads.keys, perm=[0, 1, 3, 2])
    scores: Term = scaled(op.MatMul(heads.queries, columns), scale)
    if heads.softcap:
        scores = op.Tanh(scores / heads.softcap) * heads.softcap
    if call.has(bias):
        scores = scores + call.input(bias)
    kept = None if mask is None or not call.has(mask) else _kept(call, mask, heads.length)
    for term in _masks(call, heads, columns, kept):
        scores = scores + term
    return join_heads(op.MatMul(op.Softmax(scores, axis=-1), heads.values), "queries", "value_size")


def _masks(call: Call, heads: Heads, columns: Term, kept: Term | None) -> list[Term]:
    """Return the terms that the padding mask and the causal mask add to scores.

    `kept` is true for keys that padding does not hide.  Each mask adds one number to the scores of the keys that it
    hides, usually as a term of its own.  If the padding mask's number is nearly as low as the causal mask's, a key that
    both hide gets only the causal mask's number.  Then one term has both masks: a single mask if their numbers are
    equal, else a Where that selects one of the numbers.
    """
    number = call.attribute("mask_filter_value", MASK_FILTER)
    hidden = [] if kept is None else [cast_like(op.Where(kept, 0.0, number), like=heads.keys)]
    if not heads.is_causal:
        return hidden
    nothing, sizes = as_term(None), (axis_size(heads.queries, 2), axis_size(columns, 3))
    lowest = LOWEST.get(call.dtype(0), 0.0)  # 0.0 is never used: other dtypes are not spelled out
    score = call.scalar("masked_score", lowest)
    if kept is None or number >= lowest / 2:
        return [*hidden, causal_bias(*sizes, nothing, heads.queries, score)]
    if number == lowest:
        return [causal_bias(*sizes, kept, heads.queries, score)]
    return [op.Where(causal_mask(*sizes, nothing), *hidden, cast_like(as_term(lowest), like=heads.keys))]


def _kept(call: Call, index: int, length: Term) -> Term:
    """Return a term that is true where keys are kept.

    The operator's mask has one of three forms: (batch, keys) or (batch, queries, keys), above 0 where a key is kept, or
    (batch), the number of kept keys, which come first.
    """
    name, mask = call.tensor(index).name, call.input(index)
    no_mask = f"its mask '{name}' has no shape that is known to be one of all keys"
    shape = call.axes(index, no_mask, 1, 2, 3)
    if len(shape) == 1:
        stay_if(shape[0] != call.dims["batch"], f"its mask '{name}' is one of places where keys begin and end")
        places = op.Cast(op.Range(0, length, 1), to=call.dtype(index))
        return op.Less(places, rearrange(mask, "batch -> batch 1 1 1"))
    stay_if(shape[-1] != call.dims["keys"], no_mask)
    axes = "batch keys -> batch 1 1 keys" if len(shape) == 2 else "batch queries keys -> batch 1 queries keys"
    return rearrange(op.Greater(mask, 0), axes)


# --- sizes ---------------------------------------------------------------------------------------------------------


def _name_heads(call: Call, hidden: Size, value_hidden: Size) -> tuple[int, int]:
    """Store the number and the sizes of heads in `call.dims`; return the column counts of keys and of values.

    `hidden` and `value_hidden` are these counts, for all heads together.  Raises NoSpelling if one is symbolic.
    """
    heads = call.attribute("num_heads", 0)
    size, value_size = (_size_of_head(columns, heads) for columns in (hidden, value_hidden))
    call.dims |= {"heads": heads, "size": size, "value_size": value_size}
    return heads * size, heads * value_size


def _size_of_head(columns: Size, heads: int) -> int:
    if not isinstance(columns, int) or heads < 1 or columns % heads:
        raise NoSpelling(f"{columns} columns are not {heads} heads of known size")
    return columns // heads


def name_keys(call: Call, past: int) -> None:
    """Store the number of keys in `call.dims`: the new keys and, if the node has a past, also the past keys.

    The input `past` has the past keys, and the input after it the past values.
    """
    call.dims["keys"] = call.dims["new"]
    stay_if(call.has(past) != call.has(past + 1), "it has a past of keys or of values alone")
    if call.has(past):
        call.dims["keys"] = call.axes(past, "its past has not four known axes", 4)[2] + call.dims["new"]


def after_past(call: Call, past: int, x: Term) -> Term:
    """Return the past keys or values followed by the new ones, x (batch, heads, rows, size); x if there is no past."""
    return op.Concat(call.input(past), x, axis=2) if call.has(past) else x


# --- Attention -----------------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::Attention")
def _attention(call: Call) -> dict[int, Term]:
    stay_if(call.has(4) or call.has(6), "its cache holds keys and values in one tensor")
    stay_if(call.attribute("do_rotary", 0), "it rotates queries and keys")
    no_axes = "its input has not three known axes"
    batch, rows, _ = call.axes(0, no_axes, 3)
    _, columns = call.axes(1, no_axes, 2)
    sizes = [int(each) for each in call.attribute("qkv_hidden_sizes", list[float]())]
    if not isinstance(columns, int) or (sizes and (len(sizes) != 3 or sum(sizes) != columns or sizes[0] != sizes[1])):
        raise NoSpelling("its weights have not as many columns as queries, keys and values")
    sizes = sizes or [columns // 3] * 3
    call.dims |= {"batch": batch, "queries": rows, "new": rows, "keys": rows}
    _name_heads(call, sizes[0], sizes[2])
    packed: Term = op.MatMul(call.input(0), call.input(1))
    queries, keys, values = parts_of(packed + call.input(2) if call.has(2) else packed, *sizes)
    heads = Heads(
        split_heads(queries, "queries"),
        split_heads(keys, "new"),
        split_heads(values, "new", "value_size"),
        length=axis_size(call.input(0), 1),
        is_causal=call.attribute("unidirectional", 0) == 1,
    )
    return {0: attended(call, heads, bias=5, mask=3)}


# --- MultiHeadAttention --------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::MultiHeadAttention")
def _multi_head_attention(call: Call) -> dict[int, Term]:
    stay_if(call.has(8) or call.has(9), "it shares the memory of its cache")
    return _multi_head(call, bias=3, mask=4, added=5, past=6)


@RULES.rule("com.microsoft::DecoderMaskedMultiHeadAttention")
def _decoder_masked_multi_head_attention(call: Call) -> dict[int, Term]:
    # Keys of four axes, and no past or beams: cross attention.
    is_cross = call.rank(1) == 4 and not any(map(call.has, (5, 6, 8, 9)))
    stay_if(not is_cross, "it shares the memory of its cache, or has beams")
    return _multi_head(call, bias=10, mask=3, added=4, past=5)


def _multi_head(call: Call, bias: int, mask: int, added: int, past: int) -> dict[int, Term]:
    """Return the outputs of an attention operator.  The parameters are indices of its inputs.

    The input `added` is added to the scores.  The input `past` has the past keys, and the input after it past values.
    """
    new = _new_heads(call, bias)
    name_keys(call, past)
    heads = replace(
        new,
        keys=after_past(call, past, new.keys),
        values=after_past(call, past + 1, new.values),
        length=axis_size(call.input(past), 2) + new.length if call.has(past) else new.length,
        is_causal=call.attribute("unidirectional", 0) == 1,
    )
    return {0: attended(call, heads, added, mask), 1: heads.keys, 2: heads.values}


def _new_heads(call: Call, bias: int) -> Heads:
    """Return queries, new keys and new values split into heads, after their biases are added."""
    query, key, value = (call.shape(index) for index in range(3))
    if query is None:
        raise NoSpelling("the rank of its queries is not known")
    call.dims |= {"batch": query[0], "queries": query[1]}
    if len(query) == 5:
        return _packed_heads(call, query, 3, bias)
    if len(query) == 3 and key is not None and len(key) == 5 and not call.has(2):
        return _packed_heads(call, key, 2, bias)
    if len(query) != 3 or key is None or value is None or {len(key), len(value)} not in ({3}, {4}):
        raise NoSpelling("its queries, keys and values have no axes that have a spelling")
    are_split = len(key) == 4
    value_hidden = value[3] * call.attribute("num_heads", 0) if are_split else value[2]
    hidden, value_columns = _name_heads(call, query[2], value_hidden)
    call.dims["new"] = key[-2]
    terms = [call.input(index) for index in range(3)]
    if call.has(bias):
        stay_if(are_split, "it adds biases to keys that have heads already")
        biases = parts_of(call.input(bias), hidden, hidden, value_columns)
        terms = [term + each for term, each in zip(terms, biases, strict=True)]
    queries, keys, values = terms
    if not are_split:
        keys, values = split_heads(keys, "new"), split_heads(values, "new", "value_size")
    return Heads(split_heads(queries, "queries"), keys, values, axis_size(call.input(1), 2 if are_split else 1))


def _packed_heads(call: Call, shape: tuple[Size, ...], count: int, bias: int) -> Heads:
    """Return the heads of a packed input of queries, keys and values, or of queries and packed keys and values.

    The packed input has the shape (batch, rows, heads, count, size), with a count of 3 or 2.
    """
    _, rows, heads, parts, size = shape
    no_sizes = "its packed queries, keys and values have a bias, or sizes that are not known"
    stay_if(parts != count or call.has(bias), no_sizes)
    call.dims |= {"new": rows, "heads": known(heads, no_sizes), "size": known(size, no_sizes), "value_size": size}
    packed = call.input(0 if count == 3 else 1)
    taken = parts_of(packed, *[1] * count, axis=3)
    terms = [rearrange(part, "batch new heads 1 size -> batch heads new size") for part in taken]
    if count == 2:
        terms.insert(0, split_heads(call.input(0), "queries"))
    queries, keys, values = terms
    return Heads(queries, keys, values, axis_size(packed, 1))
