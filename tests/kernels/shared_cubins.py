"""Machine code that the processes of one test run share, so that none compiles what another has compiled."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

from onnxfuse.runtime.nvrtc import compiler_version

Compile = Callable[[str, str, list[str]], tuple[bytes, str]]


def shared(compile_: Compile, folder: Path) -> Compile:
    """Return a compiler that keeps its results (machine code and log) under a folder.

    A result is found by the compiler's version, the source, its name and all flags, one of which is the architecture.
    While one process compiles, others that want the same wait for it.  What does not compile is not kept.
    """
    folder.mkdir(exist_ok=True)

    @functools.wraps(compile_)
    def compile_once(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
        content = (compiler_version(), source, name, flags)
        kept = folder / hashlib.sha256(repr(content).encode()).hexdigest()
        with kept.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which closing the file releases, also where compiling fails
            file.seek(0)
            data = file.read()
            if not data:
                data = pickle.dumps(compile_(source, name, flags))
                file.write(data)
        found: tuple[bytes, str] = pickle.loads(data)
        return found

    return compile_once
