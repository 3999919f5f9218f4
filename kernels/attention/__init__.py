"""Scaled dot-product attention, with masks, caches and rotary embedding."""

FUSIONS = ("attention", "attention_with_cache", "attention_with_rotary_embedding", "group_query_attention")
# The operands that hold a single int32 in host memory, by fusion; see `numbers_of` in onnxfuse/runtime/hosts.py.
NUMBERS = {"group_query_attention": ("total_sequence_length",)}
