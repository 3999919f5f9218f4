"""A bias along the last axis and an activation, behind something that takes neither of them."""

from onnxfuse.dsl import fusion, scalar, tensor, weight
from onnxfuse.patterns._activations import activation


@fusion(out="... d", last=True)
def bias_activation(x=tensor("... d"), bias=weight("d"), alpha=scalar(optional=True), beta=scalar(optional=True)):
    """y = activation(x + bias)"""
    return activation(x + bias, alpha, beta)
