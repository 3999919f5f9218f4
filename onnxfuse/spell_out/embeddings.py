"""The embeddings of BERT and the norm of their sum."""

from __future__ import annotations

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.patterns._norms import layer_normalized
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()


@RULES.rule("com.microsoft::EmbedLayerNormalization")
def _embed_layer_normalization(call: Call) -> dict[int, Term] | str:
    ids = call.shape(0)
    if ids is None or len(ids) != 2 or call.has(1) != call.has(4):
        return "its ids have not two known axes, or it has segments without a table"
    total: Term = op.Gather(call.input(2), call.input(0))
    if call.has(8):
        total = total + op.Gather(call.input(3), call.input(8))
    elif isinstance(ids[1], int):
        total = total + op.Slice(call.input(3), starts=[0], ends=[ids[1]], axes=[0], steps=[1])
    else:
        length = op.Gather(op.Shape(call.input(0)), 1)
        total = total + op.Gather(call.input(3), op.Range(0, length, 1))
    if call.has(1):
        total = total + op.Gather(call.input(4), call.input(1))
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-12))
    return {0: layer_normalized(total, call.input(5), call.input(6), epsilon), 1: _lengths(call), 2: total}


def _lengths(call: Call) -> Term:
    """Return how many ids of each sequence the mask keeps; 0 if there is no mask."""
    if not call.has(7):
        return op.Gather(op.Sub(call.input(0), call.input(0)), 0, axis=1)
    counts = op.Cast(op.Equal(call.input(7), 1), to=call.dtype(7))
    return op.ReduceSum(counts, axes=[1], keepdims=0)
