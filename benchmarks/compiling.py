"""Compile kernels in several threads before they are timed; onnxfuse keeps their machine code on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from onnxfuse.runtime.code_cache import cached_cubin
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Kernel


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Compile kernels into the cache.  Raises KernelError if one does not compile."""
    different = list({kernel.key: kernel for kernel in kernels}.values())
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda kernel: cached_cubin(kernel, gpu(0).arch), different))
