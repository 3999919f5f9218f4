"""Kernels compiled without a GPU: NVRTC through cuda-bindings, or through CuPy."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.provider.plan import Kernel
from onnxfuse.provider.source import KernelError, architecture, options, source_text

# What CuPy always adds, so that both ways make the same code.
LIKE_CUPY: Final = ("-ftz=true", "--device-as-default-execution-space")
REPORT: Final = re.compile(
    r"Compiling entry function '(?P<entry>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what the assembler reports of the kernel's entry; -1: it does not tell."""

    code: bytes
    registers: int  # per thread
    stack: int  # bytes of local memory per thread
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    shared: int  # bytes of static shared memory
    log: str  # warnings of the compiler


def compile_cubin(kernel: Kernel, arch: int) -> Cubin:
    """Compile for compute capability `arch` (75, 90 …).  Needs no device.  Raises KernelError."""
    flags = [f"-arch={architecture(kernel, arch)}", *options(kernel), *LIKE_CUPY, "-Xptxas=-v", *_includes()]
    code, log = _nvrtc(source_text(kernel.source), f"{kernel.source}.cu", flags)
    for found in REPORT.finditer(log):
        if found["entry"] == kernel.entry:
            registers, stack, stores, loads, shared = (
                int(found[name] or 0) for name in ("registers", "stack", "stores", "loads", "shared")
            )
            return Cubin(code, registers, stack, stores, loads, shared, log)
    if f".text.{kernel.entry}".encode() in code:
        return Cubin(code, -1, -1, -1, -1, -1, log)
    raise KernelError(f"{kernel.source}.cu has no entry {kernel.entry}; the compiler says: {log.strip()}")


def _includes() -> Iterator[str]:
    """Where <cuda_fp16.h> and the like are: a CUDA toolkit, or NVIDIA's wheels (nvidia-cuda-runtime)."""
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(home, "include") for home in homes if home]
    try:
        packages = list(importlib.import_module("nvidia").__path__)
    except ImportError:
        packages = []
    folders += [folder for package in packages for folder in sorted(Path(package).glob("cu*/include"), reverse=True)]
    found = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if found:
        yield f"-I{found}"


def _nvrtc(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    """(cubin, log)"""
    try:
        return _by_bindings(importlib.import_module("cuda.bindings.nvrtc"), source, name, flags)
    except ImportError:
        pass
    try:
        return _by_cupy(importlib.import_module("cupy_backends.cuda.libs.nvrtc"), source, name, flags)
    except ImportError as error:
        raise KernelError("compiling kernels needs cuda-bindings and nvidia-cuda-nvrtc, or CuPy") from error


def _by_bindings(nvrtc: Any, source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    def call(function: Any, *arguments: Any) -> Any:
        code, *results = function(*arguments)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} does not compile: {log().strip() or code}")
        return results[0] if results else None

    def text(size: Any, get: Any) -> bytes:
        buffer = bytes(size(program)[1])
        get(program, buffer)  # writes into the buffer
        return buffer

    def log() -> str:
        return text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")

    program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])[1]
    try:
        call(nvrtc.nvrtcCompileProgram, program, len(flags), [flag.encode() for flag in flags])
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _by_cupy(nvrtc: Any, source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(flags))
        return bytes(nvrtc.getCUBIN(program)), str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        raise KernelError(f"{name} does not compile: {nvrtc.getProgramLog(program).strip() or error}") from error
    finally:
        nvrtc.destroyProgram(program)
