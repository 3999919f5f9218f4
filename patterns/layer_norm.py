"""LayerNorm over the last axis."""

from onnxfuse.dsl import Term, fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized, require_epsilon


@fusion(out="... d", casts=True, epilogue=True)
def layer_norm(
    x: Term = tensor("... d"),
    scale: Term = weight("d"),
    bias: Term = weight("d", optional=True),
    epsilon: Term = scalar(if_absent=1e-5),
) -> Term:
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias (Ba et al. 2016, arXiv:1607.06450)"""
    require_epsilon()
    return layer_normalized(x, scale, bias, epsilon)
