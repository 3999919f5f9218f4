"""Scaled dot-product attention, with masks, caches, rotary embedding and vectors of relative positions."""

FUSIONS = (
    "attention",
    "attention_with_cache",
    "attention_with_rotary_embedding",
    "disentangled_attention",
    "group_query_attention",
)
# The operands that hold a single int32 in host memory, by fusion; see `numbers_of` in onnxfuse/runtime/hosts.py.
NUMBERS = {"group_query_attention": ("total_sequence_length",)}
