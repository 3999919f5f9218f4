"""Gated activations: SwiGLU, GEGLU, ReGLU, GLU."""

from onnxfuse.dsl import choose, fusion, op, require, tensor
from onnxfuse.patterns._activations import gelu, gelu_tanh, quick_gelu, silu


@fusion(out="...")
def gated_activation(gate=tensor("..."), up=tensor("...")):
    """y = activation(gate) * up (Shazeer 2020, arXiv:2002.05202)"""
    require("gate and up are two values, not {gate} twice", lambda gate, up: gate is not up)
    activated = choose(
        "activation",
        silu=silu(gate),
        gelu=gelu(gate),
        gelu_tanh=gelu_tanh(gate),
        quick_gelu=quick_gelu(gate),
        relu=op.Relu(gate),
        sigmoid=op.Sigmoid(gate),
    )
    return activated * up
