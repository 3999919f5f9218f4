"""Regions take channels-last Concats, Splits and gates where they are cheaper there; the others have own kernels."""

from __future__ import annotations

import pytest
from layout_models import assert_same, converted, operators, parse

from onnxfuse import optimize

SIZES = {"n": 2, "h": 6, "w": 10}
HEAD = """(float[n,8,h,w] x) => (float[n,8,h,w] y)
  <float[16,8,3,3] k1, float[8,8,3,3] k2, float[8,16,3,3] k3, float[16,1,3,3] k4, float[16,16,1,1] k5,
   int64[1] channels = {{1}}, int64[5] pairs = {{2,2,8,6,10}}, int64[4] image = {{2,16,6,10}}>
  {{ a = Conv <pads = [1,1,1,1]> (x, k1) {body} }}"""
HALVES = "c, d = Split <axis = 1, num_outputs = 2> (a) "


@pytest.mark.parametrize(
    "body",
    [
        # gates of halves: NAFNet, GLU, WaveNet
        HALVES + "e = Mul (c, d) y = Conv <pads = [1,1,1,1]> (e, k2)",
        HALVES + "s = Sigmoid (d) e = Mul (c, s) y = Conv <pads = [1,1,1,1]> (e, k2)",
        HALVES + "t = Tanh (c) s = Sigmoid (d) e = Mul (t, s) y = Conv <pads = [1,1,1,1]> (e, k2)",
        # a sum of joined images: GhostNet
        """e = Conv <pads = [1,1,1,1]> (a, k3) f = Conv <pads = [1,1,1,1]> (e, k2) g = Concat <axis = 1> (e, f)
        j = Add (g, a) y = Conv <pads = [1,1,1,1]> (j, k3)""",
        # a gated image that is also reduced: CBAM
        """m = GlobalMaxPool (a) n = Conv (m, k5) s = Sigmoid (n) b = Mul (a, s)
        p = ReduceMean (b, channels) q = ReduceMax (b, channels) o = Add (p, q) r = Sigmoid (o) t = Mul (b, r)
        y = Conv <pads = [1,1,1,1]> (t, k3)""",
    ],
    ids=["halves", "glu", "two activations", "sum", "reduced gate"],
)
def test_regions_take_what_is_beside_elementwise_operators(body: str) -> None:
    """By estimate, a channels-last model costs no more than a channels-first one, but for Transposes at its ends."""
    source = parse(HEAD.format(body=body))
    last, first = (converted(source, layout, regions=True) for layout in ("nhwc", "nchw"))
    found = operators(last)
    assert found["region"] == 1 and not {"concat", "split", "channel_scale", "Split", "Concat"} & found.keys()
    (region,) = (one for one in last.fused if one.fusion == "region")
    assert set(region.replaces) <= {name for node in source.graph.node for name in node.output} | {"Transpose"}
    assert last.after.launches - found["Transpose"] <= first.after.launches
    assert_same(source, last.model, **SIZES)
    assert optimize(source, layout="nhwc", timeout=None)[1].verified.status == "verified"


def test_a_channel_shuffle_is_one_region() -> None:
    """As in ShuffleNet, two images are joined, their channels are interleaved, and the result is halved again."""
    body = (
        HALVES
        + """e = Conv <pads = [1,1,1,1]> (c, k2) f = Concat <axis = 1> (e, d)
      g = Reshape (f, pairs) i = Transpose <perm = [0,2,1,3,4]> (g) j = Reshape (i, image)
      l, m = Split <axis = 1, num_outputs = 2> (j) o = Conv <pads = [1,1,1,1]> (l, k2) r = Concat <axis = 1> (o, m)
      y = Conv <pads = [1,1,1,1]> (r, k3)"""
    )
    source = parse(HEAD.format(body=body).replace("float[n,8,h,w] x", "float[2,8,6,10] x"))
    result = converted(source, regions=True)
    found = operators(result)
    assert found == {"conv_bias_activation": 4, "Transpose": 2, "split": 1, "region": 1, "concat": 1}
    assert_same(source, result.model)


def test_others_have_kernels_of_their_own() -> None:
    """Each is the node that it is without regions, and equal ones share a function."""
    body = (
        HALVES
        + """e = Conv <pads = [1,1,1,1]> (c, k2) f = Conv <pads = [1,1,1,1]> (d, k2)
      g = Concat <axis = 1> (e, f) p = GlobalMaxPool (g) b = Mul (g, p) j = Conv <group = 16, pads = [1,1,1,1]> (b, k4)
      o, r = Split <axis = 1, num_outputs = 2> (j) s = Conv (o, k2) t = Conv (r, k2) u = Concat <axis = 1> (s, t)
      y = Conv <pads = [2,2,2,2]> (u, k3)"""
    )
    source = parse(HEAD.format(body=body))
    result, without = (converted(source, regions=regions) for regions in (True, False))
    found = operators(result)
    assert found == operators(without) and found["concat"] == found["split"] == 2 and found["channel_scale"] == 1
    nodes = {node.name: node.op_type for node in result.model.graph.node}
    assert nodes == {node.name: node.op_type for node in without.model.graph.node}
    assert [f.name for f in result.model.functions] == [f.name for f in without.model.functions]
    assert {one.node for one in result.fused} == {one.node for one in without.fused}
    assert_same(source, result.model, **SIZES)
