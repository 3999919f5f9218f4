"""CUDA kernels of the fusions: a folder for each family, with its `FUSIONS`, its `host.py` and its .cu files."""
