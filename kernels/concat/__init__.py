"""Concat and Split of channels-last tensors along their channels."""

from typing import Final

FUSIONS: Final = ("concat", "split")
