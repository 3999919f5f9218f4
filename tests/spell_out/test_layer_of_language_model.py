"""A layer as onnxruntime-genai's builder writes it: operators after products of packed weights are fused."""

from __future__ import annotations

import re
from collections import Counter

import onnx
from case_documents import with_weights

from onnxfuse import optimize
from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.runtime.fused_calls import read_calls

LAYER = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
main (int64[batch,seq] ids, int64[batch,total] mask, float16[batch,2,past,16] k, float16[batch,2,past,16] v)
  => (float16[batch,seq,64] logits, float16[batch,2,all,16] present_k, float16[batch,2,all,16] present_v)
<uint8[64,32] table, float16[64,2] s_table, uint8[128,2,16] w_qkv, float16[128,2] s_qkv, uint8[64,2,16] w_o,
 float16[64,2] s_o, uint8[128,2,16] w_gate, float16[128,2] s_gate, uint8[128,2,16] w_up, float16[128,2] s_up,
 uint8[64,4,16] w_down, float16[64,4] s_down, uint8[64,2,32] w_head, float16[64,2] s_head, float16[64] norm_0,
 float16[64] norm_1, float16[64] norm_2, float16[32,8] cos, float16[32,8] sin, int64[1] one = {1}, int64 i = {1}>
{
  counts = ReduceSum(mask, one)
  less = Sub(counts, one)
  lengths = Cast <to = 6> (less)
  shape = Shape(mask)
  length = Gather(shape, i)
  total_length = Cast <to = 6> (length)
  x = com.microsoft.GatherBlockQuantized <block_size = 32> (table, ids, s_table)
  n_0 = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> (x, norm_0)
  qkv = com.microsoft.MatMulNBits <K = 64, N = 128, block_size = 32, bits = 4, accuracy_level = 0> (n_0, w_qkv, s_qkv)
  attended, present_k, present_v = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, do_rotary = 1>
      (qkv, , , k, v, lengths, total_length, cos, sin)
  o = com.microsoft.MatMulNBits <K = 64, N = 64, block_size = 32, bits = 4, accuracy_level = 0> (attended, w_o, s_o)
  n_1, , , r_1 = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (x, o, norm_1)
  gate = com.microsoft.MatMulNBits <K = 64, N = 128, block_size = 32, bits = 4, accuracy_level = 0>
      (n_1, w_gate, s_gate)
  up = com.microsoft.MatMulNBits <K = 64, N = 128, block_size = 32, bits = 4, accuracy_level = 0> (n_1, w_up, s_up)
  sigmoid = Sigmoid(gate)
  silu = Mul(gate, sigmoid)
  both = Mul(silu, up)
  down = com.microsoft.MatMulNBits <K = 128, N = 64, block_size = 32, bits = 4, accuracy_level = 0>
      (both, w_down, s_down)
  n_2, , , r_2 = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (r_1, down, norm_2)
  logits = com.microsoft.MatMulNBits <K = 64, N = 64, block_size = 32, bits = 8, accuracy_level = 0>
      (n_2, w_head, s_head)
}"""


def test_products_norms_and_gates_are_fused() -> None:
    model, report = optimize(with_weights(onnx.parser.parse_model(LAYER)), verify=False)
    fused = Counter(one.fusion for one in report.fused)
    assert fused == {"gated_matmul_nbits": 1, "matmul_nbits": 4, "region": 1, "group_query_attention": 1}
    assert sum(PROLOGUE in call.node.attributes for call in read_calls(model)) == 3, "the norms are in products"
    assert all(dtype for call in read_calls(model) for dtype in call.dtypes), "else a session runs the body"


def test_products_of_floats_take_the_norms_too() -> None:
    text = re.sub(
        r"(\w+) = com\.microsoft\.MatMulNBits <[^>]*>\s*\((\w+), (w_\w+), s_\w+\)", r"\1 = MatMul(\2, \3)", LAYER
    )
    text = re.sub(r"uint8\[(\d+),(\d),\d+\] (w_\w+),\s*float16\[\d+,\d\] s_\w+", _float_weight, text)
    model, report = optimize(with_weights(onnx.parser.parse_model(text)), verify=False)
    fused = Counter(one.fusion for one in report.fused)
    assert fused == {"gated_gemm": 1, "gemm_bias_activation": 4, "region": 1, "group_query_attention": 1}
    assert sum(PROLOGUE in call.node.attributes for call in read_calls(model)) == 3, "the norms are in products"


def _float_weight(quantized: re.Match[str]) -> str:
    return f"float16[{128 if quantized[2] == '4' else 64},{quantized[1]}] {quantized[3]}"
