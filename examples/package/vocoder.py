"""Write a small vocoder with snake activations: `python vocoder.py vocoder.onnx`.  The weights are random."""

import sys

import numpy as np
import onnx
from onnx import numpy_helper, parser

CHANNELS, MELS = 32, 20
# snake1 multiplies by a constant that is computed from alpha1, as PyTorch modules do; snake2 divides by alpha2.
GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
vocoder (float[batch,20,frames] mel) => (float[batch,1,samples] audio)
<float two = {2.0}, float tiny = {1e-9}>
{
  h = Conv <kernel_shape = [7], pads = [3, 3]> (mel, w1, b1)
  z1 = Mul (alpha1, h)
  s1 = Sin (z1)
  q1 = Pow (s1, two)
  a1 = Add (alpha1, tiny)
  r1 = Reciprocal (a1)
  p1 = Mul (r1, q1)
  snake1 = Add (h, p1)
  up = ConvTranspose <kernel_shape = [8], strides = [4], pads = [2, 2]> (snake1, w2, b2)
  z2 = Mul (up, alpha2)
  s2 = Sin (z2)
  q2 = Mul (s2, s2)
  p2 = Div (q2, alpha2)
  snake2 = Add (p2, up)
  wave = Conv <kernel_shape = [7], pads = [3, 3]> (snake2, w3, b3)
  audio = Tanh (wave)
}
"""
SHAPES = {
    "w1": (CHANNELS, MELS, 7), "b1": (CHANNELS,), "alpha1": (1, CHANNELS, 1),
    "w2": (CHANNELS, CHANNELS, 8), "b2": (CHANNELS,), "alpha2": (1, CHANNELS, 1),
    "w3": (1, CHANNELS, 7), "b3": (1,),
}  # fmt: skip


def vocoder() -> onnx.ModelProto:
    """Return the model."""
    model = parser.parse_model(GRAPH)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        drawn = random.standard_normal(shape) * 0.1 + (1.0 if name.startswith("alpha") else 0.0)
        model.graph.initializer.append(numpy_helper.from_array(drawn.astype(np.float32), name))
    return model


if __name__ == "__main__":
    onnx.save(vocoder(), sys.argv[1])
