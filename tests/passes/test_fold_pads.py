"""Which Pads and Slices are folded into the pads of convolutions and pools, with the same values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, ops, parse

from onnxfuse.passes.fold_pads import fold_pads

WEIGHTS = {"w": (4, 3, 3, 3), "rows": (4, 3, 3), "volumes": (4, 3, 3, 3, 3)}
CONSTANTS = {
    "one": np.array(1, np.float32), "least": np.array(-np.inf, np.float32), "six": np.array(6, np.float32),
    "zero": np.array(0, np.float32), "around": np.array([0, 0, 1, 0, 0, 0, 2, 1]), "behind": np.array([0, 0, 0, 1]),
    "spatial": np.array([-2, 3]), "channel": np.array([0, 1, 0, 0, 0, 0, 0, 0]), "past": np.array([0, 0, 4, 0, 0, 0]),
    "cut": np.array([0, 0, 1, 1, 0, 0, -1, 1]), "nhwc": np.array([0, 1, 0, 0, 0, 2, 1, 0]),
    "none": np.array([0]), "two": np.array([2]), "nine": np.array([9]), "minus": np.array([-1]),
    "along": np.array([2]), "first": np.array([0]), "wide": np.array([0, 0, 3, 0, 0, 0, 0, 0]),
    "volume": np.array([0, 0, 1, 0, 2, 0, 0, 0, 1, 0]),
}  # fmt: skip
IMAGE, SIZES = "float[N,3,h,w] x", (2, 3, 8, 7)


def folded(nodes: str, x: str = IMAGE, sizes: tuple[int, ...] = SIZES, opset: int = 18) -> onnx.ModelProto:
    """Return the model after the pass; it must compute the same."""
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype(np.float32) for name, shape in WEIGHTS.items()} | CONSTANTS
    words = nodes.replace("(", " ").replace(")", " ").replace(",", " ").split()
    before = parse(f"({x}) => (y) {{ {nodes} }}", opset, **{name: arrays[name] for name in arrays if name in words})
    after, _ = apply(before, fold_pads)
    assert_same(before, after, sizes)
    return after


def pads(model: onnx.ModelProto) -> list[list[int]]:
    """Return the pads of every node that has any."""
    return [list(each.ints) for node in model.graph.node for each in node.attribute if each.name == "pads"]


@pytest.mark.parametrize(
    ("nodes", "result"),
    [
        ("p = Pad(x, around ) y = Conv(p, w )", [1, 0, 2, 1]),
        ("p = Pad(x, around, zero ) y = Conv <pads = [1,1,0,1]> (p, w )", [2, 1, 2, 2]),
        ('p = Pad(x, around ) y = Conv <auto_pad = "VALID"> (p, w )', [1, 0, 2, 1]),
        ("p = Pad(x, behind ,, spatial ) y = Conv(p, w )", [0, 0, 0, 1]),
        ("p = Pad(x, around ) c = Conv(p, w ) d = Conv <dilations = [1,1]> (p, w ) y = Add(c, d)", [1, 0, 2, 1]),
        ("p = Pad(x, around, least ) y = MaxPool <kernel_shape = [3,2]> (p)", [1, 0, 2, 1]),
        ("r = Relu(x) p = Pad(r, around ) y = MaxPool <kernel_shape = [3,2]> (p)", [1, 0, 2, 1]),
        ("r = Clip(x, zero, six ) p = Pad(r, around ) y = MaxPool <kernel_shape = [3,2]> (p)", [1, 0, 2, 1]),
        ("p = Pad(x, around ) y = AveragePool <kernel_shape = [3,2]> (p)", [1, 0, 2, 1]),
        ("p = Pad(x, around ) y = AveragePool <kernel_shape = [4,3], pads = [1,1,0,0], count_include_pad = 1> (p)",
         [2, 1, 2, 1]),
    ],
)  # fmt: skip
def test_a_pad_of_an_image(nodes: str, result: list[int]) -> None:
    after = folded(nodes)
    assert "Pad" not in ops(after).split()
    assert {tuple(each) for each in pads(after)} == {tuple(result)}


def test_pads_that_are_attributes() -> None:
    after = folded("p = Pad <pads = [0,0,1,0,0,0,2,1]> (x) y = Conv(p, w )", opset=10)
    assert (ops(after), pads(after)) == ("Conv", [[1, 0, 2, 1]])


def test_sequences_and_volumes() -> None:
    after = folded("p = Pad(x, past ) y = Conv <dilations = [2]> (p, rows )", "float[N,3,t] x", (2, 3, 9))
    assert (ops(after), pads(after)) == ("Conv", [[4, 0]])
    after = folded("p = Pad(x, volume ) y = Conv(p, volumes )", "float[N,3,d,h,w] x", (2, 3, 5, 6, 4))
    assert (ops(after), pads(after)) == ("Conv", [[1, 0, 2, 0, 1, 0]])


SEQUENCE = "float[N,3,9] x"


@pytest.mark.parametrize(
    ("nodes", "result"),
    [
        ("c = Conv <pads = [2,2]> (x, rows ) y = Slice(c, none, nine, along )", [2, 0]),
        ("c = Conv <pads = [4,4], dilations = [2]> (x, rows ) y = Slice(c, two, minus, along )", [2, 3]),
    ],
)
def test_a_slice_of_a_causal_convolution(nodes: str, result: list[int]) -> None:
    after = folded(nodes, SEQUENCE, (2, 3, 9))
    assert (ops(after), pads(after)) == ("Conv", [result])


@pytest.mark.parametrize(
    ("nodes", "x"),
    [
        ("c = Conv <pads = [2,2]> (x, rows ) y = Slice(c, none, nine, along )", "float[N,3,t] x"),  # t may be 0
        ("c = Conv <pads = [2,0]> (x, rows ) y = Slice(c, none, minus, along )", SEQUENCE),
        ("c = Conv <pads = [2,2], strides = [2]> (x, rows ) y = Slice(c, none, minus, along )", SEQUENCE),
        ("c = Conv <pads = [2,2]> (x, rows ) y = Slice(c, none, two, first )", SEQUENCE),
        ("c = Conv <pads = [2,2]> (x, rows ) s = Slice(c, none, nine, along ) d = Relu(c) y = Concat <axis = 2> (s, d)",
         SEQUENCE),
        ('c = Conv <auto_pad = "SAME_UPPER"> (x, rows ) y = Slice(c, none, minus, along )', SEQUENCE),
    ],
)  # fmt: skip
def test_a_slice_that_stays(nodes: str, x: str) -> None:
    assert "Slice" in ops(folded(nodes, x, (2, 3, 9))).split()


def test_a_slice_that_begins_at_the_last_column_stays() -> None:
    """No column lies in the image of two elements, and pads of (1, 0) would give a column that does."""
    after = folded("c = Conv <pads = [0,9]> (x, rows ) y = Slice(c, minus, nine, along )", "float[N,3,2] x", (2, 3, 2))
    assert (ops(after), pads(after)) == ("Conv Slice", [[0, 9]])


def test_a_transpose_between() -> None:
    """Converters of channels-last models pad in front of the Transpose."""
    after = folded(
        "p = Pad(x, nhwc ) t = Transpose <perm = [0,3,1,2]> (p) y = Conv(t, w )", "float[N,h,w,3] x", (2, 8, 7, 3)
    )
    assert (ops(after), pads(after)) == ("Transpose Conv", [[1, 0, 2, 1]])


@pytest.mark.parametrize(
    "nodes",
    [
        "p = Pad(x, around, one ) y = Conv(p, w )",
        'p = Pad <mode = "edge"> (x, around ) y = Conv(p, w )',
        "p = Pad(x, cut ) y = Conv(p, w )",
        'p = Pad(x, around ) y = Conv <auto_pad = "SAME_UPPER", strides = [2,2]> (p, w )',
        "p = Pad(x, around ) c = Conv(p, w ) r = Relu(p) y = Conv(r, w )",  # whose rows Relu reads too
        "p = Pad(x, around ) y = MaxPool <kernel_shape = [3,2]> (p)",  # of numbers that may be negative
        "r = Relu(x) p = Pad(r, wide ) y = MaxPool <kernel_shape = [3,2]> (p)",  # a window would have no element
        "p = Pad(x, around, least ) y = MaxPool <kernel_shape = [3,2], strides = [2,2], ceil_mode = 1> (p)",
        "p = Pad(x, around ) y = AveragePool <kernel_shape = [4,3], pads = [1,1,0,0]> (p)",
        "p = Pad(x, around ) y = LpPool <kernel_shape = [3,2]> (p)",
    ],
)
def test_what_stays(nodes: str) -> None:
    assert "Pad" in ops(folded(nodes)).split()


def test_pads_of_channels_stay() -> None:
    assert ops(folded("p = Pad(x, channel ) y = Conv(p, w )", "float[N,2,h,w] x", (2, 2, 8, 7))) == "Pad Conv"
