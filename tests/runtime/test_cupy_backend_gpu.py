"""Compiled kernels are kept on disk, for all processes; sessions run if they are damaged, or nothing can be kept."""

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
        bool(importlib.import_module("onnxfuse.runtime.cupy_backend").unavailable()), reason="needs CuPy and a GPU"
    ),
]

# A program that runs a session whose kernel has two candidates, checks the result, and says what it compiled.
PROGRAM = """
import dataclasses, logging, resource, signal, sys
import onnxruntime
sys.path.insert(0, {tests!r})
import onnxfuse.kernels
from onnxfuse.runtime import code_cache
from test_runtime_gpu import CUDA, D, close, feed, model
onnxfuse.kernels.__path__.append({kernels!r})
from onnxfuse.kernels.row_center import host
own = host.candidates
ways = lambda node: [dataclasses.replace(node, attributes={{"steps": steps}}) for steps in (2, 1)]
host.candidates = lambda node, *rest: [plan for way in ways(node) for plan in own(way, *rest)]
compiled, compile_cubin = [], code_cache.compile_cubin
code_cache.compile_cubin = lambda *each: compiled.append(each) or compile_cubin(*each)
logging.basicConfig(level=logging.INFO, format="%(message)s")
onnxruntime.preload_dlls()
if {full}:  # no file may grow, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
session = onnxfuse.InferenceSession(model(), providers=[CUDA], tune={tune!r}, shapes={{"x": (512, D)}})
close(session.run(None, feed(512))[0], feed(512))
print("right, compiled", len(compiled))
"""


def run(folder: Path, full: bool = False, tune: str = "never") -> tuple[int, str]:
    """Return how often a process compiles whose caches are in this folder, and what it logs.

    Its result must be right.  With `tune` "now", candidates are compared and timed, for which CuPy compiles kernels.
    """
    here = Path(__file__).parent
    kernels = here.parent / "native" / "gpu_kernels"
    program = PROGRAM.format(tests=str(here), kernels=str(kernels), full=full, tune=tune)
    caches = {"CUPY_CACHE_DIR": str(folder / "cupy"), "ONNXFUSE_CACHE_DIR": str(folder / "onnxfuse")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said, _, compiled = done.stdout.rpartition("right, compiled ")
    assert compiled, f"{said}{done.stdout}"
    assert ("is the fastest" in done.stderr) == (tune == "now"), done.stderr
    return int(compiled), done.stderr


def kept(folder: Path) -> dict[Path, int]:
    """Return the files of machine code, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "onnxfuse" / "code").iterdir()}


def test_processes_share_compiled_kernels(tmp_path: Path) -> None:
    compiled, _ = run(tmp_path)
    files = kept(tmp_path)
    assert compiled >= len(files) > 0
    assert run(tmp_path)[0] == 0
    assert kept(tmp_path) == files


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_kernel_is_compiled_again(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    files = kept(tmp_path)
    for path in files:
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 0xFF
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}.get(damage, bytes(data)))
    assert run(tmp_path)[0] >= len(files), "no damaged file is loaded"
    assert run(tmp_path)[0] == 0, "the files are whole again"


@pytest.mark.parametrize("tune", ["never", "now"])
def test_a_full_disk_costs_the_caches_only(tmp_path: Path, tune: str) -> None:
    """The session keeps its kernels, and the choice between candidates, in memory."""
    compiled, said = run(tmp_path, full=True, tune=tune)
    assert compiled > 0 and said.count("compiled kernels cannot be kept in") == 1
    assert ("measurements cannot be written" in said) == (tune == "now")
    assert ("kernels are not cached on disk" in said) == (tune == "now"), "those of CuPy, which compares results"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("tune", ["never", "now"])
def test_folders_that_cannot_be_made_cost_the_caches_only(tmp_path: Path, tune: str) -> None:
    (tmp_path / "file").write_text("")
    compiled, said = run(tmp_path / "file", tune=tune)
    assert compiled > 0 and said.count("compiled kernels cannot be kept in") == 1
    assert ("measurements cannot be written" in said) == (tune == "now")
    assert "kernels are not cached on disk" in said, "CuPy cannot even be imported without its folder"
