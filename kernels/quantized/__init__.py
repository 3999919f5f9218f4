"""Matrix products and convolutions of 8-bit integers; an integer represents (integer - zero point) * scale."""

from typing import Final

FUSIONS: Final = ("quantized_conv", "quantized_gemm")
