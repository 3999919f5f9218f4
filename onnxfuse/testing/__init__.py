"""Check your own kernels on a CPU: see `check_kernels`."""

from __future__ import annotations

from onnxfuse.testing.check_kernels import KernelCheck, check_kernels

__all__ = ["KernelCheck", "check_kernels"]
