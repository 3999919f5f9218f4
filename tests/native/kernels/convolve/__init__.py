"""A convolution by cuDNN."""

FUSIONS = ("convolve",)
