"""Build the C++ example against the onnxruntime that is installed, and run it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
import pytest

from onnxfuse.runtime import build_native

SOURCES = Path(__file__).parents[1] / "examples" / "cpp"
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Answer:
    """What the example printed, and when."""

    outputs: Mapping[str, tuple[list[int], list[float]]]  # shapes and first elements
    seconds: float  # from the start of the process to its first answer
    text: str


def onnxruntime_library() -> Path | None:
    """Return a libonnxruntime.so.<version>: of the Python package, or in a folder of LIBRARY_PATH; None without any."""
    named = filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
    folders = [Path(ort.__file__).parent / "capi", *map(Path, named)]
    return next((path for folder in folders for path in sorted(folder.glob("libonnxruntime.so.*.*"))), None)


def build_example(folder: Path) -> Path:
    """Return the program, which is compiled into a folder; skip the test where it cannot be built."""
    library, compiler = onnxruntime_library(), build_native.compiler()
    if library is None or compiler is None:
        pytest.skip("needs a C++ compiler and libonnxruntime.so")
    if not (library.parent / "libonnxruntime.so.1").exists():  # the name that programs look for; wheels do not have it
        (folder / "libonnxruntime.so.1").symlink_to(library)
    program = folder / "run_model"
    link = [str(library), f"-Wl,-rpath,{folder}:{library.parent}"]
    subprocess.run([compiler, *FLAGS, str(SOURCES / "run_model.cc"), "-o", str(program), *link], check=True)
    return program


def run_example(program: Path, *arguments: str | Path, **variables: str) -> Answer:
    """Run the program.  Raises RuntimeError with what it wrote to stderr if it fails."""
    start = time.monotonic()
    with subprocess.Popen(
        [str(program), *map(str, arguments)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        seconds = time.monotonic() - start
        rest, errors = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(errors)
    outputs = {
        name: ([int(size) for size in re.findall(r"\d+", shape)], [float(value) for value in values.split()])
        for name, shape, values in re.findall(r"^(\S+) \[(.*)\]:(.*)$", rest, re.MULTILINE)
    }
    return Answer(outputs, seconds, first + rest + errors)
