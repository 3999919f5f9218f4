"""A kernel with two outputs."""

FUSIONS = ("pair",)
