"""A kernel with two inputs, for float32."""

FUSIONS = ("shift",)
