"""Elementwise kernels: activations alone, after a bias, of a gate, after a channel scale, and after batch norm."""

from typing import Final

FUSIONS: Final = ("activation", "bias_activation", "gated_activation", "channel_scale", "batch_norm_activation")
