"""The programs of benchmarks/ and models/, as far as a machine without a GPU and without PyTorch can tell."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from other_gpus import OTHER_GPUS

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("models/*.py"), ROOT / "tests" / "sanitize.py"])
WITH_OPTIONS = (
    "attention",
    "conv",
    "cpp_start",
    "cpu",
    "gemm",
    "kernels",
    "memory",
    "models",
    "other_gpus",
    "serving",
    "tilings",
)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_needs_no_gpu(name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_imported_from_onnxfuse_exists(path: Path) -> None:
    lacking = []
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("onnxfuse"):
            module = str(statement.module)
            lacking += [f"{module}.{each.name}" for each in statement.names if not has(module, each.name)]
    assert not lacking, f"{path.name} imports what does not exist: {', '.join(lacking)}"


def test_the_benchmark_of_other_gpus_has_those_of_the_tests() -> None:
    text = (ROOT / "benchmarks" / "other_gpus.py").read_text(encoding="utf-8")
    for each in OTHER_GPUS:
        assert f'Device("{each.name}", {each.arch}, {each.multiprocessors}, {each.shared_per_block})' in text
    assert text.count('": Device("') == len(OTHER_GPUS)


def has(module: str, name: str) -> bool:
    """Return whether a module exists and has an attribute or a submodule of this name."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False
