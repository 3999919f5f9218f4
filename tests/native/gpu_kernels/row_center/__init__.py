"""A kernel for tests on a GPU."""

FUSIONS = ("row_center",)
