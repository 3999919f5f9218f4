"""Gated activations: SwiGLU, GEGLU, ReGLU, GLU."""

from onnxfuse.dsl import fusion, require, tensor
from onnxfuse.patterns._activations import gate as activated


@fusion(out="...")
def gated_activation(gate=tensor("..."), up=tensor("...")):
    """y = activation(gate) * up (Shazeer 2020, arXiv:2002.05202)"""
    require("gate and up are two values, not {gate} twice", lambda gate, up: gate is not up)
    return activated(gate) * up
