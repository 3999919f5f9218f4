"""Numbers of integers that operators before and after a product read."""

from __future__ import annotations

import numpy as np
import onnx.parser
from case_documents import with_weights
from region_models import assert_programs_agree, optimized

MODEL = """\
<ir_version: 8, opset_import: ["" : 17]>
model (float[3,8] x) => (float[3,8] y)
<float scale = {0.05}, uint8 zero = {131}, float[8,8] w> {
  integers = QuantizeLinear (x, scale, zero)
  numbers = DequantizeLinear (integers, scale, zero)
  product = MatMul (numbers, w)
  gate = Sigmoid (product)
  probabilities = Softmax (gate)
  scaled = Mul (probabilities, numbers)
  y = Add (scaled, numbers)
}"""


def test_readers_at_several_levels_dequantize_for_themselves() -> None:
    fused, report = optimized(with_weights(onnx.parser.parse_model(MODEL)))
    assert not report.left_out, report.left_out
    operators = {node.op_type for node in fused.graph.node}
    assert "DequantizeLinear" not in operators, operators
    values = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    assert assert_programs_agree(fused, {"x": values}) >= 1


def test_casts_of_numbers_are_computed_by_their_readers() -> None:
    text = MODEL.replace("Add (scaled, numbers)", "Add (scaled, wide)").replace(
        "  product =", "  half = Cast <to = 10> (numbers)\n  wide = Cast <to = 1> (half)\n  product ="
    )
    fused, report = optimized(with_weights(onnx.parser.parse_model(text)))
    assert not report.left_out, report.left_out
    assert not {"half", "wide"} & {name for node in fused.graph.node for name in node.output}
    values = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    assert assert_programs_agree(fused, {"x": values}) >= 1
