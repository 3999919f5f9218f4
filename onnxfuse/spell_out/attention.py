"""onnxruntime's attention: of queries, keys and values, or of an input and the weights that project it to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term, as_term
from onnxfuse.dsl.words import cast_like, op, rearrange, scaled
from onnxfuse.patterns._attention import axis_size, causal_bias, causal_mask
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()

MASK_FILTER: Final = -10000.0  # added to the scores of keys that padding hides
LOWEST: Final[Mapping[int, float]] = {  # added to the scores of keys after their query
    TensorProto.FLOAT: -3.4028234663852886e38,
    TensorProto.FLOAT16: -65504.0,
    TensorProto.BFLOAT16: -3.3895313892515355e38,
}
HEADS: Final = "batch heads {rows} {size}"


@dataclass
class Padding:
    """A padding mask: a term that is true where keys are kept, and the number added to the scores of others."""

    counts: Term
    number: float


@dataclass
class Heads:
    """Queries, keys and values as (batch, heads, rows, size), and the biases and masks of the scores."""

    queries: Term
    keys: Term
    values: Term
    length: Term  # the number of keys
    added: tuple[Term, ...] = ()
    padding: Padding | None = None
    is_causal: bool = False
    softcap: float = 0.0


def attended(call: Call, heads: Heads) -> Term:
    """Return `softmax(scale * queries keys^T + added) values` as (batch, queries, heads * value_size)."""
    size = call.dims["size"]
    assert isinstance(size, int)
    scale = call.scalar("scale", call.number("scale", 0.0) or size**-0.5)
    columns = op.Transpose(heads.keys, perm=[0, 1, 3, 2])
    scores: Term = scaled(op.MatMul(heads.queries, columns), scale)
    if heads.softcap:
        scores = op.Tanh(scores / heads.softcap) * heads.softcap
    for term in (*heads.added, *_masks(call, heads, columns)):
        scores = scores + term
    context = op.MatMul(op.Softmax(scores, axis=-1), heads.values)
    return rearrange(context, "batch heads queries value_size -> batch queries (heads value_size)")


def _masks(call: Call, heads: Heads, columns: Term) -> list[Term]:
    """Return the terms that masks add to scores.

    A causal mask replaces the number that padding adds to a score.  If the padding number is so low that adding both
    numbers gives a third one, both masks become one mask, or a Where that selects one of the numbers.
    """
    padding, lowest = heads.padding, LOWEST[call.dtype(0)]
    hidden = [] if padding is None else [_added(padding.counts, padding.number, heads)]
    if not heads.is_causal:
        return hidden
    sizes = axis_size(heads.queries, 2), axis_size(columns, 3)
    if padding is not None and padding.number < lowest / 2:
        if padding.number == lowest:
            return [causal_bias(*sizes, padding.counts, heads.queries, call.scalar("masked_score", lowest))]
        return [op.Where(causal_mask(*sizes, as_term(None)), *hidden, cast_like(as_term(lowest), like=heads.keys))]
    return [*hidden, causal_bias(*sizes, as_term(None), heads.queries, call.scalar("masked_score", lowest))]


def _added(counts: Term, number: float, heads: Heads) -> Term:
    return cast_like(op.Where(counts, 0.0, number), like=heads.keys)


def split_heads(x: Term, rows: str, size: str) -> Term:
    """Return (batch, rows, heads * size) as (batch, heads, rows, size)."""
    return rearrange(x, f"batch {rows} (heads {size}) -> {HEADS.format(rows=rows, size=size)}")


def columns_of(x: Term, start: int, count: int, axis: int = -1) -> Term:
    """Return `count` columns of x from column `start` on."""
    return op.Slice(x, starts=[start], ends=[start + count], axes=[axis], steps=[1])


def sizes(call: Call, heads: int, hidden: Size, value_hidden: Size) -> str | None:
    """Name the sizes of heads in `call.dims`; return the reason if they are not known."""
    for name, whole in ("size", hidden), ("value_size", value_hidden):
        if not isinstance(whole, int) or not heads or whole % heads:
            return f"{whole} columns are no {heads} heads of known size"
        call.dims[name] = whole // heads
    call.dims["heads"] = heads
    return None


# --- masks ---------------------------------------------------------------------------------------------------------


def padding(call: Call, index: int, heads: Heads) -> Padding | str:
    """Return the padding mask that an input is, or the reason why it has no spelling.

    The input has 1 where a key is kept, per batch or per batch and query, or it is the number of kept keys.
    """
    shape, mask = call.shape(index), call.input(index)
    if shape is None or len(shape) not in (1, 2, 3) or (len(shape) > 1 and shape[-1] != call.dims["keys"]):
        return f"its mask '{call.tensor(index).name}' has no shape that is known to be one of all keys"
    if len(shape) == 1:
        if shape[0] != call.dims["batch"]:
            return f"its mask '{call.tensor(index).name}' is one of places where keys begin and end"
        places = op.Cast(op.Range(0, heads.length, 1), to=call.dtype(index))
        counts: Term = op.Less(places, rearrange(mask, "batch -> batch 1 1 1"))
    else:
        axes = "batch keys -> batch 1 1 keys" if len(shape) == 2 else "batch queries keys -> batch 1 queries keys"
        counts = rearrange(op.Greater(mask, 0), axes)
    return Padding(counts, call.number("mask_filter_value", MASK_FILTER))


# --- Attention -----------------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::Attention")
def _attention(call: Call) -> dict[int, Term] | str:
    shape, weights = call.shape(0), call.shape(1)
    if call.has(4) or call.has(6):
        return "its cache holds keys and values in one tensor"
    if call.integer("do_rotary") or shape is None or weights is None or len(shape) != 3:
        return "it rotates queries and keys" if call.integer("do_rotary") else "its input has not three known axes"
    columns = weights[1]
    parts = [int(each) for each in call.numbers("qkv_hidden_sizes")]
    if not isinstance(columns, int) or (parts and (len(parts) != 3 or sum(parts) != columns or parts[0] != parts[1])):
        return "its weights have not as many columns as queries, keys and values"
    hidden, _, value_hidden = parts or [columns // 3] * 3
    call.dims |= {"batch": shape[0], "queries": shape[1], "new": shape[1], "keys": shape[1]}
    if reason := sizes(call, call.integer("num_heads"), hidden, value_hidden):
        return reason
    packed: Term = op.MatMul(call.input(0), call.input(1))
    packed = packed + call.input(2) if call.has(2) else packed
    heads = Heads(
        split_heads(columns_of(packed, 0, hidden), "queries", "size"),
        split_heads(columns_of(packed, hidden, hidden), "new", "size"),
        split_heads(columns_of(packed, 2 * hidden, value_hidden), "new", "value_size"),
        length=axis_size(call.input(0), 1),
        is_causal=call.integer("unidirectional") == 1,
    )
    return _with_masks(call, heads, mask=3, bias=5)


def _with_masks(call: Call, heads: Heads, mask: int, bias: int) -> dict[int, Term] | str:
    """Return attention with the inputs `mask` and `bias` as its mask and bias, or the reason for no spelling."""
    heads.added = (call.input(bias),) if call.has(bias) else ()
    if call.has(mask):
        found = padding(call, mask, heads)
        if isinstance(found, str):
            return found
        heads.padding = found
    return {0: attended(call, heads)}


# --- MultiHeadAttention --------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::MultiHeadAttention")
def _multi_head_attention(call: Call) -> dict[int, Term] | str:
    if call.has(8) or call.has(9):
        return "it shares the memory of its cache"
    return _multi_head(call, Inputs(bias=3, mask=4, added=5, past=6))


@RULES.rule("com.microsoft::DecoderMaskedMultiHeadAttention")
def _decoder_masked_multi_head_attention(call: Call) -> dict[int, Term] | str:
    if call.rank(1) != 4 or any(map(call.has, (5, 6, 8, 9))):  # only cross attention has a spelling
        return "it shares the memory of its cache, or has beams"
    return _multi_head(call, Inputs(bias=10, mask=3, added=4, past=5))


@dataclass(frozen=True)
class Inputs:
    """The indices of the inputs after queries, keys and values; past values are the input after past keys."""

    bias: int
    mask: int
    added: int
    past: int


def _multi_head(call: Call, inputs: Inputs) -> dict[int, Term] | str:
    found = _heads(call, inputs)
    if isinstance(found, str):
        return found
    keys, values = found.keys, found.values
    if call.has(inputs.past) != call.has(inputs.past + 1):
        return "it has a past of keys or of values alone"
    if call.has(inputs.past):
        past = call.shape(inputs.past)
        if past is None or len(past) != 4:
            return "its past has not four known axes"
        found.keys = op.Concat(call.input(inputs.past), keys, axis=2)
        found.values = op.Concat(call.input(inputs.past + 1), values, axis=2)
        found.length = axis_size(call.input(inputs.past), 2) + found.length
        call.dims["keys"] = past[2] + call.dims["new"]
    found.is_causal = call.integer("unidirectional") == 1
    outputs = _with_masks(call, found, inputs.mask, inputs.added)
    return outputs if isinstance(outputs, str) else {**outputs, 1: found.keys, 2: found.values}


def _heads(call: Call, inputs: Inputs) -> Heads | str:
    """Return queries, keys and values split into heads, with their biases, or the reason for no spelling."""
    query, heads = call.shape(0), call.integer("num_heads")
    if query is None:
        return "the rank of its queries is not known"
    call.dims |= {"batch": query[0], "queries": query[1]}
    if len(query) == 5:
        return _packed_heads(call, query, 3, inputs)
    key, value = call.shape(1), call.shape(2)
    if len(query) == 3 and key is not None and len(key) == 5 and not call.has(2):
        return _packed_heads(call, key, 2, inputs)
    if len(query) != 3 or key is None or value is None or {len(key), len(value)} not in ({3}, {4}):
        return "its queries, keys and values have no axes that have a spelling"
    if reason := sizes(call, heads, query[2], value[2] if len(value) == 3 else value[3] * heads):
        return reason
    call.dims["new"] = call.dims["keys"] = key[1] if len(key) == 3 else key[2]
    terms = [call.input(0), call.input(1), call.input(2)]
    if call.has(inputs.bias):
        if len(key) == 4:
            return "it adds biases to keys that have heads already"
        hidden, value_hidden = query[2], value[2]
        assert isinstance(hidden, int) and isinstance(value_hidden, int)
        places = (0, hidden), (hidden, hidden), (2 * hidden, value_hidden)
        terms = [t + columns_of(call.input(inputs.bias), *place) for t, place in zip(terms, places, strict=True)]
    if len(key) == 4:
        return Heads(split_heads(terms[0], "queries", "size"), terms[1], terms[2], axis_size(call.input(1), 2))
    return Heads(
        split_heads(terms[0], "queries", "size"),
        split_heads(terms[1], "new", "size"),
        split_heads(terms[2], "new", "value_size"),
        length=axis_size(call.input(1), 1),
    )


def _packed_heads(call: Call, shape: tuple[Size, ...], count: int, inputs: Inputs) -> Heads | str:
    """Return the heads of packed (batch, rows, heads, 3, size) queries, keys and values; or 2 for keys and values."""
    _, rows, heads, parts, size = shape
    if parts != count or not isinstance(heads, int) or not isinstance(size, int) or call.has(inputs.bias):
        return "its packed queries, keys and values have a bias, or sizes that are not known"
    call.dims |= {"new": rows, "keys": rows, "heads": heads, "size": size, "value_size": size}
    index = 0 if count == 3 else 1
    length = axis_size(call.input(index), 1)

    def part(number: int, axis: str) -> Term:
        taken = columns_of(call.input(index), number, 1, axis=3)
        return rearrange(taken, f"batch {axis} heads 1 size -> {HEADS.format(rows=axis, size='size')}")

    if count == 3:
        return Heads(part(0, "queries"), part(1, "new"), part(2, "new"), length)
    return Heads(split_heads(call.input(0), "queries", "size"), part(0, "new"), part(1, "new"), length)
