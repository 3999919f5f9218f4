"""Sessions start with the kernels for likely sizes, and compile others later; runs wait for these, or do not."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, DEVICE, Stage, feed, load, model, node, session, stage

import onnxfuse.session
from onnxfuse.errors import KernelError, ModelError, UsageError
from onnxfuse.runtime import background_compile, body_runs, late_work, prepare_session
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.likely_sizes import likely_sizes
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Plan, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.saved_plans import save_plans
from onnxfuse.runtime.template import Template
from onnxfuse.runtime.template_key import Situation
from onnxfuse.session import InferenceSession, explain_session, register

ROWS_NODE = node("shift", "x, b", "y", operands="x bias")
ROWS = f"g (float[n, 3] x, float[3] b) => (float[n, 3] y) {{ {ROWS_NODE} }}"
WITH_RANKS = ROWS.replace("output_types = [1]", "output_types = [1], output_ranks = [2]")
MANY = 1000  # rows, from which on the host takes another kernel


class Compiler:
    """Loads kernels, says which, and waits with those for many rows until that is allowed."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.given_up: list[str] = []
        self.goes_on, self.few_go_on = threading.Event(), threading.Event()
        self.few_go_on.set()
        self.seconds = 0.0
        self.error: Exception | None = None

    def load(self, kernel: Kernel, ordinal: int) -> LoadedKernel:
        kind = "many" if "MANY" in kernel.defines else "few"
        time.sleep(self.seconds)
        if not (self.goes_on if kind == "many" else self.few_go_on).wait(0 if self.given_up else 10):
            self.given_up.append(kind)
            raise AssertionError("what should end the wait waits for it")
        if kind == "many" and self.error:
            raise self.error
        self.loaded.append(kind)
        return dataclasses.replace(load(kernel, ordinal))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Stage:
    """Let the host of shift have one kernel for few rows and one for many; with the parameter 1.0, both are right."""
    result, factor = stage(monkeypatch), getattr(request, "param", 1)
    own = result.kernels("shift").candidates

    def by_rows(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        (plan,) = own(node, inputs, device)
        if factor * inputs[0].shape[0] < MANY:  # real numbers are estimates
            return [plan]
        (step,) = plan.steps
        kernel = dataclasses.replace(step.kernel, defines={**step.kernel.defines, "MANY": 1})
        return [dataclasses.replace(plan, steps=(dataclasses.replace(step, kernel=kernel, grid=(9, 1, 1)),))]

    monkeypatch.setattr(result.kernels("shift"), "candidates", by_rows)
    return result


@pytest.fixture
def compiler(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    result = Compiler()
    backend = dataclasses.replace(BACKENDS[CPU], load=result.load)
    monkeypatch.setitem(BACKENDS, CPU, backend)
    return result


def check(run: Any, rows: int) -> None:
    given = feed(rows, 3)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


def unaligned(rows: int) -> dict[str, np.ndarray]:
    """Return inputs whose memory no session foresees."""
    given = feed(rows, 3)
    memory = np.empty(3 * rows + 1, np.float32)
    given["x"] = memory[1 if memory.ctypes.data % 16 == 0 else 0 :][: 3 * rows].reshape(rows, 3)
    given["x"][:] = 1
    assert given["x"].ctypes.data % 16
    return given


def requests(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which every later request of a node for a template is added."""
    found: list[object] = []
    own = planner._template_for
    monkeypatch.setattr(planner, "_template_for", lambda *given: (found.append(given), own(*given))[1])
    return found


def test_nodes_have_their_templates_before_they_run(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request of a server must not wait for Python."""
    layers = (node("shift", f"{x}, b", y, operands="x bias") for x, y in (("x", "z"), ("z", "y")))
    graph = f"g (float[n, 3] x, float[3] b) => (float[n, 3] y) {{ {' '.join(layers)} }}"
    run = session(model(graph))
    assert len(planner.templates_in_use()) == 1
    asked = requests(monkeypatch)
    for rows in 8, 1, 9:
        given = feed(rows, 3)
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"] + given["b"])
    assert not asked


def test_nodes_of_other_settings_get_nothing(gpu: Stage) -> None:
    """Sessions that several threads make at once have nodes of the same names."""
    options = ort.SessionOptions()
    register(options, model(ROWS), [CPU])
    other = ort.InferenceSession(model(ROWS), options, [CPU])
    run = session(model(ROWS), aim="throughput")
    assert [each.situation.device.shared for each in planner.templates_in_use()] == [True]
    check(run, 2)
    check(other, 2)
    assert sorted(each.situation.device.shared for each in planner.templates_in_use()) == [False, True]


def test_a_run_loads_the_kernel_that_it_lacks(gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_session, "compile_in_background", lambda *_: None)
    run = session(model(ROWS))
    check(run, 8)
    assert compiler.loaded == ["few"]
    compiler.goes_on.set()
    asked = requests(monkeypatch)
    for rows in (MANY, 8, 2 * MANY, 9):
        check(run, rows)
        assert gpu.last()[0] == (9 if rows >= MANY else 7)
    assert compiler.loaded == ["few", "many"]
    assert len(asked) == 1


def test_nodes_get_what_was_compiled_behind_the_session(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_session, "compile_in_background", background_compile.compile_in_background)
    run = session(model(ROWS))
    check(run, 8)  # while the other kernel is compiled
    assert compiler.loaded == ["few"]
    asked = requests(monkeypatch)
    compiler.goes_on.set()
    late_work.wait()
    check(run, MANY)
    assert compiler.loaded == ["few", "many"] and not asked


def test_a_run_waits_for_the_kernel_that_is_being_compiled(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_session, "compile_in_background", background_compile.compile_in_background)
    run = session(model(ROWS))
    threading.Timer(0.05, compiler.goes_on.set).start()
    check(run, MANY)


@pytest.mark.parametrize("in_background", [True, False])
def test_the_body_runs_in_place_of_a_kernel_that_does_not_compile(
    gpu: Stage,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_background: bool,
) -> None:
    if not in_background:
        monkeypatch.setattr(prepare_session, "compile_in_background", lambda *_: None)
    compiler.error = KernelError("shift.cu does not compile: here\n  ^")
    compiler.goes_on.set()
    run, before = session(model(ROWS)), gpu.launches()
    for rows in (8, MANY, 8, 2 * MANY, MANY):
        check(run, rows)
    assert gpu.launches() == before + 2
    assert "(shift): its body runs where its kernel failed: KernelError: shift.cu does not comp" in caplog.text
    assert compiler.loaded == ["few"] and "^" not in caplog.text
    (dispatch,) = explain_session(run)
    assert dispatch.how == "kernel" and "its body runs where its kernel failed: KernelError: shift.cu" in dispatch.why


def test_a_library_that_chooses_otherwise_gets_all_kernels(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_session, "compile_in_background", lambda *_: None)
    compiler.goes_on.set()
    own = Template.chosen
    few_for_many = lambda of, sizes: own(of, [min(size, 8) for size in sizes])  # noqa: E731
    monkeypatch.setattr(Template, "chosen", few_for_many)
    run = session(model(ROWS))
    assert compiler.loaded == ["few"]
    check(run, MANY)
    assert compiler.loaded == ["few", "many"]
    assert gpu.last()[0] == 9


def test_a_template_that_a_run_makes_has_all_kernels(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread would load the others: memory that is not aligned is not foreseen when a session is made."""
    compiler.goes_on.set()
    run = session(model(ROWS))
    del compiler.loaded[:]
    given = unaligned(8)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert sorted(compiler.loaded) == ["few", "many"]


def test_nothing_is_compiled_when_python_exits(gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    exits = threading.Event()
    exits.set()
    monkeypatch.setattr(late_work, "_exits", exits)
    compiler.goes_on.set()
    check(session(model(ROWS)), 8)
    assert compiler.loaded == ["few"]


# --- runs that do not wait --------------------------------------------------------------------------------------------


@pytest.fixture
def no_wait(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let sessions wait for no compiler, whose cache is empty, and compile in the background."""
    monkeypatch.delenv("ONNXFUSE_WAIT")
    monkeypatch.setattr(late_work, "PATIENCE", 5.0)  # enough for a run that compiles nothing, on any machine
    monkeypatch.setattr(prepare_session, "compile_in_background", background_compile.compile_in_background)
    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], is_compiled=lambda *_: False))
    yield
    compiler.goes_on.set()
    compiler.few_go_on.set()
    late_work.wait()


@pytest.fixture
def filled_cache(no_wait: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions find all kernels in the cache, and wait for no plan."""
    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], is_compiled=lambda *_: True))
    monkeypatch.setattr(prepare_session, "PATIENCE", 0.0)


def held_plans(gpu: Stage, monkeypatch: pytest.MonkeyPatch, fusion: str = "scale") -> threading.Event:
    """Return an event for which the plans of a fusion wait."""
    goes_on, kernels = threading.Event(), gpu.kernels(fusion)
    own = kernels.candidates
    monkeypatch.setattr(kernels, "candidates", lambda *given: (goes_on.wait(10), own(*given))[1])
    return goes_on


@pytest.mark.usefixtures("no_wait")
def test_the_body_runs_until_a_kernel_is_compiled(gpu: Stage, compiler: Compiler) -> None:
    compiler.few_go_on.clear()
    run, before = session(model(ROWS)), gpu.launches()
    for rows in (8, 8, 3, MANY):
        check(run, rows)
    assert gpu.launches() == before and not compiler.loaded
    assert explain_session(run)[0].why.endswith("; some of its kernels are still being compiled")
    compiler.few_go_on.set()
    compiler.goes_on.set()
    late_work.wait()
    for rows in (8, MANY):
        check(run, rows)
    assert "compiled" not in explain_session(run)[0].why
    assert gpu.launches() == before + 2 and set(compiler.loaded) == {"few", "many"}


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("gpu", [1.0], indirect=True, ids=["estimate"])
def test_another_compiled_kernel_runs_until_the_best_one_is_compiled(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = session(model(ROWS)), gpu.launches()
    while gpu.launches() == before:
        check(run, 8)  # as the body, until the thread has sent the kernel for few rows
    asked, before = requests(monkeypatch), gpu.launches()
    check(run, 4 * MANY)
    check(run, 4 * MANY)
    assert gpu.launches() == before + 2 and gpu.last()[0] == 7 and not asked, "the kernel for few rows is right, too"
    compiler.goes_on.set()
    late_work.wait()
    check(run, 4 * MANY)
    assert gpu.last()[0] == 9


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("fails", [False, True])
def test_threads_run_sizes_never_seen_while_a_slow_compiler_works_or_fails(
    gpu: Stage, compiler: Compiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The first 100 runs end while no kernel is compiled; if one waited for a kernel, the compiler would give up."""
    monkeypatch.setattr(late_work, "PATIENCE", 60.0)
    compiler.few_go_on.clear()
    compiler.error = KernelError("shift.cu does not compile") if fails else None
    run = session(model(ROWS))
    random = np.random.default_rng(7)
    shapes = [int(rows) for rows in random.integers(0, 3 * MANY, 200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(partial(check, run), shapes[:100]))
        assert not compiler.loaded and not compiler.given_up
        compiler.seconds = 0.05
        compiler.few_go_on.set()
        compiler.goes_on.set()
        list(pool.map(partial(check, run), shapes[100:]))
    late_work.wait()
    check(run, 8)
    assert gpu.last()[0] == 7
    assert ("does not compile" in caplog.text) == fails


@pytest.mark.usefixtures("no_wait")
def test_a_run_at_unforeseen_inputs_does_not_wait(gpu: Stage, compiler: Compiler) -> None:
    """Memory that is not aligned is not foreseen when a session is made, so that the node's request plans, too."""
    run = session(model(ROWS))
    given, before = unaligned(8), gpu.launches()
    compiler.few_go_on.clear()
    for _ in range(2):
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert gpu.launches() == before
    compiler.few_go_on.set()
    compiler.goes_on.set()
    late_work.wait()
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert gpu.launches() == before + 1


@pytest.mark.usefixtures("no_wait")
def test_compiling_stops_with_the_session(gpu: Stage, compiler: Compiler) -> None:
    compiler.few_go_on.clear()
    run = session(model(ROWS))
    check(run, 8)
    del run
    gc.collect()
    compiler.few_go_on.set()
    late_work.wait()
    assert "many" not in compiler.loaded


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize(
    ("wait", "environment", "provider"),
    [(True, "0", CPU), (False, "1", CPU), (False, "0", (CPU, {"enable_cuda_graph": "1"}))],
    ids=["wait", "environment", "CUDA graph"],
)
def test_sessions_that_wait(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, wait: bool, environment: str, provider: Any
) -> None:
    monkeypatch.setenv("ONNXFUSE_WAIT", environment)
    compiler.seconds = 0.05
    compiler.goes_on.set()
    run = InferenceSession(model(ROWS), providers=[provider], wait=wait)
    before = gpu.launches()
    check(run, 8)
    check(run, MANY)
    assert gpu.launches() == before + 2


def of_unknown_rank() -> bytes:
    """Return a model whose node gets its template only when it runs."""
    proto = onnx.load_from_string(model(WITH_RANKS))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return bytes(proto.SerializeToString())


@pytest.mark.usefixtures("no_wait")
def test_a_run_waits_where_its_body_cannot_run(gpu: Stage, compiler: Compiler) -> None:
    """onnxruntime adds no bfloat16 on the CPU."""
    body = "(x, bias) => (y) { a = Cast <to = 16> (x) b = Cast <to = 16> (bias) c = Add (a, b) y = Cast <to = 1> (c) }"
    compiler.few_go_on.clear()
    run, before = session(model(ROWS, shift=body)), gpu.launches()
    threading.Timer(0.1, compiler.few_go_on.set).start()
    threading.Timer(0.1, compiler.goes_on.set).start()
    check(run, 8)
    assert gpu.launches() == before + 1


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("first", ["x", "h"])
def test_nodes_of_other_input_dtypes_have_other_bodies(gpu: Stage, compiler: Compiler, first: str) -> None:
    """Fused nodes with equal attributes and outputs can differ in the Casts of their functions."""
    compiler.few_go_on.clear()
    calls = {"x": node("shift", "x, b", "y", operands="x bias")}
    calls["h"] = node("shift", "h, b", "z", operands="x bias").replace("onnxfuse.shift", "onnxfuse.shift_of_half")
    ordered = [calls.pop(first), *calls.values()]
    graph = (
        f"g (float[n, 3] x, float16[n, 3] h, float[3] b) => (float[n, 3] y, float[n, 3] z) {{ {' '.join(ordered)} }}"
    )
    body = "(x, bias) => (y) { a = Cast <to = 1> (x) y = Add (a, bias) }"
    run, before = session(model(graph, shift_of_half=body)), gpu.launches()
    given = feed(8, 3)
    given["h"] = (given["x"] + 1).astype(np.float16)
    for found, name in zip(run.run(None, given), "xh", strict=True):
        np.testing.assert_array_equal(found, given[name].astype(np.float32) + given["b"])
    assert gpu.launches() == before


@pytest.mark.usefixtures("no_wait")
def test_the_error_of_a_body_is_logged(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run then waits for the compiler, which must not be a secret."""
    compiler.goes_on.set()
    run = session(of_unknown_rank())

    def open_body(*_: object) -> int:
        raise RuntimeError("no memory")

    with planner._lock:  # which the answer needs
        monkeypatch.setattr(body_runs, "open_body", open_body)
        monkeypatch.setattr(late_work, "PATIENCE", 0.0)
        threading.Timer(0.1, compiler.few_go_on.set).start()
        check(run, 8)
    assert "the body of node 'node_0' does not run: RuntimeError: no memory" in capfd.readouterr().err


TWO = f"""g (float[n, 3] x, float[3] b) => (float[n, 3] y) {{
{node("shift", "x, b", "z", operands="x bias")} {node("scale", "z", "y", operands="x", more=", factor = 2.0")} }}"""


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("fails", [False, True])
def test_a_session_waits_for_no_plans_if_kernels_must_be_compiled(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Planning takes longer than onnxruntime's session, and its plans would wait for the compiler."""
    compiler.goes_on.set()
    goes_on, scale = threading.Event(), gpu.kernels("scale")
    own = scale.candidates

    def slow(*given: Any) -> list[Plan]:
        assert goes_on.wait(10)
        if fails:
            raise ValueError("no plan")
        return list(own(*given))

    monkeypatch.setattr(scale, "candidates", slow)
    run, given, before = session(model(TWO)), feed(8, 3), gpu.launches()
    for _ in range(2):
        np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert gpu.launches() == before and len(planner.preparations) == 1
    goes_on.set()
    late_work.wait()
    np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert gpu.launches() == before + (1 if fails else 2) and not planner.preparations
    assert fails == ("its body runs" in caplog.text)


@pytest.mark.usefixtures("no_wait")
def test_a_preparation_ends_though_its_session_is_refused(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Answers wait for preparations: one that never ends would leave all nodes on their bodies, and hang the exit."""
    compiler.goes_on.set()
    goes_on, path = held_plans(gpu, monkeypatch), tmp_path / "m.onnx"
    path.write_bytes(model(TWO))
    stamps = itertools.count()
    monkeypatch.setattr(onnxfuse.session, "stamp_of", lambda _: next(stamps))
    with pytest.raises(ModelError, match="was written to"):
        InferenceSession(path, providers=[CPU])
    assert len(planner.preparations) == 1
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "onnxfuse preparation":
            thread.join(10)
    assert not planner.preparations


@pytest.mark.usefixtures("no_wait")
def test_a_node_requests_a_template_while_later_sessions_are_made(gpu: Stage, compiler: Compiler) -> None:
    """A server may make sessions without a pause; the node's own session gave it no template."""
    compiler.goes_on.set()
    run, later, before = session(of_unknown_rank()), threading.Event(), gpu.launches()
    planner.begin_preparation(later)
    try:
        check(run, 8)
        late_work.wait()
        check(run, 8)
    finally:
        planner.end_preparation(later)
    assert gpu.launches() > before


@pytest.mark.usefixtures("no_wait")
def test_a_request_is_answered_though_the_kernel_of_another_fails(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template for other inputs does not answer the request; without an answer, the body would run for ever."""
    run, goes_on, before = session(of_unknown_rank()), threading.Event(), gpu.launches()
    monkeypatch.setattr(late_work, "MAX_THREADS", 1)
    compiler.error = KernelError("too many rows")
    compiler.goes_on.set()
    with planner._lock:  # which the answers need
        late_work.start(lambda: bool(goes_on.wait(10)), "busy")
        check(run, MANY)
        check(run, 8)
    goes_on.set()
    late_work.wait()
    check(run, 8)
    late_work.wait()
    check(run, 8)
    assert gpu.launches() > before


def test_no_node_stays_known_whose_session_ends_while_it_gets_its_template(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, own = [session(of_unknown_rank())], native.new_nodes
    (request,) = own()
    node = FusedNode.read(request.node, request.attributes)
    situation = Situation(node, DEVICE, request.provider, request.verdicts)
    template = planner.prepare(situation, [TensorSpec((8, 3), "float32"), TensorSpec((3,), "float32")])

    def new_nodes() -> list[native.Request]:
        found = own()
        runs.clear()
        gc.collect()
        return found

    monkeypatch.setattr(native, "new_nodes", new_nodes)
    planner.equip([(situation, template)])
    assert not runs and not planner._nodes


@pytest.mark.usefixtures("no_wait")
def test_sessions_without_bodies_wait(gpu: Stage, compiler: Compiler) -> None:
    proto = onnx.load_from_string(model(ROWS))
    del proto.functions[:]
    compiler.few_go_on.clear()
    threading.Timer(0.1, compiler.few_go_on.set).start()
    check(session(proto.SerializeToString()), 8)


@pytest.mark.usefixtures("no_wait")
def test_a_session_made_while_another_compiles_gets_the_last_kernel(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.goes_on.set()
    compiler.few_go_on.clear()
    first, own = session(model(ROWS)), native.give_template

    def slow(kernel: int, data: bytes) -> None:
        if threading.current_thread().name in ("MainThread", "onnxfuse preparation"):
            compiler.few_go_on.set()  # a third thread loads the kernels after these bytes were made
            time.sleep(0.2)
        own(kernel, data)

    monkeypatch.setattr(native, "give_template", slow)
    second, before = session(model(ROWS)), gpu.launches()
    late_work.wait()
    check(first, 8)
    check(second, 8)
    assert gpu.launches() == before + 2


@pytest.mark.usefixtures("no_wait")
def test_a_node_gets_all_kernels_though_the_session_that_compiled_them_is_gone(gpu: Stage, compiler: Compiler) -> None:
    first = session(model(WITH_RANKS))
    while not compiler.loaded:
        time.sleep(0.001)
    second, before = session(of_unknown_rank()), gpu.launches()
    del first
    gc.collect()
    compiler.goes_on.set()
    late_work.wait()
    for rows in (8, MANY):
        check(second, rows)
        late_work.wait()
        check(second, rows)
    assert gpu.launches() >= before + 2 and gpu.last()[0] == 9


@pytest.mark.usefixtures("no_wait")
def test_an_older_answer_replaces_no_newer_template(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = session(model(WITH_RANKS))
    while not compiler.loaded:
        time.sleep(0.001)
    second, own = session(of_unknown_rank()), planner._template_bytes
    made, goes_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> bytes:
        data = own(*given)
        made.set()
        goes_on.wait(5)
        return data

    monkeypatch.setattr(planner, "_template_bytes", slow)
    check(second, 8)  # as its body, because other work goes on
    compiler.goes_on.set()
    assert made.wait(5)
    for thread in list(late_work._working):
        if thread.name == "onnxfuse later kernels":
            thread.join()
    goes_on.set()
    late_work.wait()
    before = gpu.launches()
    for each in (first, second):
        check(each, MANY)
    assert gpu.launches() == before + 2


@pytest.mark.usefixtures("no_wait")
def test_a_template_that_cannot_be_written_costs_no_other_node(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copied = f" {node('copy', 'x', 'z', operands='x')} }}"
    text = ROWS.replace("float[n, 3] y)", "float[n, 3] y, float[n, 3] z)").replace(" }", copied)
    own = PreparedTemplate.data_so_far

    def data_so_far(template: PreparedTemplate) -> bytes:
        if template.situation.node.fusion == "copy":
            raise ValueError("too long")
        return own(template)

    monkeypatch.setattr(PreparedTemplate, "data_so_far", data_so_far)
    run = session(model(text))
    compiler.goes_on.set()
    late_work.wait()
    run.run(None, feed(MANY, 3))
    assert gpu.last()[0] == 9 and "goes on as its body: ValueError: too long" in caplog.text


@pytest.mark.usefixtures("no_wait")
def test_sessions_open_while_the_plans_after_a_failed_one_are_compiled(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tried = gpu.kernels("shift").candidates, threading.Event()

    def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        (plan,) = own(node, inputs, device)
        (step,) = plan.steps
        kernel = dataclasses.replace(step.kernel, defines={**step.kernel.defines, "BROKEN": 1})
        return [dataclasses.replace(plan, steps=(dataclasses.replace(step, kernel=kernel),)), plan]

    def load_(kernel: Kernel, ordinal: int) -> LoadedKernel:
        if "BROKEN" in kernel.defines:
            raise KernelError("broken")
        tried.set()
        return compiler.load(kernel, ordinal)

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", candidates)
    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=load_))
    compiler.few_go_on.clear()
    run = session(model(ROWS))
    assert tried.wait(5)
    start = time.perf_counter()
    session(model(f"g (float[n, 4] x) => (float[n, 4] y) {{ {node('copy', 'x', 'y', operands='x')} }}"))
    assert time.perf_counter() - start < 5, "the compiler gives up after ten seconds"
    check(run, 8)


@pytest.mark.usefixtures("no_wait")
def test_new_sizes_need_few_threads(gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_work, "PATIENCE", 0.0)
    run, before = session(of_unknown_rank()), threading.active_count()
    compiler.few_go_on.clear()
    for rows in range(1, 60):
        check(run, rows)
    assert threading.active_count() <= before + 3 * late_work.MAX_THREADS


@pytest.mark.usefixtures("no_wait")
def test_a_process_with_too_many_threads_runs_bodies(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, own = session(of_unknown_rank()), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "onnxfuse late answer":
            raise RuntimeError("can't start new thread")
        own(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(late_work, "PATIENCE", 0.0)
        check(run, 8)
    assert not late_work._working
    check(run, 9)  # a thread that starts makes both answers
    late_work.wait()
    before = gpu.launches()
    check(run, 8)
    assert gpu.launches() == before + 1


def test_python_exits_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        late_work.wait()
        own(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    done = threading.Event()
    late_work.start(done.set, "late")
    late_work.wait()
    assert done.is_set() and not late_work._working


def test_runs_get_python_soon_from_threads_that_make_plans() -> None:
    """The program would wait 5 ms for a thread that does not release it, and so would a run that opens a body."""
    goes_on, before = threading.Event(), sys.getswitchinterval()
    for _ in range(2):
        late_work.start(lambda: bool(goes_on.wait(10)), "busy")
    assert before > sys.getswitchinterval() == pytest.approx(late_work.SWITCH_INTERVAL)
    goes_on.set()
    late_work.wait()
    assert sys.getswitchinterval() == before


@pytest.mark.usefixtures("no_wait")
def test_a_late_answer_keeps_no_node_of_a_session_that_is_gone(gpu: Stage, compiler: Compiler) -> None:
    run, goes_on = session(of_unknown_rank()), threading.Event()
    with planner._lock:  # which the answer needs
        late_work.start(lambda: bool(goes_on.wait(10)), "busy")
        check(run, 8)
        del run
        gc.collect()
    goes_on.set()
    compiler.goes_on.set()
    late_work.wait()
    assert not planner._nodes


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("are_compiled", [False, True])
def test_bodies_are_shared_and_end_with_their_nodes_or_when_kernels_run(
    gpu: Stage, compiler: Compiler, are_compiled: bool
) -> None:
    """Each has a stream.  Here, all nodes run on one stream, so that equal ones share a body."""
    compiler.few_go_on.clear()
    before = gpu.cuda.fake_streams()
    kept = [session(model(ROWS)) for _ in range(4)]
    for run in kept:
        check(run, 8)
    deadline = time.monotonic() + 5
    while gpu.cuda.fake_streams() < before + 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # the second session opens one early, too
    if are_compiled:
        compiler.few_go_on.set()
        compiler.goes_on.set()
        late_work.wait()
        assert gpu.cuda.fake_streams() == before
        for run in kept:
            check(run, 8)
    del run, kept[1:]
    gc.collect()
    assert gpu.cuda.fake_streams() >= before + (not are_compiled)
    del kept[:]
    gc.collect()
    compiler.few_go_on.set()
    compiler.goes_on.set()
    late_work.wait()
    assert gpu.cuda.fake_streams() == before


def waits(gpu: Stage) -> list[int]:
    """Return how often streams were synchronized, waited for the default stream, and it waited for others."""
    counts = (ctypes.c_int * 3)()
    gpu.cuda.fake_waits(counts)
    return list(counts)


@pytest.mark.usefixtures("no_wait")
def test_a_body_runs_after_the_earlier_work_of_the_stream(gpu: Stage, compiler: Compiler) -> None:
    """onnxruntime copies inputs that the body reads in host memory before it starts anything."""
    compiler.few_go_on.clear()
    run, before = session(model(ROWS)), waits(gpu)
    check(run, 8)
    assert waits(gpu) == [before[0] + 1, *before[1:]]


def test_a_body_that_cannot_be_opened_leaves_no_stream(gpu: Stage) -> None:
    """Each later run of the node tries again, and would leave another one."""
    session(model(ROWS))
    before = gpu.cuda.fake_streams()
    with pytest.raises(native.NativeError, match="protobuf"):
        native.open_body(CPU, 0, True, b"no model")
    gpu.cuda.fake_fail_event(700)
    with pytest.raises(native.NativeError, match="cuEventCreate failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        native.open_body(CPU, 0, True, b"no model")
    assert gpu.cuda.fake_streams() == before


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("ends_well", [False, True])
def test_a_body_that_fails_keeps_its_session(gpu: Stage, compiler: Compiler, ends_well: bool) -> None:
    """Only the end of a run frees the host memory that the run used."""
    body = (
        "(x, bias) => (y) { two = Constant <value_ints = [-1, 6]> () s = Shape (x) pairs = Reshape (x, two) "
        "same = Reshape (pairs, s) y = Add (same, bias) }"
    )
    compiler.few_go_on.clear()
    before, run, begun = gpu.cuda.fake_streams(), session(model(ROWS, shift=body)), waits(gpu)[0]
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(check, run, 9)  # waits for the kernel
        while waits(gpu)[0] == begun:
            time.sleep(0.001)
        if ends_well:
            check(run, 8)
        compiler.few_go_on.set()
        compiler.goes_on.set()
        refused.result()
    late_work.wait()
    del run
    gc.collect()
    assert gpu.cuda.fake_streams() == before + (not ends_well)


@pytest.mark.usefixtures("no_wait")
def test_options_serve_waiting_sessions_first(gpu: Stage, compiler: Compiler) -> None:
    compiler.goes_on.set()
    graph = (CPU, {"enable_cuda_graph": "1"})
    waiting, other = ort.SessionOptions(), ort.SessionOptions()
    for provider in (graph, CPU):
        check(InferenceSession(model(ROWS), waiting, [provider]), 8)
    check(InferenceSession(model(ROWS), other, [CPU]), 8)
    with pytest.raises(UsageError, match=r"this one waits, by wait=True or enable_cuda_graph; make new SessionOptions"):
        InferenceSession(model(ROWS), other, [graph])


def test_an_error_of_late_work_is_dropped_and_one_in_time_is_raised() -> None:
    def fails() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        late_work.soon(fails, lambda _: None)
    goes_on, found = threading.Event(), list[int]()
    busy = threading.Event()
    late_work.start(lambda: bool(busy.wait(10)), "busy")
    assert late_work.soon(lambda: (goes_on.wait(10), fails())[1], found.append) is None
    assert late_work.soon(lambda: (goes_on.wait(10), 5)[1], found.append) is None
    goes_on.set()
    busy.set()
    late_work.wait()
    assert found == [5]


def test_likely_sizes() -> None:
    assert list(likely_sizes(0)) == [()]
    assert list(likely_sizes(1)) == [(1,), (8,)]
    assert list(likely_sizes(2)) == [(1, 1), (1, 128), (8, 1), (8, 128)]
    assert list(likely_sizes(5))[1:3] == [(1, 1, 128, 128, 128), (1, 128, 1, 128, 128)]


@pytest.mark.usefixtures("no_wait")
def test_bodies_are_opened_while_the_session_is_made(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run would open one session after another."""
    compiler.few_go_on.clear()
    own, by_threads = body_runs._opened, list[str]()
    monkeypatch.setattr(
        body_runs, "_opened", lambda *given: (by_threads.append(threading.current_thread().name), own(*given))[1]
    )
    plain = onnxfuse.session.plain_session

    def slow(*given: Any, **named: Any) -> ort.InferenceSession:
        deadline = time.monotonic() + 5
        while not by_threads and time.monotonic() < deadline:
            time.sleep(0.001)
        return plain(*given, **named)

    monkeypatch.setattr(onnxfuse.session, "plain_session", slow)
    run = session(model(ROWS))
    check(run, 8)
    assert by_threads == ["onnxfuse bodies"]
    del by_threads[:]
    kept = session(model(f"g (float[n, 4] x) => (float[n, 4] y) {{ {node('copy', 'x', 'y', operands='x')} }}"))
    assert by_threads == ["onnxfuse bodies"] and sum(map(len, body_runs._early.values())) == 1
    for each in compiler.few_go_on, compiler.goes_on:
        each.set()
    late_work.wait()
    assert not any(body_runs._early.values()) and kept, "kernels run now"


@pytest.mark.usefixtures("no_wait")
def test_a_session_that_cannot_be_made_leaves_no_body(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxfuse.session, "plain_session", MagicMock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        session(model(ROWS))
    late_work.wait()
    assert not any(body_runs._early.values())


@pytest.mark.usefixtures("no_wait")
def test_a_session_whose_file_changes_leaves_no_body(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """onnxruntime makes its session, which nobody gets."""
    compiler.few_go_on.clear()
    plain = onnxfuse.session.plain_session

    def slow(*given: Any, **named: Any) -> ort.InferenceSession:
        deadline = time.monotonic() + 5
        while not any(each.done() for of in body_runs._early.values() for each in of.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.utime(path, ns=(0, 0))
        return plain(*given, **named)

    monkeypatch.setattr(onnxfuse.session, "plain_session", slow)
    path = tmp_path / "model.onnx"
    path.write_bytes(model(ROWS))
    with pytest.raises(ModelError, match="was written to while it was loaded"):
        InferenceSession(path, providers=[CPU])
    assert not any(body_runs._early.values())


@pytest.mark.parametrize(
    "dtype, size, runs", [("float16", -1, True), ("int64", -1, False), ("float32", 1 << 28, False)]
)
def test_bodies_run_once_on_zeros_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, dtype: str, size: int, runs: bool
) -> None:
    """Zeros as indices or lengths may be wrong, and large weights take too much memory."""
    refuses = MagicMock(side_effect=native.NativeError("the body refuses the sizes"))
    monkeypatch.setattr(native, "run_on_zeros", refuses)
    body_runs._run_on_zeros(7, [TensorSpec((size, 3), dtype), TensorSpec((3,), "float32")])
    given = (7, [TensorSpec((body_runs.DYNAMIC_SIZE, 3), dtype), TensorSpec((3,), "float32")])
    assert [call.args for call in refuses.call_args_list] == [given] * runs


@pytest.mark.usefixtures("no_wait")
def test_a_run_opens_the_body_that_could_not_be_opened_early(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.few_go_on.clear()
    own, failed = body_runs._opened, threading.Event()

    def opened(*given: Any) -> int:
        if threading.current_thread().name == "onnxfuse bodies":
            failed.set()
            raise RuntimeError("no memory")
        assert failed.is_set()
        return own(*given)

    plain = onnxfuse.session.plain_session
    monkeypatch.setattr(body_runs, "_opened", opened)
    monkeypatch.setattr(
        onnxfuse.session, "plain_session", lambda *given, **named: (failed.wait(5), plain(*given, **named))[1]
    )
    check(session(model(ROWS)), 8)


@pytest.mark.usefixtures("no_wait")
def test_a_run_does_not_wait_for_bodies_of_other_nodes(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread opens one after another; a run opens what the thread has not begun."""
    compiler.few_go_on.clear()
    own, goes_on, by_runs = body_runs._opened, threading.Event(), list[str]()

    def opened(*given: Any) -> int:
        if threading.current_thread().name == "onnxfuse bodies":
            assert goes_on.wait(10)
        else:
            by_runs.append(given[0][0])
        return own(*given)

    monkeypatch.setattr(body_runs, "_opened", opened)
    both = f"g (float[n, 3] x, float[3] b) => (float[n, 3] y, float[n, 3] z) {{ {ROWS_NODE} "
    run = session(model(both + node("scale", "x", "z", operands="x", more=", factor = 2.0") + " }"))
    threading.Timer(0.1, goes_on.set).start()
    given = feed(8, 3)
    y, z = run.run(None, given)
    np.testing.assert_array_equal(y, given["x"] + given["b"])
    np.testing.assert_array_equal(z, 2 * given["x"])
    assert len(by_runs) == 1


@pytest.mark.usefixtures("no_wait")
def test_runs_at_new_sizes_do_not_call_python(gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for threads that make plans."""
    goes_on, calls = held_plans(gpu, monkeypatch), list[str]()
    compiler.few_go_on.clear()
    run, given = session(model(TWO)), feed(8, 3)
    run.run(None, given)  # opens the bodies
    for module, name in (body_runs, "open_body"), (late_work, "soon"):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, call=call, name=name: (calls.append(name), call(*given))[1])
    for rows in 1, 9, MANY:
        given = feed(rows, 3)
        np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert not calls
    goes_on.set()


@pytest.mark.usefixtures("filled_cache")
def test_a_session_does_not_wait_for_plans_whose_kernels_are_compiled(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading them from the disk also takes a while: nodes get their templates again when that is done."""
    goes_on = held_plans(gpu, monkeypatch)
    compiler.few_go_on.clear()
    run, given, before = session(model(TWO)), feed(8, 3), gpu.launches()
    np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert gpu.launches() == before and len(planner.preparations) == 1
    for each in compiler.few_go_on, compiler.goes_on, goes_on:
        each.set()
    late_work.wait()
    while planner.preparations:
        time.sleep(0.001)
    late_work.wait()
    np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert gpu.launches() == before + 2


@pytest.mark.usefixtures("filled_cache")
@pytest.mark.parametrize("gpu", [200], indirect=True, ids=["both kernels are likely"])
def test_nodes_get_kernels_that_are_loaded_after_their_session_is_made(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, plain = held_plans(gpu, monkeypatch), onnxfuse.session.plain_session

    def slow(*given: Any, **named: Any) -> ort.InferenceSession:
        deadline = time.monotonic() + 5
        while not compiler.loaded and time.monotonic() < deadline:
            time.sleep(0.001)
        return plain(*given, **named)

    monkeypatch.setattr(onnxfuse.session, "plain_session", slow)
    run = session(model(TWO))
    assert compiler.loaded == ["few"]
    for rows, launches in (1, 1), (8, 0), (1, 2), (8, 2):
        if launches == 2:  # both nodes have all kernels now
            compiler.goes_on.set()
            goes_on.set()
            while planner.preparations:
                time.sleep(0.001)
        given, before = feed(rows, 3), gpu.launches()
        np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
        assert gpu.launches() == before + launches, (rows, launches)


@pytest.mark.usefixtures("no_wait")
def test_saved_plans_include_those_that_are_being_made(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goes_on = held_plans(gpu, monkeypatch)
    compiler.goes_on.set()
    run = session(model(TWO))
    run.run(None, feed(8, 3))
    assert planner.preparations
    threading.Timer(0.1, goes_on.set).start()
    assert save_plans(tmp_path / "plans", CPU) == 2


@pytest.mark.usefixtures("no_wait")
def test_saved_plans_include_those_that_a_first_run_has_requested(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    goes_on = held_plans(gpu, monkeypatch, "shift")
    monkeypatch.setattr(late_work, "PATIENCE", 0.0)
    compiler.goes_on.set()
    run = session(of_unknown_rank())
    check(run, 8)
    threading.Timer(0.1, goes_on.set).start()
    assert save_plans(tmp_path / "plans", CPU) == 1


@pytest.mark.usefixtures("no_wait")
def test_sessions_come_and_go_while_bodies_are_opened(gpu: Stage, compiler: Compiler) -> None:
    compiler.few_go_on.clear()
    before = gpu.cuda.fake_streams()

    def one(rows: int) -> None:
        check(session(model(ROWS)), rows)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(1, 17)))
    compiler.few_go_on.set()
    compiler.goes_on.set()
    late_work.wait()
    gc.collect()
    assert gpu.cuda.fake_streams() == before


@pytest.mark.usefixtures("filled_cache")
@pytest.mark.parametrize("gpu", [200], indirect=True, ids=["all kernels are likely"])
def test_a_session_that_has_all_kernels_waits_for_no_body(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread began to open bodies, but all kernels were loaded before onnxruntime had made its session."""
    compiler.goes_on.set()
    goes_on, opened, prepared = threading.Event(), list[int](), list[prepare_session.Preparation]()
    own, prepare, plain = body_runs._opened, prepare_session._prepare, onnxfuse.session.plain_session

    def slow(*given: Any) -> int:
        assert goes_on.wait(5)
        opened.append(own(*given))
        return opened[-1]

    monkeypatch.setattr(body_runs, "_opened", slow)
    monkeypatch.setattr(prepare_session, "_prepare", lambda *given: (prepared.append(given[-1]), prepare(*given))[1])
    monkeypatch.setattr(
        onnxfuse.session, "plain_session", lambda *given, **named: (prepared[0].ends.wait(5), plain(*given, **named))[1]
    )
    streams, launches, given = gpu.cuda.fake_streams(), gpu.launches(), feed(8, 3)
    threading.Timer(0.5, goes_on.set).start()
    run = session(model(TWO))
    assert prepared[0].bodies and not opened
    np.testing.assert_array_equal(run.run(None, given)[0], 2 * (given["x"] + given["b"]))
    assert gpu.launches() == launches + 2
    late_work.wait()
    assert len(opened) == 1 and gpu.cuda.fake_streams() == streams


@pytest.mark.usefixtures("no_wait")
def test_a_body_stays_open_where_no_kernel_compiles(
    gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later runs would open it again."""

    def fails(kernel: Kernel, ordinal: int) -> LoadedKernel:
        compiler.load(kernel, ordinal)
        raise KernelError("shift.cu does not compile")

    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=fails))
    own, opened = body_runs._opened, list[int]()
    monkeypatch.setattr(body_runs, "_opened", lambda *given: (opened.append(own(*given)), opened[-1])[1])
    compiler.few_go_on.clear()
    run = session(model(ROWS))
    check(run, 8)
    before = len(opened)
    compiler.few_go_on.set()
    compiler.goes_on.set()
    late_work.wait()
    check(run, 8)
    late_work.wait()
    check(run, 8)
    assert len(opened) == before
