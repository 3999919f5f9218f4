"""Matrix products with their epilogues."""

FUSIONS = ("gemm_bias_activation", "gated_gemm", "parallel_gemm")
