"""Activations that exporters write in several nodes, alone."""

from onnxfuse.dsl import choose, fusion, tensor
from onnxfuse.patterns._activations import gelu, gelu_tanh, hard_swish, mish, quick_gelu, silu


@fusion(out="...", last=True)
def activation(x=tensor("...")):
    """y = activation(x), in several nodes or in the one that an opset has for it

    What every opset has as one operator, as Relu, Sigmoid and Tanh, stays as it is.
    """
    return choose(
        "activation",
        gelu=gelu(x),
        gelu_tanh=gelu_tanh(x),
        silu=silu(x),
        quick_gelu=quick_gelu(x),
        hard_swish=hard_swish(x),
        mish=mish(x),
    )
