"""A copy of any dtype through scratch memory."""

FUSIONS = ("copy",)
