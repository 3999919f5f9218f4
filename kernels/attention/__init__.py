"""Scaled dot-product attention, with masks, caches and rotary embedding."""

FUSIONS = ("attention", "attention_with_cache", "attention_with_rotary_embedding", "group_query_attention")
