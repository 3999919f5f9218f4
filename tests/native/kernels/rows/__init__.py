"""A kernel whose second input is a number in host memory, for float32."""

FUSIONS = ("rows",)
NUMBERS = {"rows": ("count",)}
