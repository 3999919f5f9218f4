"""Pads whose rows a later Slice removes, and the elementwise operators between them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.passes.undo_pads import undo_pads

CONSTANTS = {
    "two": [0, 0, 0, 0, 2, 0], "before": [0, 1, 0, 0, 1, 0], "start": [0], "second": [1], "end": [5], "axis": [1],
    "steps": [2], "more": [7], "last": [-2], "fewer": [4],
}  # fmt: skip
CUT = "y = Slice(s, start, end, axis)"
SUM = "p = Pad(z, two) s = Add(x, p)"


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        (f"{SUM} {CUT}", "Slice Add"),
        (f"{SUM} y = Slice(s, start, end, last)", "Slice Add"),
        (f"p = Pad(z, two) m = Mul(w, p) s = Add(m, x) {CUT}", "Mul Slice Add"),
        (f"p = Pad(z, two) r = Pad(z, two) s = Sub(p, r) {CUT}", "Sub"),
        (f"p = Pad(z, two) m = Mul(x, x) s = Add(p, m) {CUT}", None),  # two operands would be cut
        (f"p = Pad(z, before) s = Add(x, p) {CUT}", None),
        (f"p = Pad(z, two) s = Max(x, p) {CUT}", None),
        (f"{SUM} y = Slice(s, start, fewer, axis)", None),
        (f"{SUM} y = Slice(s, second, more, axis)", None),
        (f"{SUM} y = Slice(s, start, end, axis, steps)", None),
    ],
)
def test_pads_are_undone(nodes: str, rest: str | None) -> None:
    used = {name: np.array(numbers) for name, numbers in CONSTANTS.items() if f", {name}" in nodes}
    inputs = "(float[batch,7,3] x, float[batch,5,3] z, float[3] w) => (y)"
    model = parse(f"{inputs} {{ {nodes} }}", **used)
    after, (count,) = apply(model, undo_pads)
    assert ops(after) == (rest or ops(model)) and bool(count) == (rest is not None)
    assert_same_at_all_sizes(model, after, special=False)
