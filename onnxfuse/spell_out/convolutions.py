"""Convolutions fused with an activation or a residual, and convolutions of channels-last images."""

from __future__ import annotations

from typing import Any, Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.ir.node import op_of
from onnxfuse.spell_out.call import Call, Rule, stay_if
from onnxfuse.spell_out.products import activated
from onnxfuse.spell_out.views import channels_first, channels_last

RULES = RuleTable[Rule]()

CONV_ATTRIBUTES: Final = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@RULES.rule("com.microsoft::FusedConv")
def _fused_conv(call: Call) -> dict[int, Term]:
    product: Term = op.Conv(call.input(0), call.input(1), call.optional(2), **_attributes(call))
    total = product + call.input(3) if call.has(3) else product
    return {0: activated(call, total, call.attribute("activation_params", list[float]()))}


@RULES.rule("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv")
def _nhwc_conv(call: Call) -> dict[int, Term]:
    """The weights of NhwcConv are (filters, height, width, channels); those of NhwcFusedConv are as in ONNX's Conv."""
    stay_if(call.rank(0) != 4 or call.rank(1) != 4, "its image has not two spatial axes")
    x = channels_first(call.input(0))
    w = call.input(1)
    if op_of(call.node) == "com.microsoft::NhwcConv":
        w = channels_first(w)
    total: Term = op.Conv(x, w, call.optional(2), **_attributes(call))
    if call.has(3):
        total = total + channels_first(call.input(3))
    result = activated(call, total, call.attribute("activation_params", list[float]()))
    return {0: channels_last(result)}


def _attributes(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.node.attrs.items() if name in CONV_ATTRIBUTES}
