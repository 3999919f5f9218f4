"""Fill CuPy's disk cache with a process for each core, because NVRTC compiles one kernel at a time in a process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable

import cupy

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.nvrtc import arch_name, compile_flags, kernel_text
from onnxfuse.runtime.plan import Kernel


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Compile kernels into the cache.  Raises CalledProcessError if one does not compile."""
    different = list({(kernel.source, compile_flags(kernel)): kernel for kernel in kernels}.values())
    count = min(len(different), os.cpu_count() or 1)
    command = [sys.executable, "-W", "ignore", __file__]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
    for i, process in enumerate(processes):
        assert process.stdin is not None
        pickle.dump([(k.source, k.entry, dict(k.defines), k.arch_specific) for k in different[i::count]], process.stdin)
        process.stdin.close()
    for process in processes:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, command)


def main() -> None:
    for fields in pickle.load(sys.stdin.buffer):
        kernel = Kernel(*fields)
        flags = compile_flags(kernel)
        if kernel.arch_specific:
            flags += (f"-arch={arch_name(kernel, gpu(0).arch)}",)
        cupy.RawKernel(kernel_text(kernel), kernel.entry, options=flags).compile()


if __name__ == "__main__":
    main()
