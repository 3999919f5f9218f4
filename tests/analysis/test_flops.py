"""The floating-point operations of operators, beside figures that were computed by hand."""

from __future__ import annotations

import onnx.parser
import pytest

from onnxfuse.algebra.sizes import Size, symbol
from onnxfuse.analysis.flops import RULES, count_flops
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.node import op_of
from onnxfuse.ir.serde import read_graph

BATCH = symbol("batch")
CASES: list[tuple[str, str, str, Size | None]] = [
    ("MatMul", "float[batch,5,6] a, float[6,7] b", "y = MatMul(a, b)", 2 * BATCH * 5 * 7 * 6),
    ("MatMul", "float[6] a, float[6] b", "y = MatMul(a, b)", 12),
    ("Gemm", "float[6,5] a, float[7,6] b", "y = Gemm<transA = 1, transB = 1>(a, b)", 2 * 5 * 7 * 6),
    ("MatMulInteger", "uint8[5,6] a, uint8[6,7] b", "y = MatMulInteger(a, b)", 420),
    ("com.microsoft::FusedMatMul", "float[2,6,5] a, float[2,6,7] b",
     "y = com.microsoft.FusedMatMul<transA = 1>(a, b)", 2 * 420),
    ("com.microsoft::FusedMatMul", "float[6,2,5] a, float[2,6,7] b",
     "y = com.microsoft.FusedMatMul<transA = 1, transBatchA = 1>(a, b)", 2 * 420),
    ("com.microsoft::MatMulNBits", "float[5,32] a, uint8[7,1,16] b, float[7] s",
     "y = com.microsoft.MatMulNBits<K = 32, N = 7, bits = 4, block_size = 32>(a, b, s)", 2 * 5 * 7 * 32),
    ("Einsum", "float[2,5,6] a, float[2,7,6] b", 'y = Einsum<equation = "bid, bjd -> bij">(a, b)', 2 * 420),
    ("Einsum", "float[2,5,6] a", 'y = Einsum<equation = "bid->bdi">(a)', None),
    ("Conv", "float[batch,8,16,16] a, float[12,4,3,3] b",
     "y = Conv<group = 2, strides = [2,2], pads = [1,1,1,1]>(a, b)",
     2 * BATCH * 12 * 8 * 8 * 4 * 9),
    ("com.microsoft::NhwcConv", "float[1,16,16,8] a, float[12,3,3,8] b", "y = com.microsoft.NhwcConv(a, b)",
     2 * 14 * 14 * 12 * 9 * 8),
    ("ConvTranspose", "float[1,8,4,4] a, float[8,12,2,2] b", "y = ConvTranspose<strides = [2,2]>(a, b)",
     2 * 8 * 16 * 12 * 4),
    ("Attention", "float[2,4,5,8] a, float[2,2,9,8] b, float[2,2,9,3] c", "y = Attention(a, b, c)",
     2 * 2 * 4 * 5 * 9 * (8 + 3)),
    ("com.microsoft::MultiHeadAttention", "float[2,5,32] a, float[2,9,32] b, float[2,9,32] c",
     "y = com.microsoft.MultiHeadAttention<num_heads = 4>(a, b, c)", 2 * 2 * 5 * 9 * 64),
    ("com.microsoft::LinearAttention", "float[2,7,32] a, float[2,7,16] b, float[2,7,6] c",
     'y, s = com.microsoft.LinearAttention<q_num_heads = 4, kv_num_heads = 2, update_rule = "linear">(a, b, c)',
     3 * 2 * 2 * 7 * 2 * 8 * 3),
    ("com.microsoft::GatedDeltaNet", "float[2,7,1,8] a, float[2,7,1,8] b, float[2,7,2,3] c, float[2,2,3,8] s",
     'y, t = com.microsoft.GatedDeltaNet<update_rule = "linear">(a, b, c, , , , s)', 3 * 2 * 2 * 7 * 2 * 8 * 3),
    ("LSTM", "float[7,2,5] a, float[1,12,5] b, float[1,12,3] c", "y = LSTM<hidden_size = 3>(a, b, c)",
     2 * 7 * 2 * 12 * (5 + 3)),
    ("Relu", "float[2,3] a", "y = Relu(a)", 0),
    ("MatMul", "float a, float[6,7] b", "y = MatMul(a, b)", None),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "body", "expected"), CASES)
def test_flops_of_an_operator(op: str, inputs: str, body: str, expected: Size | None) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n g ({inputs}) => (y) {{ {body} }}"""
    graph = read_graph(onnx.parser.parse_model(text))
    (node,) = graph.nodes
    assert op_of(node) == op and count_flops(infer_shapes(graph), node) == expected


def test_every_rule_is_of_a_kind_that_is_tested() -> None:
    tested = {RULES[op] for op, *_ in CASES if op in RULES}
    assert set(RULES.values()) == tested
