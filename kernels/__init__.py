"""CUDA kernels of the fusions: a folder per family, with .cu files, `host.py`, and the fusions' names as `FUSIONS`."""
