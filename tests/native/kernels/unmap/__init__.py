"""A kernel with a tensor map."""

FUSIONS = ("unmap",)
