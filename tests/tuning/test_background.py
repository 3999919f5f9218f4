"""tune="background": plans are measured between runs, and later runs take the fastest."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, feed, model, node, session, stage

import onnxfuse.session
from onnxfuse.errors import UsageError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.target import Target
from onnxfuse.session import InferenceSession, explain_session, register
from onnxfuse.tuning import autotune, background, cache, runs_in_flight
from onnxfuse.tuning.background import BackgroundTuning
from onnxfuse.tuning.counted_session import CountedSession
from onnxfuse.tuning.runs_in_flight import Alone, MeasuringStopped, RunsInFlight

HANGS = 100  # seconds; what does not come true until then never does
FIRST, FASTEST = 7, 5  # grids of the plan that the host expects to be the fastest, and of the one that is


class OnHost:
    """A trial in which the plan with fewer blocks is the faster one; it keeps the shapes that it measured."""

    shapes: list[tuple[int, ...]] = []  # noqa: RUF012  # emptied by the fixture

    def __init__(self, inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device, alone: Alone) -> None:
        self.shape, self.alone = inputs[0].shape, alone

    def refusal(self) -> None:
        return None

    def outputs(self, plan: Plan) -> int:
        return self.alone(lambda: 0)

    def difference(self, expected: int, outputs: int) -> None:
        return None

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        times = [self.alone(lambda plan=plan: 1e-6 * grid(plan)) for plan in plans]  # type: ignore[misc]
        self.shapes.append(self.shape)
        return times

    def close(self) -> None:
        pass


def grid(plan: Plan) -> int:
    (step,) = plan.steps
    assert isinstance(step, Launch)
    return step.grid[0]


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundTuning]:
    """Return what measures for the sessions of a test, without long pauses."""
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(runs_in_flight, "QUIET_SECONDS", 0.002)
    result = BackgroundTuning()
    monkeypatch.setattr(onnxfuse.session, "background", result)
    yield result
    result.stop()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tuning: BackgroundTuning) -> Stage:
    """Let the host of shift offer two plans."""
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_unwritten", {})
    monkeypatch.setitem(autotune.trials, CPU, OnHost)
    OnHost.shapes.clear()
    result = stage(monkeypatch)
    own = result.kernels("shift").candidates

    def both(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        (first,) = own(node, inputs, device)
        (step,) = first.steps
        return [first, dataclasses.replace(first, steps=(dataclasses.replace(step, grid=(FASTEST, 1, 1)),))]

    monkeypatch.setattr(result.kernels("shift"), "candidates", both)
    return result


def check(run: ort.InferenceSession, rows: int, columns: int = 3) -> None:
    given = feed(rows, columns)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + HANGS
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_later_runs_take_what_was_measured_between_runs(gpu: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxfuse")
    run = session(model(SHIFT), tune="background")
    check(run, 2)
    assert gpu.last()[0] == FIRST

    assert comes_true(lambda: OnHost.shapes == [(2, 3)] and "measured between runs" in caplog.text)
    check(run, 2)
    assert gpu.last()[0] == FASTEST
    check(run, 3)
    assert gpu.last()[0] == FASTEST, "sizes within a factor of two"
    check(run, 100)
    assert gpu.last()[0] == FIRST
    assert "shift: measured between runs at sizes 2x3" in caplog.text
    del run
    gc.collect()
    check(later := session(model(SHIFT)), 2)
    assert gpu.last()[0] == FASTEST, "later sessions know it, too"
    assert type(later) is ort.InferenceSession


def test_the_shapes_that_ran_most_are_measured_first_and_near_ones_not(gpu: Stage, tuning: BackgroundTuning) -> None:
    run = session(model(SHIFT), tune="background")
    tuning.runs.begin()  # as if a run were in flight
    for rows, count in ((2, 1), (64, 5), (500, 3), (70, 4)):
        for _ in range(count):
            check(run, rows)
    time.sleep(0.05)
    assert OnHost.shapes == []
    tuning.runs.end()
    assert comes_true(lambda: len(OnHost.shapes) == 3)
    time.sleep(0.05)
    assert OnHost.shapes == [(64, 3), (500, 3), (2, 3)]


def test_other_sessions_and_those_with_cuda_graphs_keep_their_plans(gpu: Stage) -> None:
    plain, run = session(model(SHIFT)), session(model(SHIFT), tune="background")
    check(plain, 2)
    check(run, 2)
    graph = Target(CPU, 0, cuda_graph=True)
    assert graph.settings("observed", False) & native.CUDA_GRAPH
    assert not graph.settings("known", False) & native.CUDA_GRAPH
    for each in planner._nodes.values():
        each.may_change = False  # as answers to requests with that flag do
    assert comes_true(lambda: OnHost.shapes == [(2, 3)])
    time.sleep(0.05)
    for each in plain, run:
        check(each, 2)
        assert gpu.last()[0] == FIRST


def test_threads_run_while_plans_change(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_in_flight, "QUIET_SECONDS", 0.0)
    chain = [node("shift", f"{x}, b", y, operands="x bias") for x, y in (("x", "t"), ("t", "u"), ("u", "y"))]
    graph = f"g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {' '.join(chain)} }}"
    run = session(model(graph), tune="background")

    def work(seed: int) -> None:
        for i in range(60):
            given = feed(1 + (seed * 7 + i * i) % 300, 3)
            np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"] + given["b"] + given["b"])
            time.sleep(0.001 * (i % 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert comes_true(lambda: len(OnHost.shapes) > 0)


# --- what is in flight ------------------------------------------------------------------------------------------------


def test_every_way_to_run_is_counted(gpu: Stage, tuning: BackgroundTuning) -> None:
    run = session(model(SHIFT), tune="background")
    given = feed(2, 3)
    values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in given.items()}
    binding = run.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    done = threading.Event()
    ways: list[Callable[[], Any]] = [
        lambda: run.run(None, given),
        lambda: run.run_with_ort_values(None, values),
        lambda: run.run_with_iobinding(binding),
        lambda: (run.run_async(None, given, lambda *_: done.set(), None), done.wait(10)),
    ]
    for count, way in enumerate(ways, 1):
        way()
        assert tuning.runs._begun == count
        assert comes_true(lambda: tuning.runs._running == 0)
    with pytest.raises(Exception, match="missing from input feed"):
        run.run(None, {})
    with pytest.raises(Exception, match="missing from input feed"):
        run.run_async(None, {}, lambda *_: None, None)
    assert tuning.runs._running == 0


def test_work_is_done_between_runs_and_again_if_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_in_flight, "QUIET_SECONDS", 0.01)
    runs = RunsInFlight(lambda: True)
    done: list[float] = []

    def work() -> int:
        done.append(time.monotonic())
        if len(done) == 1:
            runs.begin()
            runs.end()
        return len(done)

    runs.begin()
    threading.Timer(0.05, runs.end).start()
    began = time.monotonic()
    assert runs.alone(work) == 2
    assert done[0] - began >= 0.05 and done[1] - done[0] >= 0.01


def test_work_is_given_up_if_runs_leave_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_in_flight, "QUIET_SECONDS", 0.001)
    monkeypatch.setattr(runs_in_flight, "PATIENCE_SECONDS", 0.01)
    runs = RunsInFlight(lambda: True)
    runs.begin()
    with pytest.raises(MeasuringStopped):
        runs.alone(lambda: pytest.fail("a run is in flight"))
    runs.end()
    with pytest.raises(MeasuringStopped):  # a run begins during each attempt
        runs.alone(lambda: (runs.begin(), runs.end()))
    with pytest.raises(MeasuringStopped):
        RunsInFlight(lambda: False).alone(lambda: pytest.fail("nobody wants it"))


def test_a_measurement_that_is_given_up_is_made_later(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    class Interrupted(OnHost):
        def seconds(self, plans: Sequence[Plan]) -> list[float]:
            attempts.append(1)
            if len(attempts) == 1:
                raise MeasuringStopped
            return super().seconds(plans)

    monkeypatch.setitem(autotune.trials, CPU, Interrupted)
    run = session(model(SHIFT), tune="background")
    check(run, 2)
    assert comes_true(lambda: OnHost.shapes == [(2, 3)])
    assert len(attempts) == 2


# --- the thread -------------------------------------------------------------------------------------------------------


def test_the_thread_ends_with_the_last_session(gpu: Stage, tuning: BackgroundTuning) -> None:
    first, second = (session(model(SHIFT), tune="background") for _ in range(2))
    thread = tuning._thread
    assert thread and thread.daemon and isinstance(first, CountedSession)
    del first
    gc.collect()
    time.sleep(0.05)
    assert thread.is_alive()
    del second
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and not planner._nodes
    again = session(model(SHIFT), tune="background")
    check(again, 2)
    assert comes_true(lambda: OnHost.shapes == [(2, 3)])


def test_a_forked_process_begins_anew(gpu: Stage, tuning: BackgroundTuning) -> None:
    run = session(model(SHIFT), tune="background")
    tuning.runs.begin()  # a run of another thread, which the new process does not have
    tuning.stop()
    tuning.forget()
    check(run, 2)
    other = session(model(SHIFT), tune="background")
    check(other, 2)
    assert comes_true(lambda: OnHost.shapes == [(2, 3)])


# --- where nothing can be measured ------------------------------------------------------------------------------------


def test_a_session_without_a_gpu_says_that_nothing_is_measured(
    tuning: BackgroundTuning, caplog: pytest.LogCaptureFixture
) -> None:
    run = InferenceSession(model(SHIFT), providers=[CPU], tune="background")
    assert "tune='background' measures nothing: the session does not use CUDAExecutionProvider" in caplog.text
    assert type(run) is ort.InferenceSession and tuning._thread is None
    check(run, 2)
    assert [each.how for each in explain_session(run)] == ["body"]


def test_a_session_without_kernels_says_so_too(gpu: Stage, caplog: pytest.LogCaptureFixture) -> None:
    run = session(model("g (float[n] x) => (float[n] y) { y = Relu(x) }"), tune="background")
    assert "tune='background' measures nothing: no node of the model runs as a kernel" in caplog.text
    assert type(run) is ort.InferenceSession


def test_without_what_times_kernels_it_says_so(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = dataclasses.replace(BACKENDS[CPU], cannot_time=lambda: "CuPy cannot be imported")
    monkeypatch.setitem(BACKENDS, CPU, backend)
    run = session(model(SHIFT), tune="background")
    check(run, 2)
    assert comes_true(lambda: "tune='background' measures nothing: CuPy cannot be imported" in caplog.text)
    assert OnHost.shapes == []


def test_registered_options_cannot_count_runs() -> None:
    with pytest.raises(
        UsageError, match=r"needs a session that counts its runs; make it by onnxfuse\.InferenceSession"
    ):
        register(ort.SessionOptions(), model(SHIFT), [CPU], tune="background")


def test_an_error_ends_the_thread_and_is_told(
    gpu: Stage, tuning: BackgroundTuning, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Iterator[Any]:
        raise OSError("no more files")

    monkeypatch.setattr(planner, "take_runs", fails)
    run = session(model(SHIFT), tune="background")
    assert comes_true(lambda: tuning._thread is None)
    assert "tune='background' measures nothing more: OSError: no more files" in caplog.text
    check(run, 2)
