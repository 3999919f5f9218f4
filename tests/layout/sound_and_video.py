"""Small networks of sound, which have one spatial axis, and of videos, which have three, in float16."""

from __future__ import annotations

import numpy as np
import onnx
from layout_models import parse
from onnx import numpy_helper

WAV2VEC = """(float16[n,1,t] x) => (float16[n,r,16] y)
<float16[16,1,10] k0, float16[16] g, float16[16] b, float16[16,16,3] k1, float16[16,16,2] k2, float16[16,16] w,
 float16[16,4,8] kp, float16[16] bp, int64[1] zero = {0}, int64[1] less = {-1}, int64[1] at = {2}>
{ c0 = Conv <strides = [5]> (x, k0)
  t0 = Transpose <perm = [0,2,1]> (c0) n0 = LayerNormalization (t0, g, b) u0 = Transpose <perm = [0,2,1]> (n0)
  a0 = Gelu (u0)
  c1 = Conv <strides = [2]> (a0, k1) a1 = Gelu (c1)
  c2 = Conv <strides = [2]> (a1, k2) a2 = Gelu (c2)
  t2 = Transpose <perm = [0,2,1]> (a2) n2 = LayerNormalization (t2, g, b) m = MatMul (n2, w)
  t3 = Transpose <perm = [0,2,1]> (m)
  p = Conv <group = 4, pads = [4,4]> (t3, kp, bp) q = Slice (p, zero, less, at) v = Gelu (q)
  t4 = Transpose <perm = [0,2,1]> (v)
  y = Add (m, t4) }"""
CONFORMER = """(float16[n,t,16] x) => (float16[n,t,16] y)
<float16[16] g, float16[16] b, float16[32,16,1] k1, float16[32] b1, float16[16,1,15] kd, float16[16] s, float16[16] o,
 float16[16] m, float16[16] v, float16[16,16,1] k2>
{ l = LayerNormalization (x, g, b) a = Transpose <perm = [0,2,1]> (l)
  c = Conv (a, k1, b1) d, e = Split <axis = 1, num_outputs = 2> (c) f = Sigmoid (e) i = Mul (d, f)
  j = Conv <group = 16, pads = [7,7]> (i, kd) k = BatchNormalization (j, s, o, m, v)
  q = Sigmoid (k) r = Mul (k, q)
  u = Conv (r, k2) w = Transpose <perm = [0,2,1]> (u)
  y = Add (x, w) }"""
VOCODER = """(float16[n,16,t] x) => (float16[n,1,t] y)
<float16[16,16,3] k1, float16[16] b1, float16[16,16,3] k2, float16[16] b2, float16[16,16,3] k3, float16[16] b3,
 float16[16,16,3] k4, float16[16] b4, float16[1,16,7] k5>
{ a = LeakyRelu <alpha = 0.1> (x) b = Conv <pads = [1,1]> (a, k1, b1)
  c = LeakyRelu <alpha = 0.1> (b) d = Conv <pads = [1,1]> (c, k2, b2) e = Add (d, x)
  f = LeakyRelu <alpha = 0.1> (e) i = Conv <pads = [3,3], dilations = [3]> (f, k3, b3)
  j = LeakyRelu <alpha = 0.1> (i) k = Conv <pads = [1,1]> (j, k4, b4) l = Add (k, e)
  m = LeakyRelu (l) o = Conv <pads = [3,3]> (m, k5) y = Tanh (o) }"""
VIDEO = """(float16[n,3,d,h,w] x) => (float16[n,6,o,p,q] y)
<float16[16,3,1,7,7] k0, float16[16,16,3,1,1] k1, float16[16,16,1,3,3] k2, float16[4,16,1,1,1] s1,
 float16[16,4,1,1,1] s2, float16[6,32,3,3,3] k4, float[5] scales = {1,1,1,2,2}>
{ a0 = Conv <strides = [1,2,2], pads = [0,3,3,0,3,3]> (x, k0) a = Relu (a0)
  b0 = Conv <pads = [1,0,0,1,0,0]> (a, k1) b = Relu (b0)
  p = MaxPool <kernel_shape = [1,2,2], strides = [1,2,2]> (b)
  c0 = Conv <pads = [0,1,1,0,1,1]> (p, k2)
  m = GlobalAveragePool (c0) e0 = Conv (m, s1) e = Relu (e0) f = Conv (e, s2) g = Sigmoid (f)
  i = Mul (c0, g) j = Add (i, p) k = Relu (j)
  u = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (k, , scales)
  v = Concat <axis = 1> (u, b)
  y = Conv (v, k4) }"""

TEXTS = {"wav2vec": WAV2VEC, "conformer": CONFORMER, "vocoder": VOCODER, "video": VIDEO}
SIZES_OF = {
    "wav2vec": {"n": 2, "t": 405}, "conformer": {"n": 2, "t": 20}, "vocoder": {"n": 2, "t": 50},
    "video": {"n": 2, "d": 3, "h": 8, "w": 12},
}  # fmt: skip


def network(name: str) -> onnx.ModelProto:
    """Return a network with random weights; its variances are positive."""
    model = parse(TEXTS[name])
    for tensor in model.graph.initializer:
        if tensor.name == "v":
            value = np.abs(numpy_helper.to_array(tensor)) + 1
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float16), "v"))
    return model
