"""The kernels of the snake activation."""

from typing import Final

FUSIONS: Final = ("snake",)
