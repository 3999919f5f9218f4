"""The two matrix products of a gated activation, and the gating itself: SwiGLU, GEGLU, ReGLU and GLU."""

from onnxfuse.dsl import Term, fusion, require, tensor, weight
from onnxfuse.patterns._activations import gate_activation
from onnxfuse.patterns._linear import linear


@fusion(out="... n", epilogue=True, prologue=True)
def gated_gemm(
    x: Term = tensor("... k"),
    w: Term = weight(),
    up: Term = weight(),
    bias: Term = weight("n", optional=True),
    up_bias: Term = weight("n", optional=True),
) -> Term:
    """y = activation(x w + bias) * (x up + up_bias); w and up are (k, n), or (n, k) with weight_layout nk

    Shazeer 2020, arXiv:2002.05202.
    """
    require("w and up are two weights, so that there are two products", lambda w, up: w is not up)
    return gate_activation(linear(x, w, bias)) * linear(x, up, up_bias)
