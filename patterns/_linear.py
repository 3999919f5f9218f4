"""The spellings of a matrix product with a constant weight, shared by the fusions that begin with one."""

from typing import Any

from onnxfuse.dsl import Term, choose, either, given, op, rearrange


def linear(x: Term, w: Term, bias: Any) -> Term:
    """x w + bias, or x w; w is (k, n), or (n, k) with weight_layout nk."""
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
    return choose("weight_layout", **variants)
