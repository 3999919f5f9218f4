"""Run the C++ example, which is built against the onnxruntime that is installed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from build_example import build


@dataclass(frozen=True)
class Answer:
    """What the example printed."""

    outputs: Mapping[str, tuple[list[int], list[float]]]  # shapes and first elements
    text: str


def built_example(folder: Path) -> Path:
    """Return the program, which is compiled into a folder; skip the test where it cannot be built."""
    try:
        return build(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def run_example(program: Path, *arguments: str | Path, **variables: str) -> Answer:
    """Run the program.  Raises RuntimeError with what it wrote to stderr if it fails."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    outputs = {
        name: ([int(size) for size in re.findall(r"\d+", shape)], [float(value) for value in values.split()])
        for name, shape, values in re.findall(r"^(\S+) \[(.*)\]:(.*)$", done.stdout, re.MULTILINE)
    }
    return Answer(outputs, done.stdout + done.stderr)
