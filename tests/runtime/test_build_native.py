"""The native library is built by any number of processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
