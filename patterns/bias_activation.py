"""A bias along the last axis and an activation, which were not fused with a product before them."""

from onnxfuse.dsl import Term, fusion, scalar, tensor, weight
from onnxfuse.patterns._activations import activation


@fusion(out="... d", last=True)
def bias_activation(
    x: Term = tensor("... d"),
    bias: Term = weight("d"),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
) -> Term:
    """y = activation(x + bias)"""
    return activation(x + bias, alpha, beta)
