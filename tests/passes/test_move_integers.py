"""Which operators between quantizers become operators on integers, with equal results."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse

from onnxfuse.passes.move_integers import move_integers

CONSTANTS = {
    "s": np.float32(0.05), "t": np.float32(0.06), "m": np.float32(-0.05), "z": np.uint8(3), "o": np.uint8(4),
    "i8": np.int8(-3), "shape": np.array([0, -1]), "one": np.array([1]), "two": np.array([2]),
    "scales": np.array([1, 1, 2, 2], np.float32),
}  # fmt: skip
NODES = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) {} y = DequantizeLinear(r, s, z)"
POOL = "p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(d) r = QuantizeLinear(p, s, z)"


def moved(nodes: str, opset: int = 17) -> str:
    """Return the operators after the pass; the model must compute the same."""
    known = {name: value for name, value in CONSTANTS.items() if name in re.findall(r"\w+", nodes)}
    before = parse(f"(float[N,3,h,w] x) => (y) {{ {nodes} }}", opset, **known)
    after, _ = apply(before, move_integers)
    assert_same(before, after, (2, 3, 8, 7))
    return ops(after)


@pytest.mark.parametrize("opset", [12, 17, 22])
def test_between_quantizers(opset: int) -> None:
    assert moved(NODES.format(POOL), opset) == "QuantizeLinear MaxPool DequantizeLinear"


@pytest.mark.parametrize(
    ("operator", "opset"),
    [
        ("Transpose<perm = [0, 2, 3, 1]>(d)", 13),
        ("Reshape(d, shape)", 13),
        ("Flatten(d)", 13),
        ("Slice(d, one, two)", 13),
        ("Concat<axis = 1>(d, d, e)", 13),
        ('Resize<nearest_mode = "floor">(d, , scales)', 19),
    ],
)
def test_what_moves_elements(operator: str, opset: int) -> None:
    nodes = NODES.format(f"e = DequantizeLinear(q, s, z) p = {operator} r = QuantizeLinear(p, s, z)")
    assert moved(nodes, opset) == f"QuantizeLinear {operator.split('<')[0].split('(')[0]} DequantizeLinear"


@pytest.mark.parametrize(
    "operator",
    [
        "Concat<axis = 1>(d, x)",  # one input is not quantized
        "Concat<axis = 1>(d, e)",  # one input has another scale
        'Resize<mode = "linear">(d, , scales)',  # it computes elements
    ],
)
def test_what_computes_or_has_other_operands(operator: str) -> None:
    nodes = NODES.format(f"f = QuantizeLinear(x, t, z) e = DequantizeLinear(f, t, z) p = {operator}"
                         " r = QuantizeLinear(p, s, z)")  # fmt: skip
    found = moved(nodes, 19)
    assert f"{operator.split('<')[0]} QuantizeLinear" in found and "Quantizer" not in found


@pytest.mark.parametrize(
    "nodes",
    [
        NODES.format(POOL.replace("(p, s, z)", "(p, t, z)")),  # another scale
        NODES.format(POOL.replace("(p, s, z)", "(p, s, o)")),  # another zero point
        NODES.format(POOL.replace("(d)", "(x)")),  # numbers that are not quantized
        NODES.format(POOL).replace("y = D", "e = D") + " y = Sub(e, p)",  # the numbers are read, too
        NODES.format(POOL).replace("p = M", "p, i = M").replace("y = D", "e = D")
        + " f = Cast<to = 1>(i) y = Add(e, f)",
    ],
)
def test_what_stays(nodes: str) -> None:
    assert moved(nodes).startswith("QuantizeLinear DequantizeLinear MaxPool QuantizeLinear")


def test_int8_stays() -> None:
    """onnxruntime finds an operator on int8 only where the two quantizers of a pair are neighbours."""
    nodes = NODES.format("p = Flatten(d) r = QuantizeLinear(p, s, z)").replace(", z)", ", i8)")
    assert moved(nodes).startswith("QuantizeLinear DequantizeLinear Flatten QuantizeLinear")


def test_negative_scales_stay() -> None:
    """The largest number is that of the smallest integer."""
    nodes = NODES.format(POOL).replace(" s,", " m,")
    assert "MaxPool QuantizeLinear" in moved(nodes)


def test_old_opsets_stay() -> None:
    assert "MaxPool QuantizeLinear" in moved(NODES.format(POOL), 11)
