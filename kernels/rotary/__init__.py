"""Kernels of rotary position embedding, and of the tables of cosines and sines that it reads."""

from typing import Final

FUSIONS: Final = ("rotary_embedding", "rotary_table")
