"""Each rule against the operator that it spells out in plain onnxruntime, or in NumPy where that has no kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from spelled_models import drawn, parsed, run, spelled

from onnxfuse.activations import ACTIVATIONS

TOLERANCES = {"float32": 2e-5, "float16": 5e-3, "int32": 0.0}
X = "float[2,5,8] x"
GROUPS = "float[2,5,16] q, float[2,5,8] k, float[2,5,8] v"
NEW = "float[2,5,16] y, float[2,1,5,8] t, float[2,1,5,8] u"
LENGTHS = "<int32[2] n = {4, 4}, int32 l = {5}>"
HIDING = "int32[2,5] m = {0, 0, 1, 1, 1, 0, 0, 0, 0, 0}"  # keys on the left, and all of them
LOWEST = -3.4028234663852886e38
NORM = "<float[8] g, float[8] b, float[8] c>"

IN_ONNXRUNTIME = {
    # --- norms
    "skip_layer_norm": f"({X}, {X[:-1]}k) => (float[2,5,8] y) {NORM} "
    "{ y = com.microsoft.SkipLayerNormalization(x, k, g, b) }",
    "skip_layer_norm_sum": f"({X}, {X[:-1]}k) => (float[2,5,8] y, float[2,5,8] s) {NORM} "
    "{ y, , , s = com.microsoft.SkipLayerNormalization <epsilon = 0.001> (x, k, g, b, c) }",
    "skip_layer_norm_no_shift": f"({X}, {X[:-1]}k) => (float[2,5,8] y) {NORM} "
    "{ y = com.microsoft.SkipLayerNormalization(x, k, g) }",
    "skip_layer_norm_broadcast": f"({X}, float[5,8] k) => (float[2,5,8] y) {NORM} "
    "{ y = com.microsoft.SkipLayerNormalization(x, k, g, b) }",
    "skip_rms_norm": f"({X}, {X[:-1]}k) => (float[2,5,8] y, float[2,5,8] s) {NORM} "
    "{ y, , , s = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.001> (x, k, g, c) }",
    "rms_norm": f"({X}) => (float[2,5,8] y) {NORM} "
    "{ y = SimplifiedLayerNormalization <axis = 2, epsilon = 0.01> (x, g) }",
    "skip_rms_norm_half": "(float16[2,5,8] x, float16[2,5,8] k) => (float16[2,5,8] y, float16[2,5,8] s) <float16[8] g> "
    "{ y, , , s = com.microsoft.SkipSimplifiedLayerNormalization(x, k, g) }",
    "skip_layer_norm_half": "(float16[2,5,8] x, float16[2,5,8] k) => (float16[2,5,8] y) <float16[8] g, float16[8] b> "
    "{ y = com.microsoft.SkipLayerNormalization(x, k, g, b) }",
    # --- activations
    "gelu": f"({X}) => (float[2,5,8] y) {{ y = com.microsoft.Gelu(x) }}",
    "bias_gelu": f"({X}) => (float[2,5,8] y) {NORM} {{ y = com.microsoft.BiasGelu(x, b) }}",
    "fast_gelu": f"({X}) => (float[2,5,8] y) {{ y = com.microsoft.FastGelu(x) }}",
    "fast_gelu_bias": f"({X}) => (float[2,5,8] y) {NORM} {{ y = com.microsoft.FastGelu(x, b) }}",
    "quick_gelu": f"({X}) => (float[2,5,8] y) {{ y = com.microsoft.QuickGelu(x) }}",
    "quick_gelu_silu": f"({X}) => (float[2,5,8] y) {{ y = com.microsoft.QuickGelu <alpha = 1.0> (x) }}",
    "quick_gelu_alpha": f"({X}) => (float[2,5,8] y) {{ y = com.microsoft.QuickGelu <alpha = 2.5> (x) }}",
    # --- products
    "fused_matmul": f"({X}, float[2,6,8] z) => (float[2,5,6] y) "
    "{ y = com.microsoft.FusedMatMul <alpha = 0.25, transB = 1> (x, z) }",
    "fused_matmul_trans_a": "(float[3,8,5] x, float[3,8,4] z) => (float[3,5,4] y) "
    "{ y = com.microsoft.FusedMatMul <transA = 1> (x, z) }",
    "fused_matmul_trans_batch": "(float[2,3,5,8] x, float[3,5,2,4] z) => (float[3,5,8,4] y) "
    "{ y = com.microsoft.FusedMatMul <transBatchA = 1, transA = 1> (x, z) }",
    "fused_matmul_trans_batches": "(float[2,3,5,8] x, float[4,3,5,8] z) => (float[3,5,2,4] y) "
    "{ y = com.microsoft.FusedMatMul <transBatchA = 1, transBatchB = 1, transB = 1> (x, z) }",
    "fused_gemm_relu": "(float[5,8] x) => (float[5,6] y) <float[6,8] w, float[6] b> "
    '{ y = com.microsoft.FusedGemm <activation = "Relu", transB = 1, alpha = -0.5> (x, w, b) }',
    "fused_gemm_leaky_relu": "(float[5,8] x) => (float[5,6] y) <float[8,6] w, float[6] b> "
    '{ y = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.3, alpha = -1.0> (x, w, b) }',
    # --- convolutions
    "fused_conv_relu": "(float[2,4,6,7] x) => (float[2,5,6,7] y) <float[5,4,3,3] w, float[5] b> "
    '{ y = com.microsoft.FusedConv <activation = "Relu", pads = [1,1,1,1]> (x, w, b) }',
    "fused_conv_residual": "(float[2,4,6,7] x, float[2,5,3,4] z) => (float[2,5,3,4] y) <float[5,4,3,3] w, float[5] b> "
    '{ y = com.microsoft.FusedConv <activation = "Relu", pads = [1,1,1,1], strides = [2,2]> (x, w, b, z) }',
    "fused_conv_clip": "(float[2,4,6,7] x) => (float[2,5,6,7] y) <float[5,4,3,3] w> "
    '{ y = com.microsoft.FusedConv <activation = "Clip", activation_params = [-0.5, 2.0], pads = [1,1,1,1]> (x, w) }',
    "fused_conv_hard_sigmoid": "(float[2,4,6,7] x) => (float[2,5,4,5] y) <float[5,4,3,3] w> "
    '{ y = com.microsoft.FusedConv <activation = "HardSigmoid", activation_params = [0.1, 0.4]> (x, w) }',
    "fused_conv_leaky_relu": "(float[2,4,6,7] x) => (float[2,4,4,5] y) <float[4,1,3,3] w> "
    '{ y = com.microsoft.FusedConv <activation = "LeakyRelu", activation_params = [0.2], group = 4> (x, w) }',
    # --- losses
    "cross_entropy": "(float[4,7] x, int64[4] l) => (float y, float[4,7] p) { y, p = SoftmaxCrossEntropyLoss(x, l) }",
    "cross_entropy_weights": "(float[4,7,3] x, int64[4,3] l) => (float y) <float[7] w> "
    "{ y = SoftmaxCrossEntropyLoss <ignore_index = 1> (x, l, w) }",
    "cross_entropy_each": "(float[4,7,3] x, int32[4,3] l) => (float[4,3] y, float[4,7,3] p) <float[7] w> "
    '{ y, p = SoftmaxCrossEntropyLoss <reduction = "none"> (x, l, w) }',
    "likelihood": "(float[4,7] x, int64[4] l) => (float y) { y = NegativeLogLikelihoodLoss(x, l) }",
    "likelihood_ignored": "(float[4,7,2] x, int64[4,2] l) => (float y) "
    "{ y = NegativeLogLikelihoodLoss <ignore_index = 0> (x, l) }",
    "likelihood_sum": "(float[4,7] x, int64[4] l) => (float y) <float[7] w> "
    '{ y = NegativeLogLikelihoodLoss <reduction = "sum"> (x, l, w) }',
    "likelihood_half": "(float16[4,7] x, int64[4] l) => (float16 y) "
    "{ y = NegativeLogLikelihoodLoss <ignore_index = -100> (x, l) }",
    # --- attention
    "attention": "(float[2,5,8] x) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b) }",
    "attention_sizes": "(float[2,5,8] x) => (float[2,5,12] y) <float[8,28] w, float[28] b> "
    "{ y = com.microsoft.Attention <num_heads = 2, qkv_hidden_sizes = [8, 8, 12], scale = 0.3> (x, w, b) }",
    "attention_mask": "(float[2,5,8] x, int32[2,5] m) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b, m) }",
    "attention_mask_filter": "(float[2,5,8] x, int32[2,5] m) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2, mask_filter_value = -3.0> (x, w, b, m) }",
    "attention_mask_rows": "(float[2,5,8] x, int32[2,5,5] m) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b, m) }",
    "attention_lengths": "(float[2,5,8] x) => (float[2,5,8] y) <float[8,24] w, float[24] b, int32[2] m = {3, 5}> "
    "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b, m) }",
    "attention_causal": "(float[2,5,8] x) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b) }",
    "attention_causal_mask": "(float[2,5,8] x, int32[2,5] m) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b, m) }",
    **{
        f"attention_causal_mask_{name}": f"(float[2,5,8] x) => (float[2,5,8] y) <float[8,24] w, float[24] b, {HIDING}> "
        f"{{ y = com.microsoft.Attention <num_heads = 2, unidirectional = 1, mask_filter_value = {number}>"
        " (x, w, b, m) }"
        for name, number in {"lowest": LOWEST, "low": -2e38}.items()
    },
    "attention_bias": "(float[2,5,8] x, float[1,2,5,5] a) => (float[2,5,8] y) <float[8,24] w, float[24] b> "
    "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b, , , a) }",
    "multi_head": "(float[2,5,8] q, float[2,6,8] k, float[2,6,12] v) => (float[2,5,12] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v) }",
    "multi_head_bias": "(float[2,5,8] q, float[2,6,8] k, float[2,6,12] v) => (float[2,5,12] y) <float[28] b> "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, b) }",
    "multi_head_mask": "(float[2,5,8] q, float[2,6,8] k, float[2,6,8] v, int32[2,6] m) => (float[2,5,8] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , m) }",
    "multi_head_lengths": "(float[2,5,8] q, float[2,6,8] k, float[2,6,8] v) => (float[2,5,8] y) <int32[2] m = {2, 6}> "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, , m) }",
    "multi_head_added": "(float[2,5,8] q, float[2,6,8] k, float[2,6,8] v, int32[2,6] m, float[1,2,5,6] a) => "
    "(float[2,5,8] y) { y = com.microsoft.MultiHeadAttention <num_heads = 2, scale = 0.7> (q, k, v, , m, a) }",
    "multi_head_causal": "(float[2,5,8] q, float[2,5,8] k, float[2,5,8] v, int32[2,5] m) => (float[2,5,8] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1> (q, k, v, , m) }",
    "multi_head_cross": "(float[2,5,8] q, float[2,2,6,4] k, float[2,2,6,4] v) => (float[2,5,8] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v) }",
    "multi_head_present": "(float[2,5,8] q, float[2,5,8] k, float[2,5,8] v) => "
    "(float[2,5,8] y, float[2,2,5,4] u, float[2,2,5,4] t) <float[24] b> "
    "{ y, u, t = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, b) }",
    "multi_head_past": "(float[2,3,8] q, float[2,3,8] k, float[2,3,8] v, float[2,2,4,4] c, float[2,2,4,4] d) => "
    "(float[2,3,8] y, float[2,2,7,4] u, float[2,2,7,4] t) <float[24] b> "
    "{ y, u, t = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, b, , , c, d) }",
    "multi_head_past_causal": "(float[2,3,8] q, float[2,3,8] k, float[2,3,8] v, float[2,2,4,4] c, float[2,2,4,4] d, "
    "int32[2,7] m) => (float[2,3,8] y, float[2,2,7,4] u, float[2,2,7,4] t) "
    "{ y, u, t = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1> (q, k, v, , m, , c, d) }",
    "decoder_masked_cross": "(float[2,1,8] q, float[2,2,6,4] k, float[2,2,6,4] v, int32[2,6] m) => "
    "(float[2,1,8] y) { y = com.microsoft.DecoderMaskedMultiHeadAttention <num_heads = 2> (q, k, v, m) }",
    "group_query": f"({GROUPS}) => ({NEW}) {LENGTHS} "
    "{ y, t, u = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (q, k, v, , , n, l) }",
    "group_query_bias": f"({GROUPS}, float[1,2,5,5] a) => ({NEW}) {LENGTHS} {{ y, t, u = "
    "com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (q, k, v, , , n, l, , , , a) }",
    "group_query_softcap": f"({GROUPS}) => ({NEW}) {LENGTHS} {{ y, t, u = com.microsoft.GroupQueryAttention "
    "<num_heads = 2, kv_num_heads = 1, softcap = 2.0, scale = 0.5> (q, k, v, , , n, l) }",
    "group_query_packed": "(float[2,5,64] q) => (float[2,5,32] y, float[2,1,5,16] t, float[2,1,5,16] u) "
    "<int32[2] n = {4, 4}, int32 l = {5}, float[16,8] c, float[16,8] s> { y, t, u = "
    "com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1> (q, , , , , n, l, c, s) }",
    "group_query_past": "(float[2,1,32] q, float[2,1,16] k, float[2,1,16] v, float[2,1,4,16] c, float[2,1,4,16] d) => "
    "(float[2,1,32] y, float[2,1,5,16] t, float[2,1,5,16] u) <int32[2] n = {4, 4}, int32 l = {5}, float[16,8] o, "
    "float[16,8] s> { y, t, u = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1> "
    "(q, k, v, c, d, n, l, o, s) }",
    "group_query_past_of_several": "(float[1,3,16] q, float[1,3,8] k, float[1,3,8] v, float[1,1,4,8] c, "
    "float[1,1,4,8] d) => (float[1,3,16] y, float[1,1,7,8] t, float[1,1,7,8] u) <int32[1] n = {6}, int32 l = {7}> "
    "{ y, t, u = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (q, k, v, c, d, n, l) }",
    # --- rotary embedding
    "rotary": "(float[2,3,5,8] x, int64[2,5] i) => (float[2,3,5,8] y) <float[16,4] c, float[16,4] s> "
    "{ y = com.microsoft.RotaryEmbedding(x, i, c, s) }",
    "rotary_part": "(float[2,3,5,8] x, int64[2,5] i) => (float[2,3,5,8] y) <float[16,2] c, float[16,2] s> "
    "{ y = com.microsoft.RotaryEmbedding <num_heads = 3, rotary_embedding_dim = 4> (x, i, c, s) }",
    "rotary_packed": "(float[2,5,8] x, int64[2,5] i, float[2,5,8] k) => (float[2,5,8] y) "
    "<float[16,2] c, float[16,2] s> { q = com.microsoft.RotaryEmbedding(x, i, c, s) "
    "y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, k) }",
    # --- gated delta nets, whose recurrence stays an operator
    "gates_of_a_net": "(float[6,2,4] q, float[6,2,4] k, float[6,4,3] v, float[6,4] g, float[6,4] b, float[2,4,3,4] s, "
    "float[4] a, float[4] d) => (float[6,4,3] y, float[2,4,3,4] t) { y, t = com.microsoft.GatedDeltaNet "
    """<qk_l2_norm = 1, gate_activation = "softplus", beta_activation = "sigmoid"> (q, k, v, , g, b, s, a, d) }""",
    "gates_of_a_net_in_float16": "(float16[3,2,1,4] q, float16[3,2,1,4] k, float16[3,2,1,5] v, float16[3,2,1] g, "
    "float16[3,2,1] b, float[3,1,5,4] s, float[1] a, float[1] d) => (float16[3,2,1,5] y, float[3,1,5,4] t) { y, t = "
    """com.microsoft.GatedDeltaNet <gate_activation = "qwen"> (q, k, v, , g, b, s, a, d) }""",
    "packed_rows_of_a_net": "(float[3,2,28] x, float[3,2,4] g, float[3,2,4] b, float[3,4,3,4] s, float[4] a, "
    "float[4] d) => (float[3,2,4,3] y, float[3,4,3,4] t) { y, t = com.microsoft.GatedDeltaNet "
    """<gate_activation = "kda", gate_lower_bound = -3.0> (x, , , , g, b, s, a, d) }""",
    "all_packed_rows_of_a_net": "(float[6,28] x, float[2,4,3,4] s) => (float[6,4,3] y, float[2,4,3,4] t) "
    """{ y, t = com.microsoft.GatedDeltaNet <update_rule = "linear", scale = 0.5> (x, , , , , , s) }""",
    # --- embeddings
    "embedding": "(int32[2,5] i, int32[2,5] j) => (float[2,5,8] y, int32[2] m, float[2,5,8] e) "
    "<float[11,8] t, float[16,8] p, float[2,8] u, float[8] g, float[8] b> "
    "{ y, m, e = com.microsoft.EmbedLayerNormalization(i, j, t, p, u, g, b) }",
    "embedding_mask": "(int32[2,5] i, int32[2,5] j, int32[2,5] k) => (float[2,5,8] y, int32[2] m) "
    "<float[11,8] t, float[16,8] p, float[2,8] u, float[8] g, float[8] b> "
    "{ y, m = com.microsoft.EmbedLayerNormalization(i, j, t, p, u, g, b, k) }",
    "embedding_positions": "(int32[2,5] i, int32[1,5] q) => (float[2,5,8] y) "
    "<float[11,8] t, float[16,8] p, float[8] g, float[8] b> "
    "{ y, m = com.microsoft.EmbedLayerNormalization <epsilon = 0.01> (i, , t, p, , g, b, , q) }",
}


QUERIES = "float[2,4,5,4] q"
KEYS = "float[2,2,3,4] q, float[2,2,3,4] k, float[2,2,3,4] v, float[2,2,4,4] c, float[2,2,4,4] d"
CACHES = "float[2,2,3,4] y, float[2,2,7,4] t, float[2,2,7,4] u"
OF_ONNX = {  # by the first opset that has them
    (24, "swish"): f"({X}) => (float[2,5,8] y) {{ y = Swish <alpha = 2.0> (x) }}",
    (17, "layer_norm_of_axes"): "(float[2,3,4,5] x) => (float[2,3,4,5] y) <float[4,5] g, float[4,5] b> "
    "{ y = LayerNormalization <axis = -2> (x, g, b) }",
    (23, "rms_norm_of_axes"): "(float[2,3,4,5] x) => (float[2,3,4,5] y) <float[3,4,5] g> "
    "{ y = RMSNormalization <axis = 1, epsilon = 0.01> (x, g) }",
    (18, "group_norm"): "(float[2,6,4,5] x) => (float[2,6,4,5] y) <float[3] g, float[3] b> "
    "{ y = GroupNormalization <num_groups = 3> (x, g, b) }",
    (23, "rotary_positions"): "(float[2,3,5,8] x, int64[2,5] i) => (float[2,3,5,8] y) <float[16,4] c, float[16,4] s> "
    "{ y = RotaryEmbedding(x, c, s, i) }",
    (23, "rotary_neighbours"): "(float[2,5,24] x, int64[2,5] i) => (float[2,5,24] y) <float[16,4] c, float[16,4] s> "
    "{ y = RotaryEmbedding <num_heads = 3, interleaved = 1> (x, c, s, i) }",
    (23, "rotary_part"): "(float[2,3,5,8] x) => (float[2,3,5,8] y) <float[2,5,2] c, float[2,5,2] s> "
    "{ y = RotaryEmbedding <num_heads = 3, rotary_embedding_dim = 4> (x, c, s) }",
    (23, "rotary_packed"): "(float[2,5,16] x) => (float[2,5,16] y) <float[2,5,4] c, float[2,5,4] s> "
    "{ q = RotaryEmbedding <num_heads = 2> (x, c, s) y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, x, x) }",
    (23, "attention_packed"): "(float[2,5,16] q, float[2,6,8] k, float[2,6,12] v) => (float[2,5,24] y) "
    "{ y = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v) }",
    (23, "attention_grouped"): f"({QUERIES}, float[2,2,6,4] k, float[2,2,6,4] v, bool[2,1,5,6] m) => "
    "(float[2,4,5,4] y) { y = Attention <scale = 0.3, softcap = 2.0, softmax_precision = 1> (q, k, v, m) }",
    (23, "attention_grouped_causal"): f"({QUERIES}, float[2,2,6,4] k, float[2,2,6,4] v, float[5,6] m) => "
    "(float[2,4,5,4] y) { y = Attention <is_causal = 1> (q, k, v, m) }",
    (23, "attention_past"): f"({KEYS}) => ({CACHES}) {{ y, t, u = Attention(q, k, v, , c, d) }}",
    (
        23,
        "attention_past_causal",
    ): f"({KEYS}) => ({CACHES}) {{ y, t, u = Attention <is_causal = 1> (q, k, v, , c, d) }}",
    (23, "attention_past_mask"): f"({KEYS}, bool[3,7] m) => ({CACHES}) "
    "{ y, t, u = Attention <is_causal = 1> (q, k, v, m, c, d) }",
    (
        24,
        "attention_past_causal",
    ): f"({KEYS}) => ({CACHES}) {{ y, t, u = Attention <is_causal = 1> (q, k, v, , c, d) }}",
    (24, "attention_lengths"): f"({QUERIES}, float[2,4,6,4] k, float[2,4,6,4] v) => (float[2,4,5,4] y) "
    "<int64[2] n = {3, 6}> { y = Attention(q, k, v, , , , n) }",
    (24, "attention_lengths_causal"): "(float[2,4,3,4] q, float[2,4,6,4] k, float[2,4,6,4] v, bool[3,6] m) => "
    "(float[2,4,3,4] y) <int64[2] n = {4, 6}> { y = Attention <is_causal = 1> (q, k, v, m, , , n) }",
}


@pytest.mark.parametrize(("opset", "name"), OF_ONNX)
def test_a_rule_of_onnx_computes_what_the_operator_does(opset: int, name: str) -> None:
    compare_with_onnxruntime(parsed(OF_ONNX[opset, name], opset))


@pytest.mark.parametrize("name", IN_ONNXRUNTIME)
def test_a_rule_computes_what_onnxruntime_does(name: str) -> None:
    compare_with_onnxruntime(parsed(IN_ONNXRUNTIME[name]))


def compare_with_onnxruntime(model: onnx.ModelProto) -> None:
    """Hold a model whose operators are spelled out against the model, in onnxruntime."""
    result, found = spelled(model)
    left = {node.op_type for node in result.graph.node if node.domain}
    assert [one.op for one in found.spelled] and left <= {"GatedDeltaNet"}, found.stays
    for seed in range(2):
        feeds = drawn(model, seed)
        for expected, value in zip(run(model, feeds), run(result, feeds), strict=True):
            close(value, expected)


def close(value: np.ndarray, expected: np.ndarray) -> None:
    assert value.dtype == expected.dtype and value.shape == expected.shape
    tolerance = TOLERANCES[expected.dtype.name]
    scale = np.abs(expected.astype(np.float64)).max() or 1.0
    np.testing.assert_allclose(value.astype(np.float64), expected.astype(np.float64), rtol=0, atol=tolerance * scale)


# --- operators of which the CPU provider has no kernel ---------------------------------------------------------------


def conv(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the convolution of a channels-last image, padded by one, with (filters, height, width, channels)."""
    height, width = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = ((i, j) for i in range(3) for j in range(3))
    return sum(np.einsum("nhwc,mc->nhwm", padded[:, i : i + height, j : j + width], w[:, i, j]) for i, j in taps)


def group_norm(x: np.ndarray, groups: int, epsilon: float) -> np.ndarray:
    """Return a channels-last image whose groups of channels have mean 0 and variance 1."""
    rows = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, variance = rows.mean((1, 3), keepdims=True), rows.var((1, 3), keepdims=True)
    return ((rows - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)


def formula(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: ACTIVATIONS[name].formula(x, 0.0, 0.0)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return attention of (batch, rows, heads, size), with the heads side by side."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    context = np.einsum("bhqk,bkhd->bqhd", powers / powers.sum(-1, keepdims=True), v)
    return context.reshape(*context.shape[:2], -1)


IMAGE = "float[2,6,7,4] x"
IN_NUMPY: dict[str, tuple[str, Callable[..., object]]] = {
    "nhwc_conv": (
        f"({IMAGE}) => (float[2,6,7,5] y) <float[5,3,3,4] w, float[5] b> "
        "{ y = com.microsoft.NhwcConv <pads = [1,1,1,1]> (x, w, b) }",
        lambda x, w, b: conv(x, w) + b,
    ),
    "nhwc_fused_conv": (
        f"({IMAGE}, float[2,6,7,5] z) => (float[2,6,7,5] y) <float[5,4,3,3] w, float[5] b> "
        '{ y = com.microsoft.NhwcFusedConv <pads = [1,1,1,1], activation = "Relu"> (x, w, b, z) }',
        lambda x, z, w, b: np.maximum(conv(x, w.transpose(0, 2, 3, 1)) + b + z, 0),
    ),
    "group_norm": (
        f"({IMAGE}) => (float[2,6,7,4] y) <float[4] g, float[4] b> "
        "{ y = com.microsoft.GroupNorm <groups = 2, activation = 0, epsilon = 0.01> (x, g, b) }",
        lambda x, g, b: group_norm(x, 2, 0.01) * g + b,
    ),
    "group_norm_silu_channels_first": (
        f"({IMAGE}) => (float[2,6,7,4] y) <float[6] g, float[6] b> "
        "{ y = com.microsoft.GroupNorm <groups = 3, activation = 1, channels_last = 0> (x, g, b) }",
        lambda x, g, b: formula("silu")(group_norm(x.transpose(0, 2, 3, 1), 3, 1e-5) * g + b).transpose(0, 3, 1, 2),
    ),
    "skip_group_norm": (
        f"({IMAGE}, float[2,1,1,4] z) => (float[2,6,7,4] y, float[2,6,7,4] s) <float[4] g, float[4] b, float[4] c> "
        "{ y, s = com.microsoft.SkipGroupNorm <groups = 2, activation = 1> (x, g, b, z, c) }",
        lambda x, z, g, b, c: (formula("silu")(group_norm(x + z + c, 2, 1e-5) * g + b), x + z + c),
    ),
    "bias_split_gelu": (
        "(float[2,6,8] x) => (float[2,6,4] y) <float[8] b> { y = com.microsoft.BiasSplitGelu(x, b) }",
        lambda x, b: (x + b)[..., :4] * formula("gelu")((x + b)[..., 4:]),
    ),
    "bias_add": (
        "(float[2,6,8] x, float[2,6,8] z) => (float[2,6,8] y) <float[8] b> { y = com.microsoft.BiasAdd(x, b, z) }",
        lambda x, z, b: x + b + z,
    ),
    "gemm_fast_gelu": (
        "(float[2,6,8] x) => (float[2,6,5] y) <float[8,5] w, float[5] b> { y = com.microsoft.GemmFastGelu(x, w, b) }",
        lambda x, w, b: formula("gelu_tanh")(x @ w + b),
    ),
    "multi_head_packed": (
        "(float[2,5,2,3,4] x) => (float[2,5,8] y) { y = com.microsoft.MultiHeadAttention <num_heads = 2> (x) }",
        lambda x: attention(*x.transpose(3, 0, 1, 2, 4)),
    ),
    "multi_head_packed_keys": (
        "(float[2,5,8] q, float[2,6,2,2,4] k) => (float[2,5,8] y) "
        "{ y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k) }",
        lambda q, k: attention(q.reshape(2, 5, 2, 4), *k.transpose(3, 0, 1, 2, 4)),
    ),
}


@pytest.mark.parametrize("name", IN_NUMPY)
def test_a_rule_computes_what_the_operator_does(name: str) -> None:
    text, reference = IN_NUMPY[name]
    model = parsed(text)
    result, found = spelled(model)
    assert found.spelled and not any(node.domain for node in result.graph.node), found.stays
    feeds = drawn(model)
    weights = [numpy_helper.to_array(each).astype(np.float64) for each in model.graph.initializer]
    expected = reference(*(value.astype(np.float64) for value in feeds.values()), *weights)
    several = expected if isinstance(expected, tuple) else (expected,)
    for wanted, value in zip(several, run(result, feeds), strict=True):
        close(value, wanted.astype(np.float32))
