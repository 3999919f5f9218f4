"""Test models that onnxruntime's quantizer makes: what becomes regions, and that CPUs still compute in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from architectures import H200
from case_documents import with_weights
from kernel_hosts import host_of, require_support
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from region_models import assert_programs_agree, left_by_onnxruntime, optimized, regions
from runtimes import open_on_cpu

from onnxfuse.ir.dtypes import FLOAT8, Array
from onnxfuse.runtime.fused_calls import read_calls

HEAD = '<ir_version: 9, opset_import: ["" : 17]> g '
BLOCK = (
    HEAD
    + """(float[batch,8,10,10] x) => (float[batch,8] y)
<float[8,8,3,3] w1, float[8] b1, float[8,8,1,1] w2, float[8] b2, float[8,8] w3, float[8] b3>
{
  c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
  r1 = Relu (c1)
  c2 = Conv (r1, w2, b2)
  s = Add (c2, x)
  r2 = Relu (s)
  p = GlobalAveragePool (r2)
  f = Flatten (p)
  y = Gemm (f, w3, b3)
}"""
)
LAYER = (
    HEAD
    + """(float[batch,6,16] x) => (float[batch,6,16] y)
<float[16,16] wq, float[16,16] wk, float[16,16] wv, float[16,32] w1, float[32] b1, float[32,16] w2, float[16] scale,
 float[16] bias, float root = {4}, float sqrt2 = {1.4142135}, float one = {1}, float half = {0.5}>
{
  q = MatMul (x, wq)
  k = MatMul (x, wk)
  v = MatMul (x, wv)
  t = Transpose <perm = [0, 2, 1]> (k)
  m = MatMul (q, t)
  d = Div (m, root)
  p = Softmax (d)
  o = MatMul (p, v)
  s = Add (o, x)
  n = LayerNormalization (s, scale, bias)
  u1 = MatMul (n, w1)
  u = Add (u1, b1)
  e1 = Div (u, sqrt2)
  e2 = Erf (e1)
  e3 = Add (e2, one)
  e4 = Mul (u, e3)
  e = Mul (e4, half)
  w = MatMul (e, w2)
  z = Add (w, n)
  y = LayerNormalization (z, scale, bias)
}"""
)


class Drawn(CalibrationDataReader):
    """Values on which the quantizer measures ranges."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._left: Iterator[Array] = iter([values(shape, seed) for seed in (1, 2, 3)])

    def get_next(self) -> dict[str, Array] | None:
        found = next(self._left, None)
        return None if found is None else {"x": found}


def values(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def made(text: str) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return a model with centred weights, and the shape of its input."""
    model = with_weights(onnx.parser.parse_model(text))
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.ndim > 1:
            tensor.CopyFrom(onnx.numpy_helper.from_array((array - 1) * 0.7, tensor.name))
    return model, (2, *(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]))


def quantized(text: str, folder: Path, how: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    model, shape = made(text)
    source, target = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(model, source)
    if how == "float8":
        model.opset_import[0].version = 19
        onnx.save(model, source)
        kinds = dict.fromkeys(("activation_type", "weight_type"), QuantType.QFLOAT8E4M3FN)
        quantize_static(source, target, Drawn(shape), **kinds, per_channel=True, op_types_to_quantize=["MatMul"],
                        calibrate_method=CalibrationMethod.Distribution)  # fmt: skip
    elif how == "dynamic":
        quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    else:
        activations = QuantType.QInt8 if how == "int8" else QuantType.QUInt8
        kind = QuantFormat.QOperator if how == "operators" else QuantFormat.QDQ
        quantize_static(source, target, Drawn(shape), activation_type=activations, weight_type=QuantType.QInt8,
                        per_channel=how == "per channel", quant_format=kind,
                        extra_options={"UseQDQContribOps": how == "com.microsoft"})  # fmt: skip
    return onnx.load(target), {"x": values(shape, 7)}


def kinds(model: onnx.ModelProto) -> Counter[str]:
    """Return how many nodes there are of each operator, or of each fusion."""
    names = ((node.op_type, {a.name: a.s.decode() for a in node.attribute if a.name == "fusion"}) for node in
             model.graph.node)  # fmt: skip
    return Counter(own.get("fusion", op) for op, own in names)


# What is left of a quantized model: products and convolutions read integers, and operators after them have joined them.
LEFT = {BLOCK: {"quantized_conv": 2, "quantized_gemm": 1, "region": 1, "global_average_pool": 1, "Reshape": 1},
        LAYER: {"quantized_gemm": 5, "quantized_matmul": 2, "region": 3, "QuantizeLinear": 1}}  # fmt: skip
DYNAMIC = {BLOCK: {"quantized_conv": 2, "quantized_gemm": 1, "region": 3, "global_average_pool": 1},
           LAYER: {"quantized_gemm": 3, "attention": 1, "add_layer_norm": 2, "region": 3}}  # fmt: skip
INT8 = {BLOCK: {"quantized_conv": 2, "quantized_gemm": 1, "region": 2, "global_average_pool": 1},
        LAYER: {**LEFT[LAYER], "region": 4}}  # fmt: skip
OTHERS = {"dynamic": DYNAMIC, "int8": INT8}


def in_integers(operators: Counter[str]) -> dict[str, int]:
    """Return the operators of onnxruntime that compute in integers."""
    kinds = ("QLinear", "QGemm", "DynamicQuantizeMatMul")
    return {op: count for op, count in operators.items() if op.startswith(kinds) or "Integer" in op}


WAYS = {f"{name}, {how}": (text, how) for name, text in (("block", BLOCK), ("layer", LAYER))
        for how in ("per tensor", "per channel", "int8", "operators", "com.microsoft", "dynamic")}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_cpus_compute_what_they_did_in_the_same_integer_operators(name: str, tmp_path: Path) -> None:
    """onnxruntime inlines the bodies before it looks for integer operators, so that regions block none of these."""
    text, how = WAYS[name]
    model, feeds = quantized(text, tmp_path, how)
    fused, _ = optimized(model)
    again, _ = optimized(fused)
    assert kinds(again) == kinds(fused)
    assert kinds(fused) == OTHERS.get(how, LEFT)[text]
    found, wanted = (left_by_onnxruntime(each, tmp_path) for each in (fused, model))
    if (text, how) == (LAYER, "dynamic"):  # the projections are one product, whose quantizer joins it
        wanted += Counter({"DynamicQuantizeMatMul": 1, "Split": 1})
        wanted -= Counter({"MatMulIntegerToFloat": 3})
    # Views give attention of one head four axes, and onnxruntime quantizes again after a Transpose that it moves.
    assert (found - wanted).keys() <= {"Reshape", "Transpose", "QuantizeLinear", "DequantizeLinear"}
    assert in_integers(found) == in_integers(wanted) != {}
    expected, result = (open_on_cpu(each).run(None, feeds) for each in (model, fused))
    np.testing.assert_array_equal(result[0], expected[0])
    assert assert_programs_agree(fused, feeds) == len(regions(fused))


def test_what_a_dynamic_quantizer_reads_twice_is_computed_once(tmp_path: Path) -> None:
    """The Gelu joins the product before it, and not the region of the quantizer after it."""
    fused, _ = optimized(quantized(LAYER, tmp_path, "dynamic")[0])
    programs = [(call.node.fusion, call.node.text("program", "")) for call in read_calls(fused)]
    assert [fusion for fusion, program in programs if "Erf" in program] == ["quantized_gemm"]
    assert sum("ReduceMin" in program for _, program in programs) == 3


def test_layers_of_float8_have_kernels(tmp_path: Path) -> None:
    """Nodes are those of a model whose products alone are quantized to int8, and products read and write float8."""
    model, feeds = quantized(LAYER, tmp_path, "float8")
    fused, _ = optimized(model)
    assert kinds(fused) == {"quantized_gemm": 5, "quantized_matmul": 2, "region": 5, "DequantizeLinear": 1}
    assert assert_programs_agree(fused, feeds) == len(regions(fused))
    calls = read_calls(fused)
    for call in calls:
        require_support(host_of(call.node.fusion), call.node, call.dtypes, H200)
    products = [call for call in calls if call.node.fusion == "quantized_gemm"]
    assert all(call.dtypes[0] == call.dtypes[2] == FLOAT8 for call in products)
    assert sum(call.node.output_dtypes == (FLOAT8,) for call in products) == 5


@pytest.mark.parametrize("name", ["block, per tensor", "layer, dynamic"])
def test_products_of_integers_stay_so_in_half_precision(name: str, tmp_path: Path) -> None:
    """A Cast between a quantizer and a product would have it compute in floats."""
    text, how = WAYS[name]
    model, _ = quantized(text, tmp_path, how)
    found = kinds(optimized(model, dtype="float16")[0])
    wanted = OTHERS.get(how, LEFT)[text]
    assert {kind: count for kind, count in found.items() if "quantized" in kind} == {
        kind: count for kind, count in wanted.items() if "quantized" in kind
    }
