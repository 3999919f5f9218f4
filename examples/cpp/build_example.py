"""Build run_model.cc against the onnxruntime that is installed for Python: `python build_example.py [FOLDER]`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")
COMPILERS = ("c++", "g++", "clang++")


def onnxruntime_library() -> Path | None:
    """Return a libonnxruntime.so.<version>: of the Python package, or in a folder of LIBRARY_PATH; None without any."""
    named = filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
    folders = [Path(onnxruntime.__file__).parent / "capi", *map(Path, named)]
    return next((path for folder in folders for path in sorted(folder.glob("libonnxruntime.so.*.*"))), None)


def build(folder: Path) -> Path:
    """Compile the program into a folder, and return its path.  Raises FileNotFoundError if something is missing."""
    library = onnxruntime_library()
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), *COMPILERS))), None)
    if library is None or compiler is None:
        raise FileNotFoundError("no libonnxruntime.so" if library is None else "no C++ compiler")
    main = "libonnxruntime.so.1"  # the name that programs look for, which the Python package lacks
    providers = {path.name: path for path in library.parent.glob("libonnxruntime_providers_*.so")}
    for name, path in {main: library, **providers}.items():  # onnxruntime looks for providers beside itself
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(path.resolve())
    program = folder / "run_model"
    command = [compiler, *FLAGS, str(HERE / "run_model.cc"), str(folder / main), "-Wl,-rpath,$ORIGIN"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
