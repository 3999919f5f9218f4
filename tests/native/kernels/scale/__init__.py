"""A kernel with an attribute."""

FUSIONS = ("scale",)
