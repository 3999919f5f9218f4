"""Activations together with the sum before them, and gates."""

from __future__ import annotations

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.patterns._activations import gelu, gelu_tanh, quick_gelu, silu
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()


@RULES.rule("com.microsoft::Gelu")
def _gelu(call: Call) -> dict[int, Term]:
    return {0: gelu(call.input(0))}


@RULES.rule("com.microsoft::BiasGelu")
def _bias_gelu(call: Call) -> dict[int, Term]:
    return {0: gelu(call.sum_of(0, 1))}


@RULES.rule("com.microsoft::FastGelu")
def _fast_gelu(call: Call) -> dict[int, Term]:
    return {0: gelu_tanh(call.sum_of(0, 1))}


@RULES.rule("com.microsoft::QuickGelu")
def _quick_gelu(call: Call) -> dict[int, Term]:
    alpha = call.number("alpha", 1.702)
    return {0: _swish(call.input(0), alpha)}


@RULES.rule("Swish")
def _swish_operator(call: Call) -> dict[int, Term] | None:
    alpha = call.number("alpha", 1.0)
    return None if alpha == 1 else {0: _swish(call.input(0), alpha)}


def _swish(x: Term, alpha: float) -> Term:
    """Return x * sigmoid(alpha x)."""
    if alpha == 1:
        return silu(x)
    return quick_gelu(x) if abs(alpha - 1.702) < 1e-6 else x * op.Sigmoid(x * alpha)


@RULES.rule("com.microsoft::BiasSplitGelu")
def _bias_split_gelu(call: Call) -> dict[int, Term] | str:
    shape = call.shape(0)
    if shape is None or not isinstance(shape[-1], int) or shape[-1] % 2:
        return "the number of its columns is not known, or odd"
    half = shape[-1] // 2
    total = call.sum_of(0, 1)
    left = op.Slice(total, starts=[0], ends=[half], axes=[-1], steps=[1])
    right = op.Slice(total, starts=[half], ends=[2 * half], axes=[-1], steps=[1])
    return {0: left * gelu(right)}


@RULES.rule("com.microsoft::BiasAdd")
def _bias_add(call: Call) -> dict[int, Term]:
    return {0: call.sum_of(0, 1, 2)}
