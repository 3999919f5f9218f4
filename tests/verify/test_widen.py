"""Test the conversion of models to a wider precision."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.widen import arrays_to_float64, model_to_float64

MODEL = """<ir_version: 9, opset_import: ["" : 17]>
    g (float[2] x, float16[2] h) => (double[2] y, float16[2] z) <float[2] w = {1, 2}> {
        c = Constant <value_float = 0.1> ()  n = Constant <value_floats = [1.0, 2.0]> ()
        p = Mul (x, c)  q = Add (p, w)  s = Add (q, n)  y = Cast <to = 11> (s)  t = Cast <to = 10> (x)  z = Add (t, h)
    }"""


def test_float32_becomes_float64_and_half_precision_stays() -> None:
    converted = model_to_float64(onnx.parser.parse_model(MODEL))
    onnx.checker.check_model(converted, full_check=True)
    feeds = arrays_to_float64({"x": np.full(2, 1 / 3, np.float32), "h": np.ones(2, np.float16)})
    y, z = run(open_session(converted, None, optimize=False), feeds).values()
    product = float(np.float32(1 / 3)) * float(np.float32(0.1))
    assert (y.dtype, z.dtype) == (np.float64, np.float16)
    np.testing.assert_allclose(y, [product + 2, product + 4], rtol=1e-15)
