"""Run models in a worker process, so that this process goes on if onnxruntime crashes or hangs."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from onnxfuse.errors import NO_ONNXRUNTIME_TO_COMPARE, NothingRunsError, VerificationError
from onnxfuse.verify.messages import receive, send

if TYPE_CHECKING:
    from onnxfuse.ir.dtypes import Array

DEFAULT_TIMEOUT: Final = 600.0  # time limit in seconds for opening a model, and for each run of it
BYTES_SENT: Final = 16 * 2**20  # a larger model is sent as a file, so that onnxruntime needs no second copy in memory
# The worker gets the module search path of this process, so that it imports the same modules.
START_WORKER: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from onnxfuse.verify.worker import main; main()"
)

enabled = True  # the tests of this project switch worker processes off: they run some thousand models


class OnnxruntimeFailure(Exception):
    """onnxruntime failed to open or run a model, in this process or in the worker; the text says why."""


class OnnxruntimeCrash(OnnxruntimeFailure):
    """onnxruntime crashed, which ended the worker; the text names the signal or the exit code."""


class TimeLimitExceeded(VerificationError):
    """Opening or running a model took longer than allowed."""


class Worker:
    """A process that opens and runs models.  If a model crashes it, the next request starts a new process."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.ended = 0  # number of worker processes that have ended so far; their sessions ended with them
        self.closed: list[int] = []  # numbers of sessions that the worker can drop
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the process, which imports onnxruntime while the present process goes on."""
        if not sys.executable:
            raise NothingRunsError("Python does not know the path of its interpreter, so no process can be started; "
                                    "pass timeout=None to run models in this process")  # fmt: skip
        paths = json.dumps([str(Path(path or ".").resolve()) for path in sys.path if isinstance(path, str)])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START_WORKER, paths],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which then ends the worker
            )  # fmt: skip
        except OSError as error:
            raise NothingRunsError(f"the process that runs models cannot be started: {error}; "
                                    "pass timeout=None to run them in this one") from error  # fmt: skip
        self._ready = False

    def new_number(self) -> int:
        """Return a number for a session."""
        return next(self._numbers)

    def file_for(self, name: str) -> Path:
        """Return a path for a model file, in a folder that is deleted with the worker."""
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="onnxfuse-", ignore_cleanup_errors=True)
        return Path(self._scratch.name, name)

    def ask(self, action: str, number: int, *arguments: object) -> Any:
        """Return the answer to a request.

        Raises OnnxruntimeFailure for errors of onnxruntime, OnnxruntimeCrash if a crash ends the worker,
        TimeLimitExceeded if the answer takes too long, and VerificationError if the worker cannot start.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        expired = threading.Event()
        timer = threading.Timer(min(self.timeout, threading.TIMEOUT_MAX), _end_late, (self._process, expired))
        timer.daemon = True
        timer.start()
        try:
            if not self._ready:
                self._receive_ready()
            closed, self.closed = self.closed, []
            send(self._pipe("stdin"), (closed, action, number, *arguments))
            kind, answer = self._answer()
        except (EOFError, OSError):
            how = self._ended()
            if expired.is_set():
                raise TimeLimitExceeded(
                    f"onnxruntime took more than {self.timeout:g} s to {action} a model; allow more: --timeout SECONDS"
                ) from None
            if not self._ready:
                raise NothingRunsError(
                    f"the process that runs models ended with {how} before it ran one; "
                    f"`{sys.executable} -c 'import onnxruntime'` may say why"
                ) from None
            raise OnnxruntimeCrash(f"it ended onnxruntime with {how}") from None
        except BaseException:  # such as Ctrl-C: the pipe still holds a part of the answer, so the worker must end
            self._ended()
            raise
        finally:
            timer.cancel()
        if kind == "failed":
            raise OnnxruntimeFailure(answer)
        return answer

    def close(self) -> None:
        """End the process and delete its files."""
        self._ended()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _receive_ready(self) -> None:
        kind, text = self._answer()
        if kind != "ready":
            self._ended()
            raise NothingRunsError(f"{NO_ONNXRUNTIME_TO_COMPARE} ({text})")
        self._ready = True

    def _answer(self) -> tuple[str, Any]:
        answer: tuple[str, Any] = receive(self._pipe("stdout"))
        return answer

    def _pipe(self, name: str) -> Any:
        return getattr(self._process, name)

    def _ended(self) -> str:
        """End the process if it runs, and return the signal or the exit code with which it ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        self.ended += 1
        self.closed = []
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # closing a pipe flushes it, which fails if the process has ended
                if pipe is not None:
                    pipe.close()
        try:
            code = process.wait(0.5)  # a worker exits when its input ends
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code < 0:
            return signal.Signals(-code).name
        return f"exit code {code if code < 256 else hex(code)}"


def _end_late(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    process.kill()


class Stored:
    """A model as a worker reads it: bytes with external weights in `folder`, or a temporary file.

    The file is deleted with this object.
    """

    def __init__(self, source: bytes | str, folder: str | None) -> None:
        self.source, self.folder = source, folder

    def __del__(self) -> None:
        if isinstance(self.source, str):
            Path(self.source).unlink(missing_ok=True)


class WorkerSession:
    """A model that is open in a worker."""

    def __init__(self, worker: Worker, stored: Stored, optimize: bool) -> None:
        self._worker, self._stored, self._optimize = worker, stored, optimize
        self._number = worker.new_number()
        self._ended = -1
        self._open()

    def _open(self) -> None:
        self._worker.ask("open", self._number, self._stored.source, self._stored.folder, self._optimize)
        self._ended = self._worker.ended

    def run(self, feeds: Mapping[str, Array]) -> dict[str, object]:
        """Return the outputs by name; if the worker has ended, open the model in a new worker first."""
        if self._ended != self._worker.ended:
            self._open()
        outputs: dict[str, object] = self._worker.ask("run", self._number, dict(feeds))
        return outputs

    def __del__(self) -> None:
        if self._ended == self._worker.ended:
            self._worker.closed.append(self._number)


_worker: ContextVar[Worker | None] = ContextVar("worker", default=None)


def current_worker() -> Worker | None:
    """Return the worker that runs the models of this thread; None if they run in this process."""
    return _worker.get()


@contextmanager
def own_process(timeout: float | None, *, at_once: bool = True, shared: bool = False) -> Iterator[None]:
    """Run models in a worker process while the block runs; opening or running a model takes at most `timeout` seconds.

    If `timeout` is None, models run in this process, without a limit.  The worker starts now if `at_once`, else when
    the first model is opened.  If `shared`, a block within another one that has the same limit takes its worker.
    """
    outer = _worker.get()
    if timeout is None or not enabled or (shared and outer and outer.timeout == timeout):
        yield
        return
    worker = Worker(timeout)
    token = _worker.set(worker)
    try:
        if at_once:
            worker.start()
        yield
    finally:
        _worker.reset(token)
        worker.close()
