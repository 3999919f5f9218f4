"""Choices by measurement on a GPU: slow kernels lose to their bodies, wrong and slow candidates to other candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from test_runtime_gpu import CUDA, close, feed, kernels, model, session  # noqa: F401

from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime.backends import device_of
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.target import PlanChoice
from onnxfuse.runtime.template import sizes_of
from onnxfuse.session import InferenceSession, explain_session, open_session
from onnxfuse.tuning.autotune import gpu_trial, plan_digest
from onnxfuse.tuning.bound_session import TimedModel
from onnxfuse.tuning.dispatch import SessionSettings
from onnxfuse.tuning.trial import GpuTrial
from onnxfuse.tuning.tune import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
ROWS, D = 512, 768
NODE = FusedNode("row_center", "n", ("x", "scale"), {"steps": 1}, ("float32",))
INPUTS = (TensorSpec((ROWS, D), "float32"), TensorSpec((D,), "float32"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))


def device() -> Device:
    return device_of(CUDA, 0, True)


def host() -> Any:
    return find_host("row_center")


def repeated(plan: Plan, times: int) -> Plan:
    return dataclasses.replace(plan, steps=plan.steps * times)


def plan(steps: int = 1, times: int = 1) -> Plan:
    (own,) = host().candidates(dataclasses.replace(NODE, attributes={"steps": steps}), INPUTS, device())
    return repeated(own, times)


@pytest.mark.parametrize(("times", "kind"), [(1, "kernel"), (60, "body")])
def test_a_fast_kernel_wins_and_a_slow_one_loses(monkeypatch: pytest.MonkeyPatch, times: int, kind: str) -> None:
    own = host().candidates
    monkeypatch.setattr(host(), "candidates", lambda *arguments: [repeated(each, times) for each in own(*arguments)])
    given = feed(ROWS, D)
    found = tune(TimedModel(onnx.load_from_string(model(nodes=4)), None, given, "cuda", open_session))
    (row,) = found.ops
    assert (row.error, row.cuda_graph) == ("", True)
    assert row.kernel is not None and row.body is not None and (row.kernel < row.body) == (kind == "kernel")
    assert [(each.mode, each.reason) for each in found.models] == [("plain", ""), ("cuda graph", "")]
    assert {each.chosen for each in found.models} == {"kernels" if kind == "kernel" else "bodies"}
    for options in ({}, {"enable_cuda_graph": "1"}):
        run = session(model(nodes=4), kind, **options)
        assert "the whole model with" in explain_session(run)[0].why
    assert session(model(nodes=4), "kernel") if kind == "kernel" else session(model(nodes=4), "body")
    never = InferenceSession(model(nodes=4), providers=[CUDA], tune="never")
    assert {each.how for each in explain_session(never)} == {"kernel"}


def test_now_tunes_a_session() -> None:
    run = InferenceSession(model(), providers=[CUDA], tune="now", shapes={"x": (ROWS, D)})
    close(run.run(None, feed(ROWS, D))[0], feed(ROWS, D))
    assert "measured 20" in explain_session(run)[0].why


def test_the_fastest_right_candidate_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first is slow, the second leaves the mean out, the third is right and fast."""
    plans = [plan(times=20), plan(steps=0), plan()]
    monkeypatch.setattr(host(), "candidates", lambda *_: plans, raising=False)
    taken: list[Sequence[Plan]] = []
    seconds = GpuTrial.seconds

    def spied(self: GpuTrial, good: Sequence[Plan]) -> list[float]:
        taken.append(good)
        return seconds(self, good)

    monkeypatch.setattr(GpuTrial, "seconds", spied)
    choices: tuple[PlanChoice, ...] = ("measured", "known", "first")
    chosen = []
    for choice in choices:
        run = open_session(model(), providers=[CUDA], settings=SessionSettings(None, choice))
        close(run.run(None, feed(ROWS, D))[0], feed(ROWS, D))
        chosen.append(plan_in_use())
        del run
        planner._recent.clear()  # as another process, which knows what is on disk alone
    assert chosen == [plans[2], plans[2], plans[0]]
    assert [[plan_digest(each) for each in good] for good in taken] == [[plan_digest(plans[0]), plan_digest(plans[2])]]
    assert "candidate 1 of 3 is left out: output 0 differs in" in caplog.text


def plan_in_use() -> Plan:
    """Return the plan by which the only node of all sessions runs at INPUTS."""
    (used,) = planner.templates_in_use()
    assert isinstance(used, PreparedTemplate)
    sizes = sizes_of(used.template.inputs, INPUTS)
    assert sizes is not None
    variant = used.template.chosen(sizes)
    assert variant is not None
    return variant.plan


def trial(plans: Sequence[Plan], inputs: Sequence[TensorSpec] = INPUTS) -> Any:
    return gpu_trial(inputs, plans, device())


def test_times_are_those_of_memory_and_in_proportion() -> None:
    made = trial([plan(), plan(times=4)])
    assert made.refusal() is None
    once, four = made.seconds([plan(), plan(times=4)])
    made.close()
    assert 1e-6 < once < 100e-6
    assert 2 * once < four < 6 * once


def test_constants_come_from_memory_and_what_is_computed_from_the_cache() -> None:
    made = {}
    for constant in (False, True):
        inputs = (TensorSpec((2048, 1024), "float32", constant=constant), TensorSpec((1024,), "float32"))
        node = FusedNode("rms_norm", "n", ("x", "scale"), {"epsilon": 1e-5}, ("float32",))
        own = find_host("rms_norm").candidates(node, inputs, device())[0]
        each = trial([own], inputs)
        made[constant] = each.seconds([own])[0]
        each.close()
    print(f"\nfrom the cache {1e6 * made[False]:.2f} us, from memory {1e6 * made[True]:.2f} us")
    assert made[True] > 1.03 * made[False]


def test_memory_is_given_back() -> None:
    made = trial([plan(), plan(times=2)])
    made.outputs(plan())
    made.seconds([plan(), plan(times=2)])
    pool = made._pool
    assert pool.total_bytes() > 2 * 4 * ROWS * D
    made.close()
    assert pool.total_bytes() == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("aligned", [True, False])
def test_outputs_are_those_of_random_inputs(dtype: str, aligned: bool) -> None:
    """The mean square of each row of RMSNorm shows that the inputs are random and the scale has variance one."""
    import cupy

    node = FusedNode("rms_norm", "n", ("x", "scale"), {"epsilon": 1e-5}, (dtype,))
    inputs = (TensorSpec((64, 768), dtype, aligned), TensorSpec((768,), dtype, aligned))
    own = find_host("rms_norm").candidates(node, inputs, device())[0]
    made = trial([own], inputs)
    (y,) = made.outputs(own)
    assert made.difference([y], made.outputs(own)) is None
    wrong = y.copy()
    wrong[3, 5] += 1
    cupy.cuda.runtime.deviceSynchronize()  # the trial's stream does not wait for CuPy's own
    assert "differs in 1 of 49152 elements" in made.difference([y], [wrong])
    squares = cupy.asnumpy((y.astype("float32") ** 2).mean(-1))
    made.close()
    np.testing.assert_allclose(squares, 1, atol=0.5)


def test_what_does_not_fit_is_not_measured() -> None:
    huge = (TensorSpec((1 << 33,), "float32"),)
    assert "bytes of scratch memory" in trial([Plan(huge, ())], huge).refusal()


def test_another_threads_capture_goes_on() -> None:
    import cupy

    def measure() -> list[float]:
        made = trial([plan(), plan(times=2)])
        try:
            made.outputs(plan())
            return list(made.seconds([plan(), plan(times=2)]))
        finally:
            made.close()

    measure()  # compiles CuPy's own kernels
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(8, "float32")
    with ThreadPoolExecutor(1) as pool, stream:
        x += 1
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:  # a capture that stays open would make every later test fail
            x += 1
            times = pool.submit(measure).result()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert min(times) > 0
    assert x.get().tolist() == [2.0] * 8
