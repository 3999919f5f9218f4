"""LayerNorm of a sum; the sum, which the next residual connection reads, is a second output."""

from onnxfuse.dsl import fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized


@fusion(out=("... d", "... d"), casts=True)
def add_layer_norm(
    x=tensor("... d"),
    residual=tensor("... d"),
    scale=weight("d"),
    bias=weight("d", optional=True),
    epsilon=scalar(default=1e-5),
):
    """sum = x + residual; y = layer_norm(sum)"""
    total = x + residual
    return layer_normalized(total, scale, bias, epsilon), total
