"""Transposed convolutions of channels-last tensors with their epilogues."""

from typing import Final

FUSIONS: Final = ("conv_transpose_bias_activation",)
