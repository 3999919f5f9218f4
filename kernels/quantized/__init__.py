"""Matrix products and convolutions of 8-bit values; a value represents (value - zero point) * scale."""

from typing import Final

FUSIONS: Final = ("quantized_conv", "quantized_gemm", "quantized_matmul")
