"""The spellings of a matrix product with a constant weight, shared by the fusions that begin with one."""

from typing import Any

from onnxfuse.dsl import Term, choose, either, given, op, rearrange


def linear(x: Term, w: Term, bias: Any, number: str = "") -> Term:
    """x w + bias, or x w; w is (k, n), or (n, k) with weight_layout nk.

    `number` ends the names of n and of the choice, where a fusion has several products.
    """
    rows, n = rearrange(x, "... k -> (...) k"), f"n{number}"
    variants = {}
    for layout, stored in ("kn", f"k {n}"), ("nk", f"{n} k"):
        flat, turned = f"{stored} -> {stored}", f"{stored} -> k {n}"
        gemm = op.Gemm if layout == "kn" else lambda *inputs: op.Gemm(*inputs, transB=1)
        product = op.MatMul(x, rearrange(w, turned))
        variants[layout] = either(
            given(gemm(x, rearrange(w, flat), bias), "x has two axes", lambda rank: rank == 2),
            product + bias,
            product,
            rearrange(gemm(rows, rearrange(w, flat), bias), f"(...) {n} -> ... {n}"),
        )
    return choose(f"weight_layout{number}", **variants)
