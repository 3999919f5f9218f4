"""Matrix products with transposed or scaled operands, a bias or an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.patterns._activations import gelu_tanh
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()


@RULES.rule("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def _fused_matmul(call: Call) -> dict[int, Term] | str:
    sides = []
    for index, side in (0, "A"), (1, "B"):
        rank = call.rank(index)
        if rank is None:
            return f"the rank of '{call.tensor(index).name}' is not known"
        order = list(range(rank))
        if call.integer(f"transBatch{side}") and rank > 2:  # the first axis moves before the last one
            order = [*order[1:-1], 0, order[-1]]
        if call.integer(f"trans{side}") and rank > 1:
            order[-2:] = order[:-3:-1]
        moved = order != sorted(order)
        sides.append(op.Transpose(call.input(index), perm=order) if moved else call.input(index))
    product, alpha = op.MatMul(*sides), call.number("alpha", 1.0)
    return {0: product if alpha == 1 else product * alpha}


@RULES.rule("com.microsoft::GemmFastGelu")
def _gemm_fast_gelu(call: Call) -> dict[int, Term]:
    product = op.MatMul(call.input(0), call.input(1))
    return {0: gelu_tanh(product + call.input(2) if call.has(2) else product)}


@RULES.rule("com.microsoft::FusedGemm")
def _fused_gemm(call: Call) -> dict[int, Term] | str:
    product = op.Gemm(
        call.input(0), call.input(1), call.optional(2), alpha=call.number("alpha", 1.0), beta=call.number("beta", 1.0),
        transA=call.integer("transA"), transB=call.integer("transB"),
    )  # fmt: skip
    names = (f"activation_{name}" for name in ("alpha", "beta", "gamma"))
    parameters = [call.number(name, 0.0) for name in names if name in call.node.attrs]
    return activated(product, call.text("activation"), parameters)


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


def activated(x: Term, name: str, parameters: Sequence[float]) -> dict[int, Term] | str:
    """Return the named activation of x as the first output (x itself for no name), or the reason for no spelling."""
    if not name:
        return {0: x}
    if name not in NAMED:
        return f"the activation {name} has no spelling here"
    try:
        return {0: NAMED[name](x, *parameters)}
    except TypeError:
        return f"{name} has {len(parameters)} parameters"
