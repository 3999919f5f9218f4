"""The linear attention of onnxruntime that stays as it is, with the reason."""

from __future__ import annotations

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, stay_if

RULES = RuleTable[Rule]()

SEQUENCE_STARTS = 3  # the input of GatedDeltaNet that has the first token of each sequence


@RULES.rule("com.microsoft::GatedDeltaNet")
def _gated_delta_net(call: Call) -> dict[int, Term]:
    stay_if(call.has(SEQUENCE_STARTS), "its sequences have lengths that only a run knows")
    raise NoSpelling("its states are float32 and transposed, unlike those of LinearAttention")
