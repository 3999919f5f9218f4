"""CuPy's disk cache filled by as many processes as there are cores: in one, NVRTC compiles one kernel at a time."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable

import cupy

from onnxfuse.provider.compile import gpu
from onnxfuse.provider.plan import Kernel
from onnxfuse.provider.source import architecture, options, source_text


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Raises CalledProcessError where one does not compile."""
    different = list({(kernel.source, options(kernel)): kernel for kernel in kernels}.values())
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
        flags = options(kernel)
        if kernel.arch_specific:
            flags += (f"-arch={architecture(kernel, gpu(0).arch)}",)
        cupy.RawKernel(source_text(kernel.source), kernel.entry, options=flags).compile()


if __name__ == "__main__":
    main()
