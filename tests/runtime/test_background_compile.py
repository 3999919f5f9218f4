"""A session is made with the kernels for likely sizes; others are compiled behind it, and a run waits for its own."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, Stage, feed, load, model, node, session, stage

from onnxfuse.errors import KernelError
from onnxfuse.runtime import background_compile, prepare_session
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.likely_sizes import likely_sizes
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Plan, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.template import Template
from onnxfuse.session import explain_session, register

ROWS = f"g (float[n, 3] x, float[3] b) => (float[n, 3] y) {{ {node('shift', 'x, b', 'y', operands='x bias')} }}"
MANY = 1000  # rows, from which on the host takes another kernel


class Compiler:
    """Loads kernels, says which, and waits with those for many rows until that is allowed."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.goes_on = threading.Event()
        self.error: Exception | None = None

    def load(self, kernel: Kernel, ordinal: int) -> LoadedKernel:
        kind = "many" if "MANY" in kernel.defines else "few"
        if kind == "many":
            assert self.goes_on.wait(10)
            if self.error:
                raise self.error
        self.loaded.append(kind)
        return dataclasses.replace(load(kernel, ordinal))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Let the host of shift have one kernel for few rows and one for many."""
    result = stage(monkeypatch)
    own = result.kernels("shift").candidates

    def by_rows(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        (plan,) = own(node, inputs, device)
        if inputs[0].shape[0] < MANY:
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
    monkeypatch.setattr(prepare_session, "compile_in_background", lambda _: None)
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
    background_compile.wait()
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
        monkeypatch.setattr(prepare_session, "compile_in_background", lambda _: None)
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
    monkeypatch.setattr(prepare_session, "compile_in_background", lambda _: None)
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
    given = feed(8, 3)
    memory = np.empty(4 * 3 * 8 + 1, np.float32)
    given["x"] = memory[1 if memory.ctypes.data % 16 == 0 else 0 :][: 3 * 8].reshape(8, 3)
    given["x"][:] = 1
    assert given["x"].ctypes.data % 16
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert sorted(compiler.loaded) == ["few", "many"]


def test_nothing_is_compiled_when_python_exits(gpu: Stage, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    exits = threading.Event()
    exits.set()
    monkeypatch.setattr(background_compile, "_exits", exits)
    check(session(model(ROWS)), 8)
    assert compiler.loaded == ["few"]


def test_likely_sizes() -> None:
    assert list(likely_sizes(0)) == [()]
    assert list(likely_sizes(1)) == [(1,), (8,)]
    assert list(likely_sizes(2)) == [(1, 1), (1, 128), (8, 1), (8, 128)]
    assert list(likely_sizes(5))[1:3] == [(1, 1, 128, 128, 128), (1, 128, 1, 128, 128)]
