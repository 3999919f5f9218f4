"""Kernels of regions, which are generated from the operators in the node's attribute `program`."""

from typing import Final

FUSIONS: Final = ("region",)
