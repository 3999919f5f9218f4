"""Elementwise kernels: activations alone, after a bias, a channel scale or a batch norm, and gated activations."""

from typing import Final

FUSIONS: Final = ("activation", "bias_activation", "gated_activation", "channel_scale", "batch_norm_activation")
