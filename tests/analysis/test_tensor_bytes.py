"""Estimates take one size for each dim that the model names, and sizes like those of the inputs where none is known."""

from __future__ import annotations

import onnx.parser
import pytest

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.tensor_bytes import ASSUMED_SIZE, MAX_INT64, tensor_bytes
from onnxfuse.ir.serde import read_graph

SIDE = ASSUMED_SIZE // 16  # of an image that was made smaller by strides of 16
EMPTY_ROWS = "e = Slice(x, two, one) c = Pad(e, pads) n = Shape <end = 1> (c) t = Concat <axis = 0> (n, rest)"
DOUBLED = " ".join(f"c{i} = Concat <axis = 2> (b{i}, b{i}) b{i + 1} = Pad(c{i}, pads)" for i in range(1100))


@pytest.mark.parametrize(
    ("body", "elements"),
    [
        ("y = Relu(a)", 8 * SIDE * SIDE),
        ("y = Pad(a, pads)", 8 * SIDE * SIDE),
        ("b = Pad(a, pads) c = Pad(b, pads) y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (c)", 2 * SIDE * SIDE),
        ("b = Pad(a, pads) y = Add(b, z)", 8 * ASSUMED_SIZE * ASSUMED_SIZE),  # z has the size of the input
        ("b = Pad(a, pads) y = Reshape(b, rows)", 8 * SIDE * SIDE),
        ("y = NonZero(a)", 4 * ASSUMED_SIZE),  # how many there are is not related to a size
        (f"b = Pad(z, pads) {EMPTY_ROWS} y = Reshape <allowzero = 1> (b, t)", 0),
        (f"b0 = Pad(a, pads) {DOUBLED} y = Relu(b1100)", MAX_INT64 // 4),
    ],
)
def test_elements_of_an_output(body: str, elements: int) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[batch,3,h,w] x, float[8,3,1,1] k, float[batch,8,h,w] z, int64[8] pads) => (y)
        <int64[3] rows = {{0, 8, -1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] rest = {{-1}}>
        {{ a = Conv <strides = [16, 16]> (x, k) {body} }}"""
    graph = read_graph(onnx.parser.parse_model(text))
    shapes = infer_shapes(graph, strict=True)
    y = graph.linked.tensors()["y"]
    assert tensor_bytes(shapes, shapes.shape(y), onnx.TensorProto.FLOAT) // 4 == elements
