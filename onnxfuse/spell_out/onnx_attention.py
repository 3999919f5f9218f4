"""ONNX's Attention: with packed heads, fewer heads of keys, a past, or lengths of keys."""

from __future__ import annotations

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, rearrange
from onnxfuse.patterns._attention import axis_size, causal_mask
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()

Q, K, V, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)
NEEDLESS = {"q_num_heads", "kv_num_heads", "softmax_precision"}  # not needed in the form that patterns match


@RULES.rule("Attention")
def _attention(call: Call) -> dict[int, Term] | str | None:
    shapes = [call.shape(index) for index in (Q, K, V)]
    if None in shapes or {len(shape or ()) for shape in shapes} not in ({3}, {4}):
        return "its queries, keys and values have not all three or all four known axes"
    precision = call.integer("softmax_precision")
    if precision not in (0, TensorProto.FLOAT, call.dtype(Q)):
        return "its softmax has another precision"
    if reason := _name_sizes(call):
        return reason
    extra = any(map(call.has, (PAST_KEY, PAST_VALUE, LENGTHS))) or not NEEDLESS.isdisjoint(call.node.attrs)
    if call.rank(Q) == 4 and call.dims["repeats"] == 1 and not extra:
        return None
    queries = _by_heads(call, Q, "queries", "heads", "size")
    keys = _by_heads(call, K, "new", "kv_heads", "size")
    values = _by_heads(call, V, "new", "kv_heads", "value_size")
    if call.has(PAST_KEY):
        keys = op.Concat(call.input(PAST_KEY), keys, axis=2)
        values = op.Concat(call.input(PAST_VALUE), values, axis=2)
    mask = _mask(call, queries, keys)
    if isinstance(mask, str):
        return mask
    named = (name for name in ("scale", "softcap") if name in call.node.attrs)
    attributes = {str(name): call.number(name, 0.0) for name in named}
    if call.integer("is_causal") and not call.has(PAST_KEY) and not call.has(LENGTHS):
        attributes["is_causal"] = 1
    many_keys, many_values = _repeated(call, keys, "size"), _repeated(call, values, "value_size")
    context = op.Attention(queries, many_keys, many_values, mask, **attributes)
    packed = "batch heads queries value_size -> batch queries (heads value_size)"
    return {0: rearrange(context, packed) if call.rank(Q) == 3 else context, 1: keys, 2: values}


def _name_sizes(call: Call) -> str | None:
    """Name the sizes of queries, keys and values in `call.dims`; return the reason if they are not known."""
    (q, k, v), past = (call.shape(index) or () for index in (Q, K, V)), call.shape(PAST_KEY)
    heads: Size
    kv_heads: Size
    if len(q) == 3:
        heads, kv_heads = call.integer("q_num_heads"), call.integer("kv_num_heads")
        if not heads or not kv_heads:
            return "it does not say how many heads there are"
        size, value_size, rows, new = q[2] // heads, v[2] // kv_heads, q[1], k[1]
    else:
        heads, kv_heads, size, value_size, rows, new = q[1], k[1], q[3], v[3], q[2], k[2]
    if not isinstance(size, int) or not isinstance(value_size, int):
        return "the size of its heads is not known"
    repeats = 1
    if heads != kv_heads:
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or not kv_heads or heads % kv_heads:
            return f"{heads} heads of queries are no multiple of {kv_heads} heads of keys"
        repeats = heads // kv_heads
    if call.has(PAST_KEY) != call.has(PAST_VALUE) or (call.has(PAST_KEY) and (past is None or len(past) != 4)):
        return "its past has not four known axes"
    call.dims |= {
        "batch": q[0], "heads": heads, "queries": rows, "size": size, "kv_heads": kv_heads, "new": new,
        "value_size": value_size, "repeats": repeats, "keys": new + past[2] if past else new,
    }  # fmt: skip
    return None


def _by_heads(call: Call, index: int, rows: str, heads: str, size: str) -> Term:
    """Return an input as (batch, heads, rows, size)."""
    x = call.input(index)
    return x if call.rank(index) == 4 else rearrange(x, f"batch {rows} ({heads} {size}) -> batch {heads} {rows} {size}")


def _repeated(call: Call, x: Term, size: str) -> Term:
    """Return keys or values with each head repeated for the query heads that share it."""
    if call.dims["repeats"] == 1:
        return x
    return rearrange(x, f"batch kv_heads keys {size} -> batch (kv_heads repeats) keys {size}")


# --- masks ---------------------------------------------------------------------------------------------------------


def _mask(call: Call, queries: Term, keys: Term) -> Term | str:
    """Return the mask, combined with those of a causal past and of key lengths, or the reason for no spelling."""
    causal = call.integer("is_causal") == 1
    given = call.optional(MASK)
    if not call.has(LENGTHS) and not (causal and call.has(PAST_KEY)):
        return given
    if call.has(MASK) and call.dtype(MASK) != TensorProto.BOOL:
        return "its mask of numbers stands beside a past or lengths that mask as well"
    if not call.has(LENGTHS):
        if call.dims["queries"] != call.dims["new"]:
            return "it is causal with a past, and has not as many queries as new keys"
        return causal_mask(axis_size(queries, 2), axis_size(keys, 2), given)
    counts = _within_length(call, causal)
    return op.And(counts, given) if call.has(MASK) else counts


def _within_length(call: Call, causal: bool) -> Term:
    """Return a mask of keys within each sequence's length, and, if causal, not after their query."""
    places = op.Range(0, axis_size(call.input(K), 2 if call.rank(K) == 4 else 1), 1)
    lengths = rearrange(call.input(LENGTHS), "batch -> batch 1 1 1")
    if not causal:  # onnxruntime requires a row for each query
        return rearrange(op.Less(places, lengths), "batch 1 1 keys -> batch 1 queries keys")
    rows = axis_size(call.input(Q), 2 if call.rank(Q) == 4 else 1)
    behind = rearrange(op.Range(1, rows + 1, 1), "queries -> queries 1")
    return op.Less(places, lengths - rows + behind)
