"""The spellings of a matrix product with a constant weight, which all fusions of matrix products share."""

from onnxfuse.dsl import Term, choose, either, op, rearrange, when


def linear(x: Term, w: Term, bias: Term, number: str = "") -> Term:
    """Return x w + bias, or x w; w is (k, n), or (n, k) with weight_layout nk.

    If a fusion has several products, `number` is appended to the names of the dimension n and of the choice.
    """
    return choose(f"weight_layout{number}", **linear_by_layout(x, w, w, bias, number))


def linear_by_layout(x: Term, w_kn: Term, w_nk: Term, bias: Term, number: str = "") -> dict[str, Term]:
    """Return x w + bias, or x w, by the layout of the weight: for a `w_kn` of (k, n), and for a `w_nk` of (n, k)."""
    rows, n = rearrange(x, "... k -> (...) k"), f"n{number}"
    variants = {}
    for layout, w, axes, attributes in ("kn", w_kn, f"k {n}", {}), ("nk", w_nk, f"{n} k", {"transB": 1}):
        weight, weight_kn = rearrange(w, f"{axes} -> {axes}"), rearrange(w, f"{axes} -> k {n}")
        product = op.MatMul(x, weight_kn)
        variants[layout] = either(
            when(op.Gemm(x, weight, bias, **attributes), "x has two axes", lambda rank: rank == 2),
            product + bias,
            product,
            rearrange(op.Gemm(rows, weight, bias, **attributes), f"(...) {n} -> ... {n}"),
        )
    return variants
