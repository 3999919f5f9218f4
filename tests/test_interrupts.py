"""Test Ctrl-C: at any moment a command ends with "Aborted!" and leaves neither files nor processes behind."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from test_optimize import BLOCK, parse
from test_own_process import HEAD, RUNS_FOR_EVER

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")

FIRST, STEP = 0.02, 2.6  # seconds until the first moment, and how much longer each next one is
# The first line of the program: Python itself prints a traceback if Ctrl-C comes before.
PROGRAM = """
import onnxfuse.interrupts as interrupts
interrupts.install()
print("started", flush=True)
from onnxfuse.__main__ import run
run()
"""


def interrupted(folder: Path, wait: Callable[[], None], *arguments: str) -> tuple[int, str, str]:
    """Run a command, send SIGINT after `wait` has returned, and return the exit code and what was printed."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    wait()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=100)
    assert {path.name for path in scratch.iterdir()} <= {".ses"}  # onnxruntime 1.31 writes that one itself
    assert not processes_in(folder)
    return process.returncode, printed, errors


def processes_in(folder: Path) -> dict[str, float]:
    """Return the processes that use this folder for their temporary files, and for how many seconds each computed."""
    found, wanted = {}, f"TMPDIR={folder / 'scratch'}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                user, system = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
                command = (process / "cmdline").read_text(encoding="utf-8")
                found[command] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return found


@pytest.mark.parametrize(
    "arguments",
    ["optimize in.onnx out.onnx --report report.json", "verify in.onnx in.onnx", "explain in.onnx", "list",
     "bench in.onnx --runs 3"],
    ids=lambda text: text.split()[0],
)  # fmt: skip
def test_a_command_can_be_interrupted_at_any_moment(tmp_path: Path, arguments: str) -> None:
    """The moments lie closer together where a program begins; the last one is when the command has ended."""
    onnx.save(parse(BLOCK), tmp_path / "in.onnx")
    before = {"in.onnx", "scratch"}
    for number in itertools.count():
        wait = functools.partial(time.sleep, FIRST * STEP**number)
        code, printed, errors = interrupted(tmp_path, wait, *arguments.split())
        files = {path.name for path in tmp_path.iterdir()}
        if code == 0:
            assert errors.strip() == "" and printed and number > 2
            break
        assert (code, errors.strip()) == (1, "Aborted!")
        assert files - {"out.onnx", "report.json"} == before  # each of these is whole, or is not there
        for name in files - before:
            assert (tmp_path / name).stat().st_size
            (tmp_path / name).unlink()


SWALLOWED = """
import os, signal
import onnxfuse.interrupts as interrupts
interrupts.install()
class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
try:
    Deleted()
    while True:
        pass
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)  # while files are cleaned up
    print("interrupted", interrupts.seen())
"""


def test_an_interrupt_that_a_destructor_swallows_is_raised_again() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\n", "")


INSIDE_AN_IMPORT = """
import os, signal, sys
import onnxfuse.interrupts as interrupts
interrupts.install()
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "onnx":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(100):
                    pass
            except KeyboardInterrupt:
                raise ImportError("as C extensions make of it") from None
sys.meta_path.insert(0, Finder)
sys.argv[1:] = ["list"]
from onnxfuse.__main__ import run
run()
"""


def test_an_interrupt_that_an_import_turns_into_an_error_is_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSIDE_AN_IMPORT], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", "Aborted!")


INSIDE_AN_EXTENSION = """
import _imp, os, signal
import onnxfuse.interrupts as interrupts
interrupts.install()
create, created = _imp.create_dynamic, []
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass
    created.append(create(*arguments))
    return created[-1]
_imp.create_dynamic = interrupted
try:
    import onnx
    while True:
        pass
except KeyboardInterrupt:
    print("interrupted", len(created) > 0)
"""


def test_an_interrupt_waits_until_an_extension_is_loaded() -> None:
    """That of onnx crashed where Python code that it runs raised KeyboardInterrupt."""
    done = subprocess.run(
        [sys.executable, "-c", INSIDE_AN_EXTENSION], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\n", "")


WHILE_A_PROCESS_STARTS = """
import os, signal, subprocess
import onnxfuse.interrupts as interrupts
from onnxfuse.verify.own_process import own_process
interrupts.install()
start, started = subprocess.Popen._execute_child, []
def interrupted(self, *arguments, **more):
    start(self, *arguments, **more)
    started.append(self)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        pass
subprocess.Popen._execute_child = interrupted
try:
    with own_process(100.0, at_once=True):
        while True:
            pass
except KeyboardInterrupt:
    print("interrupted", [process.returncode is not None for process in started])
"""


def test_an_interrupt_waits_until_a_process_is_recorded() -> None:
    """Otherwise, nothing ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", WHILE_A_PROCESS_STARTS], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted [True]\n", "")


def test_a_model_that_runs_can_be_interrupted(tmp_path: Path) -> None:
    """The process in which onnxruntime runs the model ends as well."""
    onnx.save(onnx.parser.parse_model(f"{HEAD} g {RUNS_FOR_EVER}"), tmp_path / "in.onnx")
    for least in (1.5, 2.5):  # seconds that this process computes, about half a second before the model runs

        def wait(least: float = least) -> None:
            until = time.monotonic() + 100
            while not any("verify.worker" in each and took > least for each, took in processes_in(tmp_path).items()):
                assert time.monotonic() < until
                time.sleep(0.05)

        code, _, errors = interrupted(tmp_path, wait, "optimize", "in.onnx", "out.onnx")
        assert (code, errors.strip().splitlines()[-1], "Traceback" in errors) == (1, "Aborted!", False)
        assert not (tmp_path / "out.onnx").exists()
