"""Kernels of elementwise functions: an activation alone, after a bias, or of a gate."""

from typing import Final

FUSIONS: Final = ("activation", "bias_activation", "gated_activation")
