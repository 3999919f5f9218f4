"""Parameters that are inputs of an operator, and known in a run only: no step takes them for values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from spelled_models import parsed

from onnxfuse import optimize

AXES = {"axes": np.array([-1])}
REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
MODELS = {
    **{op: (f"float[2,4,8] x, int64[1] axes) => (float[?,?,?] y) {{ y = {op}(x, axes)", AXES) for op in REDUCTIONS},
    **{
        f"{op}-of-an-image": (
            f"float[2,4,6,8] x, int64[2] axes) => (float[?,?,?,?] y) <float[4,4,3,3] w> "
            f"{{ c = Conv <pads = [1,1,1,1]> (x, w) m = {op}(c, axes) y = Conv <pads = [1,1,1,1]> (m, w)",
            {"axes": np.array([-1, -2])},
        )
        for op in ("ReduceMean", "ReduceMax")
    },
    "layer_norm": (
        "float[2,4,8] x, int64[1] axes) => (float[2,4,8] y) <float two = {2}, float e = {1}> { m = ReduceMean(x, axes) "
        "d = Sub(x, m) s = Pow(d, two) v = ReduceMean(s, axes) w = Add(v, e) r = Sqrt(w) y = Div(d, r)",
        AXES,
    ),
    "softmax": (
        "float[2,4,8] x, int64[1] axes) => (float[2,4,8] y) { m = ReduceMax(x, axes) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum(e, axes) y = Div(e, s)",
        AXES,
    ),
    "softmax-of-a-difference": (
        "float[2,4,8] x, int64[1] axes) => (float[2,4,8] y) "
        "{ m = ReduceMax(x, axes) d = Sub(x, m) y = Softmax <axis = -1> (d)",
        AXES,
    ),
    "Squeeze": ("float[2,1,8] x, int64[1] axes) => (float[?,?] y) { s = Squeeze(x, axes) y = Relu(s)",
                {"axes": np.array([1])}),
    "Unsqueeze": ("float[2,8] x, int64[1] axes) => (float[?,?,?] y) { s = Unsqueeze(x, axes) y = Relu(s)", AXES),
    "Slice": (
        "float[2,8] x, int64[1] a, int64[1] b, int64[1] axes, int64[1] s) => (float[?,?] y) "
        "{ p = Slice(x, a, b, axes, s) y = Relu(p)",
        {**AXES, "a": np.array([1]), "b": np.array([6]), "s": np.array([2])},
    ),
    "Pad": (
        "float[2,4,6,8] x, int64[8] p, float v) => (float[?,?,?,?] y) <float[4,4,3,3] w> "
        "{ q = Pad(x, p, v) y = Conv(q, w)",
        {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.float32(0)},
    ),
    "Clip": ("float[2,8] x, float l, float h) => (float[2,8] y) { c = Clip(x, l, h) y = Mul(c, x)",
             {"l": np.float32(0), "h": np.float32(6)}),
    "Resize": (
        "float[2,4,6,8] x, float[4] s) => (float[?,?,?,?] y) <float[4,4,3,3] w> "
        "{ c = Conv <pads = [1,1,1,1]> (x, w) r = Resize(c, , s) y = Conv <pads = [1,1,1,1]> (r, w)",
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "Tile": ("float[2,8] x, int64[2] r) => (float[?,?] y) { t = Tile(x, r) y = Relu(t)", {"r": np.array([1, 2])}),
    "Expand": ("float[2,8] x, int64[3] r) => (float[?,?,?] y) { t = Expand(x, r) y = Relu(t)",
               {"r": np.array([3, 2, 8])}),
    "Reshape": ("float[2,8] x, int64[2] r) => (float[?,?] y) { t = Reshape(x, r) y = Relu(t)",
                {"r": np.array([4, 4])}),
    "Split": ("float[2,8] x, int64[2] r) => (float[2,?] y) { a, b = Split <axis = 1> (x, r) y = Mul(a, b)",
              {"r": np.array([4, 4])}),
    "Dropout": ("float[2,8] x, float r, bool t) => (float[2,8] y) { d = Dropout(x, r, t) y = Relu(d)",
                {"r": np.float32(0), "t": np.bool_(False)}),
    "TopK": ("float[2,8] x, int64[1] k) => (float[2,?] y) { a, i = TopK(x, k) y = Relu(a)", {"k": np.array([3])}),
    "CumSum": ("float[2,8] x, int64 axis) => (float[2,8] y) { a = CumSum(x, axis) y = Relu(a)",
               {"axis": np.array(1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_no_step_takes_it_for_a_value(name: str) -> None:
    text, given = MODELS[name]
    model = parsed(f"({text} }}", opset=18)
    onnx.checker.check_model(model)
    _, report = optimize(model, layout="nhwc", inputs={key: np.asarray(value) for key, value in given.items()})
    assert [str(one) for one in report.left_out] == []
    assert report.verified.status == "verified", report.verified.reason
