"""An activation that is not part of another fusion, if exporters write it in several nodes."""

from onnxfuse.dsl import Term, choose, fusion, tensor
from onnxfuse.patterns._activations import spelled

IN_SEVERAL_NODES = "gelu", "gelu_tanh", "silu", "quick_gelu", "hard_swish", "mish"


@fusion(out="...", last=True)
def activation(x: Term = tensor("...")) -> Term:
    """y = activation(x), in several nodes or in the one operator that newer opsets have for it

    Activations that are one operator in every opset, such as Relu, Sigmoid and Tanh, are not fused alone.
    """
    return choose("activation", **spelled(IN_SEVERAL_NODES, x))
