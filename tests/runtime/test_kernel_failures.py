"""No kernel that does not compile reaches a run: another one of its host runs, or the node's body."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, ROWS, SHIFT, Stage, feed, load, model, node, session, stage

from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.errors import KernelError
from onnxfuse.runtime import body_runs, kernel_failures, late_work
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Plan, TensorSpec
from onnxfuse.session import InferenceSession, explain_session, register

FIXED = f"g (float[4, 3] x, float[3] b) => (float[4, 3] y) {{ {node('shift', 'x, b', 'y', operands='x bias')} }}"
ERROR = 'shift.cu does not compile: shift.cu(7): error: identifier "t1" is undefined'


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return stage(monkeypatch)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, gpu: Stage) -> list[str]:
    """Let kernels fail whose constants have BROKEN, and return the entries that were compiled."""
    found = list[str]()

    def compile_(kernel: Kernel, ordinal: int) -> LoadedKernel:
        found.append(f"{kernel.entry}{' broken' if 'BROKEN' in kernel.defines else ''}")
        if "BROKEN" in kernel.defines:
            raise KernelError(f"{ERROR}\n    x0 + t1[j]\n")
        return dataclasses.replace(load(kernel, ordinal))

    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=compile_))
    return found


def broken(plan: Plan) -> Plan:
    (step,) = plan.steps
    kernel = dataclasses.replace(step.kernel, defines={**step.kernel.defines, "BROKEN": 1})
    return dataclasses.replace(plan, steps=(dataclasses.replace(step, kernel=kernel),))


def offer(gpu: Stage, monkeypatch: pytest.MonkeyPatch, name: str, also_good: bool = False) -> None:
    """Let the host of a kernel offer a plan that does not compile, and behind it, if `also_good`, one that does."""
    host = gpu.kernels(name)
    own = host.candidates

    def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        plans = own(node, inputs, device)
        return [*map(broken, plans), *(plans if also_good else [])]

    monkeypatch.setattr(host, "candidates", candidates)


def check(run: ort.InferenceSession, rows: int) -> None:
    given = feed(rows, 3)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


@pytest.mark.parametrize("graph", [FIXED, SHIFT], ids=["fixed sizes", "dynamic sizes"])
def test_a_session_is_made_with_the_body_of_a_node_whose_kernels_fail(
    gpu: Stage,
    tried: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    graph: str,
) -> None:
    offer(gpu, monkeypatch, "shift")
    before = gpu.launches()
    run = session(model(graph))
    check(run, 4)
    assert gpu.launches() == before and set(tried) == {"shift broken"}
    assert not gpu.library.onnxfuse_kernels_alive(), "onnxruntime has the body itself"
    (dispatch,) = explain_session(run)
    assert (dispatch.how, dispatch.why) == ("body", f"KernelError: {ERROR}")
    warning = f"node 'node_0' (shift): its body runs, because its kernels failed: KernelError: {ERROR}"
    assert [each.message for each in caplog.records if each.levelname == "WARNING"][-1] == warning
    del tried[:]
    check(session(model(graph)), 4)
    assert not tried, "a later session knows it"


def test_another_plan_of_the_host_runs(
    gpu: Stage, tried: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(gpu, monkeypatch, "shift", also_good=True)
    run, before = session(model(SHIFT)), gpu.launches()
    for rows in (1, 4, 1000):
        check(run, rows)
    assert gpu.launches() == before + 3
    (dispatch,) = explain_session(run)
    assert dispatch.how == "kernel"
    assert dispatch.why.endswith(f"another kernel runs, or its body, in place of one that failed: KernelError: {ERROR}")
    assert (
        f"(shift): another kernel runs, or its body, in place of one that failed: KernelError: {ERROR}" in caplog.text
    )


def test_options_that_have_registered_the_operator_serve_its_body(
    gpu: Stage, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(gpu, monkeypatch, "shift")
    options = ort.SessionOptions()
    check(session(model(SHIFT), sess_options=options), 5)
    assert not gpu.library.onnxfuse_kernels_alive()


def test_a_node_whose_kernels_fail_is_not_registered(
    gpu: Stage, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(gpu, monkeypatch, "shift")
    options = ort.SessionOptions()
    (dispatch,) = register(options, model(SHIFT), [CPU])
    assert dispatch.how == "body"
    check(ort.InferenceSession(model(SHIFT), options, [CPU]), 5)


@pytest.fixture
def late(gpu: Stage, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all kernels fail for inputs that no session prepares: those of memory that is not aligned."""
    for name in ("shift", "pair", "scale", "rows"):
        host = gpu.kernels(name)

        def candidates(
            node: FusedNode, inputs: Sequence[TensorSpec], device: Device, own: object = host.candidates
        ) -> list[Plan]:
            plans: list[Plan] = own(node, inputs, device)  # type: ignore[operator]
            return plans if inputs[0].aligned else [broken(each) for each in plans]

        monkeypatch.setattr(host, "candidates", candidates)


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = 4 + -memory.ctypes.data % 16
    found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


@pytest.mark.usefixtures("late")
def test_bodies_run_inside_runs_of_many_threads(gpu: Stage) -> None:
    run, before = session(model(SHIFT)), gpu.launches()

    def one(rows: int) -> None:
        given = feed(rows, 3)
        found = run.run(None, {"x": unaligned(given["x"]), "b": given["b"]})[0]
        np.testing.assert_array_equal(found, given["x"] + given["b"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [1, 2, 3, 0, 700, 5] * 20))
    assert gpu.launches() == before
    check(run, 2)
    assert gpu.launches() == before + 1, "aligned memory has its kernel"


@pytest.mark.usefixtures("late")
def test_bodies_have_attributes_and_several_outputs(gpu: Stage) -> None:
    graph = "g (float[n] x, float[n] r) => (float[n] d, float[n] t) {{ {} {} }}".format(
        node("pair", "x, r", "s, d", operands="x r", types="1, 1"),
        node("scale", "s", "t", operands="x", more=", factor = 0.5"),
    )
    run, before = session(model(graph)), gpu.launches()
    x, r = unaligned(np.float32([1, 2, 3])), unaligned(np.float32([4, 5, 7]))
    difference, scaled = run.run(None, {"x": x, "r": r})
    np.testing.assert_array_equal(difference, x - r)
    np.testing.assert_array_equal(scaled, (x + r) / 2)
    assert gpu.launches() == before + 1, "onnxruntime aligns what lies between two nodes"


@pytest.mark.usefixtures("late")
def test_bodies_read_numbers_in_host_memory() -> None:
    run, given = session(model(ROWS)), feed(5, 3)
    for count in 2, 4:
        found = run.run(None, {"x": unaligned(given["x"]), "b": given["b"], "count": np.array(count, np.int32)})[0]
        np.testing.assert_array_equal(found, given["x"][:count] + given["b"])


@pytest.mark.usefixtures("late")
def test_bodies_go_with_their_session(gpu: Stage) -> None:
    run, before = session(model(SHIFT)), gpu.cuda.fake_streams()
    given = feed(2, 3)
    run.run(None, {**given, "x": unaligned(given["x"])})
    assert gpu.cuda.fake_streams() == before + 1
    del run
    gc.collect()
    assert gpu.cuda.fake_streams() == before


@pytest.mark.usefixtures("late")
def test_bodies_start_no_threads_of_onnxruntime(gpu: Stage) -> None:
    """Otherwise each would have as many threads as the machine has processors, and these compile kernels meanwhile."""
    run, given, streams = session(model(SHIFT)), feed(2, 3), gpu.cuda.fake_streams()
    before = set(Path("/proc/self/task").iterdir())
    run.run(None, {**given, "x": unaligned(given["x"])})
    late_work.wait()
    assert gpu.cuda.fake_streams() == streams + 1
    assert set(Path("/proc/self/task").iterdir()) <= before


@pytest.mark.usefixtures("late")
def test_what_a_body_raises_is_the_error_of_the_node(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = session(model(SHIFT)), feed(2, 3)

    def open_body(*_: object) -> int:
        raise RuntimeError("no memory")

    monkeypatch.setattr(body_runs, "open_body", open_body)
    with pytest.raises(Exception, match=r"shift 'node_0' \(float32\[2,3\], float32\[3\]\): RuntimeError: no memory"):
        run.run(None, {**given, "x": unaligned(given["x"])})


def test_a_failure_that_leaves_fewer_kernels_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    from stand_in import DEVICE

    fused = FusedNode("shift", "n", ("x",), {"only": "here"}, ("float32",))
    for instead in ("kernel", "body", "body", "kernel", "body always", "body"):
        kernel_failures.note(fused, DEVICE, ValueError(), instead)  # type: ignore[arg-type]
    assert [each.message.split(": ")[1] for each in caplog.records] == list(kernel_failures.TEXTS.values())


def test_plan_files_have_kernels_that_did_not_compile_here(
    gpu: Stage, tried: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(SHIFT))
    compile_file(path, tmp_path / "m.onnx.plans", CompileSettings(provider=CPU))
    with monkeypatch.context() as patch:
        offer(gpu, patch, "shift")
        assert explain_session(session(model(SHIFT)))[0].how == "body"
    run, before = InferenceSession(path, providers=[CPU]), gpu.launches()
    check(run, 5)
    assert explain_session(run)[0].how == "kernel" and gpu.launches() == before + 1
