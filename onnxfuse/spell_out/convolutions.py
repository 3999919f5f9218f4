"""Convolutions fused with an activation or a residual, and convolutions of channels-last images."""

from __future__ import annotations

from typing import Any, Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.ir.node import op_of
from onnxfuse.spell_out.call import Call, Rule
from onnxfuse.spell_out.products import activated

RULES = RuleTable[Rule]()

CONV_ATTRIBUTES: Final = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@RULES.rule("com.microsoft::FusedConv")
def _fused_conv(call: Call) -> dict[int, Term] | str:
    product: Term = op.Conv(call.input(0), call.input(1), call.optional(2), **_attributes(call))
    total = product + call.input(3) if call.has(3) else product
    return activated(total, call.text("activation"), call.numbers("activation_params"))


@RULES.rule("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv")
def _nhwc_conv(call: Call) -> dict[int, Term] | str:
    """The weights of NhwcConv are (filters, height, width, channels); those of NhwcFusedConv are as in ONNX's Conv."""
    if call.rank(0) != 4 or call.rank(1) != 4:
        return "its image has not two spatial axes"
    x = op.Transpose(call.input(0), perm=[0, 3, 1, 2])
    w = call.input(1)
    if op_of(call.node) == "com.microsoft::NhwcConv":
        w = op.Transpose(w, perm=[0, 3, 1, 2])
    total: Term = op.Conv(x, w, call.optional(2), **_attributes(call))
    if call.has(3):
        total = total + op.Transpose(call.input(3), perm=[0, 3, 1, 2])
    found = activated(total, call.text("activation"), call.numbers("activation_params"))
    return found if isinstance(found, str) else {0: op.Transpose(found[0], perm=[0, 2, 3, 1])}


def _attributes(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.node.attrs.items() if name in CONV_ATTRIBUTES}
