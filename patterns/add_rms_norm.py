"""RMSNorm of a sum; the second output is the sum, which the next residual connection reads."""

from onnxfuse.dsl import Term, fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import require_epsilon, rms_normalized


@fusion(out=("... d", "... d"), casts=True, epilogue=True)
def add_rms_norm(
    x: Term = tensor("... d"),
    residual: Term = tensor("... d"),
    scale: Term = weight("d"),
    epsilon: Term = scalar(if_absent=1e-5),
) -> tuple[Term, Term]:
    """sum = x + residual; y = rms_norm(sum)"""
    total = x + residual
    require_epsilon()
    return rms_normalized(total, scale, epsilon), total
