"""Spelling rules of matrix products and convolutions.

The operators have transposed or scaled operands, channels-last images, a residual or an activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.ir.node import op_of
from onnxfuse.patterns._activations import gelu_tanh
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, known, stay_if
from onnxfuse.spell_out.views import channels_first, channels_last

RULES = RuleTable[Rule]()


@RULES.rule("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def _fused_matmul(call: Call) -> dict[int, Term]:
    sides = []
    for index, side in (0, "A"), (1, "B"):
        rank = known(call.rank(index), f"the rank of '{call.tensor(index).name}' is not known")
        order = list(range(rank))
        if call.attribute(f"transBatch{side}", 0) and rank > 2:  # the first axis moves before the last one
            order = [*order[1:-1], 0, order[-1]]
        if call.attribute(f"trans{side}", 0) and rank > 1:
            order[-2:] = order[:-3:-1]
        moved = order != sorted(order)
        sides.append(op.Transpose(call.input(index), perm=order) if moved else call.input(index))
    product, alpha = op.MatMul(*sides), call.attribute("alpha", 1.0)
    return {0: product if alpha == 1 else product * alpha}


@RULES.rule("com.microsoft::GemmFastGelu")
def _gemm_fast_gelu(call: Call) -> dict[int, Term]:
    product = op.MatMul(call.input(0), call.input(1))
    return {0: gelu_tanh(product + call.input(2) if call.has(2) else product)}


@RULES.rule("com.microsoft::FusedGemm")
def _fused_gemm(call: Call) -> dict[int, Term]:
    defaults = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    attributes = {name: call.attribute(name, default) for name, default in defaults.items()}
    product = op.Gemm(call.input(0), call.input(1), call.optional(2), **attributes)
    names = (f"activation_{name}" for name in ("alpha", "beta", "gamma"))
    parameters = [call.attribute(name, 0.0) for name in names if name in call.node.attrs]
    return {0: activated(call, product, parameters)}


# --- convolutions ---------------------------------------------------------------------------------------------------

WINDOW_ATTRIBUTES: Final = (
    "auto_pad", "ceil_mode", "count_include_pad", "dilations", "group", "kernel_shape", "pads", "strides",
)  # fmt: skip


@RULES.rule("com.microsoft::FusedConv")
def _fused_conv(call: Call) -> dict[int, Term]:
    product: Term = op.Conv(call.input(0), call.input(1), call.optional(2), **window_attributes(call))
    total = product + call.input(3) if call.has(3) else product
    return {0: activated(call, total, call.attribute("activation_params", list[float]()))}


@RULES.rule("com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv")
def _nhwc_conv(call: Call) -> dict[int, Term]:
    """Spell out a convolution of channels-last images.

    The weights of NhwcConv are (filters, height, width, channels); those of NhwcFusedConv are as in ONNX's Conv.
    """
    stay_if(call.rank(0) != 4 or call.rank(1) != 4, "its image has not two spatial axes")
    x = channels_first(call.input(0))
    w = call.input(1)
    if op_of(call.node) == "com.microsoft::NhwcConv":
        w = channels_first(w)
    total: Term = op.Conv(x, w, call.optional(2), **window_attributes(call))
    if call.has(3):
        total = total + channels_first(call.input(3))
    result = activated(call, total, call.attribute("activation_params", list[float]()))
    return {0: channels_last(result)}


def window_attributes(call: Call) -> dict[str, Any]:
    """Return the attributes of a convolution or pool, without empty lists, which to onnxruntime mean the defaults."""
    return {name: value for name, value in call.node.attrs.items() if name in WINDOW_ATTRIBUTES and value != []}


# --- activations by name -------------------------------------------------------------------------------------------

# Activations by the names that onnxruntime's fused operators use, as functions of x and the parameters.
NAMED: Final[Mapping[str, Callable[..., Term]]] = {
    "Relu": lambda x: op.Relu(x),
    "Sigmoid": lambda x: op.Sigmoid(x),
    "Tanh": lambda x: op.Tanh(x),
    "Softplus": lambda x: op.Softplus(x),
    "LeakyRelu": lambda x, alpha=0.01: op.LeakyRelu(x, alpha=alpha),
    "Clip": lambda x, low, high: op.Clip(x, min=low, max=high),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: op.HardSigmoid(x, alpha=alpha, beta=beta),
}


def activated(call: Call, x: Term, parameters: Sequence[float]) -> Term:
    """Return x after the activation that the attribute `activation` names, if any."""
    name = call.attribute("activation", "")
    if not name:
        return x
    stay_if(name not in NAMED, f"the activation {name} has no spelling here")
    try:
        return NAMED[name](x, *parameters)
    except TypeError:
        raise NoSpelling(f"{name} has {len(parameters)} parameters") from None
