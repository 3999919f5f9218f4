"""Test what each operator becomes in a channels-last region: it computes the same, and no Transpose is left inside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from layout_models import assert_same, attribute, converted, nodes, operators, parse

import onnxfuse
from onnxfuse.layout.rules import MAX_BLOCK
from onnxfuse.runtime.hosts import find_host

# A region: two convolutions around what is tested, of 8 channels, which begin and end at the graph.
HEAD = "(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2 {weights}>"
BORDERS = 2  # Transposes: of x and of y
SIZES = {"n": 2, "h": 6, "w": 10}


def between(body: str, weights: str = "", channels: int = 8, opset: int = 20, **values: np.ndarray) -> onnx.ModelProto:
    """Return a model with `body` between two convolutions: it computes `b` of that many channels from `a`."""
    head = HEAD.format(weights=weights and f", {weights}").replace("float[8,8,3,3] k2", f"float[8,{channels},3,3] k2")
    text = f"{head} {{ a = Conv <pads = [1,1,1,1]> (x, k1) {body} y = Conv <pads = [1,1,1,1]> (b, k2) }}"
    return parse(text, opset, **values)


@pytest.mark.parametrize(
    ("body", "weights", "inside"),
    [
        ("b = Relu (a)", "", {}),
        ("c = Abs (a) b = Sqrt (c)", "", {"Abs": 1, "Sqrt": 1}),
        ("b = Clip (a, low, high)", "float low = {-0.5}, float high = {0.5}", {}),
        ("b = Min (a, s)", "float s = {3}", {"Min": 1}),
        ("b = Max (a, s)", "float[8,1,1] s", {"Max": 1}),
        ("b = Max (s, a)", "float[1,8,1,1] s", {"Max": 1}),
        ("b = Sub (s, a)", "float[10] s", {"Sub": 1}),
        ("b = Add (a, s)", "float[6,10] s", {"Add": 1}),
        ("c = Exp (a) b = PRelu (c, s)", "float[8,1,1] s", {"Exp": 1, "PRelu": 1}),
        ("c = Greater (a, s) b = Where (c, a, s)", "float[8,1,1] s", {"Greater": 1, "Where": 1}),
        ("c = Exp (a) b = Max (a, c, s)", "float[1] s", {"Exp": 1, "Max": 1}),
        ("c = Exp (a) b = Div (a, c)", "", {"Exp": 1, "Div": 1}),
        ("b = Softmax <axis = 1> (a)", "", {"Softmax": 1}),
        ("b = Softmax <axis = -2> (a)", "", {"Softmax": 1}),
        ("c = ReduceMax <keepdims = 1> (a, axes) b = Sub (a, c)", "int64[1] axes = {1}", {"ReduceMax": 1, "Sub": 1}),
        ("c = ReduceMean (a, axes) b = Sub (a, c)", "int64[2] axes = {2,3}", {"global_average_pool": 1, "Sub": 1}),
        ("c = GlobalAveragePool (a) b = Mul (a, c)", "", {"global_average_pool": 1, "channel_scale": 1}),
        ("c = GlobalAveragePool (a) d = Sigmoid (c) b = Mul (d, a)", "",
         {"global_average_pool": 1, "channel_scale": 1, "Sigmoid": 1}),
        ("b, i = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]> (a)", "", {"max_pool": 1}),
        ("b = MaxPool <kernel_shape = [2,3], strides = [2,1], ceil_mode = 1, dilations = [1,2]> (a)", "",
         {"max_pool": 1}),
        ("b = AveragePool <kernel_shape = [3,2], auto_pad = \"SAME_UPPER\", count_include_pad = 1> (a)", "",
         {"average_pool": 1}),
        ("b = Resize <mode = \"nearest\", coordinate_transformation_mode = \"asymmetric\", nearest_mode = \"floor\">"
         "(a, , scales)", "float[4] scales = {1,1,2,2}", {"resize": 1}),
        ("b = Resize <mode = \"linear\", axes = [-2, -1]> (a, , , sizes)", "int64[2] sizes = {9,7}", {"resize": 1}),
        ("b = Resize <mode = \"linear\", axes = [3, 2]> (a, , scales)", "float[2] scales = {1.5,2}", {"resize": 1}),
        ("c = Slice (a, starts, ends, axes) b = Concat <axis = 1> (c, c)",
         "int64[1] starts = {4}, int64[1] ends = {8}, int64[1] axes = {1}", {"Slice": 1, "concat": 1}),
        ("b = Slice (a, starts, ends)", "int64[4] starts = {0,0,1,2}, int64[4] ends = {9,9,9,9}", {"Slice": 1}),
        ("b = Slice (a, starts, ends, axes, steps)",
         "int64[2] starts = {0,0}, int64[2] ends = {9,9}, int64[2] axes = {-1,2}, int64[2] steps = {2,1}",
         {"Slice": 1}),
        ("c, d = Split <axis = 1, num_outputs = 2> (a) e = Exp (d) b = Concat <axis = -3> (e, c)", "",
         {"split": 1, "Exp": 1, "concat": 1}),
        ("c, d = Split <axis = -1> (a, sizes) b = Concat <axis = 3> (d, c)", "int64[2] sizes = {3,7}",
         {"Split": 1, "Concat": 1}),
        ("c, d = Split <axis = 1, num_outputs = 2> (a) b = Concat <axis = 1> (d, s)", "float[2,4,6,10] s",
         {"split": 1, "Concat": 1}),
        ("c = Cast <to = 11> (a) d, e = Split <axis = 1, num_outputs = 2> (c) f = Concat <axis = 1> (e, d) "
         "b = Cast <to = 1> (f)", "", {"Cast": 2, "Split": 1, "Concat": 1}),
        ("b = Pad (a, pads, value)", "int64[8] pads = {0,0,1,2,0,0,3,4}, float value = {0.5}", {"Pad": 1}),
        ("b = Pad <mode = \"reflect\"> (a, pads, , axes)", "int64[4] pads = {1,2,3,4}, int64[2] axes = {3,2}",
         {"Pad": 1}),
        ("c = Concat <axis = 2> (a, s) b = Exp (c)", "float[2,8,1,10] s", {"Concat": 1, "Exp": 1}),
        ("b = Dropout (a)", "", {}),
        ("c = Cast <to = 11> (a) d = Exp (c) b = Cast <to = 1> (d)", "", {"Cast": 2, "Exp": 1}),
        ("b = Gelu (a)", "", {}),
        ("c = Mul (a, s) t = Sigmoid (c) b = Mul (c, t)", "float[1,8,1,1] s", {"activation": 1}),
    ],
)  # fmt: skip
def test_operators_inside_a_region(body: str, weights: str, inside: dict[str, int]) -> None:
    channels = 8
    model = between(body, weights, channels)
    result = converted(model)
    found = operators(result)
    assert found.pop("conv_bias_activation") == 2
    assert found.pop("Transpose") == BORDERS
    if "activation" in inside:  # the scale is folded into the weights in front of it
        assert sum(found.values()) <= 1
    else:
        assert found == Counter(inside)
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize("opset", range(11, 24))
def test_axes_in_every_opset(opset: int) -> None:
    """Axes, pads, splits and scales were attributes, and became inputs."""
    axes_of_mean = "ReduceMean <axes = [1]> (a)" if opset < 18 else "ReduceMean (a, one)"
    split = "Split <axis = 1> (e)" if opset < 18 else "Split <axis = 1, num_outputs = 2> (e)"
    body = f"""
      c = {axes_of_mean} d = Sub (a, c)
      e = Pad (d, pads)
      f, g = {split}
      i = Concat <axis = 1> (g, f)
      j = Slice (i, begin, end, spatial)
      b = Resize <mode = "nearest"> (j, none, scales)
    """
    weights = """int64[1] one = {1}, int64[8] pads = {0,0,1,1,0,0,1,1}, int64[2] begin = {1,1}, int64[2] end = {6,9},
      int64[2] spatial = {2,3}, float[4] scales = {1,1,2,2}"""
    model = between(body, weights, opset=opset, none=np.zeros(0, np.float32))
    result = converted(model)
    assert operators(result) == {
        "conv_bias_activation": 2, "Transpose": BORDERS, "ReduceMean": 1, "Sub": 1, "Pad": 1, "split": 1, "concat": 1,
        "Slice": 1, "resize": 1,
    }  # fmt: skip
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize("axes", ["", "int64[2] axes = {3,2}"])
def test_computed_pads_are_put_into_order(axes: str) -> None:
    """Those of axes that have none are 0.  An image is padded by half of the batch."""
    count = "two" if axes else "four"
    pad = "Pad (a, pads, , axes)" if axes else "Pad (a, pads)"
    body = f"""s = Shape <end = 1> (a) half = Div (s, two) r = Expand (half, {count}) none = Sub (r, r)
    {"pads = Concat <axis = 0> (none, r)" if axes else "t = Mul (r, spatial) pads = Concat <axis = 0> (none, t)"}
    b = {pad}"""
    weights = "int64[1] two = {2}, int64[1] four = {4}, int64[4] spatial = {0,0,1,3}"
    model = between(body, f"{weights}, {axes}" if axes else weights)
    result = converted(model)
    found = operators(result)
    assert found["Transpose"] == BORDERS and found["Pad"] == 1
    assert_same(model, result.model, **SIZES)


def test_attributes_of_convolutions() -> None:
    text = """(float[n,8,h,w] x) => (float[n,6,p,q] y)
    <float[8,1,3,5] k1, float[12,4,3,3] k2, float[12] b2, float[6,12,1,1] k3>
    { a = Conv <group = 8, auto_pad = "SAME_UPPER", strides = [2, 1]> (x, k1)
      b = Conv <group = 2, dilations = [1, 2], pads = [0, 1, 2, 3]> (a, k2, b2)
      c = Relu (b)
      y = Conv (c, k3) }"""
    model = parse(text)
    result = converted(model)
    depthwise, grouped, last = nodes(result, "conv_bias_activation")
    for node in (depthwise, grouped, last):
        assert attribute(node, "layout") == "nhwc" and attribute(node, "x_layout") is None
        named = set(attribute(node, "attributes").split())
        assert named == {a.name for a in node.attribute} - {"fusion", "operands", "output_types", "attributes"}
    assert [attribute(n, "w_layout") for n in (depthwise, grouped, last)] == ["hwio", "ohwi", "ohwi"]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in result.model.graph.initializer}
    assert [shapes[n.input[1]] for n in (depthwise, grouped, last)] == [(3, 5, 1, 8), (12, 3, 3, 4), (6, 1, 1, 12)]
    assert attribute(depthwise, "auto_pad") == "SAME_UPPER" and attribute(depthwise, "strides") == [2, 1]
    assert attribute(grouped, "pads") == [0, 1, 2, 3] and attribute(grouped, "activation") == "relu"
    assert [attribute(n, "activation") for n in (depthwise, last)] == ["none", "none"]
    assert attribute(depthwise, "operands") == attribute(last, "operands") == "x w"
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_stem_reads_its_image_as_it_is(channels: int) -> None:
    text = f"""(float[n,{channels},h,w] x) => (float[n,8,p,q] y) <float[8,{channels},3,3] k1, float[8,8,3,3] k2>
    {{ a = Conv <strides = [2,2]> (x, k1) b = Relu (a) y = Conv (b, k2) }}"""
    model = parse(text)
    result = converted(model)
    stem, _ = nodes(result, "conv_bias_activation")
    assert attribute(stem, "x_layout") == "nchw" and stem.input[0] == "x"
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": 1}
    assert_same(model, result.model, n=2, h=9, w=11)


def test_few_channels_inside_a_region_are_read_channels_last() -> None:
    text = """(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[3,8,3,3] k1, float[8,3,3,3] k2>
    { a = Conv (x, k1) y = Conv (a, k2) }"""
    model = parse(text)
    result = converted(model)
    assert [attribute(n, "x_layout") for n in nodes(result, "conv_bias_activation")] == [None, None]
    assert operators(result)["Transpose"] == BORDERS
    assert_same(model, result.model, **SIZES)


def test_normalizing_the_image_stays_in_front_of_the_stem() -> None:
    """Operators that are neutral leave a region where that saves a Transpose."""
    text = """(float[n,3,h,w] x) => (float[n,8,p,q] y) <float[3,1,1] mean, float[8,3,3,3] k1, float[8,8,3,3] k2>
    { d = Sub (x, mean) e = Abs (d) a = Conv (e, k1) b = Relu (a) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result)["Transpose"] == 1
    assert_same(model, result.model, **SIZES)


def test_equal_weights_are_stored_once() -> None:
    text = """(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[8,8,3,3] k>
    { a = Conv (x, k) b = Relu (a) c = Conv (b, k) y = Conv (c, k) }"""
    result = converted(parse(text))
    assert len({node.input[1] for node in nodes(result, "conv_bias_activation")}) == 1
    assert [t.name for t in result.model.graph.initializer] == ["k/ohwi"]


@pytest.mark.parametrize("opset", [11, 13, 18, 20])
def test_channels_side_by_side(opset: int) -> None:
    """Each is one operator of channels-last images in a function; equal ones share it."""
    sizes = "Split <axis = 1, split = [2, 5, 1]> (a)" if opset < 13 else "Split <axis = 1> (a, sizes)"
    body = f"""c, d, e = {sizes} f = Exp (c) g = Concat <axis = -3> (e, d, f, d) i = Abs (g)
    j = Concat <axis = 1> (f, d, c, e) k = Concat <axis = 1> (i, j) b = Tanh (k)"""
    model = between(body, "int64[3] sizes = {2,5,1}", channels=23, opset=opset)
    result = converted(model)
    assert operators(result) == {
        "conv_bias_activation": 2, "Transpose": BORDERS, "split": 1, "concat": 3, "Exp": 1, "Abs": 1, "Tanh": 1,
    }  # fmt: skip
    (split,) = nodes(result, "split")
    four, other, two = nodes(result, "concat")
    assert (attribute(split, "axis"), attribute(split, "split")) == (-1, [2, 5, 1])
    assert (attribute(split, "output_types"), attribute(split, "output_ranks")) == ([1, 1, 1], [4, 4, 4])
    assert (attribute(four, "operands"), attribute(two, "operands")) == ("x_0 x_1 x_2 x_3", "x_0 x_1")
    assert four.op_type == other.op_type != two.op_type
    functions = {f.name: [n.op_type for n in f.node if n.op_type != "Constant"] for f in result.model.functions}
    assert [functions[node.op_type] for node in (split, four, two)] == [["Split"], ["Concat"], ["Concat"]]
    for node in (split, four, two):
        assert attribute(node, "layout") == "nhwc"
        named = set(attribute(node, "attributes").split())
        assert named == {a.name for a in node.attribute} - {"fusion", "operands", "output_types", "attributes"}
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(("parts", "fusion"), [(32, "concat"), (33, "Concat")])
def test_a_concat_of_more_tensors_than_a_kernel_takes_is_an_operator(parts: int, fusion: str) -> None:
    model = between(f"b = Concat <axis = 1> ({', '.join(['a'] * parts)})", channels=8 * parts)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": BORDERS, fusion: 1}
    assert_same(model, result.model, **SIZES)


def test_a_residual_before_and_after_the_activation() -> None:
    for body, position in (
        ("e = Relu (a) c = Conv <pads = [1,1,1,1]> (e, k3) d = Add (c, e) b = Relu (d)", "before"),
        ("e = Relu (a) c = Conv <pads = [1,1,1,1]> (e, k3) d = Relu (c) b = Add (d, e)", "after"),
    ):
        model = between(body, "float[8,8,3,3] k3")
        result = converted(model)
        (node,) = (n for n in nodes(result, "conv_bias_activation") if "residual" in attribute(n, "operands"))
        assert attribute(node, "residual_position") == position
        assert operators(result) == {"conv_bias_activation": 3, "Transpose": BORDERS}
        assert_same(model, result.model, **SIZES)


def test_a_squeeze_and_excite_block_stays_inside() -> None:
    """The convolutions of the gate, whose images have one pixel, are in the region, and one node with the mean."""
    body = """m = GlobalAveragePool (a) s = Conv (m, k3) t = Relu (s) e = Conv (t, k4) g = HardSigmoid (e)
    b = Mul (a, g)"""
    model = between(body, "float[4,8,1,1] k3, float[8,4,1,1] k4")
    result = converted(model)
    assert operators(result) == {
        "conv_bias_activation": 2, "Transpose": BORDERS, "squeeze_excite": 1, "channel_scale": 1,
    }  # fmt: skip
    (scale,) = nodes(result, "channel_scale")
    assert attribute(scale, "operands") == "x gate" and attribute(scale, "activation") == "none"
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(
    ("body", "channels", "mode"),
    [
        ("b = DepthToSpace <blocksize = 2> (a)", 2, None),
        ('b = DepthToSpace <blocksize = 2, mode = "CRD"> (a)', 2, "CRD"),
        ("b = SpaceToDepth <blocksize = 2> (a)", 32, None),
    ],
)
def test_blocks_of_pixels(body: str, channels: int, mode: str | None) -> None:
    model = between(body, channels=channels)
    result = converted(model)
    fusion = "space_to_depth" if "Space (" not in body and "SpaceTo" in body else "depth_to_space"
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": BORDERS, fusion: 1}
    (node,) = nodes(result, fusion)
    assert (attribute(node, "blocksize"), attribute(node, "mode"), attribute(node, "layout")) == (2, mode, "nhwc")
    assert_same(model, result.model, **SIZES)


RESIZE = """p = AveragePool <kernel_shape = [3,3], strides = [2,2]> (a)
  s = Shape (p) outer = Slice (s, zero, two) inner = Slice (s, two, four)
  {spatial} sizes = Concat <axis = 0> (outer, t) b = Resize <mode = "linear"{more}> (p, , , {sizes})"""
VECTORS = """int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, int64[1] three = {3},
  int64[2] known = {13,7}, int64[2] odd = {5,3}"""


@pytest.mark.parametrize(
    ("spatial", "more", "sizes", "expected"),
    [
        # of any size: here half as many pixels again, and of another image, and in another order
        ("u = Mul (inner, three) t = Div (u, two)", "", "sizes", {"operands": "x like"}),
        ("i = Shape (a) t = Slice (i, two, four)", "", "sizes", {"operands": "x like"}),
        ("t = Add (inner, odd)", ", axes = [2, 3]", "t", {"operands": "x like"}),
        ("t = Add (inner, odd)", ", axes = [-1, 2]", "t", {"operands": "x like"}),
        # multiples of those of the image, and known ones beside a batch that is not
        ("t = Mul (inner, three)", "", "sizes", {"operands": "x", "scales": [1.0, 3.0, 3.0, 1.0]}),
        ("t = Mul (inner, two)", ", axes = [2, 3]", "t", {"operands": "x", "scales": [1.0, 2.0, 2.0, 1.0]}),
        ("t = Identity (known)", "", "sizes", {"operands": "x", "sizes": [0, 13, 7, 8]}),
    ],
)
def test_resizing_to_computed_sizes(spatial: str, more: str, sizes: str, expected: dict[str, object]) -> None:
    model = between(RESIZE.format(spatial=spatial, more=more, sizes=sizes), VECTORS)
    result = converted(model)
    found = operators(result)
    assert found["Transpose"] == BORDERS and found["resize"] == 1, result.layout.ends
    (node,) = nodes(result, "resize")
    assert {name: attribute(node, name) for name in expected} == expected
    assert len(node.input) == len(str(expected["operands"]).split())
    assert_same(model, result.model, **SIZES)


def test_a_constant_may_have_a_name_that_bodies_use() -> None:
    """Older exporters give a Resize empty scales beside its sizes."""
    body = RESIZE.format(spatial="t = Mul (inner, two)", more="", sizes="sizes").replace("(p, , , ", "(p, , scales, ")
    model = between(body, f"{VECTORS}, float[0] scales")
    result = converted(model)
    assert attribute(nodes(result, "resize")[0], "scales") == [1.0, 2.0, 2.0, 1.0]
    assert_same(model, result.model, **SIZES)


def test_empty_scales_may_be_an_input_of_the_graph() -> None:
    body = RESIZE.format(spatial="t = Identity (known)", more="", sizes="sizes").replace("(p, , , ", "(p, , scales, ")
    model = between(body.replace("(p, , ", "(p, scales, "), f"{VECTORS}, float[0] scales", opset=11)
    model.graph.input.append(onnx.helper.make_tensor_value_info("scales", onnx.TensorProto.FLOAT, [0]))
    result = converted(model)
    assert operators(result)["resize"] == 1, result.layout.ends
    assert_same(model, result.model, **SIZES)


def test_computed_sizes_cost_no_more_nodes() -> None:
    """Sizes that are joined of those of two images are taken from the second, without those of the first."""
    model = between(RESIZE.format(spatial="i = Shape (a) t = Slice (i, two, four)", more="", sizes="sizes"), VECTORS)
    result = converted(model)
    shapes = [node.op_type for node in result.model.graph.node if not node.domain and node.op_type != "Transpose"]
    assert sorted(shapes) == ["Concat", "Gather", "Reshape", "Shape"]
    like = nodes(result, "resize")[0].input[1]
    (info,) = (value.type.tensor_type for value in result.model.graph.value_info if value.name == like)
    assert [dim.dim_param or dim.dim_value for dim in info.shape.dim] == [0, "h", "w"], "which plans need to know"


@pytest.mark.parametrize(
    ("opset", "op", "scales", "mode", "rounding"),
    [
        (9, "Upsample", "1,1,2,2", "nearest", "floor"),
        (9, "Upsample", "1,1,1.5,1", "linear", "floor"),
        (10, "Resize", "1,1,1,2.5", "nearest", "floor"),
        (10, "Resize", "1,1,1.5,0.7", "linear", "ceil"),
        (10, "Resize", "1,1,0.5,0.4", "nearest", "ceil"),
    ],
)
def test_resizing_before_opset_11(opset: int, op: str, scales: str, mode: str, rounding: str) -> None:
    """Coordinates were asymmetric, and onnxruntime rounds them down where images become larger, else up."""
    model = between(f'b = {op} <mode = "{mode}"> (a, scales)', f"float[4] scales = {{{scales}}}", opset=opset)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": BORDERS, "resize": 1}
    (node,) = nodes(result, "resize")
    assert attribute(node, "coordinate_transformation_mode") == "asymmetric"
    assert attribute(node, "nearest_mode") == rounding
    assert_same(model, result.model, **SIZES)


def test_symmetric_coordinates_of_whole_scales_are_half_pixels() -> None:
    coordinates = 'coordinate_transformation_mode = "half_pixel_symmetric"'
    model = between(f"b = Resize <{coordinates}> (a, , scales)", "float[4] scales = {1,1,2,3}")
    result = converted(model)
    (node,) = nodes(result, "resize")
    assert attribute(node, "coordinate_transformation_mode") == "half_pixel"
    assert_same(model, result.model, **SIZES)


def test_the_largest_blocks_are_those_that_a_kernel_takes() -> None:
    """Others stay channels-first: a node without a kernel would run between two Transposes."""
    host: Any = find_host("space_to_depth")
    assert host.MAX_BLOCK == MAX_BLOCK
    text = """(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[648,8,1,1] k1, float[8,8,1,1] k2>
    { a = Conv (x, k1) b = DepthToSpace <blocksize = 9> (a) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result)["DepthToSpace"] == 1
    assert any("its blocks have 9 x 9 pixels; the kernel takes up to 8 x 8" in e.reason for e in result.layout.ends)
    assert_same(model, result.model, n=1, h=2, w=3)


def test_group_norm_inside_a_region() -> None:
    body = """r = Reshape (a, groups) i = InstanceNormalization (r, ones, zeros) t = Reshape (i, shape)
    u = Mul (t, scale) b = Add (u, shift)"""
    weights = """int64[3] groups = {0,4,-1}, float[4] ones = {1,1,1,1}, float[4] zeros = {0,0,0,0},
      int64[4] shape = {2,8,6,10}, float[8,1,1] scale, float[8,1,1] shift"""
    text = between(body, weights)
    text.graph.input[0].type.tensor_type.shape.CopyFrom(
        onnx.helper.make_tensor_type_proto(1, [2, 8, 6, 10]).tensor_type.shape
    )
    result = converted(text)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": BORDERS, "group_norm": 1}
    assert attribute(nodes(result, "group_norm")[0], "layout") == "nhwc"
    assert_same(text, result.model)


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("r = Reshape (a, rows) s = Exp (r) i = Shape (a) b = Reshape (s, i)", "int64[3] rows = {0,0,-1}"),
        ("r = Reshape (a, volume) s = Softmax <axis = 1> (r) i = Shape (a) b = Reshape (s, i)",
         "int64[5] volume = {0,8,0,-1,2}"),
        ("i = Shape (a) o = Slice (i, zero, two) r0 = Concat <axis = 0> (o, pixels) r = Reshape (a, r0) "
         "s = LogSoftmax <axis = 2> (r) b = Reshape (s, i)",
         "int64[1] zero = {0}, int64[1] two = {2}, int64[2] pixels = {-1,5}"),
    ],
)  # fmt: skip
def test_pixels_are_joined_and_divided(body: str, weights: str) -> None:
    """Images and channels stay, so that the target is put into order; it may be computed."""
    model = between(body, weights)
    result = converted(model)
    found = operators(result)
    assert found["Transpose"] == BORDERS and found["Reshape"] == 2, result.layout.ends
    assert_same(model, result.model, **SIZES)


def test_a_scale_of_each_image_behind_an_instance_norm() -> None:
    """It stays a product, which joins the norm, unless something else reads the norm's result."""
    style = "s = GlobalAveragePool (a) i = InstanceNormalization (a, ones, zeros) m = Mul (i, s) b = Add (m, s)"
    weights = "float[8] ones = {1,1,1,1,1,1,1,1}, float[8] zeros = {0,0,0,0,0,0,0,0}"
    pools = {"conv_bias_activation": 2, "Transpose": BORDERS, "global_average_pool": 1, "group_norm": 1}
    model = between(style, weights)
    result = converted(model)
    assert operators(result) == {**pools, "Mul": 1, "Add": 1}
    assert_same(model, result.model, **SIZES)
    model = between(style.replace("b = Add (m, s)", "b = Add (m, i)"), weights)
    assert operators(converted(model)) == {**pools, "channel_scale": 1}


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("b = Gather <axis = 1> (a, order)", "int64[8] order = {0,4,1,5,2,6,3,7}"),  # a shuffle of channels
        ("g = Gather <axis = -1> (a, order) r = Relu (g) b = Add (r, r)", "int64[3] order = {2,0,2}"),
    ],
)
def test_gather_of_a_list(body: str, weights: str) -> None:
    model = between(body, weights)
    result = converted(model)
    found = operators(result)
    assert (found["Transpose"], found["Gather"], found["conv_bias_activation"]) == (BORDERS, 1, 2)
    assert_same(model, result.model, **SIZES)


def test_gather_of_one_element_ends_a_region() -> None:
    """Its result has one axis less."""
    model = between("g = Gather <axis = 2> (a, one) u = Unsqueeze (g, axis) b = Add (a, u)",
                    "int64 one = {1}, int64[1] axis = {2}")  # fmt: skip
    result = converted(model)
    assert operators(result)["Transpose"] > BORDERS
    assert_same(model, result.model, **SIZES)


def test_shapes_of_images_are_put_into_order() -> None:
    """Only the order of four numbers changes, so that no image is transposed for them."""
    body = "b = Relu (a) s = Shape <start = 2> (b) f = Cast <to = 1> (s) g = ReduceSum <keepdims = 0> (f)"
    model = between(body)
    model.graph.output.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.INT64, [2]))
    result = converted(model)
    assert operators(result)["Transpose"] == BORDERS
    assert_same(model, result.model, **SIZES)


def test_places_of_a_shape_are_taken_of_the_channels_last_one() -> None:
    """So a node that takes a constant place costs no node more."""
    body = """s = Shape (a)
    h = Gather (s, two) spatial = Slice (s, starts, ends) t = Slice (s, starts, ends, zeros, steps)
    p = Concat <axis = 0> (h, spatial, t) f = Cast <to = 1> (p) g = ReduceSum <keepdims = 0> (f) b = Relu (a)"""
    weights = (
        "int64[1] two = {-2}, int64[1] starts = {1}, int64[1] ends = {9}, int64[1] zeros = {0}, int64[1] steps = {2}"
    )
    model = between(body, weights)
    model.graph.output.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.INT64, [6]))
    result = converted(model)
    assert operators(result)["Transpose"] == BORDERS
    gathers = [node.input[0] for node in result.model.graph.node if node.op_type == "Gather"]
    assert gathers == ["s/nhwc"] * 3, "the third has the order of the channels-first shape"
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(
    "tail",
    [
        "g = GlobalAveragePool (a) y = Flatten (g)",
        "g = GlobalAveragePool (a) y = Reshape (g, flat)",
        "g = GlobalAveragePool (a) y = Squeeze (g, spatial)",
        "y = ReduceMean <keepdims = 0> (a, spatial)",
        "y = ReduceMean <keepdims = 2> (a, spatial)",  # 0 in onnxruntime
        "y = ReduceL1 <keepdims = -2> (a, spatial)",
    ],
)
def test_one_pixel_needs_no_transpose(tail: str) -> None:
    text = f"""(float[n,3,h,w] x) => (float[n,8] y)
    <float[8,3,3,3] k1, int64[2] flat = {{0,-1}}, int64[2] spatial = {{2,3}}>
    {{ a = Conv (x, k1) {tail} }}"""
    model = parse(text)
    result = converted(model)
    assert operators(result)["Transpose"] == 0, operators(result)
    assert_same(model, result.model, **SIZES)


def test_no_channel_of_one_pixel_is_left() -> None:
    """A Reshape to [n, 0, 1, 1] would keep the second axis, of size 1, where a Transpose makes it the empty one."""
    text = """(float[2,3,h,w] x) => (float[2,0,1,1] y) <float[8,3,3,3] k1, int64[1] at = {3}, int64[1] axis = {1}>
    { a = Conv (x, k1) g = GlobalMaxPool (a) y = Slice (g, at, at, axis) }"""
    model = parse(text)
    assert_same(model, converted(model).model, **SIZES)


def test_one_pixel_that_is_computed_elsewhere() -> None:
    """The embedding of a diffusion step: (N, C, 1, 1) has the elements of (N, 1, 1, C) in the same order."""
    text = """(float[n,8,h,w] x, float[n,8] step) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2,
      int64[2] axes = {2,3}>
    { a = Conv (x, k1) e = Unsqueeze (step, axes) b = Add (a, e) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result)["Transpose"] == BORDERS
    assert_same(model, result.model, **SIZES)


def test_layer_norm_between_transposes() -> None:
    """The Transposes of a ConvNeXt vanish, those around its norms and those around its products."""
    text = """(float[n,3,h,w] x) => (float[n,8,p,q] y)
    <float[8,3,2,2] k1, float[8,1,7,7] k2, float[8] s, float[8] t, float[8,16] w1, float[16,8] w2, float[8,8,2,2] k3>
    { a = Conv <strides = [2,2]> (x, k1)
      b = Conv <group = 8, pads = [3,3,3,3]> (a, k2)
      c = Transpose <perm = [0,2,3,1]> (b)
      d = LayerNormalization (c, s, t)
      e = MatMul (d, w1) f = Gelu (e) g = MatMul (f, w2)
      i = Transpose <perm = [0,3,1,2]> (g)
      j = Add (a, i)
      y = Conv <strides = [2,2]> (j, k3) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result)["Transpose"] == 1  # of y
    assert_same(model, result.model, n=2, h=16, w=20)


def test_rows_of_pixels() -> None:
    """Images that become rows of pixels, as vision transformers read them, need no Transpose."""
    text = """(float[n,3,16,16] x) => (float[n,256,8] y)
    <float[8,3,3,3] k1, float[8,8,3,3] k2, int64[3] rows = {0,8,-1}>
    { a = Conv <pads = [1,1,1,1]> (x, k1) b = Conv <pads = [1,1,1,1]> (a, k2)
      c = Reshape (b, rows) y = Transpose <perm = [0,2,1]> (c) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Reshape": 1}
    assert_same(model, result.model, n=2)


@pytest.mark.parametrize(
    ("body", "weights", "transposes", "reason"),
    [
        ("c, i = MaxPool <kernel_shape = [2,2]> (a) d = Cast <to = 1> (i) b = Add (c, d)", "", 4,
         "its second output is read"),
        ("b = Softmax <axis = 3> (a)", "", 4, "its fusion has no channels-last form"),
        ("b = CumSum (a, s)", "int64 s = {3}", 4, "its operator has no channels-last form"),
        ("b = LRN <size = 3> (a)", "", 4, "its operator has no channels-last form"),
        ("c = Reshape (a, groups) d = Abs (c) e = Neg (d) b = Reshape (e, image)",
         "int64[5] groups = {0,2,4,6,10}, int64[4] image = {0,8,6,10}", 4,
         "it does not keep both its images and its channels"),
        ("b = Resize <mode = \"cubic\"> (a, , scales)", "float[4] scales = {1,1,2,2}", 4,
         "its mode is cubic, neither nearest nor linear"),
        ("b = Resize <mode = \"linear\", antialias = 1> (a, , scales)", "float[4] scales = {1,1,0.5,0.5}", 4,
         "it filters an image that it makes smaller (antialias)"),
        ("b = Resize <keep_aspect_ratio_policy = \"not_larger\", axes = [2, 3]> (a, , , sizes)",
         "int64[2] sizes = {9,9}", 4, "it keeps the ratio of its sizes (keep_aspect_ratio_policy is not_larger)"),
        ("b = Resize <coordinate_transformation_mode = \"half_pixel_symmetric\"> (a, , scales)",
         "float[4] scales = {1,1,2,1.3}", 4,
         "its coordinate_transformation_mode is half_pixel_symmetric, and its scales are not integers"),
        ("b = Resize <coordinate_transformation_mode = \"tf_crop_and_resize\"> (a, roi, scales)",
         "float[8] roi = {0,0,0,0,1,1,1,1}, float[4] scales = {1,1,2,2}", 4,
         "its coordinate_transformation_mode is tf_crop_and_resize"),
        ("t = Shape (a) f = Cast <to = 1> (t) r = Div (f, f) scales = Mul (r, s) b = Resize (a, , scales)",
         "float[4] s = {1,1,1.5,2}", 4, "its scales are computed, or not one for each axis"),
        ("m = ReduceMean <keepdims = 0> (a) r = Mul (k, m) b = Conv (a, r)", "float[8,8,3,3] k", 4,
         "its weights 'r' are not constant"),
    ],
)  # fmt: skip
def test_where_regions_end(body: str, weights: str, transposes: int, reason: str) -> None:
    model = between(body, weights)
    result = converted(model)
    assert operators(result)["Transpose"] == transposes
    assert any(end.reason.endswith(f"is channels-first: {reason}") for end in result.layout.ends), result.layout.ends
    assert_same(model, result.model, **SIZES)


def test_scales_that_are_not_one_for_each_axis_are_left_to_onnxruntime() -> None:
    """They are an error when the model runs."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
    resized (float[1,8,height] x) => (float[] y) <float[1] scales = {1}> { y = Resize (x, , scales) }"""
    _, report = onnxfuse.optimize(onnx.parser.parse_model(text), layout="nhwc", verify=False)
    assert "resize" not in report.counts


@pytest.mark.parametrize("opset", [11, 20])
def test_a_part_of_an_image_that_a_resize_does_not_read_may_be_computed(opset: int) -> None:
    body = "n = ReduceSum <keepdims = 0> (a) m = Reshape (n, one) roi = Concat <axis = 0> (m, m, m, m, m, m, m, m) "
    body += 'b = Resize <nearest_mode = "floor"> (a, roi, scales)'
    model = between(body, "float[4] scales = {1,1,2,2}, int64[1] one = {1}", opset=opset)
    result = converted(model)
    assert any(each.fusion == "resize" for each in result.layout.fused)
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize("regions", [True, False])
def test_an_activation_of_a_concat_is_in_one_region_with_it(regions: bool) -> None:
    """Without regions the Concat has a kernel of its own."""
    body = "c = Conv (a, k3) d = Abs (a) g = Concat <axis = 1> (c, d) b = Relu (g)"
    model = between(body, "float[8,8,1,1] k3", channels=16)
    optimized, report = onnxfuse.optimize(model, layout="nhwc", regions=regions, verify=False)
    left = Counter(node.op_type for node in optimized.graph.node if node.domain == "")
    assert (report.counts.get("concat", 0), report.counts.get("region", 0)) == ((0, 1) if regions else (1, 0))
    assert (left["Concat"], left["Relu"]) == (0, not regions)
    assert_same(model, optimized, **SIZES)
