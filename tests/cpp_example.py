"""Run the C++ example, which is built against the onnxruntime that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from build_example import build


@dataclass(frozen=True)
class Answer:
    """What the example printed, and when."""

    outputs: Mapping[str, tuple[list[int], list[float]]]  # shapes and first elements
    seconds: float  # from the start of the process to its first answer
    text: str


def built_example(folder: Path) -> Path:
    """Return the program, which is compiled into a folder; skip the test where it cannot be built."""
    try:
        return build(folder)
    except FileNotFoundError as error:
        pytest.skip(str(error))


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
