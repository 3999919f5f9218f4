"""The two matrix products of a gated activation, with their product: SwiGLU, GEGLU, ReGLU, GLU."""

from onnxfuse.dsl import fusion, require, tensor, weight
from onnxfuse.patterns._activations import gate
from onnxfuse.patterns._linear import linear


@fusion(out="... n")
def gated_gemm(
    x=tensor("... k"),
    w=weight(),
    up=weight(),
    bias=weight("n", optional=True),
    up_bias=weight("n", optional=True),
):
    """y = activation(x w + bias) * (x up + up_bias); w and up are (k, n), or (n, k) with weight_layout nk

    Shazeer 2020, arXiv:2002.05202.
    """
    require("w and up are two weights: their products are two", lambda w, up: w is not up)
    return gate(linear(x, w, bias)) * linear(x, up, up_bias)
