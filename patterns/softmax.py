"""Softmax over the last axis."""

from onnxfuse.dsl import Term, either, float32, fusion, op, tensor


@fusion(out="... d", casts=True, last=True)
def softmax(x: Term = tensor("... d")) -> Term:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis

    Softmax is fused although it is one operator, because kernels for it are faster than onnxruntime's.
    """
    x32 = float32(x)
    powers = op.Exp(x32 - op.ReduceMax(x32, axes=[-1]))
    return either(op.Softmax(x, axis=-1), powers / op.ReduceSum(powers, axes=[-1]))
