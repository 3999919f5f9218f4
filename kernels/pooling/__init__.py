"""Pooling of channels-last tensors: over windows, and over all pixels of an image."""

from typing import Final

FUSIONS: Final = ("max_pool", "average_pool", "global_average_pool", "global_max_pool")
