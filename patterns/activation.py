"""Activations that onnxruntime's CUDA provider runs as several nodes, or slowly."""

from onnxfuse.dsl import choose, fusion, tensor
from onnxfuse.patterns._activations import gelu, gelu_tanh, hard_swish, mish, quick_gelu, silu


@fusion(out="...", last=True)
def activation(x=tensor("...")):
    """y = activation(x), where exporters write it in several nodes, or onnxruntime does"""
    return choose(
        "activation",
        gelu=gelu(x),
        gelu_tanh=gelu_tanh(x),
        silu=silu(x),
        quick_gelu=quick_gelu(x),
        hard_swish=hard_swish(x),
        mish=mish(x),
    )
