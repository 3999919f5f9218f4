"""Kernels of elementwise functions: activations alone, after a bias, of a gate, and of channels that are scaled."""

from typing import Final

FUSIONS: Final = ("activation", "bias_activation", "gated_activation", "channel_scale", "batch_norm_activation")
