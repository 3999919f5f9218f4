"""Gated activations: SwiGLU, GEGLU, ReGLU and GLU."""

from onnxfuse.dsl import Term, fusion, packed_slice, rearrange, require, tensor
from onnxfuse.patterns._activations import gate_activation


@fusion(out="... d", last=True)
def gated_activation(gate: Term = tensor(), up: Term = tensor()) -> Term:
    """y = activation(gate) * up (Shazeer 2020, arXiv:2002.05202); gate and up may be slices of an operand's rows"""
    require(
        "gate and up are two values, not {gate} twice",
        lambda gate, up, gate_offset, up_offset: gate is not up or gate_offset != up_offset,
    )
    require(
        "gate is not a multiple of {up}, as in x * sigmoid(1.702 x)",
        lambda gate, up, is_multiple: not is_multiple(gate, up),
    )
    gates, values = (rearrange(packed_slice(x, name), "... d -> ... d") for name, x in (("gate", gate), ("up", up)))
    return gate_activation(gates) * values
