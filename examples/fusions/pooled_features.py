"""Global average pooling and the Flatten that follows it, as image classifiers end."""

from onnxfuse import Term, fusion, op, tensor


@fusion(out="batch channels")
def pooled_features(x: Term = tensor("batch channels height width")) -> Term:
    """y[b, c] = mean of x[b, c] over height and width"""
    return op.Flatten(op.GlobalAveragePool(x), axis=1)
