"""RMSNorm of a sum; the sum, which the next residual connection reads, is a second output."""

from onnxfuse.dsl import fusion, scalar, tensor, weight
from onnxfuse.patterns._norms import rms_normalized


@fusion(out=("... d", "... d"), casts=True)
def add_rms_norm(x=tensor("... d"), residual=tensor("... d"), scale=weight("d"), epsilon=scalar(default=1e-5)):
    """sum = x + residual; y = rms_norm(sum)"""
    total = x + residual
    return rms_normalized(total, scale, epsilon), total
