"""Matrix products of one input with two or three weights, such as the projections of queries, keys and values."""

from onnxfuse.dsl import Term, fusion, tensor, weight
from onnxfuse.patterns._linear import linear


@fusion(out=("... n", "... n_2", "... n_3"), prologue=True)
def parallel_gemm(
    x: Term = tensor("... k"),
    w: Term = weight(),
    bias: Term = weight("n", optional=True),
    w_2: Term = weight(),
    bias_2: Term = weight("n_2", optional=True),
    w_3: Term = weight(optional=True),
    bias_3: Term = weight("n_3", optional=True),
) -> tuple[Term, Term, Term]:
    """y = x w + bias, y_2 = x w_2 + bias_2, y_3 = x w_3 + bias_3; each w is (k, n), or (n, k) with weight_layout nk"""
    return linear(x, w, bias), linear(x, w_2, bias_2, "_2"), linear(x, w_3, bias_3, "_3")
