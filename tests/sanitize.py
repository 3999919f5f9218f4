"""The kernel tests under compute-sanitizer: every one of them, in several processes side by side.

    python tests/sanitize.py [--tools memcheck,racecheck] [--processes 12] [tests/test_kernels_gpu.py::test_softmax ...]

Each array has an allocation of its own, so that memcheck sees what lies beyond its end.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND = 9  # what compute-sanitizer exits with where it has found something
MOST_LINES = 60  # of what one process says
PYTEST = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "ignore"]


def tests(chosen: list[str]) -> list[str]:
    """The ids of the tests."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", *PYTEST, *chosen]
    listed = subprocess.run(collect, capture_output=True, text=True, check=False)
    found = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode or not found:
        sys.exit(f"pytest collects nothing from {' '.join(chosen)}:\n{listed.stdout}{listed.stderr}")
    return found


def watched(tool: str, ids: list[str]) -> tuple[bool, str]:
    """Run these tests under the tool: whether all was well, and what it printed."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listing:
        listing.write("\n".join(ids))
        listing.flush()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        worker = [sys.executable, __file__, "--worker", listing.name]
        run = subprocess.run([*command, *worker], capture_output=True, text=True, check=False)
    text = run.stdout + run.stderr
    clean = re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", text)
    return run.returncode == 0 and clean is not None, text


def telling(text: str) -> list[str]:
    """What the tool and pytest say of errors, and how they end."""
    lines = [line for line in text.splitlines() if line.startswith(("=========", "FAILED", "ERROR", "E  "))]
    return [*lines[:MOST_LINES], *text.splitlines()[-3:]]


def work(listing: str) -> int:
    """Run the listed tests in this process."""
    import cupy

    cupy.cuda.set_allocator(None)
    return int(pytest.main([*PYTEST, "-o", "addopts=", *Path(listing).read_text(encoding="utf-8").splitlines()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", default=sorted(map(str, HERE.glob("test_kernels*_gpu.py"))))
    given = parser.parse_args()
    if given.worker:
        sys.exit(work(given.worker))
    if not shutil.which("compute-sanitizer"):
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    sys.path.insert(0, str(HERE))
    importlib.import_module("kernel_runs").compile_native()  # once, before many processes want it
    ids, well = tests(given.tests), True
    for tool in given.tools.split(","):
        started = time.monotonic()
        shares = [ids[i :: given.processes] for i in range(min(given.processes, len(ids)))]
        with ThreadPoolExecutor(len(shares)) as pool:
            results = list(pool.map(watched, [tool] * len(shares), shares))
        failed = [text for fine, text in results if not fine]
        well = well and not failed
        for text in failed:
            print("\n".join(telling(text)))
        took, where = time.monotonic() - started, f"{len(shares)} processes"
        print(f"{tool}: {len(ids)} tests, {took:.0f} s; not clean: {len(failed)} of {where}", flush=True)
    sys.exit(not well)


if __name__ == "__main__":
    main()
