"""Sessions whose outputs stay in place, and runs that are timed in turns."""

from __future__ import annotations

import time

import numpy as np
import onnx.parser

from onnxfuse.bench import timing

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x) => (float[n] a, float[n] b) { t = Neg(x) a = Abs(t) b = Add(a, x) }"""


def test_outputs_may_share_their_memory() -> None:
    """The copies of a node write where the one before them wrote, as the nodes of a chain do."""
    session = timing.start(onnx.parser.parse_model(MODEL), None, "cpu")
    for places, shared in ({"a": "y", "b": "y"}, True), ({"a": "y", "b": "z"}, False), (None, False):
        bound = timing.bind(session, {"x": np.float32([1, -2])}, "cpu", {"a": (2,), "b": (2,)}, places=places)
        bound.run()
        a, b = bound.values().values()
        assert (a.data_ptr() == b.data_ptr()) == shared
        assert b.numpy().tolist() == [2, 0]


def test_what_precedes_a_run_is_not_timed() -> None:
    order: list[str] = []

    def wait() -> None:
        order.append("before")
        time.sleep(0.01)

    runs = [lambda: order.append("first"), lambda: order.append("second")]
    spreads = timing.interleaved(runs, 4, wait)
    assert order[::2] == ["before"] * 8 and order[1::2].count("first") == order[1::2].count("second") == 4
    assert max(each.median for each in spreads) < 0.01
