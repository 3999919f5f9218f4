"""The embeddings of BERT and the norm of their sum."""

from __future__ import annotations

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.patterns._norms import layer_normalized
from onnxfuse.spell_out.call import Call, Rule, stay_if
from onnxfuse.spell_out.views import parts_of

RULES = RuleTable[Rule]()


@RULES.rule("com.microsoft::EmbedLayerNormalization")
def _embed_layer_normalization(call: Call) -> dict[int, Term]:
    reason = "its ids have not two known axes, or it has segments without a table"
    _, columns = call.axes(0, reason, 2)
    stay_if(call.has(1) != call.has(4), reason)
    total: Term = op.Gather(call.input(2), call.input(0))
    if call.has(8):
        total = total + op.Gather(call.input(3), call.input(8))
    elif isinstance(columns, int):
        total = total + parts_of(call.input(3), columns, axis=0)[0]
    else:
        length = op.Gather(op.Shape(call.input(0)), 1)
        total = total + op.Gather(call.input(3), op.Range(0, length, 1))
    if call.has(1):
        total = total + op.Gather(call.input(4), call.input(1))
    normalized = layer_normalized(total, call.input(5), call.input(6), call.epsilon(1e-12))
    return {0: normalized, 1: _lengths(call), 2: total}


def _lengths(call: Call) -> Term:
    """Return how many ids of each sequence the mask keeps; 0 if there is no mask."""
    if not call.has(7):
        return op.Gather(op.Sub(call.input(0), call.input(0)), 0, axis=1)
    counts = op.Cast(op.Equal(call.input(7), 1), to=call.dtype(7))
    return op.ReduceSum(counts, axes=[1], keepdims=0)
