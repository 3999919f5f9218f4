"""Matrix products and convolutions of integers of 8 bits, which stand for numbers by a scale and a zero point."""

from typing import Final

FUSIONS: Final = ("quantized_conv", "quantized_gemm")
