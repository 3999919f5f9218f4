"""Matrix products with weights of 2, 4 or 8 bits that are quantized in blocks along k."""

from typing import Final

FUSIONS: Final = ("gated_matmul_nbits", "matmul_nbits", "parallel_matmul_nbits")
