"""Spelling rules of activations, alone or of a sum, and of gated activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.ir.node import op_of
from onnxfuse.patterns._activations import gelu, gelu_tanh, quick_gelu, silu
from onnxfuse.spell_out.call import Call, Rule, known, stay_if
from onnxfuse.spell_out.views import parts_of

RULES = RuleTable[Rule]()


OF_SUMS: Final[Mapping[str, Callable[[Term], Term]]] = {  # operator -> the function that it applies to its inputs' sum
    "com.microsoft::BiasAdd": lambda x: x,
    "com.microsoft::BiasGelu": gelu,
    "com.microsoft::FastGelu": gelu_tanh,
    "com.microsoft::Gelu": gelu,
}


@RULES.rule(*OF_SUMS)
def _of_a_sum(call: Call) -> dict[int, Term]:
    return {0: OF_SUMS[op_of(call.node)](call.sum_of(0, 1, 2))}


@RULES.rule("com.microsoft::QuickGelu", "Swish")
def _swish(call: Call) -> dict[int, Term] | None:
    """Spell out x * sigmoid(alpha x)."""
    is_onnx, x = op_of(call.node) == "Swish", call.input(0)
    alpha = call.attribute("alpha", 1.0 if is_onnx else 1.702)
    if alpha == 1:
        return None if is_onnx else {0: silu(x)}
    return {0: quick_gelu(x) if abs(alpha - 1.702) < 1e-6 else x * op.Sigmoid(x * alpha)}


@RULES.rule("com.microsoft::BiasSplitGelu")
def _bias_split_gelu(call: Call) -> dict[int, Term]:
    odd = "the number of its columns is not known, or odd"
    half, rest = divmod(known((call.shape(0) or (None,))[-1], odd), 2)
    stay_if(rest, odd)
    left, right = parts_of(call.sum_of(0, 1), half, half)
    return {0: left * gelu(right)}
