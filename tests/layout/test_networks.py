"""Test blocks of well-known networks: their regions hold together, and what they compute stays the same."""

from __future__ import annotations

import pytest
from layout_models import assert_same, converted, operators, parse
from onnx import numpy_helper
from random_images import check

CSP = """(float[n,3,h,w] x) => (float[n,20,r] y)
<float[16,3,3,3] k0, float[16,16,1,1] k1, float[8,8,3,3] k2, float[8,8,3,3] k3, float[16,24,1,1] k4,
 float[8,16,1,1] k5, float[16,32,1,1] k6, float[16,16,3,3] k7, float[20,32,1,1] k8, float[20] b8,
 float[4] scales = {1,1,2,2}, int64[3] rows = {0,20,-1}>
{
  a0 = Conv <strides = [2,2], pads = [1,1,1,1]> (x, k0)  s0 = Sigmoid (a0)  a = Mul (a0, s0)
  b0 = Conv (a, k1)  s1 = Sigmoid (b0)  b = Mul (b0, s1)
  c, d = Split <axis = 1, num_outputs = 2> (b)
  e0 = Conv <pads = [1,1,1,1]> (d, k2)  s2 = Sigmoid (e0)  e = Mul (e0, s2)
  f0 = Conv <pads = [1,1,1,1]> (e, k3)  s3 = Sigmoid (f0)  f1 = Mul (f0, s3)  f = Add (d, f1)
  g = Concat <axis = 1> (c, d, f)
  i0 = Conv (g, k4)  s4 = Sigmoid (i0)  i = Mul (i0, s4)
  j = Conv (i, k5)
  p1 = MaxPool <kernel_shape = [5,5], pads = [2,2,2,2]> (j)
  p2 = MaxPool <kernel_shape = [5,5], pads = [2,2,2,2]> (p1)
  p3 = MaxPool <kernel_shape = [5,5], pads = [2,2,2,2]> (p2)
  q = Concat <axis = 1> (j, p1, p2, p3)
  l = Conv (q, k6)
  m = Conv <strides = [2,2], pads = [1,1,1,1]> (l, k7)
  u = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (m, , scales)
  v = Concat <axis = 1> (u, l)
  o = Conv (v, k8, b8)
  z = Reshape (o, rows)
  y = Sigmoid (z)
}"""
DENSE = """(float[n,3,h,w] x) => (float[n,24,1,1] y)
<float[8,3,3,3] k0, float[8] s1, float[8] b1, float[8] m1, float[8] v1, float[8,8,1,1] k1, float[8,8,3,3] k2,
 float[16] s2, float[16] b2, float[16] m2, float[16] v2, float[8,16,3,3] k3>
{
  a = Conv <strides = [2,2]> (x, k0)
  n1 = BatchNormalization (a, s1, b1, m1, v1)  r1 = Relu (n1)
  c1 = Conv (r1, k1)  c2 = Relu (c1)  d1 = Conv <pads = [1,1,1,1]> (c2, k2)
  e = Concat <axis = 1> (a, d1)
  n2 = BatchNormalization (e, s2, b2, m2, v2)  r2 = Relu (n2)
  d2 = Conv <pads = [1,1,1,1]> (r2, k3)
  f = Concat <axis = 1> (e, d2)
  t = AveragePool <kernel_shape = [2,2], strides = [2,2]> (f)
  y = GlobalAveragePool (t)
}"""
UNET = """(float[2,4,8,8] x, float[2,16] step) => (float[2,4,8,8] y)
<float[16,4,3,3] k0, float[16,16] wt, float[16,16,3,3] k1, float[16] g, float[16] b, int64[3] groups = {0,4,-1},
 int64[4] image = {2,16,8,8}, float[4] ones = {1,1,1,1}, float[4] zeros = {0,0,0,0}, float[16,1,1] g3, float[16,1,1] b3,
 int64[2] axes = {2,3}, int64[3] rows = {0,64,16}, int64[4] square = {0,8,8,16}, float[16,16] wq, float[16,16] wo,
 float[4,16,3,3] k2>
{
  a = Conv <pads = [1,1,1,1]> (x, k0)
  r = Reshape (a, groups)  i = InstanceNormalization (r, ones, zeros)  j = Reshape (i, image)
  k = Mul (j, g3)  l = Add (k, b3)  ls = Sigmoid (l)  m = Mul (l, ls)
  c = Conv <pads = [1,1,1,1]> (m, k1)
  e0 = MatMul (step, wt)  e = Unsqueeze (e0, axes)
  d = Add (c, e)
  f = Add (a, d)
  p = Transpose <perm = [0,2,3,1]> (f)  q = Reshape (p, rows)
  n = LayerNormalization (q, g, b)
  s = MatMul (n, wq)  t = Softmax <axis = -1> (s)  o = MatMul (t, wo)
  u = Add (o, q)
  v = Reshape (u, square)  w = Transpose <perm = [0,3,1,2]> (v)
  z = Add (w, a)
  y = Conv <pads = [1,1,1,1]> (z, k2)
}"""

# What is halved and doubled is padded to the size of the image that it is joined to, as PyTorch exports it.
PADDED_UNET = """(float[n,3,h,w] x) => (float[n,2,h,w] y)
<float[16,3,3,3] k0, float[32,16,3,3] k1, float[32,16,2,2] k2, float[16,32,3,3] k3, float[2,16,1,1] k4,
 int64 two = {2}, int64 three = {3}, int64[1] zero = {0}, int64[2] zeros = {0,0}>
{
  a0 = Conv <pads = [1,1,1,1]> (x, k0)  a = Relu (a0)
  p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a)
  b0 = Conv <pads = [1,1,1,1]> (p, k1)  b = Relu (b0)
  u = ConvTranspose <strides = [2,2]> (b, k2)
  sa = Shape (a)  su = Shape (u)
  h0 = Gather (sa, two)  h1 = Gather (su, two)  dh = Sub (h0, h1)  top = Div (dh, two)  bottom = Sub (dh, top)
  w0 = Gather (sa, three)  w1 = Gather (su, three)  dw = Sub (w0, w1)  left = Div (dw, two)  right = Sub (dw, left)
  t1 = Unsqueeze (top, zero)  l1 = Unsqueeze (left, zero)  b1 = Unsqueeze (bottom, zero)  r1 = Unsqueeze (right, zero)
  pads = Concat <axis = 0> (zeros, t1, l1, zeros, b1, r1)
  v = Pad (u, pads)
  j = Concat <axis = 1> (a, v)
  c0 = Conv <pads = [1,1,1,1]> (j, k3)  c = Relu (c0)
  y = Conv (c, k4)
}"""
FPN = """(float[n,3,h,w] x) => (float[n,8,h2,w2] y2, float[n,8,h4,w4] y4, float[n,8,h8,w8] y8)
<float[16,3,3,3] k0, float[16,16,3,3] k1, float[16,16,3,3] k2, float[16,16,1,1] i0, float[16,16,1,1] i1,
 float[16,16,1,1] i2, float[8,16,3,3] o, float[4] scales = {1,1,2,2}>
{
  a0 = Conv <pads = [1,1,1,1], strides = [2,2]> (x, k0)  a = Relu (a0)
  b0 = Conv <pads = [1,1,1,1], strides = [2,2]> (a, k1)  b = Relu (b0)
  c0 = Conv <pads = [1,1,1,1], strides = [2,2]> (b, k2)  c = Relu (c0)
  p8 = Conv (c, i2)
  l4 = Conv (b, i1)  u4 = Resize <mode = "nearest"> (p8, , scales)  p4 = Add (l4, u4)
  l2 = Conv (a, i0)  u2 = Resize <mode = "nearest"> (p4, , scales)  p2 = Add (l2, u2)
  y8 = Conv <pads = [1,1,1,1]> (p8, o)
  y4 = Conv <pads = [1,1,1,1]> (p4, o)
  y2 = Conv <pads = [1,1,1,1]> (p2, o)
}"""

# Blocks of a SegFormer: rows of pixels, whose feed-forward part has a depthwise convolution of the image again.
ROWS = """(float[n,3,h,w] x) => (float[n,8,p,q] y)
<float[16,3,3,3] k0, float[16] g, float[16] b, float[16,32] w1, float[32] b1, float[32,1,3,3] k1, float[32,16] w2,
 float[8,16,1,1] k2, int64[3] rows = {0,16,-1}, int64[1] wide = {32}, int64[1] narrow = {16}, int64[1] zero = {0},
 int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[3] wide_rows = {0,32,-1}>
{
  a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, k0)
  s = Shape (a)  n0 = Slice (s, zero, one)  spatial = Slice (s, two, four)
  r = Reshape (a, rows)  t = Transpose <perm = [0,2,1]> (r)
  l = LayerNormalization (t, g, b)
  m0 = MatMul (l, w1)  m = Add (m0, b1)
  u = Transpose <perm = [0,2,1]> (m)  shape1 = Concat <axis = 0> (n0, wide, spatial)  v = Reshape (u, shape1)
  c = Conv <pads = [1,1,1,1], group = 32> (v, k1)
  d = Reshape (c, wide_rows)  e = Transpose <perm = [0,2,1]> (d)  f = Relu (e)
  i = MatMul (f, w2)  j = Add (i, t)
  o = Transpose <perm = [0,2,1]> (j)  shape2 = Concat <axis = 0> (n0, narrow, spatial)  z = Reshape (o, shape2)
  y = Conv (z, k2)
}"""


@pytest.mark.parametrize(
    ("text", "transposes", "sizes"),
    [
        pytest.param(CSP, 1, {"n": 2, "h": 32, "w": 48}, id="csp"),  # in front of the rows
        pytest.param(DENSE, 0, {"n": 2, "h": 17, "w": 23}, id="dense"),
        pytest.param(UNET, 1, {}, id="unet"),  # of the output; the stem reads the input as it is
        pytest.param(PADDED_UNET, 1, {"n": 2, "h": 13, "w": 10}, id="padded unet"),
        pytest.param(FPN, 3, {"n": 2, "h": 32, "w": 48}, id="fpn"),
        pytest.param(ROWS, 1, {"n": 2, "h": 13, "w": 10}, id="rows of pixels"),
    ],
)
def test_networks(text: str, transposes: int, sizes: dict[str, int]) -> None:
    model = parse(text)
    for tensor in model.graph.initializer:  # variances are positive
        if tensor.name in ("v1", "v2"):
            tensor.CopyFrom(numpy_helper.from_array(abs(numpy_helper.to_array(tensor)) + 1, tensor.name))
    result = converted(model, "auto")
    found = operators(result)
    assert found["Transpose"] == transposes, (found, result.layout.ends)
    assert found["Conv"] == found["BatchNormalization"] == found["MaxPool"] == found["Resize"] == 0
    assert_same(model, result.model, **sizes)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(16))
def test_random_networks(seed: int, axes: int) -> None:
    check(seed, axes)
