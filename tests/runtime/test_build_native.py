"""The native library has all of its sources, and is built by any number of processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onnxfuse.runtime.native_library import PACKAGE

SLOW_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo library > "$2"
sleep 1
"""


def test_two_processes_build_at_the_same_time(tmp_path: Path) -> None:
    compiler, library = tmp_path / "compiler", tmp_path / "library.so"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    code = f"from pathlib import Path; from onnxfuse.runtime.build_native import build; build(Path({str(library)!r}))"
    given = {**os.environ, "CXX": str(compiler)}
    builds = [subprocess.Popen([sys.executable, "-c", code], env=given) for _ in range(2)]
    assert [each.wait() for each in builds] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiler", "library.so"]


def test_the_library_includes_every_source() -> None:
    folder = PACKAGE / "native"
    names = sorted(path.name for path in folder.glob("*.cc") if path.name != "library.cc")
    included = [line for line in (folder / "library.cc").read_text().splitlines() if line.startswith("#")]
    assert included == [f'#include "{name}"' for name in names]
