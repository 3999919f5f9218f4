"""Integer products of one tensor that become heads: which are merged, and that results stay the same, bit by bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, ops, parse, run

import onnxfuse
from onnxfuse.passes.merge_integer_projections import merge_integer_projections

HEADS = """(float[batch,6,16] x) => (q, k, v)
{
  xq, xs, xz = DynamicQuantizeLinear (x)
  qi = MatMulInteger (xq, wq, xz)
  ki = MatMulInteger (xq, wk, xz, zero)
  vi = MatMulInteger (xq, wv, xz, zeros)
  qs = Mul (xs, sq)
  ks = Mul (sk, xs)
  vs = Mul (xs, sv)
  qf = Cast <to = 1> (qi)
  kf = Cast <to = 1> (ki)
  vf = Cast <to = 1> (vi)
  qm = Mul (qf, qs)
  km = Mul (ks, kf)
  vm = Mul (vf, vs)
  qb = Add (qm, bq)
  vb = Add (bv, vm)
  q = Reshape (qb, heads)
  k = Reshape (km, heads)
  v = Reshape (vb, value_heads)
}"""


def model(text: str, **others: np.ndarray) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {
        "zero": np.array(0, np.int8), "zeros": np.zeros(32, np.int8), "sq": np.array(0.013, np.float32),
        "sk": random.uniform(0.01, 0.02, 16).astype(np.float32), "sv": np.array([0.017], np.float32),
        "heads": np.array([0, 0, 2, 8]), "value_heads": np.array([0, 0, 2, 16]),
    }  # fmt: skip
    for name, columns in (("q", 16), ("k", 16), ("v", 32)):
        weights[f"w{name}"] = random.integers(-128, 128, (16, columns)).astype(np.int8)
        weights[f"b{name}"] = random.standard_normal(columns).astype(np.float32)
    del weights["bk"]
    weights |= others
    return parse(text, **{name: value for name, value in weights.items() if name in text})


def merged(text: str, **others: np.ndarray) -> int:
    """Return how many products are merged, after a comparison of the results."""
    before = model(text, **others)
    after, (count,) = apply(before, merge_integer_projections)
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 6, 16)).astype(np.float32)}
    for found, expected in zip(run(after, feeds), run(before, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)
    products = ops(after).split().count("MatMulInteger")
    assert products == ops(before).split().count("MatMulInteger") - (count - 1 if count else 0)
    return int(count)


def test_products_of_heads_are_merged() -> None:
    assert merged(HEADS) == 3


def test_merged_products_and_their_attention_are_two_kernels() -> None:
    text = HEADS.replace("=> (q, k, v)", "=> (y)").replace(
        "}",
        """  qt = Transpose <perm = [0, 2, 1, 3]> (q)
  kt = Transpose <perm = [0, 2, 3, 1]> (k)
  vt = Transpose <perm = [0, 2, 1, 3]> (v)
  s = MatMul (qt, kt)
  p = Softmax (s)
  y = MatMul (p, vt)
}""",
    )
    _, report = onnxfuse.optimize(model(text))
    assert report.counts == {"region": 1, "quantized_gemm": 1, "attention": 1}


def test_a_scale_of_columns_stays() -> None:
    """It has as many numbers as queries and keys have columns."""
    text = HEADS.replace("(float[batch,6,16] x) => (q, k, v)", "(float[batch,6,16] x, float[16] t) => (q, k)")
    for line in text.split("\n"):
        if line.strip().startswith(("vi", "vs", "vf", "vm", "vb", "v =")):
            text = text.replace(f"{line}\n", "")
    text = text.replace("Mul (xs, sq)", "Mul (t, sq)").replace("Mul (sk, xs)", "Mul (sk, t)")
    _, (count,) = apply(model(text), merge_integer_projections)
    assert count == 0


@pytest.mark.parametrize(
    ("changed", "others", "count"),
    [
        (("k = Reshape (km, heads)", "kr = Relu (km)\n  k = Reshape (kr, heads)"), {}, 2),
        (("ki = MatMulInteger (xq, wk, xz, zero)", "n = Neg (x)\n  yq, ys, yz = DynamicQuantizeLinear (n)\n"
          "  ki = MatMulInteger (yq, wk, yz, zero)"), {}, 2),
        (("=> (q, k, v)", "=> (q, k, v, km)"), {}, 2),
        (("vi = MatMulInteger (xq, wv, xz, zeros)", "vi = MatMulInteger (xq, wv, xz, ones)"),
         {"ones": np.ones(32, np.int8)}, 2),
        (("ki = MatMulInteger (xq, wk, xz, zero)", "ki = MatMulInteger (xq, wk)"), {}, 2),
        (("ki = MatMulInteger (xq, wk, xz, zero)", "ki = MatMulInteger (xq, wk, xz)"),
         {"wk": np.arange(256, dtype=np.uint8).reshape(16, 16)}, 2),
        (("vb = Add (bv, vm)", "vb = Add (bv, vm)\n  u = Neg (vb)"), {}, 2),
        (("qb = Add (qm, bq)", "qb = Add (qm, x)"), {}, 2),
        (("ks = Mul (sk, xs)", "ks = Mul (xs, xs)"), {}, 2),
    ],
    ids=["no heads", "another quantizer", "an output", "zero points", "no zero point of x", "other dtype",
         "another reader", "a residual", "no constant scale"],
)  # fmt: skip
def test_other_products_stay_apart(changed: tuple[str, str], others: dict[str, np.ndarray], count: int) -> None:
    text = HEADS.replace(*changed)
    assert text != HEADS
    if "u = Neg" in text:
        text = text.replace("=> (q, k, v)", "=> (q, k, v, u)")
    assert merged(text, **others) == count
