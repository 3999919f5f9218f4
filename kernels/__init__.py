"""CUDA kernels of the fusions, in a folder for each family.

A folder has .cu files, a `host.py`, which plans their launches, and the names of its fusions as `FUSIONS`.
"""
