"""CUDA kernels of the fusions: a folder per family, with .cu files, `host.py`, and `FUSIONS` (the fusions it runs)."""
