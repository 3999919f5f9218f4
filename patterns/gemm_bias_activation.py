"""A matrix product with what follows it: bias, activation, residual."""

from onnxfuse.dsl import choose, either, fusion, given, op, rearrange, require, scalar, tensor, weight
from onnxfuse.patterns._activations import activation


@fusion(out="... n")
def gemm_bias_activation(
    x=tensor("... k"),
    w=weight(),
    bias=weight("n", optional=True),
    residual=tensor("... n", optional=True),
    alpha=scalar(optional=True),
    beta=scalar(optional=True),
):
    """y = activation(x w + bias) + residual; w is (k, n), or (n, k) with weight_layout nk"""
    require(
        "a bias, an activation or a residual follows the product",
        lambda bias, residual, activation: bias is not None or residual is not None or activation != "none",
    )
    rows = rearrange(x, "... k -> (...) k")
    variants = {}
    for layout, flat, turned in ("kn", "k n -> k n", "k n -> k n"), ("nk", "n k -> n k", "n k -> k n"):
        gemm = op.Gemm if layout == "kn" else lambda *inputs: op.Gemm(*inputs, transB=1)
        product = op.MatMul(x, rearrange(w, turned))
        variants[layout] = either(
            given(gemm(x, rearrange(w, flat), bias), "x has two axes", lambda rank: rank == 2),
            product + bias,
            product,
            rearrange(gemm(rows, rearrange(w, flat), bias), "(...) n -> ... n"),
        )
    activated = activation(choose("weight_layout", **variants), alpha, beta)
    return either(activated + residual, activated)
