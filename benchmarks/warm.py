"""Fill the caches of compiled code before models.py measures, with a process for each peer of each model.

No candidate of a kernel is timed here, because all processes share the GPU.
"""

from __future__ import annotations

import importlib
import subprocess
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from model_cases import Work
from peers import Peer

from onnxfuse.runtime.plan import Kernel, Launch, Plan
from onnxfuse.runtime.planner import planner


class Candidates:
    """Verdicts that collect the kernels of all candidates, and choose none."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def inputs_measured(self, *_: Any) -> tuple[()]:
        return ()

    def choose(self, plans: Sequence[Plan], *_: Any) -> None:
        self.kernels += [step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)]


def warm(work: Work, peer: Peer) -> None:
    """Prepare a peer and run it once, which writes compiled code to disk: Inductor's, or that of all candidate plans.

    Whatever the peer raises, models.py records when it measures the peer.
    """
    candidates = Candidates()
    planner.verdicts = candidates
    peer.prepare(work).run()
    if candidates.kernels:
        importlib.import_module("compiling").compile_all(candidates.kernels)


def in_processes(commands: Sequence[Sequence[str]], at_once: int, seconds: float, log: BinaryIO) -> None:
    """Run commands, `at_once` at a time, and stop those that are left after so many seconds."""
    until = time.monotonic() + seconds
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    while (waiting or running) and time.monotonic() < until:
        running = [each for each in running if each.poll() is None]
        while waiting and len(running) < at_once:
            running.append(subprocess.Popen(waiting.pop(0), stdout=log, stderr=log))
        time.sleep(0.05)
    for each in running:
        each.kill()
        each.wait()
