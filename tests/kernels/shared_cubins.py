"""Machine code that the processes of one test run share, so that none compiles what another has compiled."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

Compile = Callable[[str, str, list[str]], tuple[bytes, str]]


def shared(compile_: Compile, folder: Path) -> Compile:
    """Return a compiler that keeps its results (machine code and log) under a folder.

    A result is found by the source, its name and all flags, of which one names the architecture.  While one process
    compiles, others that want the same wait for it.  What does not compile is not kept.
    """
    folder.mkdir(exist_ok=True)

    def compile_once(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
        kept = folder / hashlib.sha256(repr((source, name, flags)).encode()).hexdigest()
        with kept.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which closing the file releases, also where compiling fails
            file.seek(0)
            content = file.read()
            if not content:
                content = pickle.dumps(compile_(source, name, flags))
                file.write(content)
        found: tuple[bytes, str] = pickle.loads(content)
        return found

    return compile_once
