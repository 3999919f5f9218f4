"""How it runs: one folder a family of kernels."""
