"""CuPy's kernel cache on disk: shared by processes, and survived where it is corrupted, unwritable or full."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(importlib.import_module("onnxfuse.provider.compile").unavailable()), reason="needs CuPy and a GPU"
    ),
]

# Compiles the layer_norm of (33, 768) and checks what it computes; the last line says how long compiling took.
PROGRAM = """
import logging, resource, signal, sys, time
import numpy as np
logging.basicConfig(level=logging.WARNING, format="%(message)s")
sys.path.insert(0, {tests!r})
import cupy, kernel_runs
from onnxfuse.provider import compile as gpu_compile
if {full}:  # no file may grow: what a full disk does to whoever writes
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
x, scale = kernel_runs.normal((33, 768), "float32", 1), kernel_runs.normal((768,), "float32", 2)
(y,) = kernel_runs.run("rms_norm", {{"x": x, "scale": scale}}, ["float32"], gpu_compile.gpu(0), epsilon=1e-5)
exact = x.astype(np.float64)
exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * scale
kernel_runs.check(y, exact)
print("right")
"""


def run(cache: Path, full: bool = False) -> str:
    """What a process that uses this cache folder says; it must compute the right result."""
    program = PROGRAM.format(tests=str(Path(__file__).parent), full=full)
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("right\n"), done.stdout
    return done.stderr


def cubins(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_processes_share_compiled_kernels(tmp_path: Path) -> None:
    run(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in cubins(tmp_path)}
    assert files
    run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in cubins(tmp_path)} == files


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_corrupted_kernel_is_compiled_again(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    for path in cubins(tmp_path):
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 0xFF
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}.get(damage, bytes(data)))
    run(tmp_path)


def test_a_full_disk_costs_the_cache_only(tmp_path: Path) -> None:
    assert "kernels are not cached on disk" in run(tmp_path, full=True)


def test_a_folder_that_cannot_be_made_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "kernels are not cached on disk" in run(tmp_path / "file" / "cache")
