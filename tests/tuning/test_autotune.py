"""The choice among candidate plans: the fastest right one wins, a wrong one never does, and each is measured once."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from architectures import H200
from group_query_cases import Case
from stand_in import CPU, DEVICE, SHIFT, Stage, feed, model, stage

from onnxfuse.bench.bench import BenchSettings, bench
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.target import PlanChoice
from onnxfuse.runtime.template_key import Situation
from onnxfuse.session import open_session
from onnxfuse.tuning import autotune, cache
from onnxfuse.tuning.autotune import plan_digest
from onnxfuse.tuning.dispatch import SessionSettings
from onnxfuse.tuning.trial import array_difference

INPUTS = (TensorSpec((2, 3), "float32"), TensorSpec((3,), "float32"))
HERE = {"gpu": "a"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_unwritten", {})


def plan(number: int) -> Plan:
    """Return a plan that differs from others in its grid."""
    arguments = (*(Pointer("input", i) for i in (0, 1)), Pointer("output", 0), Scalar(6, "int64"), Scalar(3, "int32"))
    return Plan((INPUTS[0],), (Launch(Kernel("shift", "shift"), (number, 1, 1), (32, 1, 1), arguments),))


def number(of: Plan) -> int:
    (step,) = of.steps
    assert isinstance(step, Launch)
    return step.grid[0]


@dataclasses.dataclass
class Pretended:
    """A Trial whose plans take the given microseconds; some compute wrong outputs, some raise."""

    times: Mapping[int, float]
    wrong: Sequence[int] = ()
    broken: Sequence[int] = ()
    too_large: bool = False
    timed: list[list[int]] = dataclasses.field(default_factory=list)
    open: int = 0

    def __call__(self, inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device, *_: Any) -> Pretended:
        assert (tuple(inputs), device) == (INPUTS, DEVICE)
        self.open += 1
        return self

    def refusal(self) -> str | None:
        return "it needs too much memory" if self.too_large else None

    def outputs(self, of: Plan) -> Any:
        if number(of) in self.broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_INSTRUCTION")
        return np.full(3, 2.0 if number(of) in self.wrong else 1.0)

    def difference(self, expected: Any, outputs: Any) -> str | None:
        return array_difference(np, expected, outputs, 1e-5)

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        self.timed.append([number(each) for each in plans])
        return [1e-6 * self.times[number(each)] for each in plans]

    def close(self) -> None:
        self.open -= 1


def chosen(
    trial: Pretended | None,
    plans: Sequence[int],
    *,
    environment: Mapping[str, str] = HERE,
    inputs: Sequence[TensorSpec] = INPUTS,
    subject: str = "node",
) -> int | None:
    """Return the number of the plan that is chosen; None if none is."""
    offered = [plan(each) for each in plans]
    make = partial(trial, INPUTS, device=DEVICE) if trial else None
    index = autotune.fastest_plan(offered, inputs, make, environment, {"candidates of": subject})
    assert trial is None or trial.open == 0
    return None if index is None else plans[index]


def test_the_fastest_wins() -> None:
    assert chosen(Pretended({1: 5, 2: 3, 3: 4}), [1, 2, 3]) == 2


def test_the_first_wins_where_it_is_as_fast() -> None:
    assert chosen(Pretended({1: 3, 2: 3}), [1, 2]) == 1


def test_a_wrong_candidate_never_wins(caplog: pytest.LogCaptureFixture) -> None:
    trial = Pretended({1: 5, 2: 1, 3: 4}, wrong=[2])
    assert chosen(trial, [1, 2, 3]) == 3
    assert trial.timed == [[1, 3]]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "candidate 1 of 3 is left out: differs in 3 of 3 elements, at 0 it is 2.0 where 1.0 is right"
    ]


def test_a_candidate_that_does_not_run_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(Pretended({1: 5, 2: 1, 3: 4}, broken=[2]), [1, 2, 3]) == 3
    assert "candidate 1 of 3 is left out: it does not run: RuntimeError: CUDA_ERROR_ILLEGAL" in caplog.text


def test_a_first_candidate_that_does_not_run_is_left_out_too(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(Pretended({1: 5, 2: 1}, broken=[1]), [1, 2]) == 2
    assert "candidate 0 of 2 is left out: it does not run: RuntimeError: CUDA_ERROR_ILLEGAL" in caplog.text


def test_where_none_runs_none_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(Pretended({1: 5, 2: 1}, broken=[1, 2]), [1, 2]) is None
    assert "candidates cannot be timed, the first is taken: RuntimeError" in caplog.text


def test_what_most_compute_is_right(caplog: pytest.LogCaptureFixture) -> None:
    trial = Pretended({1: 1, 2: 5, 3: 4}, wrong=[1])
    assert chosen(trial, [1, 2, 3]) == 3
    assert trial.timed == [[2, 3]]
    assert "candidate 0 of 3 is left out: differs in 3 of 3 elements, at 0 it is 2.0 where 1.0 is right" in caplog.text


def test_without_room_none_is_chosen_and_nothing_is_kept() -> None:
    assert chosen(Pretended({1: 5, 2: 1}, too_large=True), [1, 2]) is None
    assert chosen(Pretended({1: 5, 2: 1}), [1, 2]) == 2


def test_a_choice_is_measured_once() -> None:
    first, later = Pretended({1: 5, 2: 3}), Pretended({1: 1, 2: 9})
    assert (chosen(first, [1, 2]), chosen(later, [1, 2])) == (2, 2)
    assert (first.timed, later.timed) == ([[1, 2]], [])
    assert chosen(None, [1, 2]) == 2, "without a trial, too"


def test_without_a_measurement_none_is_chosen() -> None:
    assert chosen(None, [1, 2]) is None


OTHER_INPUTS = (TensorSpec((4, 3), "float32"), INPUTS[1])


@pytest.mark.parametrize(
    "other", [{"environment": {"gpu": "b"}}, {"inputs": OTHER_INPUTS}, {"plans": [1, 2, 4]}, {"subject": "other"}]
)
def test_another_gpu_shape_or_set_of_candidates_is_measured_again(other: dict[str, Any]) -> None:
    chosen(Pretended({1: 5, 2: 3}), [1, 2])
    assert chosen(Pretended({1: 1, 2: 9, 4: 5}), **{"plans": [1, 2], **other}) == 1


def test_without_a_place_on_disk_a_choice_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    trial = Pretended({1: 5, 2: 3})
    layers = [chosen(trial, [1, 2]) for _ in range(5)]
    assert (layers, trial.timed) == ([2] * len(layers), [[1, 2]])


def test_one_candidate_needs_no_measurement() -> None:
    trial = Pretended({})
    assert (chosen(trial, [7]), trial.timed) == (None, [])


def test_equal_plans_are_one_candidate() -> None:
    assert plan_digest(plan(1)) == plan_digest(plan(1)) != plan_digest(plan(2))
    trial = Pretended({1: 5, 2: 3})
    assert (chosen(trial, [1, 1, 2]), trial.timed) == (2, [[1, 2]])


# --- differences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "found", "tolerance", "differs"),
    [
        ([1.0, 2.0], [1.0, 2.001], 1e-3, False),
        ([1.0, 2.0], [1.0, 2.1], 1e-3, True),
        ([1000.0, 0.0], [1000.0, 0.5], 1e-3, False),  # an error that is small beside the large values is rounding
        ([1.0, 0.0], [1.0, math.nan], 1e-3, True),
        ([1.0, math.nan], [1.0, math.nan], 1e-3, False),
        ([1.0, math.nan], [1.0, 1.0], 1e-3, True),
        ([1.0, math.inf], [1.0, math.inf], 1e-3, False),
        ([1.0, math.inf], [1.0, -math.inf], 1e-3, True),
        ([1.0, math.inf], [1.0, 3e38], 1e-3, True),
        ([0.0, 0.0], [0.0, 1e-9], 1e-3, True),
        ([], [], 1e-3, False),
    ],
)
def test_what_differs(right: list[float], found: list[float], tolerance: float, differs: bool) -> None:
    arrays = np.array(right, np.float32), np.array(found, np.float32)
    assert (array_difference(np, *arrays, tolerance) is not None) == differs


def test_integers_are_equal_or_differ() -> None:
    assert array_difference(np, np.array([1, 2]), np.array([1, 2]), 0.0) is None
    assert array_difference(np, np.array([1, 2]), np.array([1, 3]), 0.0) == (
        "differs in 1 of 2 elements, at 1 it is 3 where 2 is right"
    )


# --- in a session ----------------------------------------------------------------------------------------------------


class OnHost(Pretended):
    """A Trial that runs the stand-in's kernels on host memory, and pretends their times."""

    def outputs(self, of: Plan) -> Any:
        x, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.float32([1, 2, 3])
        y = np.full((2, 3), np.nan, np.float32)
        ready_plan(of, INPUTS, 0, CPU).run([x.ctypes.data, bias.ctypes.data], [y.ctypes.data])
        return y


def offered(monkeypatch: pytest.MonkeyPatch, gpu: Stage, trial: Pretended) -> None:
    """Offer three candidates for shift; the one with grid 2 writes only half of the output."""

    def both(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        short = plan(2)
        (step,) = short.steps
        half = dataclasses.replace(step, arguments=(*step.arguments[:3], Scalar(3, "int64"), step.arguments[4]))
        return [plan(1), dataclasses.replace(short, steps=(half,)), plan(3)]

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", both)
    monkeypatch.setitem(autotune.trials, CPU, trial)


def grid_of_a_run(gpu: Stage, choice: PlanChoice = "known") -> int:
    given = feed(2, 3)
    run = open_session(model(SHIFT), providers=[CPU], settings=SessionSettings(None, choice))
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    return gpu.last()[0]


def forget() -> None:
    """Forget the templates of this process, as another process would not have them."""
    planner._recent.clear()
    planner._nodes.clear()


def test_runs_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, trial := OnHost({1: 5, 3: 4}))
    assert grid_of_a_run(gpu) == 1
    assert trial.timed == []


def test_what_was_measured_runs_the_fastest_right_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, trial := OnHost({1: 5, 2: 1, 3: 4}))
    assert grid_of_a_run(gpu, "measured") == 3
    assert grid_of_a_run(gpu) == 3
    forget()
    assert grid_of_a_run(gpu) == 3, "the measurement is on disk"
    assert grid_of_a_run(gpu, "first") == 1
    assert trial.timed == [[1, 3]]


def test_what_was_measured_counts_for_sizes_near_by(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, OnHost({1: 5, 2: 1, 3: 4}))
    assert grid_of_a_run(gpu, "measured") == 3
    forget()
    run = open_session(model(SHIFT), providers=[CPU], settings=SessionSettings(None, "known"))
    grids = []
    for rows in (1, 2, 3, 4, 5, 100):
        with contextlib.suppress(Exception):  # the plans are for six elements only
            run.run(None, feed(rows, 3))
        grids.append(gpu.last()[0])
    assert grids == [3, 3, 3, 3, 1, 1]


def test_a_session_that_measures_asks_at_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    asked: list[tuple[int, ...]] = []

    class Verdicts:
        def inputs_measured(self, *_: object) -> list[tuple[TensorSpec, ...]]:
            return []

        def choose(self, plans: Sequence[Plan], situation: Situation, inputs: Sequence[TensorSpec], *_: object) -> int:
            asked.append(inputs[0].shape)
            return 1

    monkeypatch.setattr(planner, "verdicts", Verdicts())
    own = gpu.kernels("shift").candidates
    twice = lambda *arguments: [*own(*arguments), *own(*arguments)]  # noqa: E731
    monkeypatch.setattr(gpu.kernels("shift"), "candidates", twice)
    run = open_session(model(SHIFT), providers=[CPU], settings=SessionSettings(None, "measured"))
    for rows in (2, 5, 2, 9):
        given = feed(rows, 4)
        np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert asked == [(2, 4), (5, 4), (9, 4)]


@pytest.mark.parametrize("word", ["never", "cached"])
def test_bench_times_no_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: Any) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, trial := OnHost({1: 5, 2: 1, 3: 4}))
    (tmp_path / "model.onnx").write_bytes(model(SHIFT))
    result = bench(tmp_path / "model.onnx", BenchSettings(shapes=["x:2x3"], runs=2, tune=word))
    assert result.passed and result.ops[0].kernel is not None
    assert trial.timed == []


def test_nothing_is_timed_where_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, trial := OnHost({1: 5, 3: 4}))

    def empty(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        return [dataclasses.replace(plan(each), outputs=(inputs[0],)) for each in (1, 3)]

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", empty)
    run = open_session(model(SHIFT), providers=[CPU], settings=SessionSettings(None, "measured"))
    assert run.run(None, feed(0, 3))[0].shape == (0, 3)
    assert trial.timed == []


def test_where_nothing_can_be_measured_the_first_candidate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = stage(monkeypatch)
    offered(monkeypatch, gpu, OnHost({}))
    monkeypatch.delitem(autotune.trials, CPU)
    assert grid_of_a_run(gpu, "measured") == 1


def test_a_cache_is_placed_like_weights() -> None:
    """Each layer has a cache of its own, which the layers in between have evicted from the L2 cache."""
    operands = ("q", "w", "past_key", "past_value")
    node = FusedNode("attention_with_cache", "n", operands, {}, ("float16",))
    inputs = [TensorSpec((8,), "float16", constant=name == "w") for name in operands]
    assert [spec.constant for spec in autotune.inputs_of_trial(node, inputs, ())] == [False, True, True, True]


@pytest.mark.parametrize(("past", "new", "rows"), [(64, 1, 64), (0, 7, 7), (6, 1, 7)])
def test_lengths_fill_the_cache(past: int, new: int, rows: int) -> None:
    """A past of more rows than the total length is a buffer, which has room for rows that will come."""
    case = Case((7, 7), new, past)
    node, inputs = case.node(), case.specs()
    outputs = find_host(node.fusion).candidates(node, inputs, H200)[0].outputs  # type: ignore[union-attr]
    found = dict(zip(node.operands, autotune.inputs_of_trial(node, inputs, outputs), strict=True))
    assert found["seqlens_k"].drawn == rows - 1
    assert {spec.drawn for name, spec in found.items() if name != "seqlens_k"} == {0}


def test_sequences_of_recurrent_layers_have_all_steps() -> None:
    operands = ("x", "w", "r", "sequence_lens")
    node = FusedNode("rnn", "n", operands, {"hidden": 16, "directions": 1}, ("float16",))
    shapes = zip(((9, 2, 8), (1, 16, 8), (1, 16, 16), (2,)), ("float16",) * 3 + ("int32",), strict=True)
    inputs = [TensorSpec(shape, dtype) for shape, dtype in shapes]
    outputs = find_host(node.fusion).candidates(node, inputs, H200)[0].outputs  # type: ignore[union-attr]
    assert [spec.drawn for spec in autotune.inputs_of_trial(node, inputs, outputs)] == [0, 0, 0, 9]
