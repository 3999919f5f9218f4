"""tune="background" on a GPU: the faster plan runs later, captured graphs keep theirs, and nobody waits or crashes."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnxruntime as ort
import pytest
from test_runtime_gpu import CUDA, bound, close, feed, kernels, model  # noqa: F401
from test_tune_gpu import ROWS, D, _folder, host, plan_in_use, pytestmark, repeated  # noqa: F401

from onnxfuse.runtime.planner import planner
from onnxfuse.session import InferenceSession
from onnxfuse.tuning import runs_in_flight
from onnxfuse.tuning.trial import GpuTrial

SLOW, FAST = 20, 1  # times that a plan computes its result
PROGRAM = """
import sys, time
sys.path[:0] = {folders!r}
import numpy as np, onnxruntime as ort, pytest
from test_runtime_gpu import CUDA, D, model
import onnxfuse, onnxfuse.kernels
ort.preload_dlls()
onnxfuse.kernels.__path__.append({kernels!r})
run = onnxfuse.InferenceSession(model(d="d"), providers=[CUDA], tune="background")
run.run(None, {{"x": np.ones((512, D), np.float32), "scale": np.ones(D, np.float32)}})
time.sleep({seconds})
print("done")
"""


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Offer a slow plan and a fast one."""
    caplog.set_level(logging.INFO, "onnxfuse")
    own = host().candidates
    both = lambda *given: [repeated(each, times) for times in (SLOW, FAST) for each in own(*given)]  # noqa: E731
    monkeypatch.setattr(host(), "candidates", both, raising=False)
    planner._recent.clear()


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def median_seconds(run: ort.InferenceSession, binding: ort.IOBinding) -> float:
    seconds = []
    for _ in range(41):
        begin = time.perf_counter()
        run.run_with_iobinding(binding)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[20]


def test_later_runs_take_the_fastest_plan(caplog: pytest.LogCaptureFixture) -> None:
    run = InferenceSession(model(), providers=[CUDA], tune="background")
    given = feed(ROWS, D)
    binding, _, output = bound(run, given)
    median_seconds(run, binding)
    assert len(plan_in_use().steps) == SLOW
    assert comes_true(lambda: "row_center: measured between runs" in caplog.text)
    median_seconds(run, binding)
    close(output.numpy(), given)
    assert len(plan_in_use().steps) == FAST


def test_captured_graphs_keep_their_plan(caplog: pytest.LogCaptureFixture) -> None:
    run = InferenceSession(model(), providers=[(CUDA, {"enable_cuda_graph": "1"})], tune="background")
    given = feed(ROWS, D)
    binding, _, output = bound(run, given)
    median_seconds(run, binding)
    before = median_seconds(run, binding)
    assert comes_true(lambda: "row_center: measured between runs" in caplog.text)
    after = median_seconds(run, binding)
    close(output.numpy(), given)
    print(f"a captured run takes {1e6 * before:.1f} us before and {1e6 * after:.1f} us after the measurement")
    assert 0.7 < after / before < 1.4
    later = InferenceSession(model(), providers=[CUDA])
    close(later.run(None, given)[0], given)
    assert len(plan_in_use().steps) == FAST


def test_dense_requests_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    timed: list[float] = []
    seconds = GpuTrial._replay
    monkeypatch.setattr(GpuTrial, "_replay", lambda *given: (timed.append(time.monotonic()), seconds(*given))[1])
    monkeypatch.setattr(runs_in_flight, "QUIET_SECONDS", 0.5)  # requests are closer, on a busy machine too
    run = InferenceSession(model(), providers=[CUDA], tune="background")
    end = time.monotonic() + 3

    def work(rows: int) -> None:
        given = feed(rows, D)
        while time.monotonic() < end:
            close(run.run(None, given)[0], given)
            time.sleep(0.001)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (ROWS, ROWS, 64, 2000)))
    assert not [each for each in timed if each < end], "nothing is timed while requests follow closely"
    assert comes_true(lambda: "row_center: measured between runs" in caplog.text)
    assert timed


@pytest.mark.parametrize("seconds", [0.0, 0.7, 1.5])
def test_python_exits_while_it_measures(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that are still compiled behind the session, too: the model has dozens, and the cache is empty."""
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "empty"))
    tests = Path(__file__).parents[1]
    program = PROGRAM.format(
        folders=[str(tests / "runtime"), str(tests)], kernels=str(tests / "native" / "gpu_kernels"), seconds=seconds
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
