"""RMSNorm over the last axis."""

from onnxfuse.dsl import Term, fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import require_epsilon, rms_normalized


@fusion(out="... d", casts=True, epilogue=True)
def rms_norm(x: Term = tensor("... d"), scale: Term = weight("d"), epsilon: Term = scalar(if_absent=1e-5)) -> Term:
    """y = x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich 2019, arXiv:1910.07467)"""
    require_epsilon()
    return rms_normalized(x, scale, epsilon)
