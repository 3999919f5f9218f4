"""A product by cuBLASLt."""

FUSIONS = ("product",)
