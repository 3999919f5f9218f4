"""Channels-last layouts: which tensors get them, and how nodes read and write them."""
