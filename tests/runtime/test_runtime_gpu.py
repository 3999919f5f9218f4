"""A small kernel in sessions on a GPU: CUDA graphs, threads and plan files."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
import onnxfuse.kernels
from onnxfuse.errors import KernelError
from onnxfuse.runtime import cupy_backend, kernel_failures
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.loaded_plans import load_plans
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.planner import Planner, planner
from onnxfuse.runtime.saved_plans import save_plans
from onnxfuse.session import InferenceSession, explain_session, register

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
D = 768
BODY = """<domain: "onnxfuse", opset_import: ["" : 17]>
row_center <d, steps, fusion, operands, output_types> (x, scale) => (y) {
  mean = ReduceMean<axes = [-1]>(x)
  diff = Sub(x, mean)
  y = Mul(diff, scale)
}"""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parents[1] / "native" / "gpu_kernels")
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, folder])
    # Sessions of other tests may not be collected yet, and all modules hold the one planner.
    monkeypatch.setattr(planner, "__dict__", {**vars(Planner()), "verdicts": planner.verdicts})
    ort.preload_dlls()


def model(
    *, nodes: int = 1, steps: int = 1, op: str = "", dtype: str = "float", d: int | str = D, body: str = BODY
) -> bytes:
    """Return a chain of fused nodes, or of nodes of an ONNX operator with the same inputs.

    `d` is the size of a row, or a name: the kernel has it as a constant, so that a template then has dozens of kernels.
    """
    call = f'onnxfuse.row_center <fusion = "row_center", operands = "x scale", output_types = [1], steps = {steps}>'
    if dtype == "float16":
        call = call.replace("[1]", "[10]")
    names = ["x", *(f"t{i}" for i in range(1, nodes)), "y"]
    chain = "\n".join(f"{after} = {op or call} ({before}, scale)" for before, after in pairwise(names))
    text = (
        f'<ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]>\n'
        f"g ({dtype}[n, {d}] x, {dtype}[{d}] scale) => ({dtype}[n, {d}] y) {{ {chain} }}\n{'' if op else body}"
    )
    return bytes(onnx.parser.parse_model(text).SerializeToString())


def session(source: bytes, how: str | None = "kernel", **options: Any) -> ort.InferenceSession:
    run = InferenceSession(source, providers=[(CUDA, options)])
    assert run.get_providers()[0] == CUDA
    assert how is None or {r.how for r in explain_session(run)} == {how}, explain_session(run)
    return run


def feed(rows: int, d: int = D, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(rows + seed)
    return {
        "x": random.standard_normal((rows, d)).astype(np.float32),
        "scale": random.standard_normal(d).astype(np.float32),
    }


def expected(given: dict[str, Any]) -> Any:
    x = given["x"].astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) * given["scale"]


def close(result: Any, given: dict[str, Any]) -> None:
    np.testing.assert_allclose(result, expected(given), rtol=1e-5, atol=1e-5)


def bound(run: ort.InferenceSession, given: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Return the binding, the inputs on the GPU and the output on the GPU."""
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0) for name, value in given.items()}
    output = ort.OrtValue.ortvalue_from_shape_and_type(given["x"].shape, np.float32, "cuda", 0)
    binding = run.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("y", output)
    return binding, inputs, output


@pytest.mark.parametrize("steps", [1, 2])
def test_a_kernel_gives_what_the_body_gives(steps: int) -> None:
    run = session(model(steps=steps, nodes=1, d="d"))
    for rows, d in [(1, D), (7, D), (64, D), (64, 1023), (7, D), (0, D)]:
        given = feed(rows, d)
        close(run.run(None, given)[0], given)


def test_kernels_run_where_no_providers_are_named() -> None:
    run = InferenceSession(model())
    assert run.get_providers() == [CUDA, "CPUExecutionProvider"]
    assert [each.how for each in explain_session(run)] == ["kernel"]
    close(run.run(None, feed(8))[0], feed(8))


def test_registered_options_run_bodies_where_no_providers_are_named() -> None:
    options = ort.SessionOptions()
    (dispatch,) = register(options, model())
    assert (dispatch.how, "name CUDAExecutionProvider in `providers`" in dispatch.why) == ("body", True)
    close(ort.InferenceSession(model(), options).run(None, feed(8))[0], feed(8))


def test_the_body_runs_for_another_dtype() -> None:
    run = session(model(dtype="float16"), how="body")
    given = {name: value.astype(np.float16) for name, value in feed(8).items()}
    np.testing.assert_allclose(run.run(None, given)[0], expected(given), rtol=0.02, atol=0.02)


# A Concat of 40 inputs copies their addresses from host memory; onnxruntime refuses it while a CUDA graph is captured.
MANY = f"many = Concat<axis = -1>({', '.join(['x'] * 40)})\n  mean = ReduceMean<axes = [-1]>(many)"


@pytest.mark.parametrize(("graph", "mean"), [("0", MANY), ("1", "mean = ReduceMean<axes = [-1]>(x)")])
def test_a_body_outlives_the_streams_of_its_session(graph: str, mean: str, capfd: pytest.CaptureFixture[str]) -> None:
    source = model(nodes=2, dtype="float16", body=BODY.replace("mean = ReduceMean<axes = [-1]>(x)", mean))
    given = {name: value.astype(np.float16) for name, value in feed(8).items()}
    wanted = expected({"x": expected(given).astype(np.float16), "scale": given["scale"]})
    for _ in range(3):
        run = session(source, how="body", enable_cuda_graph=graph)
        binding, inputs, _ = bound(run, given)
        output = ort.OrtValue.ortvalue_from_shape_and_type(given["x"].shape, np.float16, "cuda", 0)
        binding.bind_ortvalue_output("y", output)
        for _ in range(70):
            run.run_with_iobinding(binding)
        np.testing.assert_allclose(output.numpy(), wanted, rtol=0.02, atol=0.05)
        del run, binding, inputs
        gc.collect()
    assert "CUDA failure" not in capfd.readouterr().err


@pytest.mark.parametrize("steps", [1, 2])
def test_a_cuda_graph_is_captured_and_replayed_with_other_inputs(steps: int) -> None:
    run = session(model(steps=steps), enable_cuda_graph="1")
    binding, inputs, output = bound(run, feed(64))
    for seed in range(6):
        given = feed(64, seed=seed)
        for name, value in given.items():
            inputs[name].update_inplace(value)
        run.run_with_iobinding(binding)
        close(output.numpy(), given)


# --- bodies in place of kernels that do not compile -------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes have no templates when their session is made, and planning fail in their runs."""

    def template_bytes(*_: object) -> bytes:
        raise KernelError("row_center.cu does not compile: here")

    monkeypatch.setattr(planner, "equip", lambda _: None)
    monkeypatch.setattr(planner, "_template_bytes", template_bytes)
    monkeypatch.setattr(kernel_failures, "_failures", {})


@pytest.mark.usefixtures("late")
def test_bodies_run_inside_runs_of_many_threads(caplog: pytest.LogCaptureFixture) -> None:
    run = session(model(nodes=2))
    feeds = [feed(rows, seed=seed) for seed in range(10) for rows in (1, 7, 64, 0)]
    with ThreadPoolExecutor(8) as pool:
        for given, (found,) in zip(feeds, pool.map(lambda given: run.run(None, given), feeds), strict=True):
            close(found, {**given, "x": expected(given).astype(np.float32)})
    assert "its body runs where its kernel failed: KernelError: row_center.cu does not compile: here" in caplog.text


@pytest.mark.usefixtures("late")
def test_a_cuda_graph_captures_bodies() -> None:
    run = session(model(nodes=2), enable_cuda_graph="1")
    binding, inputs, output = bound(run, feed(64))
    for seed in range(6):
        given = feed(64, seed=seed)
        for name, value in given.items():
            inputs[name].update_inplace(value)
        run.run_with_iobinding(binding)
        close(output.numpy(), {**given, "x": expected(given).astype(np.float32)})


@pytest.mark.usefixtures("late")
def test_bodies_run_on_the_stream_that_the_session_was_given() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    run = session(model(), user_compute_stream=str(stream.ptr))
    for rows in (1, 64, 7):
        binding, _, output = bound(run, given := feed(rows))
        run.run_with_iobinding(binding)
        stream.synchronize()
        close(output.numpy(), given)


def test_a_session_has_the_body_of_a_node_whose_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernel: Kernel, ordinal: int) -> Any:
        raise KernelError("row_center.cu does not compile: here")

    monkeypatch.setattr(kernel_failures, "_failures", {})
    monkeypatch.setattr(planner, "_prepared", weakref.WeakValueDictionary())
    monkeypatch.setitem(BACKENDS, CUDA, dataclasses.replace(BACKENDS[CUDA], load=fails))
    run = session(model(), how="body")
    assert "row_center.cu does not compile: here" in explain_session(run)[0].why
    close(run.run(None, given := feed(7))[0], given)


def test_plans_know_which_inputs_are_constants() -> None:
    """Initializers are constants wherever onnxruntime stores them; their values are not read."""
    proto = onnx.load_from_string(model(nodes=1))
    given = feed(64)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(given["scale"], "scale"))
    del proto.graph.input[1]
    run = session(proto.SerializeToString())
    close(run.run(None, {"x": given["x"]})[0], given)
    (used,) = planner.templates_in_use()
    assert isinstance(used, PreparedTemplate)
    assert [spec.constant for spec in used.template.inputs] == [False, True]


def test_kernels_run_on_the_stream_that_the_session_was_given() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    run = session(model(steps=2), user_compute_stream=str(stream.ptr))
    for rows in (1, 64, 7):
        binding, _, output = bound(run, given := feed(rows))
        run.run_with_iobinding(binding)
        stream.synchronize()
        close(output.numpy(), given)


def test_kernels_run_where_onnxruntime_prefers_channels_last() -> None:
    run = session(model(steps=2, nodes=1), prefer_nhwc="1")
    close(run.run(None, feed(64))[0], feed(64))


@pytest.mark.parametrize("steps", [1, 2])
def test_eight_threads_share_a_session(steps: int) -> None:
    run = session(model(steps=steps, nodes=1))

    def work(seed: int) -> None:
        for i in range(200):
            given = feed(1 + (seed + i) % 5, seed=seed)
            close(run.run(None, given)[0], given)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_another_threads_capture_goes_on_while_code_is_loaded_and_unloaded() -> None:
    """Without relaxed capture mode cuModuleUnload fails, and the capture with it."""
    import cupy

    kernel, backend = Kernel("row_center", "row_center", {"D": D, "BLOCK": 128}), BACKENDS[CUDA]
    cubin, library = backend.machine_code(kernel, backend.device(0)), native.driver()

    def load_and_unload() -> None:
        module, _ = native.load_function(library, 0, cubin, kernel.entry)
        native.check(library.onnxfuse_unload(0, module))

    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(8, "float32")
    with ThreadPoolExecutor(1) as pool, stream:
        x += 1
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:  # because an open capture would make every later test fail
            x += 1
            pool.submit(load_and_unload).result()
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert x.get().tolist() == [2.0] * 8


@pytest.mark.parametrize("steps", [1, 2])
def test_saved_plans_need_no_planning(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ran at one number of rows saves the plans for others: with two steps, odd ones have their own."""
    first = session(model(steps=steps))
    first.run(None, feed(64))
    assert save_plans(tmp_path / "plans") >= 1
    load_plans(tmp_path / "plans")
    monkeypatch.setattr(planner, "new_template", None)
    monkeypatch.setattr(planner, "_prepared", {})
    run = session(model(steps=steps))
    assert [each.why for each in explain_session(run)] == [f"{CUDA}, device 0; plans of plans"]
    for rows in 64, 1, 1000:
        close(run.run(None, feed(rows))[0], feed(rows))


def test_sessions_come_and_go_without_a_leak() -> None:
    """Other processes may allocate on the same GPU, but not each time."""
    import cupy

    def free_after(count: int) -> int:
        for _ in range(count):
            session(model(steps=2)).run(None, feed(64))
        return int(cupy.cuda.runtime.memGetInfo()[0])

    free = free_after(5)
    for _ in range(8):
        before, free = free, free_after(100)
        if before - free < 32 << 20:
            return
    pytest.fail("each 100 sessions keep 32 MiB or more")
