"""The spelling of onnxruntime's GatedDeltaNet: its packed operands, gates and norms, and the operator without them."""

from __future__ import annotations

from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import cast_like, contrib, float32, op, rearrange, results
from onnxfuse.spell_out.call import Call, Rule, known, stay_if
from onnxfuse.spell_out.views import parts_of

RULES = RuleTable[Rule]()

# The inputs of GatedDeltaNet.
QUERY, KEY, VALUE, STARTS, DECAY, BETA, STATE, A_LOG, DT_BIAS, CAPTURED = range(10)
EPSILON: Final = 1e-12  # which onnxruntime adds to the sum of squares of a query or key
MATCHED: Final = {"update_rule", "scale", "chunk_size"}  # attributes of the operator that patterns match


@RULES.rule("com.microsoft::GatedDeltaNet")
def _gated_delta_net(call: Call) -> dict[int, Term] | None:
    """Spell out what surrounds the recurrence; None if the node has nothing but the recurrence."""
    stay_if(call.has(STARTS), "its sequences have lengths that only a run knows")
    stay_if(not call.has(STATE), "it has no state before the first token")
    stay_if(call.has(CAPTURED) or call.attribute("state_update_capacity", 0), "it stores the updates of states")
    if call.has(KEY) and not call.node.attrs.keys() - MATCHED:
        return None
    query, key, value = (call.input(i) for i in (QUERY, KEY, VALUE)) if call.has(KEY) else _unpacked(call)
    if call.attribute("qk_l2_norm", 0):
        query, key = _normalized(query), _normalized(key)
    beta = float32(call.input(BETA)) if call.has(BETA) else call.optional(BETA)
    if call.has(BETA) and call.attribute("beta_activation", "none") == "sigmoid":
        beta = op.Sigmoid(beta)
    call.may_remain |= {"Add", "Div", "Exp", "Mul", "Neg", "ReduceSum", "Sigmoid", "Softplus", "Sqrt"}
    node = contrib.GatedDeltaNet(
        query, key, value, None, _logarithms(call), beta, call.input(STATE), scale=call.attribute("scale", 0.0),
        update_rule=call.attribute("update_rule", "gated_delta"),
    )  # fmt: skip
    return dict(enumerate(results(node, 2)))


def _unpacked(call: Call) -> list[Term]:
    """Return the queries, keys and values in rows of all of them."""
    sizes = "the sizes of its heads are not known"
    *leading, last = call.axes(QUERY, sizes, 2, 3)
    width = known(last, sizes)
    _, heads, value_size, size = (known(each, sizes) if i else 0 for i, each in enumerate(call.axes(STATE, sizes, 4)))
    keys = (width - heads * value_size) // 2
    call.dims |= {"heads": keys // size, "size": size, "kv_heads": heads, "value_size": value_size}
    call.dims |= dict(zip(names := ("batch", "tokens")[-len(leading) :], leading, strict=True))
    rows = " ".join(names)
    parts = parts_of(call.input(QUERY), keys, keys, heads * value_size)
    of_keys, of_values = (f"{rows} ({each}) -> {rows} {each}" for each in ("heads size", "kv_heads value_size"))
    return [rearrange(part, axes) for part, axes in zip(parts, (of_keys, of_keys, of_values), strict=True)]


def _normalized(x: Term) -> Term:
    """Return rows divided by their lengths."""
    wide = float32(x)
    return cast_like(wide / op.Sqrt(op.ReduceSum(wide * wide, axes=[-1], keepdims=1) + EPSILON), x)


def _logarithms(call: Call) -> Term:
    """Return the logarithms of decays in float32, as those of rates, after the activation of the gate."""
    activation = call.attribute("gate_activation", "none")
    if activation == "none" or not call.has(DECAY):
        return float32(call.input(DECAY)) if call.has(DECAY) else call.optional(DECAY)
    gate, rate = float32(call.input(DECAY)) + call.input(DT_BIAS), op.Exp(call.input(A_LOG))
    by_rows = call.rank(DECAY) == (call.rank(QUERY) or 0) + (not call.has(KEY))
    stay_if(by_rows or call.rank(DT_BIAS) != 1, "its decays of rows have an activation")
    if activation in ("softplus", "qwen"):
        return -rate * op.Softplus(gate)
    stay_if(activation not in ("sigmoid", "kda"), f"its gate has the activation {activation}")
    return op.Sigmoid(rate * gate) * call.attribute("gate_lower_bound", -5.0)
