"""Test the process in which models run: crashes, time limits and interrupts end it, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from click.testing import CliRunner

from onnxfuse import optimize
from onnxfuse.cli import main
from onnxfuse.verify import cpu_session, ort_session, own_process
from onnxfuse.verify.compare import compare
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.extent import QUICK
from onnxfuse.verify.own_process import OnnxruntimeFailure, TimeLimitExceeded, current_worker

LIMIT = 120.0  # seconds; no test comes near
SHORT_LIMIT = 1  # seconds for a run, which a test waits for
LOWEST = "low = Constant<value = int64 {-9223372036854775808}>()"
HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
# The processor raises a signal for the lowest integer divided by -1; x is drawn as 2.
CRASHES_ON_TWO = f"(int64[b] x) => (int64[b] y) {{ {LOWEST} c = Constant<value_int = 3>() n = Sub(x, c) y = Div(low, n) }}"  # fmt: skip # noqa: E501
CRASHES_WHEN_OPENED = f"(float[b] x) => (float[b] y) {{ {LOWEST} m = Constant<value = int64 {{-1}}>() c = Div(low, m) f = Cast<to = 1>(c) y = Add(x, f) }}"  # fmt: skip # noqa: E501
RUNS_FOR_EVER = """(float[b] x) => (float[b] y) {
    n = Constant<value = int64 {9223372036854775807}>() c = Constant<value = bool {1}>()
    y = Loop(n, c, x) <body = l (int64 i, bool d, float[b] u) => (bool e, float[b] v) {
        e = Identity(d) v = Neg(u) }> }"""


@pytest.fixture(autouse=True)
def models_run_in_their_own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(own_process, "enabled", True)
    yield
    assert current_worker() is None


@pytest.fixture
def only_runs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit of a test be short: a process that starts to open a model takes longer on a machine under load."""
    ask = own_process.Worker.ask

    def ask_in_time(self: own_process.Worker, action: str, number: int, *arguments: object) -> object:
        limit, self.timeout = self.timeout, self.timeout if action == "run" else LIMIT
        try:
            return ask(self, action, number, *arguments)
        finally:
            self.timeout = limit

    monkeypatch.setattr(own_process.Worker, "ask", ask_in_time)


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} g {text}")


RELU = model("(float[b] x) => (float[b] y) { y = Relu(x) }")
ONES = np.ones(3, np.float32)


def test_outputs_are_those_of_this_process() -> None:
    """Arrays of every kind pass, in both directions: bfloat16, strings, scalars, empty ones, and sequences."""
    kinds = {"float": ONES, "bfloat16": ONES.astype(ml_dtypes.bfloat16), "bool": ONES > 0, "int64": np.arange(0)}
    for dtype, value in kinds.items():
        source = model(f"({dtype}[b] x) => ({dtype}[b] y) {{ y = Identity(x) }}")
        with own_process.own_process(LIMIT):
            found = run(open_session(source, None), {"x": value})["y"]
        assert isinstance(found, np.ndarray) and found.dtype == value.dtype and (found == value).all()
    with own_process.own_process(LIMIT):
        text = np.array(["a", "ä"], object)
        source = model("(string[b] x) => (string[b] y) { y = Identity(x) }")
        assert list(run(open_session(source, None), {"x": text})["y"]) == ["a", "ä"]  # type: ignore[call-overload]
        source = model("(float[b] x) => (seq(float[b]) y) { y = SequenceConstruct(x, x) }")
        (first, second) = run(open_session(source, None), {"x": ONES})["y"]  # type: ignore[misc]
        assert (first == second).all() and (first == ONES).all()


def test_a_crash_on_drawn_inputs_is_told() -> None:
    with own_process.own_process(LIMIT):
        found = compare(model(CRASHES_ON_TWO), model(CRASHES_ON_TWO))
    assert found.passed is None
    expected = "the original does not run on generated inputs (it ended onnxruntime with SIGFPE)"
    assert found.reason.startswith(expected)


def test_sizes_are_tried_after_four_crashes() -> None:
    """The model divides by zero, except at 2 x 8, which is the fifth combination of sizes."""
    text = """(float[b, s] x) => (int64 y) { n = Shape(x) m = ReduceProd<keepdims = 0>(n)
        c = Constant<value_int = 16>() e = Equal(m, c) d = Cast<to = 7>(e) y = Div(m, d) }"""
    with own_process.own_process(LIMIT):
        found = compare(model(text), model(text), extent=QUICK)
    assert found.sizes == ({"b": 2, "s": 8},), found.reason


def test_a_crash_when_a_model_is_opened_is_told() -> None:
    """onnxruntime computes the constants of a model when it optimizes it, else in each run."""
    feeds = {"x": ONES}
    with own_process.own_process(LIMIT):
        with pytest.raises(OnnxruntimeFailure, match="it ended onnxruntime with SIGFPE"):
            open_session(model(CRASHES_WHEN_OPENED), None)
        found = compare(model(CRASHES_WHEN_OPENED), RELU, inputs=feeds)
        assert "the original does not run on the given inputs (it ended onnxruntime with SIGFPE)" in found.reason
        broken = compare(RELU, model(CRASHES_WHEN_OPENED))
    assert (broken.passed, broken.reason) == (
        False,
        "the optimized model does not run: it ended onnxruntime with SIGFPE",
    )


def test_other_models_run_on_after_a_crash() -> None:
    """Whatever the crash closed is opened again."""
    with own_process.own_process(LIMIT):
        good, bad = open_session(RELU, None), open_session(model(CRASHES_ON_TWO), None)
        with pytest.raises(OnnxruntimeFailure, match="SIGFPE"):
            run(bad, {"x": np.array([2])})
        assert (run(good, {"x": ONES})["y"] == ONES).all()
        assert run(bad, {"x": np.array([1])})["y"] == 2**62


@pytest.mark.usefixtures("only_runs_are_limited")
def test_a_model_that_runs_too_long_is_ended() -> None:
    with own_process.own_process(SHORT_LIMIT):
        found = compare(model(RUNS_FOR_EVER), model(RUNS_FOR_EVER))
        assert found.passed is None
        assert (
            found.reason == f"onnxruntime took more than {SHORT_LIMIT} s to run a model; allow more: --timeout SECONDS"
        )
        found = compare(RELU, model(RUNS_FOR_EVER))
        assert (found.passed, f"took more than {SHORT_LIMIT} s" in found.reason) == (None, True)
        with pytest.raises(TimeLimitExceeded):
            run(open_session(model(RUNS_FOR_EVER), None), {"x": ONES})


def test_without_a_limit_models_run_in_this_process() -> None:
    with own_process.own_process(None):
        assert current_worker() is None
        assert compare(RELU, RELU).passed is True


def test_large_models_pass_through_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is deleted with the session, and its folder with the process."""
    monkeypatch.setattr(cpu_session, "BYTES_SENT", 10)
    with own_process.own_process(LIMIT):
        worker = current_worker()
        assert worker is not None
        session = open_session(RELU, None)
        (file,) = worker.file_for("x").parent.iterdir()
        assert (run(session, {"x": ONES})["y"] == ONES).all()
        del session
        assert not file.exists()
    assert not file.parent.exists()


def test_external_weights_are_found_where_they_lie(tmp_path: Path) -> None:
    source = model("(float[b, 400] x) => (float[b, 400] y) { y = Add(x, w) }")
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.full(400, 2, np.float32), "w"))
    onnx.save(source, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    with own_process.own_process(LIMIT):
        session = open_session(onnx.load(tmp_path / "m.onnx", load_external_data=False), tmp_path)
        assert (run(session, {"x": np.zeros((1, 400), np.float32)})["y"] == 2).all()


def test_optimize_starts_one_process_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = []
    start = own_process.Worker.start
    monkeypatch.setattr(own_process.Worker, "start", lambda self: [workers.append(self), start(self)])
    _, report = optimize(RELU)
    assert report.verified.passed is True and len(workers) == 1
    optimize(RELU, timeout=None)
    optimize(RELU, verify=False)
    assert len(workers) == 1


def test_a_block_within_another_takes_its_process_if_shared() -> None:
    """So the command starts the process before it imports the optimizer; another limit needs a process of its own."""
    with own_process.own_process(LIMIT, at_once=False):
        outer = current_worker()
        with own_process.own_process(LIMIT, shared=True):
            assert current_worker() is outer is not None
        for limit, shared in ((2 * LIMIT, True), (LIMIT, False)):
            with own_process.own_process(limit, at_once=False, shared=shared):
                assert current_worker() not in (outer, None)
        assert current_worker() is outer


@pytest.mark.usefixtures("only_runs_are_limited")
def test_the_commands_take_a_time_limit(tmp_path: Path) -> None:
    onnx.save(model(RUNS_FOR_EVER), tmp_path / "in.onnx")
    arguments = str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--timeout", str(SHORT_LIMIT)
    result = CliRunner().invoke(main, ["optimize", *arguments])
    assert f"onnxruntime took more than {SHORT_LIMIT} s to run a model" in " ".join(result.stdout.split())
    assert (tmp_path / "out.onnx").exists()
    result = CliRunner().invoke(main, ["verify", *arguments])
    assert result.exit_code != 0 and f"took more than {SHORT_LIMIT} s" in " ".join(result.stdout.split())


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('no message, and more than eight bytes')"])
def test_a_process_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """The path of the interpreter may be that of a program which embeds it."""
    monkeypatch.setattr(own_process, "START_WORKER", program)
    with own_process.own_process(LIMIT):
        reason = compare(RELU, RELU).reason
    assert reason.startswith("the process that runs models ended with exit code ")
    assert "before it ran one; `" in reason and "import onnxruntime'` may say why" in reason


def test_without_onnxruntime_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('none here')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with own_process.own_process(LIMIT):
        reason = compare(RELU, RELU).reason
    assert reason.startswith("onnxruntime is not installed, so nothing was compared; pip install onnxruntime")
    assert reason.endswith("(none here)")


PARENT = """
import onnx, sys, numpy as np
from onnxfuse.verify import own_process
from onnxfuse.verify.cpu_session import open_session, run
with own_process.own_process(600):
    session = open_session(onnx.load(sys.argv[1]), None)
    print(own_process.current_worker()._process.pid, flush=True)
    run(session, {"x": np.ones(3, np.float32)})
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_the_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    onnx.save(model(RUNS_FOR_EVER), tmp_path / "m.onnx")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "m.onnx"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = Path("/proc", parent.stdout.readline().decode().strip())
    time.sleep(1)  # the model runs now
    assert runs(worker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    until = time.perf_counter() + 30
    while runs(worker) and time.perf_counter() < until:
        time.sleep(0.05)
    assert not runs(worker)


def runs(process: Path) -> bool:
    """Whether a process runs; one that has ended may wait for whoever adopted it."""
    try:
        return "State:\tZ" not in (process / "status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_crash_without_verification_is_told() -> None:
    """The ranges of half precision are observed in a run, which is in a process of its own as well."""
    crashes = f"""(float[b, 4] x, int64[b] n) => (float[b, 4] y, int64[b] z) {{ {LOWEST} c = Constant<value_int = 1>()
        m = Mul(n, c) l = Sub(m, m) o = Sub(l, c) z = Div(low, o) s = Softmax(x) y = Neg(s) }}"""
    _, report = optimize(model(crashes), dtype="float16", verify=False, timeout=LIMIT)
    assert report.half is not None
    assert "the model was not run to see how large its tensors become" in report.half.note
    assert report.verified.status == "none" and "switched off" in report.verified.reason


def test_no_process_is_started_where_no_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process.Worker, "start", lambda self: pytest.fail("a process was started"))
    optimize(RELU, verify=False, timeout=LIMIT)


def test_a_large_model_is_written_once_for_sessions_with_and_without_optimizations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_session, "BYTES_SENT", 16)
    with own_process.own_process(LIMIT):
        prepared = cpu_session.prepare(RELU, None)
        assert prepared.stored is not None
        path = Path(str(prepared.stored.source))
        for optimize_it in (False, True):
            monkeypatch.setattr(Path, "write_bytes", lambda path, content: pytest.fail("it was written again"))
            assert (run(open_session(prepared, optimize=optimize_it), {"x": ONES})["y"] == ONES).all()  # type: ignore[union-attr]
            assert path.exists()
        del prepared
        assert not path.exists()


def test_inputs_of_the_caller_are_not_written_to() -> None:
    """onnxruntime computes the statistics of training in place of those that it reads."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n,3,4] x, float[3] scale, float[3] bias, float[3] mean, float[3] variance)
        => (float[n,3,4] y, float[3] new_mean, float[3] new_variance)
        { y, new_mean, new_variance = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance) }""")
    given = {name: np.ones(3, np.float32) for name in ("scale", "bias", "mean", "variance")}
    given["x"] = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    optimize(model, dtype="float16", inputs=given, timeout=None)
    assert (given["mean"] == 1).all() and (given["variance"] == 1).all()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system says no process which processors it has")
def test_sessions_have_no_more_threads_than_the_process_has_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, threads in ((3, 3), (8, 0)):  # 0 leaves the number to onnxruntime
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
        options = ort_session.start(RELU.SerializeToString(), None, False).get_session_options()
        assert options.intra_op_num_threads == threads
