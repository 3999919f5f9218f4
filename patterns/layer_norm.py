"""LayerNorm over the last axis."""

from onnxfuse.dsl import fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized


@fusion(out="... d", casts=True)
def layer_norm(x=tensor("... d"), scale=weight("d"), bias=weight("d", optional=True), epsilon=scalar(default=1e-5)):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias (Ba et al. 2016, arXiv:1607.06450)"""
    return layer_normalized(x, scale, bias, epsilon)
