"""The types of the attributes of onnxruntime's own operators, which ONNX's checker does not know."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import AttributeProto

# Type -> the attributes with this type in the operators of com.microsoft that onnxfuse reads.
_NAMES: Final = {
    AttributeProto.FLOAT: """activation_alpha activation_beta activation_gamma alpha beta clip epsilon gate_lower_bound
        k_norm_epsilon mask_filter_value q_norm_epsilon qk_norm_epsilon scale softcap swiglu_limit""",
    AttributeProto.FLOATS: "activation_params",
    AttributeProto.INT: """K N accuracy_level axis bits block_size causal ceil_mode channels_last chunk_size
        count_include_pad dilation do_rotary expert_weight_bits fc1_expert_weight_bits fc2_expert_weight_bits
        fc3_expert_weight_bits gather_axis group groups hidden_size input_channel_offset input_channels input_forget
        interleaved is_inner_broadcast is_packed_batching k kv_cache_bit_width kv_num_heads local_window_size
        mask_index_type ndim normalize_routing_weights num_heads opset output_qk past_present_share_buffer q_num_heads
        qk_l2_norm qk_output quantize_axis rotary_embedding_dim rotary_interleaved sliding_window_cache smooth_softmax
        sparse_block_size state_channels_last state_length state_update_capacity state_window swiglu_fusion
        swiglu_limit_after_activation training_mode transA transB transBatchA transBatchB unidirectional
        use_sparse_mixer weight_prepacked weights_prepacked""",
    AttributeProto.INTS: "dilations kernel_shape pads qkv_hidden_sizes strides",
    AttributeProto.STRINGS: "activations",
    AttributeProto.STRING: """activation activation_type auto_pad beta_activation direction gate_activation k_quant_type
        update_rule v_quant_type""",
}
_TYPES: Final = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Exceptions from _NAMES: (operator, attribute) -> type.
_OTHERS: Final = {
    ("GroupNorm", "activation"): AttributeProto.INT,
    ("SkipGroupNorm", "activation"): AttributeProto.INT,
    ("AttnLSTM", "activation_alpha"): AttributeProto.FLOATS,
    ("AttnLSTM", "activation_beta"): AttributeProto.FLOATS,
    ("DynamicQuantizeLSTM", "activation_alpha"): AttributeProto.FLOATS,
    ("DynamicQuantizeLSTM", "activation_beta"): AttributeProto.FLOATS,
    ("MatMulBnb4", "quant_type"): AttributeProto.INT,
    ("QMoE", "quant_type"): AttributeProto.STRING,
}


def required_type(op: str, name: str) -> int | None:
    """Return the type, an AttributeProto.AttributeType, of an attribute of an operator of com.microsoft.

    Returns None for attributes that onnxfuse does not read.
    """
    return _OTHERS.get((op, name), _TYPES.get(name))


def wrong_attribute(node: onnx.NodeProto) -> str | None:
    """Return the first attribute of a node of com.microsoft whose type its operator does not allow; None if none."""
    for each in node.attribute:
        required = required_type(node.op_type, each.name)
        if required is not None and each.type != required:
            found, expected = (AttributeProto.AttributeType.Name(kind) for kind in (each.type, required))
            return f"the attribute '{each.name}' of type {found}; {node.op_type} requires {expected}"
    return None
