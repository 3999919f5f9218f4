"""The process in which onnxruntime runs models for verification: it answers requests until its input ends.

A request is a tuple: the sessions to close, "open" or "run", the session's number, and the arguments for the function
of `ort_session`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any, BinaryIO

from onnxfuse.verify.messages import receive, send


def main() -> None:
    """Answer requests from standard input on standard output."""
    _no_core_files()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # native code that prints to stdout must not write into the pipe
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        send(answers, ("no onnxruntime", str(error)))
        return
    send(answers, ("ready", None))
    _answer(requests, answers)


def _read_requests(stream: BinaryIO, requests: queue.SimpleQueue[Any]) -> None:
    """Move requests from the stream to the queue; when the stream ends, end this process, even while a model runs."""
    try:
        while True:
            requests.put(receive(stream))
    except (EOFError, OSError):
        os._exit(0)


def _answer(requests: queue.SimpleQueue[Any], answers: BinaryIO) -> None:
    from onnxfuse.verify import ort_session

    sessions: dict[int, Any] = {}
    while True:
        closed, action, number, *arguments = requests.get()
        for each in closed:
            sessions.pop(each, None)
        try:
            if action == "open":
                sessions[number] = ort_session.start(*arguments)
                result = None
            else:
                result = ort_session.run(sessions[number], *arguments)
            send(answers, ("done", result))  # if pickling fails, nothing has been written yet
        except Exception as error:
            send(answers, ("failed", f"{error}" or type(error).__name__))
        arguments, result = [], None  # free the arrays before the next request comes


def _no_core_files() -> None:
    """Prevent core files when onnxruntime crashes."""
    try:
        import resource
    except ImportError:  # Windows has no such module
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
