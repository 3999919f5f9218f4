"""A BatchNormalization reads the parts of its image where nothing else reads their Concat."""

from __future__ import annotations

import pytest
from layout_models import assert_same, attribute, converted, operators, parse

from onnxfuse import optimize, unfuse

LAYER = """(float[n,8,h,w] x) => (float[n,8,h,w] y{output})
  <float[8,8,3,3] k1, float[8,24,3,3] k2, float[24] g, float[24] t, float[24] m,
   float[24] v = {{1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}}>
  {{ a = Conv <pads = [1,1,1,1]> (x, k1) b = Conv <pads = [1,1,1,1]> (a, k1) c = Concat <axis = 1> ({parts})
     d = BatchNormalization (c, g, t, m, v) e = Relu (d) {other} y = Conv <pads = [1,1,1,1]> (e, k2) }}"""


@pytest.mark.parametrize("parts", ["x, a, b", "a, a, b"])
def test_a_layer_of_a_densenet(parts: str) -> None:
    source = parse(LAYER.format(parts=parts, other="", output=""))
    result = converted(source)
    found = operators(result)
    assert found["batch_norm_activation"] == 1 and not {"concat", "Concat"} & found.keys()
    (norm,) = (node for node in result.model.graph.node if attribute(node, "fusion") == "batch_norm_activation")
    assert len(norm.input) == 7 and attribute(norm, "operands").split()[:3] == ["x_0", "x_1", "x_2"]
    (record,) = (one for one in result.fused if one.fusion == "batch_norm_activation")
    assert {"c", "d", "e"} <= set(record.replaces)
    assert_same(source, result.model, n=2, h=6, w=10)
    assert_same(source, unfuse(result.model)[0], n=2, h=6, w=10)
    assert optimize(source, layout="nhwc", timeout=None)[1].verified.status == "verified"


def test_a_concat_that_others_read_stays() -> None:
    source = parse(LAYER.format(parts="x, a, b", other="z = Abs (c)", output=", float[n,24,h,w] z"))
    assert operators(converted(source, regions=False))["concat"] == 1
