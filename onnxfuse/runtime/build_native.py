"""Compile the native library into the package's folder: `python -m onnxfuse.runtime.build_native`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.native_library import PACKAGE

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
# onnxruntime unloads a library of operators with the last session that uses it.  This library must stay loaded: it
# holds state that later sessions share, such as plan files, and objects that threads delete when they end.
LINK_FLAGS = ("-ldl", "-Wl,-z,nodelete")


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, or the first of c++, g++ and clang++ that is installed; None if none is."""
    names = [os.environ.get("CXX") or "c++", "c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(target: Path, *flags: str) -> Path:
    """Compile native/library.cc to the shared library `target`.  Raises OnnxfuseError with the compiler's messages."""
    found = compiler()
    if found is None:
        raise OnnxfuseError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    part = target.with_suffix(f".{os.getpid()}.part")  # other processes can build at the same time
    command = [found, *FLAGS, *flags, str(PACKAGE / "native" / "library.cc"), "-o", str(part), *LINK_FLAGS]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OnnxfuseError(f"{found} cannot compile the native library: {result.stderr.strip()}")
    part.rename(target)
    return target


if __name__ == "__main__":
    try:
        print(build(PACKAGE / "_native.abi3.so"))
    except OnnxfuseError as error:
        sys.exit(str(error))
