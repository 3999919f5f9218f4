"""Sessions whose inputs and outputs stay on the device, and runs that are timed in turns."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx.parser
import pytest

from onnxfuse.tuning import bound_session, timing

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x) => (float[n] a, float[n] b) { t = Neg(x) a = Abs(t) b = Add(a, x) }"""


def test_outputs_may_share_their_memory() -> None:
    """Each copy of a node may write where the copy before it wrote."""
    session = bound_session.start_session(onnx.parser.parse_model(MODEL), None, "cpu")
    for buffers, shared in ({"a": "y", "b": "y"}, True), ({"a": "y", "b": "z"}, False), (None, False):
        bound = bound_session.bind(session, {"x": np.float32([1, -2])}, "cpu", {"a": (2,), "b": (2,)}, buffers=buffers)
        bound.run()
        a, b = bound.values().values()
        assert (a.data_ptr() == b.data_ptr()) == shared
        assert b.numpy().tolist() == [2, 0]


def test_what_precedes_a_run_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0  # seconds

    def step(name: str, seconds: float) -> None:
        nonlocal now
        order.append(name)
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    runs = [partial(step, "first", 1.0), partial(step, "second", 2.0)]
    times = timing.interleaved(runs, 4, partial(step, "before", 100.0))
    assert order[::2] == ["before"] * 8 and order[1::2].count("first") == order[1::2].count("second") == 4
    assert [(each.median, each.minimum, each.runs) for each in times] == [(1.0, 1.0, 4), (2.0, 2.0, 4)]
