"""Test images of one to three spatial axes: operators, what onnxruntime makes of them, and networks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from layout_models import assert_same, attribute, converted, nodes, operators, parse
from sound_and_video import SIZES_OF, network

from onnxfuse import optimize

AXES = [1, 2, 3]
NAMES, SIZES = ("d", "h", "w"), (4, 6, 10)
# For each operator its node, its further weights, and what it becomes.  KERNEL, PADS, TWOS, ONES and SPATIAL stand for
# lists with a number for each spatial axis, or two for each.
OPERATORS = {
    "activation": ("b = Relu (a)", "", {}),
    "elementwise": ("c = Abs (a) b = Sub (c, s)", "float[8,ONES] s", {"Abs": 1, "Sub": 1}),
    "last axis": ("b = Add (a, s)", "float[10] s", {"Add": 1}),
    "softmax": ("b = Softmax <axis = 1> (a)", "", {"Softmax": 1}),
    "slice": ("b = Slice (a, begin, end, at)", "int64[1] begin = {1}, int64[1] end = {9}, int64[1] at = {-1}",
              {"Slice": 1}),
    "pad": ('b = Pad <mode = "edge"> (a, pads)', "", {"Pad": 1}),
    "channels": ("c, d = Split <axis = 1, num_outputs = 2> (a) b = Concat <axis = 1> (d, c)", "",
                 {"split": 1, "concat": 1}),
    "positions": ("c = Exp (a) d = Concat <axis = 2> (a, c) e, f = Split <axis = 2, num_outputs = 2> (d) "
                  "b = Max (e, f)", "", {"Exp": 1, "Concat": 1, "Split": 1, "Max": 1}),
    "max pool": ("b = MaxPool <kernel_shape = [KERNEL], pads = [PADS]> (a)", "", {"max_pool": 1}),
    "average pool": ("b = AveragePool <kernel_shape = [KERNEL], pads = [PADS]> (a)", "", {"average_pool": 1}),
    "global pools": ("c = GlobalAveragePool (a) d = GlobalMaxPool (a) e = Sub (c, d) b = Mul (e, a)", "",
                     {"global_average_pool": 1, "global_max_pool": 1, "Sub": 1, "channel_scale": 1}),
    "reductions": ("c = ReduceMean (a, space) d = ReduceMax (a, space) e = Sub (c, d) b = Add (e, a)", "",
                   {"global_average_pool": 1, "global_max_pool": 1, "Sub": 1, "Add": 1}),
    "nearest": ('b = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">'
                " (a, , scales)", "", {"resize": 1}),
    "linear": ('b = Resize <mode = "linear"> (a, , scales)', "", {"resize": 1}),
    "batch norm": ("c = Abs (a) b = BatchNormalization (c, g, t, m, v)",
                   "float[8] g, float[8] t, float[8] m, float[8] v = {1,2,3,4,5,6,7,8}",
                   {"Abs": 1, "batch_norm_activation": 1}),
    "equal weights": ("c = Abs (a) b = BatchNormalization (c, v, m, m, v)",
                      "float[8] m, float[8] v = {1,2,3,4,5,6,7,8}", {"Abs": 1, "batch_norm_activation": 1}),
    "transposed": ("c = ConvTranspose <strides = [TWOS], pads = [PADS], output_padding = [ONES]> (a, u, s) "
                   "b = Relu (c)", "float[8,8,KERNEL] u, float[8] s", {"conv_transpose_bias_activation": 1}),
    "transposed, depthwise": ("b = ConvTranspose <group = 8, strides = [TWOS]> (a, u)", "float[8,1,KERNEL] u",
                              {"conv_transpose_bias_activation": 1}),
    "gate": ("c = GlobalAveragePool (a) d = Conv (c, u) e = Sigmoid (d) f = Mul (a, e) g = Add (f, a) b = Relu (g)",
             "float[8,8,ONES] u", {"global_average_pool": 1, "conv_bias_activation": 1, "channel_scale": 1}),
}  # fmt: skip


def between(axes: int, body: str, weights: str = "") -> onnx.ModelProto:
    """Return a model with `body` between two convolutions of `axes` spatial axes: it computes `b` from `a`."""
    lists = {
        "KERNEL": ["3"] * axes,
        "PADS": ["1"] * 2 * axes,
        "ONES": ["1"] * axes,
        "TWOS": ["2"] * axes,
        "SPATIAL": NAMES[-axes:],
    }
    text = f"""(float[n,8,SPATIAL] x) => (float[n,8,{",".join("pqr"[:axes])}] y)
    <float[8,8,KERNEL] k1, float[8,8,KERNEL] k2{weights and f", {weights}"}>
    {{ a = Conv <pads = [PADS]> (x, k1) {body} y = Conv <pads = [PADS]> (b, k2) }}"""
    for name, values in lists.items():
        text = text.replace(name, ",".join(values))
    pads = np.array([0, 0, *range(1, axes + 1)] * 2)
    arrays = {"scales": np.array([1, 1, *[2] * axes], np.float32), "space": np.arange(2, axes + 2), "pads": pads}
    return parse(text, **{name: array for name, array in arrays.items() if f" {name})" in text})


def sizes_of(axes: int) -> dict[str, int]:
    return {"n": 2, **dict(zip(NAMES[-axes:], SIZES[-axes:], strict=True))}


def left_by_onnxruntime(model: onnx.ModelProto, folder: Path) -> Counter[str]:
    """Return the operators of a model that onnxruntime has optimized for the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_inside_a_region(name: str, axes: int, tmp_path: Path) -> None:
    """No Transpose is left inside the region, nor anywhere once onnxruntime has inlined the bodies."""
    body, weights, inside = OPERATORS[name]
    model = between(axes, body, weights)
    result = converted(model)
    assert operators(result) == Counter(inside) + Counter({"conv_bias_activation": 2, "Transpose": 2})
    ranks = {rank for node in result.model.graph.node for rank in attribute(node, "output_ranks") or ()}
    assert ranks == {axes + 2}
    assert_same(model, result.model, **sizes_of(axes))
    first = converted(model, "nchw")
    assert left_by_onnxruntime(result.model, tmp_path) == left_by_onnxruntime(first.model, tmp_path)


@pytest.mark.parametrize("axes", AXES)
def test_weights(axes: int) -> None:
    """Weights of depthwise convolutions have all channels last, and other weights the channels of a group."""
    ones = ",".join(["1"] * axes)
    spatial, taps = ",".join(NAMES[-axes:]), ",".join("543"[:axes])
    text = f"""(float[n,8,{spatial}] x) => (float[n,6,{spatial}] y)
    <float[8,1,{taps}] k1, float[12,4,{taps}] k2, float[6,12,{ones}] k3>
    {{ a = Conv <group = 8, auto_pad = "SAME_UPPER"> (x, k1) b = Conv <group = 2, auto_pad = "SAME_LOWER"> (a, k2)
       y = Conv (b, k3) }}"""
    model = parse(text)
    result = converted(model)
    found = nodes(result, "conv_bias_activation")
    assert [attribute(node, "w_layout") for node in found] == ["hwio", "ohwi", "ohwi"]
    shapes, kernel = {t.name: tuple(t.dims) for t in result.model.graph.initializer}, (5, 4, 3)[:axes]
    assert [shapes[node.input[1]] for node in found] == [(*kernel, 1, 8), (12, *kernel, 4), (6, *[1] * axes, 12)]
    assert_same(model, result.model, **sizes_of(axes))


@pytest.mark.parametrize("axes", AXES)
def test_every_node_is_verified(axes: int) -> None:
    body, weights, _ = OPERATORS["gate"]
    _, report = optimize(between(axes, body, weights), layout="nhwc")
    assert report.verified.status == "verified" and not report.dropped
    assert report.counts == {"channel_scale": 1, "conv_bias_activation": 3, "global_average_pool": 1}
    assert (report.verified.equal_parts, report.layout.nodes) == (5, 5)


def test_four_spatial_axes_stay_as_they_are() -> None:
    text = """(float16[n,8,t,d,h,w] x) => (float16[n,8,o,p,q,r] y) <float16[8,8,3,3,3,3] k1, float16[8,8,3,3,3,3] k2>
    { a = Conv (x, k1) b = Relu (a) y = Conv (b, k2) }"""
    assert operators(converted(parse(text))) == {"conv_bias_activation": 1, "Conv": 1}


def test_images_of_two_ranks_are_two_regions() -> None:
    """Pictures of a video are images of their own between Reshapes."""
    text = """(float[2,8,4,6,10] x) => (float[2,8,4,6,10] y)
    <float[8,8,3,3,3] k1, float[8,8,3,3] k2, float[8,8,3,3,3] k3, int64[4] pictures = {8,8,6,10},
     int64[5] video = {2,4,8,6,10}>
    { a = Conv <pads = [1,1,1,1,1,1]> (x, k1)
      b = Transpose <perm = [0,2,1,3,4]> (a) c = Reshape (b, pictures)
      d = Conv <pads = [1,1,1,1]> (c, k2)
      e = Reshape (d, video) f = Transpose <perm = [0,2,1,3,4]> (e)
      y = Conv <pads = [1,1,1,1,1,1]> (f, k3) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 3, "Transpose": 2, "Reshape": 2}  # of x and of y
    assert_same(model, result.model)


# --- networks ----------------------------------------------------------------------------------------------------


def test_the_encoder_of_wav2vec() -> None:
    """The waveform is read as it is; the Transposes around the norms and before the layers vanish."""
    model = network("wav2vec")
    result = converted(model, "auto")
    found = operators(result)
    assert found["Transpose"] == 0 and found["conv_bias_activation"] == 4 and found["layer_norm"] == 2
    stem = nodes(result, "conv_bias_activation")[0]
    assert (attribute(stem, "x_layout"), stem.input[0]) == ("nchw", "x")
    assert_same(model, result.model, tolerance=2e-2, **SIZES_OF["wav2vec"])


def test_the_convolutions_of_a_conformer() -> None:
    model = network("conformer")
    result = converted(model, "auto")
    found = operators(result)
    expected = {"layer_norm": 1, "conv_bias_activation": 3, "split": 1, "gated_activation": 1}
    assert found == expected and result.layout.nodes == 5
    assert_same(model, result.model, tolerance=1e-2, **SIZES_OF["conformer"])


def test_a_vocoder() -> None:
    model = network("vocoder")
    result = converted(model, "auto")
    assert operators(result) == {"conv_bias_activation": 5, "LeakyRelu": 2, "Transpose": 2}
    assert_same(model, result.model, tolerance=1e-2, **SIZES_OF["vocoder"])


def test_a_network_of_videos() -> None:
    """Convolutions over space and over time, a gate with a residual, and a skip around smaller images."""
    model = network("video")
    result = converted(model, "auto")
    assert operators(result) == {
        "conv_bias_activation": 4, "max_pool": 1, "squeeze_excite": 1, "channel_scale": 1, "resize": 1,
        "concat": 1, "Transpose": 1,
    }  # fmt: skip
    (gate,) = nodes(result, "channel_scale")
    assert (attribute(gate, "operands"), attribute(gate, "activation")) == ("x gate residual", "relu")
    assert_same(model, result.model, tolerance=1e-2, **SIZES_OF["video"])


def test_a_rank_that_is_not_known_is_the_reason() -> None:
    text = """(float[n] pixels, int64[m] shape) => (float y) <float[4,3,3,3] w>
        { x = Reshape (pixels, shape)  c = Conv (x, w)  d = Relu (c)  y = ReduceSum <keepdims = 0> (d) }"""
    (stays,) = optimize(parse(text), verify=False)[1].layout.stays
    assert stays.reason == "the rank of its image 'x' or of its result is not known"
