"""RMSNorm over the last axis."""

from onnxfuse.dsl import fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import rms_normalized


@fusion(out="... d", casts=True)
def rms_norm(x=tensor("... d"), scale=weight("d"), epsilon=scalar(default=1e-5)):
    """y = x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich 2019, arXiv:1910.07467)"""
    return rms_normalized(x, scale, epsilon)
