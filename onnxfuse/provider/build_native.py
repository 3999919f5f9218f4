"""Compile the native library where the package lies: `python -m onnxfuse.provider.build_native`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from onnxfuse.errors import OnnxfuseError
from onnxfuse.provider.native import PACKAGE

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of c++, g++, clang++ that is there."""
    names = [os.environ.get("CXX") or "c++", "c++", "g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def build(target: Path, *flags: str) -> Path:
    """Compile native/*.cc into a shared library.  Raises OnnxfuseError with the compiler's words."""
    found = compiler()
    if found is None:
        raise OnnxfuseError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    sources = sorted(str(path) for path in (PACKAGE / "native").glob("*.cc"))
    part = target.with_suffix(".part")
    result = subprocess.run([found, *FLAGS, *flags, *sources, "-o", str(part), "-ldl"], capture_output=True, text=True)
    if result.returncode:
        raise OnnxfuseError(f"{found} cannot compile the native library: {result.stderr.strip()}")
    part.rename(target)
    return target


if __name__ == "__main__":
    try:
        print(build(PACKAGE / "_native.abi3.so"))
    except OnnxfuseError as error:
        sys.exit(str(error))
