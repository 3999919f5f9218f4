"""CuPy's kernel cache on disk is shared by processes; sessions run if it is corrupted, unwritable or full."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(importlib.import_module("onnxfuse.runtime.cupy_backend").unavailable()), reason="needs CuPy and a GPU"
    ),
]

# A program that runs a session whose kernel has two candidates, and checks the result.
PROGRAM = """
import dataclasses, logging, resource, signal, sys
import onnxruntime
sys.path.insert(0, {tests!r})
import onnxfuse.kernels
from test_runtime_gpu import CUDA, close, feed, model
onnxfuse.kernels.__path__.append({kernels!r})
from onnxfuse.kernels.row_center import host
own = host.candidates
ways = lambda node: [dataclasses.replace(node, attributes={{"steps": steps}}) for steps in (2, 1)]
host.candidates = lambda node, *rest: [plan for way in ways(node) for plan in own(way, *rest)]
logging.basicConfig(level=logging.INFO, format="%(message)s")
onnxruntime.preload_dlls()
if {full}:  # no file may grow, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
session = onnxfuse.InferenceSession(model(), providers=[CUDA], tune={tune!r})
close(session.run(None, feed(512))[0], feed(512))
print("right")
"""


def run(cache: Path, full: bool = False, tune: str = "never") -> str:
    """Return what a process that uses this cache folder logs; its result must be right.

    With `tune` "cached", candidates are compiled, compared and timed, for which CuPy compiles kernels of its own.
    """
    here = Path(__file__).parent
    kernels = here.parent / "native" / "gpu_kernels"
    program = PROGRAM.format(tests=str(here), kernels=str(kernels), full=full, tune=tune)
    measurements = cache.parent / "measurements"
    shutil.rmtree(measurements, ignore_errors=True)  # so that candidates are compiled and timed again
    environment = {**os.environ, "CUPY_CACHE_DIR": str(cache), "ONNXFUSE_CACHE_DIR": str(measurements)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("right\n"), done.stdout
    assert ("is the fastest" in done.stderr) == (tune == "cached"), done.stderr
    return done.stderr


def cubins(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_processes_share_compiled_kernels(tmp_path: Path) -> None:
    run(tmp_path / "cupy")
    files = {path: path.stat().st_mtime_ns for path in cubins(tmp_path / "cupy")}
    assert files
    run(tmp_path / "cupy")
    assert {path: path.stat().st_mtime_ns for path in cubins(tmp_path / "cupy")} == files


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_corrupted_kernel_is_compiled_again(tmp_path: Path, damage: str) -> None:
    run(tmp_path / "cupy")
    for path in cubins(tmp_path / "cupy"):
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 0xFF
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}.get(damage, bytes(data)))
    run(tmp_path / "cupy")


def test_a_full_disk_costs_the_cache_only(tmp_path: Path) -> None:
    """The session keeps its kernels and the choice between candidates in memory."""
    said = run(tmp_path / "cupy", full=True, tune="cached")
    assert "kernels are not cached on disk" in said and "measurements cannot be written" in said


def test_a_folder_that_cannot_be_made_costs_the_cache_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "kernels are not cached on disk" in run(tmp_path / "file" / "cache", tune="cached")
