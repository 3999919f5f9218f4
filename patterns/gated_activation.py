"""Gated activations: SwiGLU, GEGLU, ReGLU, GLU."""

from typing import Any

from onnxfuse.dsl import fusion, part, rearrange, require, tensor
from onnxfuse.model.graph import is_constant
from onnxfuse.patterns._activations import gate as activated


def is_multiple(gate: Any, up: Any) -> bool:
    """Whether the gate is `up` times a constant."""
    makers = [node for node in getattr(gate, "inputs", ()) if node.op in ("Mul", "Div")]
    return any(t is up for node in makers for t in node.inputs) and any(map(is_constant, makers[0].inputs))


@fusion(out="... d")
def gated_activation(gate=tensor(), up=tensor()):
    """y = activation(gate) * up (Shazeer 2020, arXiv:2002.05202); either may be a part of each row of its operand"""
    require(
        "gate and up are two values, not {gate} twice",
        lambda gate, up, gate_offset, up_offset: gate is not up or gate_offset != up_offset,
    )
    require("gate is no multiple of {up}, as in x * sigmoid(1.702 x)", lambda gate, up: not is_multiple(gate, up))
    gates, values = (rearrange(part(x, name), "... d -> ... d") for name, x in (("gate", gate), ("up", up)))
    return activated(gates) * values
