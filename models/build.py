"""Build a small image classifier with the onnx package alone: `python models/build.py classifier.onnx`.

Three Conv-BatchNormalization-Relu blocks, the last two inside a residual connection, then global average pooling and
a LayerNormalization-ed two-layer perceptron with a GELU spelled out in Erf. The weights are random, from a seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

CHANNELS, WIDE, CLASSES = 16, 64, 10
DEFAULT_OPSET, OPSETS = 20, range(13, 24)
GRAPH = """
<ir_version: 10, opset_import: ["" : {opset}], producer_name: "onnxfuse models/build.py">
classifier (float[batch,3,32,32] image) => (float[batch,10] probabilities) {{
  conv1 = Conv <kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2]> (image, conv1_w)
  norm1 = BatchNormalization <epsilon = 1e-5> (conv1, norm1_scale, norm1_bias, norm1_mean, norm1_var)
  relu1 = Relu (norm1)
  conv2 = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (relu1, conv2_w)
  norm2 = BatchNormalization <epsilon = 1e-5> (conv2, norm2_scale, norm2_bias, norm2_mean, norm2_var)
  relu2 = Relu (norm2)
  conv3 = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (relu2, conv3_w)
  norm3 = BatchNormalization <epsilon = 1e-5> (conv3, norm3_scale, norm3_bias, norm3_mean, norm3_var)
  residual = Add (norm3, relu1)
  relu3 = Relu (residual)
  pooled = GlobalAveragePool (relu3)
  features = Flatten <axis = 1> (pooled)
  {layer_norm}
  hidden = Gemm <transB = 1> (normalized, fc1_w, fc1_b)
  scaled = Div (hidden, sqrt_two)
  erf = Erf (scaled)
  shifted = Add (erf, one)
  product = Mul (hidden, shifted)
  gelu = Mul (product, half)
  logits = Gemm <transB = 1> (gelu, fc2_w, fc2_b)
  probabilities = Softmax <axis = -1> (logits)
}}
"""
LAYER_NORM = "normalized = LayerNormalization <axis = -1, epsilon = 1e-5> (features, ln_scale, ln_bias)"
# LayerNormalization is an operator from opset 17 on; ReduceMean takes its axes as an attribute before opset 18.
LAYER_NORM_BEFORE_17 = """mean = ReduceMean <axes = [-1]> (features)
  centered = Sub (features, mean)
  squared = Pow (centered, two)
  variance = ReduceMean <axes = [-1]> (squared)
  stable = Add (variance, epsilon)
  deviation = Sqrt (stable)
  standard = Div (centered, deviation)
  affine = Mul (standard, ln_scale)
  normalized = Add (affine, ln_bias)"""


def build_classifier(opset: int = DEFAULT_OPSET, seed: int = 0) -> onnx.ModelProto:
    """Return a classifier of `image` float[batch,3,32,32] into `probabilities` float[batch,10].

    Raises ValueError for an opset outside 13..23.
    """
    if opset not in OPSETS:
        raise ValueError(f"build_classifier: opset {OPSETS[0]}..{OPSETS[-1]} required, found {opset}")
    text = GRAPH.format(opset=opset, layer_norm=LAYER_NORM if opset >= 17 else LAYER_NORM_BEFORE_17)
    model = parser.parse_model(text)
    model.ir_version = helper.find_min_ir_version_for(model.opset_import)
    read = {name for node in model.graph.node for name in node.input}
    arrays = {**draw_weights(np.random.default_rng(seed)), **constants()}
    model.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in arrays if name in read)
    onnx.checker.check_model(model, full_check=True)
    return model


def constants() -> dict[str, np.ndarray]:
    """Return the scalars of GELU and of the spelled-out LayerNormalization."""
    values = {"sqrt_two": 2**0.5, "one": 1.0, "half": 0.5, "two": 2.0, "epsilon": 1e-5}
    return {name: np.array(value, np.float32) for name, value in values.items()}


def draw_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return weights of unit gain, and norms that differ from the identity and from each other."""
    shapes = {
        "conv1_w": (CHANNELS, 3, 3, 3),
        "conv2_w": (CHANNELS, CHANNELS, 3, 3),
        "conv3_w": (CHANNELS, CHANNELS, 3, 3),
        "fc1_w": (WIDE, CHANNELS),
        "fc2_w": (CLASSES, WIDE),
    }
    weights = {name: rng.normal(0, np.prod(shape[1:]) ** -0.5, shape) for name, shape in shapes.items()}
    for norm in ("norm1", "norm2", "norm3", "ln"):
        weights[f"{norm}_scale"] = rng.uniform(0.5, 1.5, CHANNELS)
        weights[f"{norm}_bias"] = rng.normal(0, 0.1, CHANNELS)
        weights[f"{norm}_mean"] = rng.normal(0, 0.2, CHANNELS)
        weights[f"{norm}_var"] = rng.uniform(0.5, 1.5, CHANNELS)
    weights |= {"fc1_b": rng.normal(0, 0.1, WIDE), "fc2_b": rng.normal(0, 0.1, CLASSES)}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def main() -> None:
    """Write the classifier to the path on the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("path", type=Path)
    arguments.add_argument("--opset", type=int, default=DEFAULT_OPSET, choices=OPSETS, metavar="13..23")
    given = arguments.parse_args()
    onnx.save(build_classifier(given.opset), given.path)
    print(f"{given.path}: {given.path.stat().st_size} bytes, opset {given.opset}")


if __name__ == "__main__":
    main()
