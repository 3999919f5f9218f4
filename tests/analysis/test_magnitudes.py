"""Test which tensors may hold the numbers of a mask, and which masks hold finite numbers, or 0 and 1."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnxfuse.analysis.magnitudes import holds_zero_or_one, is_bounded, is_ordinary
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Tensor
from onnxfuse.ir.serde import read_graph

INPUTS = "float[b,4,s,8] q, float[b,4,s,8] k, float[b,1,1,s] x, int64[b,1,1,s] ids, bool[b,1,1,s] flags"
WEIGHTS = {
    "one": np.float32(1), "lowest": np.finfo(np.float32).min, "small": np.float32(1e-30), "low": np.float32(-1e4),
    "table": np.array([[0.5], [-3.0]], np.float32), "masks": np.array([[0.0], [-3.4e38]], np.float32),
    "axes": np.array([0, 1, 3, 2]), "least": np.float32(-np.inf), "bits": np.array([[0.0], [1.0]], np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Cast <to = 1> (ids)", True),
        ("y = Identity(x)", False),  # an input may hold a mask
        ("t = Transpose <perm = [0, 1, 3, 2]> (k)  y = MatMul(q, t)", True),  # as scores
        ("t = Tanh(x)  y = Mul(t, low)", True),
        ("y = Where(flags, low, one)", True),
        ("y = Where(flags, lowest, one)", False),
        ("i = Cast <to = 7> (flags)  y = Gather(table, i)", True),
        ("i = Cast <to = 7> (flags)  y = Gather(masks, i)", False),
        ("n = Cast <to = 1> (flags)  r = Sub(one, n)  y = Mul(r, lowest)", False),
        ("n = Cast <to = 1> (ids)  y = Div(n, small)", False),
        ("t = Tanh(x)  y = Div(t, x)", False),
        ("y = Log(one)", False),  # nothing is known of it
    ],
)
def test_what_may_hold_a_mask(body: str, expected: bool) -> None:
    assert is_ordinary(*last_output(body)) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Where(flags, lowest, one)", True),
        ("y = Where(flags, least, one)", False),
        ("y = Identity(x)", False),  # an input may be infinite
        ("n = Cast <to = 1> (ids)  y = Sub(one, n)", True),
        ("w = Where(flags, lowest, one)  y = Add(w, w)", False),  # beyond float32
        ("w = Where(flags, lowest, one)  y = Softmax(w)", True),
        ("w = Where(flags, least, one)  y = Softmax(w)", False),  # NaN where a row holds nothing but -inf
    ],
)
def test_masks_of_finite_numbers(body: str, expected: bool) -> None:
    assert is_bounded(*last_output(body)) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("n = Cast <to = 1> (flags)  y = Transpose(n)", True),
        ("n = Cast <to = 7> (flags)  y = Cast <to = 1> (n)", True),
        ("y = Cast <to = 1> (ids)", False),
        ("i = Cast <to = 7> (flags)  y = Gather(bits, i)", True),
        ("i = Cast <to = 7> (flags)  y = Gather(table, i)", False),
    ],
)
def test_masks_of_0_and_1(body: str, expected: bool) -> None:
    assert holds_zero_or_one(*last_output(body)) is expected


def last_output(body: str) -> tuple[ShapeInfo, Tensor]:
    """Return what is known of a model's shapes, and the output of its last node."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g ({INPUTS}) => (float[a,b,c,d] y) {{ {body} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in WEIGHTS.items())
    graph = read_graph(model, None)
    graph.sort()
    return infer_shapes(graph), graph.nodes[-1].outputs[0]


def test_two_ordinary_tensors_may_not_be_one_together() -> None:
    text = "t = Cast <to = 1> (ids)  u = Mul(t, t)  y = Mul(u, u)"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g ({INPUTS}) => (float[b,1,1,s] y) {{ {text} }}'
    )
    graph = read_graph(model, None)
    graph.sort()
    shapes, numbers = infer_shapes(graph), graph.nodes[0].outputs[0]
    assert is_ordinary(shapes, numbers) and not is_ordinary(shapes, numbers, numbers)
