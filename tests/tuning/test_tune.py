"""Kernel or body by measurement: `onnxfuse tune`, tune="never", "cached" and "now", and which nodes sessions run."""

from __future__ import annotations

import dataclasses
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner, Result
from exported_models import unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, DEVICE, HEAD, SHIFT, Stage, feed, load, model, node, session, stage

from onnxfuse.bench import tune_file
from onnxfuse.bench.bench import BenchSettings, bench
from onnxfuse.cli import main
from onnxfuse.errors import UsageError
from onnxfuse.runtime import cache_folder as cache_folder_module
from onnxfuse.runtime import environment
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.cache_folder import cache_folder
from onnxfuse.runtime.plan import Kernel
from onnxfuse.session import InferenceSession, explain_session, open_session, register
from onnxfuse.tuning import bound_session, cache, dispatch, op_times, tune
from onnxfuse.tuning.bound_session import TimedModel
from onnxfuse.tuning.timing import RunTimes

TWO = (
    "g (float[n, d] x, float[d] b) => (float[n, d] y, float[n, d] z) { "
    + node("shift", "x, b", "y", operands="x bias")
    + node("scale", "x", "z", operands="x", more=", factor = 2.0")
    + " }"
)
KERNEL = f"{CPU}, device 0"
NOTHING = Kernel("none", "noop")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder_module, "_warned", set())
    monkeypatch.setattr(cache, "_unwritten", {})
    return stage(monkeypatch)


def how_it_runs(bound: Any) -> tuple[str, ...]:
    try:
        return tuple(run.how for run in explain_session(bound.session))
    except UsageError:  # a session that onnxfuse did not make
        return ("body",)


class Clock:
    """A stand-in for measurements: microseconds of a node as (kernel, body), and of the model by how its nodes run."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, nodes: Mapping[str, tuple[float, float]],
        whole: Mapping[tuple[str, ...], float],
    ) -> None:  # fmt: skip
        self.nodes, self.whole = dict(nodes), dict(whole)
        self.measured: list[str] = []
        monkeypatch.setattr(op_times, "interleaved", self.of_nodes)
        monkeypatch.setattr(tune, "interleaved", self.of_models)

    def of_nodes(self, runs: Sequence[Callable[[], None]], count: int, before: Callable[[], None]) -> list[RunTimes]:
        result = []
        for bound in (run.__self__ for run in runs):  # type: ignore[attr-defined]
            outputs = [each.name for each in bound.session.get_outputs()]
            fusion = "scale" if outputs[0].startswith("z") else "shift"
            kernel = how_it_runs(bound)[0] == "kernel"
            result.append(self.spread(100 + len(outputs) * self.nodes[fusion][0 if kernel else 1]))
            self.measured.append(fusion)
        return result

    def of_models(self, runs: Sequence[Callable[[], None]], count: int) -> list[RunTimes]:
        kinds = [how_it_runs(run.__self__) for run in runs]  # type: ignore[attr-defined]
        self.measured += ["model"] * len(runs)
        return [self.spread(self.whole[kind]) for kind in kinds]

    @staticmethod
    def spread(microseconds: float) -> RunTimes:
        return RunTimes(*[1e-6 * microseconds] * 4, 10)


FAST, SLOW = (3.0, 5.0), (7.4, 6.1)  # kernel, body
WHOLE = {("kernel", "kernel"): 40.0, ("body",): 50.0, ("kernel", "body"): 30.0, ("body", "kernel"): 30.0}


def tuned(source: bytes, n: int = 4, d: int = 3) -> tune.Tuning:
    return tune.tune(TimedModel(onnx.load_from_string(source), None, feed(n, d), "cpu", open_session))


def how(source: bytes, **arguments: Any) -> list[tuple[str, str]]:
    run = session(source, **arguments)
    given = feed(2, 3)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    return [(each.how, each.why) for each in explain_session(run)]


# --- what is measured ------------------------------------------------------------------------------------------------


def test_each_node_and_the_whole_model_are_measured(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    found = tuned(model(TWO))
    times = {row.fusion: (row.kernel, row.body, row.shapes) for row in found.ops}
    assert times == {
        "shift": (pytest.approx(3e-6), pytest.approx(5e-6), ("4x3 float", "3 float")),
        "scale": (pytest.approx(7.4e-6), pytest.approx(6.1e-6), ("4x3 float",)),
    }
    (whole,) = found.models
    assert list(whole.seconds) == ["bodies", "kernels", whole.chosen] and whole.chosen.startswith("mix ")
    assert found.kept and found.inputs == {"x": "4x3 float32", "b": "3 float32"}


def test_real_times_are_kept_and_used(gpu: Stage) -> None:
    """With real times, sessions run whatever is faster on this machine."""
    found = tuned(model(SHIFT))
    (row,), (whole,) = found.ops, found.models
    assert row.error == "" and row.kernel is not None and row.body is not None
    assert set(whole.seconds) == {"kernels", "bodies"}
    ((kind, why),) = how(model(SHIFT))
    assert kind == ("kernel" if whole.chosen == "kernels" else "body")
    assert "the whole model with" in why


def test_nodes_without_a_kernel_are_not_measured(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"shift": FAST}, {("kernel", "body"): 30.0, ("body",): 40.0})
    found = tuned(model(TWO.replace("2.0", "-2.0")))
    assert [row.fusion for row in found.ops] == ["shift"] and "scale" not in clock.measured


def test_nodes_that_cannot_be_timed_alone_leave_the_whole_model(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    Clock(monkeypatch, {}, WHOLE)
    monkeypatch.setattr(op_times, "_values", fail)
    found = tuned(model(TWO))
    assert (found.ops, found.ops_error, found.models[0].chosen) == ((), "no memory", "kernels")
    assert [kind for kind, _ in how(model(TWO))] == ["kernel", "kernel"]


def test_kernels_that_do_not_run_leave_the_whole_model_open(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full for a while must not switch kernels off, neither at this shape nor at others."""
    own = gpu.kernels("shift").candidates

    def fail(node: Any, inputs: Sequence[Any], device: Any) -> Any:
        if inputs[0].shape == (9, 3):
            raise OSError("No space left on device")
        return own(node, inputs, device)

    Clock(monkeypatch, {"shift": FAST}, {("kernel",): 30.0, ("body",): 40.0})
    tuned(model(SHIFT))
    before = how(model(SHIFT))
    monkeypatch.setattr(gpu.kernels("shift"), "candidates", fail)
    found = tuned(model(SHIFT), 9)
    assert "No space left on device" in found.ops[0].error
    (whole,) = found.models
    assert (whole.chosen, list(whole.seconds), found.kept) == ("", ["bodies"], False)
    assert whole.reason == "not all kernels run; the log says why"
    assert "kernels (plain) cannot be chosen, it does not run: " in caplog.text
    assert how(model(SHIFT)) == before and "the whole model with" in before[0][1]


def test_a_measurement_without_kernels_is_ignored(gpu: Stage) -> None:
    proto = onnx.load_from_string(model(SHIFT))
    subject, calls = dispatch.model_subject(proto), tune.read_calls(proto)
    cache.store({}, subject, {"mode": "plain"}, "bodies", {"bodies": 1.0})
    assert dispatch.cached_preferences(proto, calls, {}, "plain") == [None]
    cache.store({}, subject, {"mode": "plain", "shapes": ["x 4x3"]}, "kernels", {"bodies": 2.0, "kernels": 1.0})
    assert [each and each.kernel for each in dispatch.cached_preferences(proto, calls, {}, "plain")] == [True]


def test_variants_that_do_not_fit_beside_each_other_are_timed_one_after_the_other(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, timed = bound_session.start_session, tune._time_model
    loaded: weakref.WeakSet[Any] = weakref.WeakSet()

    def start(*arguments: Any, **more: Any) -> Any:
        if loaded:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 4096")
        loaded.add(result := made(*arguments, **more))
        return result

    def time_model(*arguments: Any) -> Any:
        with monkeypatch.context() as only_here:
            only_here.setattr(bound_session, "start_session", start)
            return timed(*arguments)

    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    monkeypatch.setattr(tune, "_time_model", time_model)
    (whole,) = tuned(model(TWO)).models
    assert list(whole.seconds.values()) == [pytest.approx(each) for each in (50e-6, 40e-6, 30e-6)]
    assert whole.chosen.startswith("mix ") and whole.reason == ""


def test_measurements_that_cannot_be_kept_are_reported(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    (tmp_path / "cache").write_text("no folder")
    assert not tuned(model(TWO)).kept
    assert [kind for kind, _ in how(model(TWO))] == ["kernel", "body"], "they last as long as this process"


# --- what sessions make of it ----------------------------------------------------------------------------------------


def test_the_mix_runs_where_it_is_fastest(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    tuned(model(TWO))
    (first, why), (second, other) = how(model(TWO))
    assert (first, second) == ("kernel", "body")
    assert re.fullmatch(rf"{KERNEL}; kernel: 3 us, body: 5 us at 4x3, 3 float, measured 20\d\d-\d\d-\d\d", why)
    assert re.fullmatch(r"body: 6.1 us, kernel: 7.4 us at 4x3 float, measured 20\d\d-\d\d-\d\d", other)


@pytest.mark.parametrize(("best", "kinds"), [("kernels", ["kernel", "kernel"]), ("bodies", ["body", "body"])])
def test_the_whole_model_has_the_last_word(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, best: str, kinds: list[str]
) -> None:
    fast = ("kernel", "kernel") if best == "kernels" else ("body",)
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, {**WHOLE, fast: 20.0})
    tuned(model(TWO))
    found = how(model(TWO))
    assert [kind for kind, _ in found] == kinds
    text = r"the whole model with bodies: 0.0\d+ ms, kernels: 0.0\d+ ms, mix: 0.03 ms at x 4x3, b 3 float32, measured "
    for _, why in found:
        assert re.search(text, why), why


def test_a_model_that_was_not_tuned_itself_uses_what_is_known_of_its_nodes(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, {"shift": SLOW, "scale": FAST}, {**WHOLE, ("kernel", "kernel"): 10.0})
    tuned(model(TWO))
    assert [kind for kind, _ in how(model(SHIFT))] == ["body"]


def test_several_shapes_are_summed(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"shift": (5.0, 4.0)}, {("kernel",): 40.0, ("body",): 39.0})
    tuned(model(SHIFT), 4)
    assert [kind for kind, _ in how(model(SHIFT))] == ["body"]
    clock.nodes, clock.whole = {"shift": (5.0, 9.0)}, {("kernel",): 40.0, ("body",): 45.0}
    tuned(model(SHIFT), 8)
    ((kind, why),) = how(model(SHIFT))
    assert kind == "kernel"
    assert "with bodies: 0.084 ms, kernels: 0.08 ms at 2 combinations of shapes, summed, measured" in why


def test_a_mix_of_other_nodes_counts_no_more(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later measurement reversed the preferences: the mix that was timed is not the one that would run."""
    clock = Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    tuned(model(TWO))
    clock.nodes = {"shift": (70.0, 5.0), "scale": (3.0, 50.0)}
    clock.whole = {**WHOLE, ("body", "kernel"): 60.0}
    tuned(model(TWO), 8)
    assert [kind for kind, _ in how(model(TWO))] == ["kernel", "kernel"]


def test_another_body_is_another_node(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    tuned(model(SHIFT))
    assert how(model(SHIFT, shift="(x, bias) => (y) { t = Identity(bias) y = Add(x, t) }")) == [("kernel", KERNEL)]


def test_another_driver_knows_nothing(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    tuned(model(SHIFT))
    monkeypatch.setattr(environment, "driver_version", lambda: "999.1")
    assert how(model(SHIFT)) == [("kernel", KERNEL)]


def test_a_mode_has_its_own_measurement_where_it_was_measured(gpu: Stage) -> None:
    proto = onnx.load_from_string(model(SHIFT))
    store, subject = cache.store, dispatch.model_subject(proto)
    case = {"shapes": ["x 4x3 float32"]}
    store({}, subject, {**case, "mode": "plain"}, "bodies", {"kernels": 2.0, "bodies": 1.0})
    calls = tune.read_calls(proto)
    assert [each and each.kernel for each in dispatch.cached_preferences(proto, calls, {}, "plain")] == [False]
    assert [each and each.kernel for each in dispatch.cached_preferences(proto, calls, {}, "cuda graph")] == [False]
    store({}, subject, {**case, "mode": "cuda graph"}, "kernels", {"kernels": 1.0, "bodies": 2.0})
    assert [each and each.kernel for each in dispatch.cached_preferences(proto, calls, {}, "cuda graph")] == [True]


def test_register_runs_the_body_of_all_nodes_that_call_one_function(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    tuned(model(SHIFT))
    options = ort.SessionOptions()
    assert [run.how for run in register(options, model(SHIFT), [CPU])] == ["body"]
    assert [run.how for run in register(ort.SessionOptions(), model(SHIFT), [CPU], tune="never")] == ["kernel"]


ONE_OP = (
    "g (float[n, d] x, float[d] b) => (float[n, d] y, float[n, d] z) { "
    + node("shift", "x, b", "y", operands="x bias")
    + node("shift", "y, b", "z", operands="x bias", more=", place = 1")
    + " }"
)


@pytest.mark.parametrize(("kernels", "bodies", "kind"), [(20.0, 90.0, "kernel"), (90.0, 20.0, "body")])
@pytest.mark.parametrize("whole", [True, False])
def test_register_takes_the_better_of_all_kernels_and_all_bodies_where_it_cannot_mix(
    gpu: Stage, kernels: float, bodies: float, kind: str, whole: bool
) -> None:
    """The nodes call one function, and the model that onnxruntime will load is not split."""
    proto = onnx.load_from_string(model(ONE_OP))
    calls, digests = tune.read_calls(proto), dispatch.body_digests(proto)
    here = environment.session_environment(CPU, DEVICE, {})
    for call, times in zip(calls, ((1.0, 3.0), (kernels, bodies - 1) if kernels > bodies else (9.0, 8.0)), strict=True):
        seconds = dict(zip(("kernel", "body"), times, strict=True))
        cache.store(here, dispatch.node_subject(call, digests), {"shapes": []}, "", seconds)
    mix = dispatch.mix_name(dispatch.preferences_by_node(proto, calls, here))
    if whole:
        seconds = {"kernels": kernels, "bodies": bodies, mix: 10.0}
        cache.store(here, dispatch.model_subject(proto), {"mode": "plain"}, mix, seconds)
    assert [each.how for each in explain_session(session(model(ONE_OP)))] == ["kernel", "body"]
    runs = register(ort.SessionOptions(), model(ONE_OP), [CPU])
    assert [each.how for each in runs] == [kind] * 2
    text = "the whole model with bodies: " if whole else "kernel: " if kind == "kernel" else "body: "
    assert all(text in each.why for each in runs)


# --- never, cached, now ----------------------------------------------------------------------------------------------


def test_never_and_cached(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    assert how(model(SHIFT)) == how(model(SHIFT), tune="never") == [("kernel", KERNEL)]
    tuned(model(SHIFT))
    done = len(clock.measured)
    assert [kind for kind, _ in how(model(SHIFT), tune="cached")] == ["body"]
    assert how(model(SHIFT), tune="never") == [("kernel", KERNEL)]
    assert len(clock.measured) == done


def test_now_measures_once_for_each_shape(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    shapes = {"x": (4, 3), "b": (3,)}
    assert [kind for kind, _ in how(model(SHIFT), tune="now", shapes=shapes)] == ["body"]
    done = len(clock.measured)
    assert done
    how(model(SHIFT), tune="now", shapes=shapes)
    assert len(clock.measured) == done
    how(model(SHIFT), tune="now", shapes={"x": (8, 3), "b": (3,)})
    assert len(clock.measured) == 2 * done


def test_now_measures_once_where_nothing_can_be_written(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    (tmp_path / "cache").write_text("no folder")
    shapes = {"x": (4, 3), "b": (3,)}
    assert [kind for kind, _ in how(model(SHIFT), tune="now", shapes=shapes)] == ["body"]
    done = len(clock.measured)
    assert [kind for kind, _ in how(model(SHIFT), tune="now", shapes=shapes)] == ["body"]
    assert len(clock.measured) == done > 0


def test_now_takes_sizes_that_the_model_has(gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    (tmp_path / "model.onnx").write_bytes(model(SHIFT.replace("[n, d]", "[2, 3]").replace("[d]", "[3]")))
    run = InferenceSession(tmp_path / "model.onnx", providers=[CPU], tune="now")
    assert [each.how for each in explain_session(run)] == ["body"]


def test_now_registers_what_it_finds(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    runs = register(ort.SessionOptions(), model(SHIFT), [CPU], tune="now", shapes={"x": (4, 3), "b": (3,)})
    assert [run.how for run in runs] == ["body"]


def test_now_needs_sizes(gpu: Stage) -> None:
    for shapes in ({}, {"b": (3,)}):
        with pytest.raises(UsageError, match=r"input 'x' has dynamic dims; tuning needs their sizes: give shapes="):
            session(model(SHIFT), tune="now", shapes=shapes)


def test_what_fails_while_tuning_is_logged(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the GPU is busy")

    monkeypatch.setattr(tune, "_time_nodes", fail)
    assert how(model(SHIFT), tune="now", shapes={"x": (4, 3)}) == [("kernel", KERNEL)]
    assert "the model was not tuned: the GPU is busy" in caplog.text


def test_now_on_a_provider_without_kernels_runs_bodies() -> None:
    run = InferenceSession(model(SHIFT), providers=["CPUExecutionProvider"], tune="now")
    assert [each.why for each in explain_session(run)] == ["the session does not use CUDAExecutionProvider"]


def test_other_words_are_refused(gpu: Stage) -> None:
    with pytest.raises(UsageError, match="tune='always' is none of 'never', 'cached', 'now'"):
        session(model(SHIFT), tune="always")


def test_session_options_serve_one_word(gpu: Stage) -> None:
    options = ort.SessionOptions()
    InferenceSession(model(SHIFT), options, [CPU])
    with pytest.raises(UsageError, match="and tune other than 'never' = 1, here it is 0; make new SessionOptions"):
        InferenceSession(model(SHIFT), options, [CPU], tune="never")


def test_bench_takes_the_word(gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    path = tmp_path / "model.onnx"
    path.write_bytes(model(SHIFT))
    kinds = {}
    for word in ("cached", "never", "now", "cached", "never"):
        result = bench(path, BenchSettings(shapes=["x:4x3"], runs=2, tune=word))  # type: ignore[arg-type]
        assert result.passed
        kinds.setdefault(word, []).append(result.ops[0].how)
    assert kinds == {"cached": ["kernel", "body"], "never": ["kernel", "kernel"], "now": ["body"]}


# --- onnxfuse tune ---------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Result:
    """Run `onnxfuse` in this process; an exception that reaches the user fails the test."""
    result = CliRunner().invoke(main, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(model(TWO))
    return tmp_path / "model.onnx"


def test_the_command_prints_what_it_measured(gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    result = run("tune", path, "--shape", "x:4x3", "--provider", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert rows[:-1] == [
        "Fused nodes nodes kernel us body us chosen",
        "scale 1 7.40 6.10 body",
        "4x3 float",
        "shift 1 3.00 5.00 kernel",
        "4x3, 3 float",
        "",
        "The whole model variant median ms chosen",
        "plain bodies 0.0500",
        "plain kernels 0.0400",
        "plain mix 0.0300 chosen",
    ]
    assert rows[-1] == f"Kept in {cache_folder()}"
    assert [kind for kind, _ in how(model(TWO))] == ["kernel", "body"]


def test_the_command_fuses_and_times_the_original_beside(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exported = unpack("llama_sdpa_dynamo_fp32.onnx", tmp_path)
    nothing = dataclasses.replace(BACKENDS[CPU], load=lambda kernel, ordinal: load(NOTHING, ordinal))
    monkeypatch.setitem(BACKENDS, CPU, nothing)
    result = run("tune", exported, "--shape", "input_ids:1x5", "--provider", "cpu")
    assert result.exit_code == 0, result.output
    assert re.search(r"plain\s+original\s+\d", result.stdout), result.stdout
    assert re.search(r"add_rms_norm|rms_norm", result.stdout)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "input 'x' has dynamic dims; tuning needs their sizes: give --shape input:8x512, or inputs: --input x.n"),
        (["--shape", "y:3"], "no input 'y'"),
        (["--shape", "x:3"], "input 'x' has 1 dims; the model takes 2: n x d"),
        (["--device-id", "-1"], "-1 is not in the range"),
        (["--option", "use_tf32"], "--option 'use_tf32' is not of the form NAME=VALUE; give it as in --option"),
        (["--option", "device_id=1"], "give --device-id, not --option device_id"),
    ],
)
def test_wrong_options(gpu: Stage, path: Path, options: list[str], sentence: str) -> None:
    result = run("tune", path, "--provider", "cpu", *options)
    assert (result.exit_code, sentence in " ".join(result.stderr.split())) == (2, True), result.stderr


def test_the_command_tunes_for_options_of_the_provider(gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    Clock(monkeypatch, {"shift": FAST, "scale": SLOW}, WHOLE)
    result = run("tune", path, "--shape", "x:4x3", "--provider", "cpu", "--option", "prefer_nhwc=1")
    assert result.exit_code == 0, result.output
    given = InferenceSession(model(TWO), providers=[(CPU, {"prefer_nhwc": "1"})])
    assert [each.how for each in explain_session(given)] == ["kernel", "body"]
    assert [kind for kind, _ in how(model(TWO))] == ["kernel", "kernel"]


def test_options_that_onnxruntime_does_not_take_are_refused(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Unknown provider option: nhwc")

    monkeypatch.setattr(bound_session, "start_session", refuse)
    result = run("tune", path, "--shape", "x:4x3", "--provider", "cpu", "--option", "nhwc=1")
    expected = "error: the model does not load on cpu with nhwc = 1: Unknown provider option: nhwc\n"
    assert (result.exit_code, result.stderr) == (1, expected)


@pytest.mark.parametrize(("before", "said"), [(10.0, True), (35.0, False)])
def test_an_original_that_is_faster_is_named(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path, before: float, said: bool
) -> None:
    seconds = {"bodies": 50.0, "kernels": 30.0, "original": before}
    found = tune.Tuning((), (tune.ModelTimes("plain", seconds, "kernels"),), {}, True)
    monkeypatch.setattr(tune_file, "tune", lambda *_, **__: found)
    result = run("tune", path, "--shape", "x:4x3", "--provider", "cpu")
    text = "plain: the original model is faster than all variants of the fused one; run the original"
    assert (result.exit_code, text in " ".join(result.stdout.split())) == (0, said), result.stdout


@pytest.mark.parametrize("shape", [["--shape", "x:4x3"], []])
def test_a_provider_without_kernels_is_refused(path: Path, shape: list[str]) -> None:
    """This is said first: sizes would be of no use."""
    result = run("tune", path, "--provider", "cpu", *shape)
    assert result.exit_code == 2
    assert "kernels run on CUDAExecutionProvider, not on CPUExecutionProvider; there is nothing to tune" in " ".join(
        result.stderr.split()
    )


def test_an_onnxruntime_without_cuda_is_refused(path: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    result = run("tune", path, "--provider", "cuda", "--shape", "x:4x3")
    assert (result.exit_code, "this onnxruntime has no CUDAExecutionProvider" in result.stderr) == (2, True)


def test_a_gpu_that_is_not_there_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def only_one(ordinal: int) -> Any:
        raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], device=only_one))
    result = run("tune", path, "--provider", "cpu", "--shape", "x:4x3", "--device-id", "7")
    assert result.exit_code == 2
    assert "there is no GPU 7: cudaErrorInvalidDevice: invalid device ordinal; give another" in result.stderr


def test_a_machine_without_cupy_is_refused(gpu: Stage, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    missing = dataclasses.replace(BACKENDS[CPU], unavailable=lambda: "CuPy finds no GPU")
    monkeypatch.setitem(BACKENDS, CPU, missing)
    result = run("tune", path, "--provider", "cpu", "--shape", "x:4x3")
    assert result.exit_code == 2
    assert "there is nothing to tune: CuPy finds no GPU" in " ".join(result.stderr.split())


def test_a_model_without_fused_nodes_is_refused(gpu: Stage, tmp_path: Path) -> None:
    plain = onnx.parser.parse_model(f"{HEAD} g (float[2] x) => (float[2] y) {{ y = Relu(x) }}")
    onnx.save(plain, tmp_path / "plain.onnx")
    result = run("tune", tmp_path / "plain.onnx", "--provider", "cpu")
    assert (result.exit_code, "the model has no fused nodes" in result.stderr) == (2, True)


def test_a_session_with_other_options_knows_nothing(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measurements with all of onnxruntime's optimizations do not hold for a session with fewer."""
    Clock(monkeypatch, {"shift": SLOW}, {("kernel",): 40.0, ("body",): 30.0})
    tuned(model(SHIFT))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    run = InferenceSession(model(SHIFT), options, [CPU], tune="now", shapes={"x": (4, 3), "b": (3,)})
    assert [each.how for each in explain_session(run)] == ["kernel"]
    assert "the model is not tuned: these session options have ORT_ENABLE_BASIC" in caplog.text
    given = [(CPU, {"prefer_nhwc": "1"})]
    found = register(ort.SessionOptions(), model(SHIFT), given)
    assert [each.how for each in found] == ["kernel"]
    assert (
        """the model was tuned for {'options': '{}'}, which says nothing of this session's """
        """{'options': '{"prefer_nhwc": "1"}'}; tune it again"""
    ) in caplog.text
    assert [each.how for each in register(ort.SessionOptions(), model(SHIFT), [CPU])] == ["body"]
