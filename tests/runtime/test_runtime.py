"""Fused nodes run in onnxruntime sessions; the native library is real, the GPU is a stand-in."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from memory_in_use import bytes_in_use

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from stand_in import CPU, ROWS, SHIFT, Stage, fails, feed, model, node, session, stage

from onnxfuse.errors import ModelError
from onnxfuse.runtime import template_words
from onnxfuse.runtime.plan import Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.session import NodeDispatch, explain_session, register

KERNEL = f"{CPU}, device 0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    result.kernels("shift").calls.clear()
    yield result
    result.cuda.fake_fail_next(0)
    result.cuda.fake_capture(0)


# --- running ---------------------------------------------------------------------------------------------------------


def planned(gpu: Stage) -> int:
    """Return how often the host of `shift` was asked since then, and forget it."""
    calls = gpu.kernels("shift").calls
    count = len(calls)
    calls.clear()
    return count


def test_a_kernel_runs_in_place_of_the_body_and_is_planned_when_the_session_is_made(gpu: Stage) -> None:
    run = session(model(SHIFT))
    assert planned(gpu)
    before = gpu.launches()
    for n, d in [(2, 3), (5, 3), (2, 3), (5, 3), (1, 8), (2, 3)]:
        given = feed(n, d)
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert gpu.launches() - before == 6
    assert not planned(gpu)
    assert gpu.last() == [7, 1, 1, 32, 2, 1, 0, 1]
    assert explain_session(run) == (NodeDispatch("node_0", "shift", "kernel", KERNEL),)


def test_a_number_in_host_memory_determines_shapes(gpu: Stage) -> None:
    """The number counts as a dynamic dim, so that one template serves all its values."""
    run, before = session(model(ROWS)), gpu.launches()
    for n, count in (5, 3), (5, 4), (5, 3), (6, 6):
        given = {**feed(n, 4), "count": np.array(count, np.int32)}
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"][:count] + given["b"])
    assert gpu.launches() - before == 4
    assert len(planner.templates_in_use()) == 1


def test_a_tensor_in_place_of_a_number_is_refused(gpu: Stage) -> None:
    run = session(model(ROWS.replace("int32 count", "int32[k] count")))
    message = fails(run, {**feed(5, 4), "count": np.array([2, 3], np.int32)})
    assert "input 1 is not one int32" in message


def test_equal_nodes_share_a_template(gpu: Stage) -> None:
    """A growing cache brings new shapes at every step, which all layers share."""
    session(model(SHIFT))
    for_one_node = planned(gpu)
    planner._recent.clear()
    first, second = (node("shift", f"{x}, b", y, operands="x bias") for x, y in (("x", "z"), ("z", "y")))
    layers = model(f"g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {first} {second} }}")
    run = session(layers)
    assert planned(gpu) == for_one_node
    for n in 2, 3, 2:
        given = feed(n, 5)
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"] + given["b"])
    assert len(planner.templates_in_use()) == 1
    del run
    gc.collect()
    session(layers).run(None, feed(2, 5))
    assert not planned(gpu), "a template stays for the next session"


DTYPES = {"float16": np.float16, "int64": np.int64, "double": np.float64, "bool": np.bool_}


@pytest.mark.parametrize("name, dtype", DTYPES.items())
def test_every_dtype_goes_through_scratch_memory_and_clusters(gpu: Stage, name: str, dtype: Any) -> None:
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = f"g ({name}[n] x) => ({name}[n] y) {{ {node('copy', 'x', 'y', operands='x', types=str(number))} }}"
    x = (np.arange(1001) % 7).astype(dtype)
    np.testing.assert_array_equal(session(model(graph)).run(None, {"x": x})[0], x)
    assert gpu.last() == [8, 1, 1, 32, 1, 1, 64 * 1024, 4]
    assert gpu.cuda.fake_shared_limit() == 64 * 1024


def test_two_outputs_attributes_and_a_chain(gpu: Stage) -> None:
    graph = "g (float[n] x, float[n] r) => (float[n] d, float[n] t) {{ {} {} }}".format(
        node("pair", "x, r", "s, d", operands="x r", types="1, 1"),
        node("scale", "s", "t", operands="x", more=', factor = 0.1, sizes = [3, 4], mode = "fast", half = [0.5, 2.0]'),
    )
    x, r = np.float32([1, 2, 3]), np.float32([4, 5, 7])
    difference, scaled = session(model(graph)).run(None, {"x": x, "r": r})
    np.testing.assert_array_equal(difference, x - r)
    np.testing.assert_array_equal(scaled, (x + r) * np.float32(0.1))
    attributes = dict(gpu.kernels("scale").nodes[-1].attributes)
    assert attributes == {"factor": float(np.float32(0.1)), "sizes": [3, 4], "mode": "fast", "half": [0.5, 2.0]}


def test_sizes_stay_open_for_the_nodes_that_follow(gpu: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    graph = "g (float[n, d] x, float[d] b, float[d, m] w) => (float[n, m] z) {{ {} {} }}".format(
        node("shift", "x, b", "y", operands="x bias"),
        "m = MatMul(y, w) t = Transpose<perm = [1, 0]>(m) u = Transpose<perm = [1, 0]>(t) z = Relu(u)",
    )
    run = session(model(graph))
    for n in (3, 4):
        given = feed(n, 4) | {"w": np.eye(4, 2, dtype=np.float32)}
        np.testing.assert_array_equal(run.run(None, given)[0], np.maximum((given["x"] + given["b"])[:, :2], 0))
    assert capfd.readouterr().err == ""


def test_a_node_may_say_the_rank_of_its_output(gpu: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    graph = "g (float[a, b, c] x) => (float[d] y) {{ {} }}".format(
        node("copy", "x", "y", operands="x", more=", output_ranks = [1]")
    )
    session(model(graph))
    assert capfd.readouterr().err == ""


def test_nothing_is_launched_for_outputs_without_elements(gpu: Stage) -> None:
    before = gpu.launches()
    assert session(model(SHIFT)).run(None, feed(0, 4))[0].shape == (0, 4)
    assert gpu.launches() == before


def test_plans_know_which_inputs_are_constants(gpu: Stage) -> None:
    """Initializers and folded values are constants; inputs are not, even if the model has a default for them."""
    # An attribute makes the nodes different, because equal nodes would share a plan.
    names = [("x", "b", "t"), ("t", "c", "u"), ("u", "f", "v"), ("v", "k", "y")]
    chain = [
        node("shift", f"{x}, {bias}", y, operands="x bias", more=f", number = {number}")
        for number, (x, bias, y) in enumerate(names)
    ]
    graph = f"""g (float[n, d] x, float[3] b) => (float[n, d] y)
      <float[3] b = {{1, 1, 1}}, float[3] c = {{1, 2, 3}}>
      {{ f = Mul(c, c) k = Constant <value = float[3] {{1, 0, 0}}>() {" ".join(chain)} }}"""
    run = session(model(graph))
    np.testing.assert_array_equal(run.run(None, {"x": np.zeros((2, 3), np.float32)})[0], [[4, 7, 13]] * 2)
    constants = [[spec.constant for spec in each.template.inputs] for each in planner.templates_in_use()]
    assert constants == [[False, False], [False, True], [False, True], [False, True]]


def test_plans_know_which_inputs_are_aligned(gpu: Stage) -> None:
    run = session(model(SHIFT))
    gpu.kernels("shift").calls.clear()
    storage = np.zeros(64, np.float32)
    start = (-storage.ctypes.data % 16) // 4
    for offset in (start, start + 1):
        given = {"x": storage[offset : offset + 8].reshape(2, 4), "b": np.ones(4, np.float32)}
        np.testing.assert_array_equal(run.run(None, given)[0], np.ones((2, 4), np.float32))
    assert {inputs[0].aligned for _, inputs, _ in gpu.kernels("shift").calls} == {False}


def test_an_unaligned_output_is_planned_as_if_nothing_were_aligned(gpu: Stage) -> None:
    run = session(model(SHIFT))
    storage = np.zeros(64, np.float32)
    start = (-storage.ctypes.data % 16) // 4 + 1
    binding = run.io_binding()
    for name, value in feed(2, 4).items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("y", "cpu", 0, np.float32, (2, 4), storage[start:].ctypes.data)
    run.run_with_iobinding(binding)
    np.testing.assert_array_equal(storage[start : start + 8].reshape(2, 4), feed(2, 4)["x"] + feed(2, 4)["b"])
    assert not any(spec.aligned for spec in gpu.kernels("shift").calls[-1][1])


def test_eight_threads_share_a_session(gpu: Stage) -> None:
    run = session(model(SHIFT))
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(200):
            given = feed(1 + (seed + i) % 5, 16)
            if not np.array_equal(run.run(None, given)[0], given["x"] + given["b"]):
                failures.append(f"thread {seed}, run {i}")

    gpu.kernels("shift").calls.clear()
    before = gpu.launches()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not failures
    assert gpu.launches() - before == 1600
    assert not any(inputs[0].aligned and inputs[1].aligned for _, inputs, _ in gpu.kernels("shift").calls)


def test_sessions_come_and_go_without_a_leak(gpu: Stage) -> None:
    """A session that has ended holds less than a thousandth of what one holds that stays, which is 1.2 MB."""
    source = model(SHIFT)

    def growth(count: int, kept: list[ort.InferenceSession] | None = None) -> float:
        """Return the bytes by which each session makes the memory in use grow."""
        before = bytes_in_use()
        for _ in range(count):
            run = session(source)
            run.run(None, feed(3, 4))
            if kept is not None:
                kept.append(run)
        del run
        return (bytes_in_use() - before) / count

    growth(60)  # which fills caches
    stays = growth(40, [])
    ended = growth(200)
    assert 1000 * ended < stays, (ended, stays)
    assert gpu.library.onnxfuse_kernels_alive() == 0
    assert not planner.templates_in_use()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_in_python_names_op_node_shapes_and_message(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(*_: Any) -> list[Plan]:
        raise ValueError("no tile fits")

    with monkeypatch.context() as patch:
        patch.setattr(gpu.kernels("shift"), "candidates", candidates)
        run = session(model(SHIFT))
        assert "shift 'node_0' (float32[2,3], float32[3]): ValueError: no tile fits" in fails(run, feed(2, 3))
    assert run.run(None, feed(2, 3))[0].shape == (2, 3), "the session works again"


INTERRUPTED = """
import signal, sys
sys.path.insert(0, {folder!r})
import pytest
from stand_in import *
gpu = stage(pytest.MonkeyPatch())
def candidates(*_):
    raise {error}
gpu.kernels("shift").candidates = candidates
if {sigint_ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
run = session(model(SHIFT))
try:
    run.run(None, feed(2, 3))
except Exception as error:
    print("passed over:", error)
print("went on")
"""


@pytest.mark.parametrize("sigint_ignored", [False, True])
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit(0)", "ValueError"])
def test_what_stops_the_program_is_more_than_an_error_of_onnxruntime(
    gpu: Stage, error: str, sigint_ignored: bool
) -> None:
    """SIGINT is ignored in jobs that a shell script starts in the background."""
    folder = str(Path(stand_in.__file__).parent)
    script = INTERRUPTED.format(folder=folder, error=error, sigint_ignored=sigint_ignored)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if error == "ValueError":
        assert done.stdout == "went on\n" and done.returncode == 0
        assert "node 'node_0' (shift): its body runs where its kernel failed: ValueError" in done.stderr
    else:
        assert "went on" not in done.stdout and done.returncode != 0
        assert "KeyboardInterrupt" in done.stderr.splitlines()[-1]


NAMED = node("shift", "x, b", "y", operands="x bias", more=', attributes = "number", number = 1')


def test_a_node_that_nobody_registered_is_refused(gpu: Stage) -> None:
    """onnxruntime passes on only those attributes that nodes of registered models have."""
    graph = "g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {} }}"
    options = ort.SessionOptions()
    register(options, model(SHIFT), [CPU])
    other = model(graph.format(NAMED.replace("number", "other")))
    message = fails(ort.InferenceSession(other, options, [CPU]), feed(2, 3))
    assert "fused node 'node_0': attribute other is missing; register the model that runs" in message
    register(options, other, [CPU])
    run = ort.InferenceSession(other, options, [CPU])
    np.testing.assert_array_equal(run.run(None, feed(2, 3))[0], feed(2, 3)["x"] + feed(2, 3)["b"])
    assert dict(gpu.kernels("shift").nodes[-1].attributes) == {"other": 1}
    with pytest.raises(ModelError, match=r"'node_0': attribute number is missing; .* optimize it again"):
        session(model(graph.format(NAMED.replace(", number = 1", ""))))


def test_a_node_that_its_kernel_does_not_support_is_not_planned(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ort.SessionOptions()
    register(options, model(SHIFT), [CPU])
    run = ort.InferenceSession(model(SHIFT), options, [CPU])
    planner._recent.clear()  # the template of the registered model
    monkeypatch.setattr(gpu.kernels("shift"), "supports", lambda *_: "bias is too long")
    assert "KernelError: bias is too long; register the model that runs" in fails(run, feed(2, 3))


def test_a_node_without_one_of_its_outputs_runs_its_body(gpu: Stage) -> None:
    graph = "g (float[n] x, float[n] r) => (float[n] s) {{ {} }}".format(
        node("pair", "x, r", "s, d", operands="x r", types="1, 1", more=", output_ranks = [1, 1]")
    )
    proto = onnx.load_from_string(model(graph))
    proto.graph.node[0].output[1] = ""
    run = session(proto.SerializeToString())
    assert explain_session(run) == (NodeDispatch("node_0", "pair", "body", "its output 1 is left out"),)
    np.testing.assert_array_equal(run.run(None, {"x": np.float32([1, 2]), "r": np.float32([3, 5])})[0], [4, 7])


MALFORMED = {
    "an output is float16, the node declares float32": lambda p: replaced(p, outputs=(TensorSpec((2, 3), "float16"),)),
    "the number of outputs is 2, required 1 to 1": lambda p: replaced(p, outputs=p.outputs * 2),
    "a pointer's index is 2, required 0 to 1": lambda p: with_step(p, arguments=(Pointer("input", 2),)),
    "a pointer's offset is 25, required 0 to 24": lambda p: with_step(p, arguments=(Pointer("output", 0, 25),)),
    "a pointer's index is 0, required 0 to -1": lambda p: with_step(p, arguments=(Pointer("scratch", 0),)),
    "a grid size is 0, required 1 to": lambda p: with_step(p, grid=(1, 0, 1)),
    "a block has over 1024 threads": lambda p: with_step(p, block=(1024, 2, 1)),
    "the grid's width is not a multiple of the cluster's": lambda p: with_step(p, cluster=2),
    "the number of arguments is 65": lambda p: with_step(p, arguments=(Scalar(1, "int32"),) * 65),
    "a scratch size is -1": lambda p: replaced(p, scratch=(-1,)),
    "no step, but the outputs have elements": lambda p: replaced(p, steps=()),
}


def replaced(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, **changes)


def with_step(plan: Plan, **changes: Any) -> Plan:
    step: Launch = dataclasses.replace(plan.steps[0], **changes)
    return dataclasses.replace(plan, steps=(step,))


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_plan_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    shift = gpu.kernels("shift")
    good = shift.candidates
    monkeypatch.setattr(shift, "candidates", lambda *a: [MALFORMED[message](plan) for plan in good(*a)])
    before = gpu.launches()
    assert message in fails(session(model(SHIFT)), feed(2, 3))
    assert gpu.launches() == before


@pytest.mark.parametrize("size", [0, 1, 7, 8, 80])
def test_a_truncated_reply_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(template_words.TemplateWords, "data", lambda _: bytes(size))
    assert "the plan is malformed" in fails(session(model(SHIFT)), feed(2, 3))


def test_a_failed_launch_is_an_error_with_its_cuda_name(gpu: Stage) -> None:
    run = session(model(SHIFT))
    gpu.cuda.fake_fail_next(700)
    message = fails(run, feed(2, 3))
    assert "shift 'node_0' (float32[2,3], float32[3]): cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS" in message
    assert run.run(None, feed(2, 3))[0].shape == (2, 3)


def test_new_shapes_are_not_planned_while_a_graph_is_captured(gpu: Stage) -> None:
    assert gpu.cuda.fake_capture(1) is not None
    run = session(model(SHIFT))
    run.run(None, feed(2, 3))  # the CPU provider has no stream, so nothing can be captured
