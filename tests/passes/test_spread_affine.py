"""Numbers that scale and shift the result of a convolution's activation: which become vectors of its channels."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse, random, value

from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.convolutions import AFFINE

spread_affine = rules_pass("spread_affine", AFFINE)
CONSTANTS = {
    "k": random(4, 3, 1, 1) - np.float32(0.8), "s": np.array([1.25], np.float32), "t": np.array(-0.5, np.float32),
    "slopes": random(4, 1, 1), "each": random(1, 4, 1, 1), "u": random(3, 4, 2, 2) - np.float32(0.8),
}  # fmt: skip


def spread(nodes: str, header: str = "(float[N,3,h,w] x) => (y)", opset: int = 14) -> tuple[int, list[tuple[int, ...]]]:
    """Return how many constants the pass spreads, and the shapes of the vectors; the values must stay the same."""
    used = {name: value for name, value in CONSTANTS.items() if name in nodes.split() or f"{name})" in nodes}
    before = parse(f"{header} {{ {nodes} }}", opset, **used)
    after, counts = apply(before, spread_affine, spread_affine)  # the number of the Mul, then that of the Add
    assert ops(after) == ops(before).replace("Sub", "Add")
    assert_same(before, after, (2, 3, 7, 5)[: 4 if "h,w" in header else 3])
    return sum(counts), [tuple(t.dims) for t in after.graph.initializer if t.name not in used]


@pytest.mark.parametrize(
    "activation",
    ["r = Relu(c)", "r = HardSwish(c)", "g = Sigmoid(c) r = Mul( c , g )", "g = HardSigmoid(c) r = Mul(g, c)",
     "a = Add(c, c) r = Relu(a)"],
)  # fmt: skip
def test_behind_an_activation(activation: str) -> None:
    assert spread(f"c = Conv(x, k ) {activation} m = Mul(r, s) y = Add( t , m)") == (2, [(4, 1, 1)] * 2)
    assert spread(f"c = Conv(x, k ) {activation} y = Add(r, t)") == (1, [(4, 1, 1)])
    assert spread(f"c = Conv(x, k ) {activation} y = Sub(r, t)") == (1, [(4, 1, 1)])


def test_behind_a_transposed_convolution() -> None:
    assert spread("c = ConvTranspose(x, u ) r = Relu(c) m = Mul(r, s) y = Add(m, t)") == (2, [(4, 1, 1)] * 2)


def test_a_vector_with_an_axis_of_images_loses_it() -> None:
    assert spread("c = Conv(x, k ) r = Relu(c) y = Mul(r, each)") == (1, [(4, 1, 1)])
    before = parse("(float[N,3,h,w] x) => (y) { c = Conv(x, k) r = Relu(c) y = Mul(r, each) }", 14,
                   k=CONSTANTS["k"], each=CONSTANTS["each"])  # fmt: skip
    after, _ = apply(before, spread_affine)
    (vector,) = (t.name for t in after.graph.initializer if t.name != "k")
    assert value(after, vector) == CONSTANTS["each"][0].tolist()


@pytest.mark.parametrize(
    "nodes",
    [
        "c = Conv(x, k ) y = Mul(c, s)",  # it is folded into the convolution
        "r = Relu(x) y = Mul(r, s)",
        "c = Conv(x, k ) n = Neg(c) r = Relu(n) y = Mul(r, s)",
    ],
)
def test_what_stays(nodes: str) -> None:
    assert spread(nodes) == (0, [])


def test_a_shift_behind_slopes_stays() -> None:
    assert spread("c = Conv(x, k ) r = PRelu(c, slopes ) m = Mul(r, s) y = Add(m, t)") == (1, [(4, 1, 1)])
