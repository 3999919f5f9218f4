"""The names of onnxruntime's execution providers, for code that needs no onnxruntime."""

from typing import Final

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
