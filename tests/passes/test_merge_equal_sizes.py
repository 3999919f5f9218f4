"""Tensors of sizes that equal others: which of them stay, and that values do not change."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, parse, run

from onnxfuse.passes.merge_equal_sizes import merge_equal_sizes

INPUTS = "float[b,s,8] q, float[b,t,8] k"
SOFTMAX = "p = Softmax<axis=-1>(q) r = Softmax<axis=1>(k)"


@pytest.mark.parametrize(
    ("nodes", "opset", "read"),
    [
        # Where equal sizes are read from inputs and from computed tensors, those of inputs stay.
        (f"{SOFTMAX} m = Shape(p) n = Shape(q) c = Gather(m, one) d = Gather(n, one) y = Add(c, d)", 13, ["q"]),
        (f"{SOFTMAX} m = Shape(p) n = Shape(q) c = Gather(m, one) d = Gather(n, one) y = Sub(d, c)", 17, ["q"]),
        # A single size is read from the first input that has it.
        (f"{SOFTMAX} c = Shape<start=0, end=1>(r) y = Identity(c)", 17, ["q"]),
        # A size that no input has stays with its tensor, which another part of the model need not read.
        ("f = Reshape(q, flat) m = Shape(f) h = Neg(f) n = Shape(h) y = Add(m, n)", 17, ["f", "h"]),
        ("f = NonZero(q) m = Shape(f) h = Neg(f) n = Shape(h) y = Add(m, n)", 17, ["f", "h"]),
        # Sizes of other tensors, or of another dtype, differ.
        (f"{SOFTMAX} m = Shape(p) n = Shape(r) c = Gather(m, one) d = Gather(n, one) y = Add(c, d)", 17, ["p", "r"]),
        ("n = Shape(q) c = Cast<to=6>(n) d = Cast<to=7>(c) y = Add(n, d)", 17, ["q"]),
    ],
)
def test_sizes_are_read_from(nodes: str, opset: int, read: list[str]) -> None:
    weights = {"one": np.array(1, np.int64), "flat": np.array([-1, 4], np.int64)}
    names = {name: value for name, value in weights.items() if f"{name})" in nodes}
    before = parse(f"({INPUTS}) => (y) {{ {nodes} }}", opset, **names)
    after, _ = apply(before, merge_equal_sizes)
    feeds = {"q": np.ones((3, 5, 8), np.float32), "k": np.ones((3, 4, 8), np.float32)}
    np.testing.assert_array_equal(run(after, feeds)[0], run(before, feeds)[0])
    assert [node.input[0] for node in after.graph.node if node.op_type == "Shape"] == read
