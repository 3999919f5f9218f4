"""Resize of the spatial axes of channels-last tensors."""

from typing import Final

FUSIONS: Final = ("resize",)
