"""The package is found from wherever it is imported, and a wheel holds every source of a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(folder: Path, *arguments: str) -> str:
    """Return what a Python process prints that is started in the folder, with the installed package alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folder_that_holds_the_clone_does_not_hide_the_package(tmp_path: Path) -> None:
    """There, a clone named onnxfuse would be found as an empty namespace package first."""
    (tmp_path / "onnxfuse").symlink_to(ROOT)
    program = "import onnxfuse, onnxfuse.patterns.softmax, onnxfuse.kernels.norms; print(onnxfuse.__version__)"
    assert run(tmp_path, "-c", program).strip()


def test_the_command_line_runs_as_a_module(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "onnxfuse", "--version").startswith("onnxfuse, version ")


def test_a_wheel_holds_every_kernel_source() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packed = {path for glob in globs["onnxfuse.kernels"] for path in (ROOT / "kernels").glob(glob)}
    sources = {path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cu", ".cuh")}
    assert sources
    assert sources == packed
