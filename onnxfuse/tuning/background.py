"""tune="background": measure the plans of nodes between the runs of sessions, at the most frequent shapes.

A plan says which kernels compute a node, and how they are launched; a template has the plans of a node for all sizes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import Counter
from typing import Final

from onnxfuse.errors import OnnxfuseError, first_line
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.template import MAX_TUNED_DISTANCE, distance
from onnxfuse.tuning.autotune import MeasuredVerdicts
from onnxfuse.tuning.runs_in_flight import MeasuringStopped, RunsInFlight

log: Final = logging.getLogger("onnxfuse")
PAUSE_SECONDS: Final = 0.5  # time between checks of the sessions' runs
MAX_MEASURED_SIZES: Final = 32  # per template; a limit, because each new shape is compared with all measured ones
MAX_SEEN_SIZES: Final = 4096  # maximum number of sizes per template whose runs are counted
NEAR: Final = MAX_TUNED_DISTANCE / 2  # sizes this close to measured sizes are not measured
SECONDS_TO_STOP: Final = 10.0
Sizes = tuple[int, ...]


class BackgroundTuning:
    """Measures plans between the runs of sessions, in a thread that ends with the last of these sessions."""

    def __init__(self) -> None:
        """Begin without sessions; `add` starts the thread."""
        self.runs: Final = RunsInFlight(self._goes_on)
        self._verdicts = MeasuredVerdicts(self.runs.alone)
        self.forget()

    def forget(self) -> None:
        """Begin again without sessions; a forked process calls this, because it lacks its parent's threads."""
        self.runs.forget()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sessions: weakref.WeakSet[object] = weakref.WeakSet()
        self._seen: weakref.WeakKeyDictionary[PreparedTemplate, Counter[Sizes]] = weakref.WeakKeyDictionary()
        self._done: weakref.WeakKeyDictionary[PreparedTemplate, set[Sizes]] = weakref.WeakKeyDictionary()

    def add(self, session: object, provider: str) -> None:
        """Measure between the runs of this session, too, as long as it exists."""
        with self._lock:
            self._sessions.add(session)
            if self._thread is None:
                name = "onnxfuse background tuning"
                self._thread = threading.Thread(target=self._work, args=(provider,), name=name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end, because Python must not exit while a measurement uses the GPU."""
        self._stop.set()
        if thread := self._thread:
            thread.join(SECONDS_TO_STOP)

    def _goes_on(self) -> bool:
        return not self._stop.is_set() and len(self._sessions) > 0

    def _work(self, provider: str) -> None:
        if why := BACKENDS[provider].cannot_time():
            log.warning("tune='background' measures nothing: %s", why)
        while self._stays(why):
            try:
                task = None if why else self._next()
                if task is None:
                    self._stop.wait(PAUSE_SECONDS)
                else:
                    self._measure(*task)
            except MeasuringStopped:
                self._stop.wait(PAUSE_SECONDS)
            except Exception as error:  # the program goes on without the thread
                why = f"{type(error).__name__}: {error}"
                log.warning("tune='background' measures nothing more: %s", why)

    def _stays(self, why: str | None) -> bool:
        """Return whether the thread continues: sessions exist, and no error (`why`) occurred.

        If it does not continue, the next session starts another thread.
        """
        with self._lock:
            if self._goes_on() and not why:
                return True
            self._thread = None
            return False

    def _next(self) -> tuple[PreparedTemplate, Sizes] | None:
        """Return the (template, sizes) that ran most often among those not measured yet; None if all are measured.

        Raises MeasuringStopped if runs leave no time to measure.
        """
        for prepared, sizes, count in planner.take_runs():
            of_template = self._seen.setdefault(prepared, Counter())
            of_template[sizes] += count
            if len(of_template) > 2 * MAX_SEEN_SIZES:
                self._seen[prepared] = Counter(dict(of_template.most_common(MAX_SEEN_SIZES)))
        rows = [(count, prepared, sizes) for prepared, of in self._seen.items() for sizes, count in of.items()]
        for _, prepared, sizes in sorted(rows, key=lambda row: -row[0]):
            if not self._is_done(prepared, sizes):
                self.runs.wait_for_none(PAUSE_SECONDS)  # making plans would slow down a run
                return prepared, sizes
        return None

    def _is_done(self, prepared: PreparedTemplate, sizes: Sizes) -> bool:
        done = self._done.setdefault(prepared, set())
        if sizes not in done:
            measured = [each.hints for each in prepared.template.variants if each.tuned]
            if len(measured) >= MAX_MEASURED_SIZES or any(distance(sizes, hints) <= NEAR for hints in measured):
                done.add(sizes)
        return sizes in done

    def _measure(self, prepared: PreparedTemplate, sizes: Sizes) -> None:
        """Measure a template's plans at `sizes`; nodes of all sessions use the fastest plan from their next run on."""
        node = prepared.situation.node
        try:
            if planner.add_fastest(prepared, sizes, self._verdicts, measure=True):
                prepared.data()  # loads the kernels of the new plan
                planner.send(prepared, only_observed=True)
                log.info(
                    "%s: measured between runs at sizes %s", node.fusion, "x".join(map(str, sizes)) or "that are fixed"
                )
        except (OnnxfuseError, ArithmeticError, ValueError) as error:
            log.info("%s is not measured at %s: %s", node.fusion, sizes, first_line(error))
        self._done.setdefault(prepared, set()).add(sizes)


background: Final = BackgroundTuning()
atexit.register(background.stop)
if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=background.forget)
