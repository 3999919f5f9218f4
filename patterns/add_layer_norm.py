"""LayerNorm of a sum; the second output is the sum, which the next residual connection reads."""

from onnxfuse.dsl import Term, fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized, require_epsilon


@fusion(out=("... d", "... d"), casts=True, epilogue=True)
def add_layer_norm(
    x: Term = tensor("... d"),
    residual: Term = tensor("... d"),
    scale: Term = weight("d"),
    bias: Term = weight("d", optional=True),
    epsilon: Term = scalar(if_absent=1e-5),
) -> tuple[Term, Term]:
    """sum = x + residual; y = layer_norm(sum)"""
    total = x + residual
    require_epsilon()
    return layer_normalized(total, scale, bias, epsilon), total
