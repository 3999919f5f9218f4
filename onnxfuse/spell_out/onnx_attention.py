"""Spell out ONNX's Attention in basic operators if it has packed heads, shared key heads, a past, or key lengths."""

from __future__ import annotations

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, rearrange
from onnxfuse.patterns._attention import axis_size, causal_mask
from onnxfuse.spell_out.attention import after_past, name_keys
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, stay_if
from onnxfuse.spell_out.views import join_heads, repeat_heads, split_heads

RULES = RuleTable[Rule]()

Q, K, V, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)
# Attributes that are not needed in the form that patterns match.
NEEDLESS = {"q_num_heads", "kv_num_heads", "softmax_precision"}


@RULES.rule("Attention")
def _attention(call: Call) -> dict[int, Term] | None:
    windows = [call.attribute(f"{side}_window_size", -1) for side in ("left", "right")]
    stay_if(windows != [-1, -1], "each of its queries sees a window of keys")
    _name_sizes(call)
    extra = any(map(call.has, (PAST_KEY, PAST_VALUE, LENGTHS))) or not NEEDLESS.isdisjoint(call.node.attrs)
    if call.rank(Q) == 4 and call.dims["repeats"] == 1 and not extra:
        return None
    queries = _by_heads(call, Q, "queries", "heads", "size")
    keys = after_past(call, PAST_KEY, _by_heads(call, K, "new", "kv_heads", "size"))
    values = after_past(call, PAST_VALUE, _by_heads(call, V, "new", "kv_heads", "value_size"))
    mask = _mask(call, queries, keys)
    numbers = {"scale", "softcap"} & call.node.attrs.keys()
    attributes = {name: call.attribute(name, 0.0) for name in sorted(numbers)}
    if call.attribute("is_causal", 0) and not call.has(PAST_KEY) and not call.has(LENGTHS):
        attributes["is_causal"] = 1
    context = op.Attention(queries, repeat_heads(keys), repeat_heads(values, "value_size"), mask, **attributes)
    joined = join_heads(context, "queries", "value_size") if call.rank(Q) == 3 else context
    return {0: joined, 1: keys, 2: values}


def _name_sizes(call: Call) -> None:
    """Store the sizes of queries, keys and values in `call.dims`."""
    no_axes = "its queries, keys and values have not all three or all four known axes"
    q, k, v = (call.axes(index, no_axes, call.rank(Q) or 0) for index in (Q, K, V))
    stay_if(len(q) not in (3, 4), no_axes)
    other_precision = call.attribute("softmax_precision", 0) not in (0, TensorProto.FLOAT, call.dtype(Q))
    stay_if(other_precision, "its softmax has another precision")
    heads: Size
    kv_heads: Size
    if len(q) == 3:
        heads, kv_heads = call.attribute("q_num_heads", 0), call.attribute("kv_num_heads", 0)
        stay_if(not heads or not kv_heads, "it does not say how many heads there are")
        size, value_size = q[2] // heads, v[2] // kv_heads
    else:
        heads, kv_heads, size, value_size = q[1], k[1], q[3], v[3]
    unknown = not isinstance(size, int) or not isinstance(value_size, int)
    stay_if(unknown, "the size of its heads is not known")
    repeats = 1
    if heads != kv_heads:
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or not kv_heads or heads % kv_heads:
            raise NoSpelling(f"{heads} heads of queries are not a multiple of {kv_heads} heads of keys")
        repeats = heads // kv_heads
    call.dims |= {
        "batch": q[0], "heads": heads, "queries": q[-2], "size": size, "kv_heads": kv_heads, "new": k[-2],
        "value_size": value_size, "repeats": repeats,
    }  # fmt: skip
    name_keys(call, PAST_KEY)


def _by_heads(call: Call, index: int, rows: str, heads: str, size: str) -> Term:
    """Return an input as (batch, heads, rows, size); heads packed in the last axis are split."""
    return call.input(index) if call.rank(index) == 4 else split_heads(call.input(index), rows, size, heads)


# --- masks ---------------------------------------------------------------------------------------------------------


def _mask(call: Call, queries: Term, keys: Term) -> Term:
    """Return the mask that the node reads, combined with two other masks if the node needs them.

    A causal node with past keys needs a causal mask, and a node with lengths a mask of the keys within each length.
    """
    causal = call.attribute("is_causal", 0) == 1
    given = call.optional(MASK)
    if not call.has(LENGTHS) and not (causal and call.has(PAST_KEY)):
        return given
    of_numbers = call.has(MASK) and call.dtype(MASK) != TensorProto.BOOL
    stay_if(of_numbers, "its mask of numbers stands beside a past or lengths that mask as well")
    if not call.has(LENGTHS):
        as_many = call.dims["queries"] == call.dims["new"]
        stay_if(not as_many, "it is causal with a past, and has not as many queries as new keys")
        return causal_mask(axis_size(queries, 2), axis_size(keys, 2), given)
    counts = _within_length(call, causal)
    return op.And(counts, given) if call.has(MASK) else counts


def _within_length(call: Call, causal: bool) -> Term:
    """Return a mask that is true for keys within each sequence's length and, if causal, not after the query."""
    places = op.Range(0, axis_size(call.input(K), 2 if call.rank(K) == 4 else 1), 1)
    lengths = rearrange(call.input(LENGTHS), "batch -> batch 1 1 1")
    if not causal:  # the mask is repeated, because onnxruntime requires a row for each query
        return rearrange(op.Less(places, lengths), "batch 1 1 keys -> batch 1 queries keys")
    rows = axis_size(call.input(Q), 2 if call.rank(Q) == 4 else 1)
    behind = rearrange(op.Range(1, rows + 1, 1), "queries -> queries 1")
    return op.Less(places, lengths - rows + behind)
