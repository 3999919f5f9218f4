"""Which MaxPools between quantizers become MaxPools of integers, with equal results."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse

from onnxfuse.passes.pool_integers import pool_integers

CONSTANTS = {"s": np.float32(0.05), "t": np.float32(0.06), "m": np.float32(-0.05), "z": np.uint8(3), "o": np.uint8(4)}
NODES = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) {} y = DequantizeLinear(r, s, z)"
POOL = "p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(d) r = QuantizeLinear(p, s, z)"


def pooled(nodes: str, opset: int = 17) -> str:
    """Return the operators after the pass; the model must compute the same."""
    known = {name: value for name, value in CONSTANTS.items() if name in re.findall(r"\w+", nodes)}
    before = parse(f"(float[N,3,h,w] x) => (y) {{ {nodes} }}", opset, **known)
    after, _ = apply(before, pool_integers)
    assert_same(before, after, (2, 3, 8, 7))
    return ops(after)


@pytest.mark.parametrize("opset", [12, 17, 22])
def test_between_quantizers(opset: int) -> None:
    assert pooled(NODES.format(POOL), opset) == "QuantizeLinear MaxPool DequantizeLinear"


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
    assert pooled(nodes).startswith("QuantizeLinear DequantizeLinear MaxPool QuantizeLinear")


def test_negative_scales_stay() -> None:
    """The largest number is that of the smallest integer."""
    nodes = NODES.format(POOL).replace(" s,", " m,")
    assert "MaxPool QuantizeLinear" in pooled(nodes)


def test_old_opsets_stay() -> None:
    assert "MaxPool QuantizeLinear" in pooled(NODES.format(POOL), 11)
