"""Kernels of regions, which are generated from what the node's attribute `program` says."""

from typing import Final

FUSIONS: Final = ("region",)
