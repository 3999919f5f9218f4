"""Run the kernel tests under compute-sanitizer, in several processes side by side.

    python tests/sanitize.py [--tools memcheck,racecheck] [--processes 12] [tests/kernels/test_kernels_gpu.py ...]
    python tests/sanitize.py --tools racecheck --seconds 60 --left left.txt    # lists the tests left in left.txt
    python tests/sanitize.py --tools racecheck @left.txt                       # runs these

Each array has an allocation of its own, so that memcheck sees what lies beyond its end.  One test races on
purpose, which does not show at a tool's pace: it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND = 9  # exit code of compute-sanitizer if it has found an error
GRACE_SECONDS = 20.0  # for the last test to end once the time is up
MAX_LINES_SHOWN = 60  # of the output of one process
ON_PURPOSE = "tests/kernels/test_pdl_gpu.py::test_a_kernel_that_does_not_wait_is_found[True]"
PYTEST = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "ignore"]


def tests(chosen: list[str]) -> list[str]:
    """Return the ids of the tests without the one that races on purpose."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", *PYTEST, *chosen]
    listed = subprocess.run(collect, capture_output=True, text=True, check=False)
    found = [line for line in listed.stdout.splitlines() if "::" in line]
    if ON_PURPOSE in found:
        print(f"left out, as it races on purpose: {ON_PURPOSE}", flush=True)
        found.remove(ON_PURPOSE)
    if listed.returncode or not found:
        sys.exit(f"pytest collects nothing from {' '.join(chosen)}:\n{listed.stdout}{listed.stderr}")
    return found


def watched(tool: str, ids: list[str], until: float) -> tuple[bool, list[str], str]:
    """Run tests under a tool; return whether it found no error, the tests that did not end, and its output."""
    with tempfile.TemporaryDirectory() as folder:
        listing, ended = Path(folder, "tests"), Path(folder, "ended")
        listing.write_text("\n".join(ids), encoding="utf-8")
        Path(folder, "until").write_text(str(until), encoding="utf-8")
        ended.touch()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
        # The native library asks for the parameters of a kernel until cuFuncGetParamInfo has no more of them.
        command += ["--report-api-errors", "no"] if tool == "memcheck" else []
        worker = [sys.executable, __file__, "--worker", folder]
        with Path(folder, "said").open("w+", encoding="utf-8") as said:
            run = subprocess.Popen([*command, *worker], stdout=said, stderr=said, start_new_session=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(timeout=min(until - time.time() + GRACE_SECONDS, threading.TIMEOUT_MAX))
            stopped = run.poll() is None
            if stopped:  # errors found until then count
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
            said.seek(0)
            text = said.read()
        done = set(ended.read_text(encoding="utf-8").splitlines())
    if stopped:
        well = not re.search(r"hazard|Invalid|FAILED|ERROR", text)
    else:
        well = run.returncode == 0 and "SUMMARY: 0 " in text
    return well, [name for name in ids if name not in done], text


def telling(text: str) -> list[str]:
    """Return the lines of the output that tell of errors, and its last three."""
    lines = [line for line in text.splitlines() if line.startswith(("=========", "FAILED", "ERROR", "E  "))]
    return [*lines[:MAX_LINES_SHOWN], *text.splitlines()[-3:]]


class Until:
    """A pytest plugin that lists the tests that ended, and begins none once the time is up."""

    def __init__(self, ended: Path, until: float) -> None:
        self._ended, self._until = ended, until

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        with self._ended.open("a", encoding="utf-8") as notes:
            notes.write(f"{nodeid}\n")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.time() > self._until:
            item.session.shouldstop = "time is up"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.shouldstop and not session.testsfailed:
            session.exitstatus = pytest.ExitCode.OK


def work(folder: Path) -> int:
    """Run the listed tests in this process."""
    import cupy

    cupy.cuda.set_allocator(None)
    ids, until = (Path(folder, name).read_text(encoding="utf-8").splitlines() for name in ("tests", "until"))
    return int(pytest.main([*PYTEST, "-o", "addopts=", *ids], plugins=[Until(folder / "ended", float(until[0]))]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1e9, help="of a tool; soon after, no test goes on")
    parser.add_argument("--left", type=Path, help="where to list the tests that did not end under the last tool")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", default=sorted(map(str, HERE.glob("kernels/test_kernels*_gpu.py"))))
    return parser.parse_args()


def main() -> None:
    given = parse()
    if given.worker:
        sys.exit(work(given.worker))
    if not shutil.which("compute-sanitizer"):
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    sys.path[:0] = [str(HERE), str(HERE / "kernels"), str(HERE / "native")]
    importlib.import_module("kernel_runs").compile_native()  # once, before many processes want it
    ids, well = tests(given.tests), True
    for tool in given.tools.split(","):
        started, until = time.monotonic(), time.time() + given.seconds
        shares = [ids[i :: given.processes] for i in range(min(given.processes, len(ids)))]
        with ThreadPoolExecutor(len(shares)) as pool:
            results = list(pool.map(watched, [tool] * len(shares), shares, [until] * len(shares)))
        failed, left = (
            [text for fine, _, text in results if not fine],
            [name for _, each, _ in results for name in each],
        )
        well = well and not failed
        for text in failed:
            print("\n".join(telling(text)))
        took, ran = time.monotonic() - started, len(ids) - len(left)
        of = f"{len(shares)} processes"
        print(f"{tool}: {ran} of {len(ids)} tests, {took:.0f} s; not clean: {len(failed)} of {of}", flush=True)
        if given.left and left:
            given.left.write_text("\n".join(left), encoding="utf-8")
        elif given.left:
            given.left.unlink(missing_ok=True)
    sys.exit(not well)


if __name__ == "__main__":
    main()
