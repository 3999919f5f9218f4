"""Spelling rules of the losses of classifiers.

onnxruntime has no kernels for these losses, and spells them out itself.  So a spelling written here makes no model
slower, even if none of its nodes is fused.  A region computes the LogSoftmax and takes each label's score from it, so
that the logarithms of all classes are not written to memory.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.spell_out.call import Call, Rule, stay_if

RULES = RuleTable[Rule]()

CLASSES: Final = 1  # the axis of classes
FIRST_OPSET_OF_ONE_AXIS: Final = 13  # from this opset on, LogSoftmax is over one axis
OPERATORS: Final = frozenset(
    {"Add", "Div", "Equal", "GatherElements", "LogSoftmax", "Mul", "Neg", "ReduceMean", "ReduceSum"}
)


@RULES.rule("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy_loss(call: Call) -> dict[int, Term]:
    over_all_axes = call.graph.opset < FIRST_OPSET_OF_ONE_AXIS and call.rank(0) != CLASSES + 1
    stay_if(over_all_axes, "before opset 13, LogSoftmax is over all axes from one on")
    scores = op.LogSoftmax(call.input(0), axis=CLASSES)
    return {0: _loss(call, scores), 1: scores}


@RULES.rule("NegativeLogLikelihoodLoss")
def _negative_log_likelihood_loss(call: Call) -> dict[int, Term]:
    return {0: _loss(call, call.input(0))}


def _loss(call: Call, scores: Term) -> Term:
    """Return the negative score of each label times its weight, or their sum, or their weighted mean.

    Ignored labels have weight 0.  Source: ONNX, NegativeLogLikelihoodLoss.
    """
    call.may_remain |= OPERATORS
    labels = call.input(1)
    ignored = op.Equal(labels, call.attribute("ignore_index", 0)) if "ignore_index" in call.node.attrs else None
    if ignored is not None:
        labels = op.Where(ignored, 0, labels)  # a label to be ignored can be out of range
    of_labels = op.GatherElements(scores, op.Unsqueeze(labels, axes=[CLASSES]), axis=CLASSES)
    losses: Term = op.Neg(op.Squeeze(of_labels, axes=[CLASSES]))
    weights: Term | None = op.Gather(call.input(2), labels) if call.has(2) else None
    if weights is not None:
        losses = losses * weights
    if ignored is not None:
        losses = op.Where(ignored, 0.0, losses)
        weights = op.Where(ignored, 0.0, weights) if weights is not None else op.Cast(op.Not(ignored), to=call.dtype(0))
    reduction = call.attribute("reduction", "mean")
    if reduction == "none":
        return losses
    if reduction == "mean" and weights is None:
        return op.ReduceMean(losses, keepdims=0)
    total = op.ReduceSum(losses, keepdims=0)
    return total if reduction == "sum" or weights is None else total / op.ReduceSum(weights, keepdims=0)
