"""Machine code that the processes of one test run share, so that none compiles what another has compiled."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from onnxfuse.runtime.nvrtc import compiler_version
from onnxfuse.testing.emulated_build import made_once

Compile = Callable[[str, str, list[str]], tuple[bytes, str]]


def shared(compile_: Compile, folder: Path) -> Compile:
    """Return a compiler that keeps its results (machine code and log) under a folder.

    A result is found by the compiler's version, the source, its name and all flags, one of which is the architecture.
    The folder of CUDA's headers, which another environment has elsewhere, counts only for a source that includes any.
    What does not compile is not kept.
    """

    @functools.wraps(compile_)
    def compile_once(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
        includes = "#include" in source
        read = [flag for flag in flags if includes or not flag.startswith("-I")]
        key = (compiler_version(), _package(), source, name, read)

        def build(path: Path) -> None:
            path.write_bytes(pickle.dumps(compile_(source, name, flags)))

        found: tuple[bytes, str] = pickle.loads(made_once(folder, key, ".cubin", build).read_bytes())
        return found

    return compile_once


@functools.cache
def _package() -> str:
    """Return the version of NVRTC's wheel, which tells releases of one version apart; "" without the wheel."""
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""
