"""Time a model and its fused version side by side, compare their outputs, and time each operator."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from onnxfuse.bench.machine import device, versions
from onnxfuse.errors import ModelError, OnnxfuseError, UsageError, VerificationError, first_line
from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import load
from onnxfuse.ir.plain_files import write_whole
from onnxfuse.ir.protos import nodes
from onnxfuse.optimizer import optimize
from onnxfuse.report.report import Report
from onnxfuse.report.times import NodeTime, Times
from onnxfuse.report.traffic import assumed_sizes
from onnxfuse.runtime.target import PlanChoice
from onnxfuse.session import InferenceSession, explain_session, open_session
from onnxfuse.steps import Progress
from onnxfuse.tuning.bound_session import BoundSession, Provider, TimedModel, bind, check_outputs, start_session
from onnxfuse.tuning.dispatch import CUDA_GRAPH, PLAIN, Mode, NodeDispatch, TunePolicy
from onnxfuse.tuning.memory_rate import copy_rate
from onnxfuse.tuning.op_times import OpTime, op_times, timeline
from onnxfuse.tuning.product_rate import product_rate
from onnxfuse.tuning.timing import RunTimes, interleaved, runs_within
from onnxfuse.tuning.tune import tune as tune_model
from onnxfuse.verify import cpu_session
from onnxfuse.verify.accepted import Accepted, accepted_of
from onnxfuse.verify.difference import TF32, OutputDifference, Standard, compare_output
from onnxfuse.verify.extent import WITHOUT_EXTREMES
from onnxfuse.verify.judge import settled, too_coarse
from onnxfuse.verify.own_process import DEFAULT_TIMEOUT, OnnxruntimeCrash, own_process
from onnxfuse.verify.random_nodes import describe_random_node
from onnxfuse.verify.reference import Reference, run_original
from onnxfuse.verify.requested_shapes import describe_feeds, feeds_to_try
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, half_precision_tensors, model_to_float32

log = logging.getLogger(__name__)
SCHEMA: Final = 1  # the version of the JSON's fields
SECONDS_PER_MODEL: Final = 2.0  # time spent on the runs of each mode, unless the number of runs is given
LARGE_COPY_BYTES: Final = 2**29
PRODUCTS: Final = frozenset({
    "Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention", "MultiHeadAttention", "GroupQueryAttention",
    "FusedConv", "FusedGemm", "FusedMatMul", "RNN", "GRU", "LSTM",
})  # fmt: skip
GIVE_SIZES: Final = "give sizes that it takes: --shape input:8x512, or inputs: --input x.npz"


@dataclass(frozen=True)
class Contender:
    """The result of one model in one mode (with or without a CUDA graph)."""

    name: str
    mode: Mode
    times: RunTimes | None = None  # None if the model did not run in this mode
    agrees: bool | None = None  # whether the outputs agree with the original's; None if the model did not run
    reason: str = ""  # why the outputs are wrong, or why the model did not run
    speed_up: float | None = None  # relative to the original in the same mode, if the outputs of both are right
    not_compared: Mapping[str, str] = field(default_factory=dict)  # why outputs were not compared, by their names

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        times = self.times.to_json() if self.times else None
        factor = None if self.speed_up is None else round(self.speed_up, 4)
        return {"name": self.name, "mode": self.mode, "agrees": self.agrees, "reason": self.reason,
                "speed_up": factor, "time": times, "not_compared": dict(self.not_compared)}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """The result of `bench`; `to_json()` documents the fields."""

    model: str
    provider: Provider
    device: Mapping[str, str]
    inputs: Mapping[str, str]
    counts: Mapping[str, int]
    contenders: tuple[Contender, ...]
    ops: tuple[OpTime, ...]  # the times of fused and unfused operators
    copy_rate: float | None  # bytes per second of a large copy
    ops_error: str = ""  # why no operator was timed alone
    # With `trace`: for the original and the fused model, the nodes that were timed, in the order of the graph.
    timelines: Mapping[str, tuple[tuple[str, OpTime], ...]] = field(default_factory=dict)
    report: Report | None = None  # with `report`: the report of the optimization, with the times of the nodes
    estimates: Times | None = None  # with `trace` on a CPU: estimates of the times of the nodes on a GPU

    @property
    def passed(self) -> bool:
        """Whether every model ran with the right outputs; a model passes even if it does not run as a CUDA graph."""
        return all(each.agrees or (each.agrees is None and each.mode != PLAIN) for each in self.contenders)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data: schema, date, model, provider, device, versions, inputs, fused, models, ops, copy rate."""
        return {
            "schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": self.model, "provider": self.provider, "device": dict(self.device), "versions": versions(),
            "inputs": dict(self.inputs), "fused": dict(self.counts),
            "models": [each.to_json() for each in self.contenders], "ops": [each.to_json() for each in self.ops],
            "ops_error": self.ops_error, "copy_bytes_per_second": self.copy_rate,
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Write the result as JSON.  Raises ModelError where that fails."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file.  Raises ModelError where that fails."""
    try:
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ModelError(f"cannot write '{path}': {error.strerror}; give another name") from error


@dataclass(frozen=True)
class BenchSettings:
    """How a model is timed: its inputs, the models to compare with, the provider and the number of runs."""

    patterns: Iterable[str | os.PathLike[str]] = ()  # folders with further fusions
    shapes: Sequence[str] = ()  # sizes of dynamic dims, as "input:8x512"; others get those that estimates assume
    inputs: Mapping[str, Array] = field(default_factory=dict)  # inputs to run on, instead of generated ones
    against: Sequence[str | os.PathLike[str]] = ()  # further models with the same inputs and outputs
    runs: int | None = None  # number of runs of each model and mode; by default as many as fit into two seconds
    provider: Provider = "cpu"
    cuda_graph: bool = True  # on CUDA, also run with CUDA graphs
    ops: bool = True  # also time each operator alone
    tune: TunePolicy = "cached"  # decides between kernels and ONNX functions: see InferenceSession
    trace: bool = False  # also time each operator of the original alone, for a trace
    report: bool = False  # also do that for a report, and verify the fused model, which must not be fused already


def bench(
    model: str | os.PathLike[str], settings: BenchSettings, progress: Progress = lambda stage, done, of: None
) -> Bench:
    """Time a model and its fused version in turns, on inputs and outputs that stay on the device.

    If the model is not fused, it is fused here.  If it is fused already, the original is the same model with its fused
    nodes run as ONNX functions.

    Raises UsageError for a shape that the model does not accept, and for a fused model if settings.report is true;
    VerificationError if the original does not run, or has outputs that cannot be compared.
    """
    path = Path(model)
    progress("load", 0, 0)
    original, folder = _load(path, settings.inputs)
    others = [(name, *load(other)) for name, other in _named(settings.against).items()]
    choices = list(feeds_to_try(original, settings.shapes, settings.inputs, assumed_sizes(original)))
    provider, tune = settings.provider, settings.tune
    cuda_graph = settings.cuda_graph and provider == "cuda"
    runner = _Runner(provider, progress, cuda_graph, "cached" if tune == "now" else tune)
    feeds, first = runner.first(original, folder, choices)
    fused, counts, report = _fused(path, original, settings, feeds, progress)
    timed = TimedModel(fused, folder, feeds, provider, open_session, progress=progress)
    if tune == "now":
        tune_model(timed)
    models = [("bodies" if fused is original else "original", original, folder), ("fused", fused, folder), *others]
    contenders, bound = _timed(runner, models, feeds, first, settings.runs)
    session = bound.get(("fused", PLAIN))
    how = explain_session(session.session) if session else ()
    both = settings.trace or settings.report
    rows, why = _op_times(timed, runner, how) if settings.ops and (counts or both) else ([], "")
    timelines = {}
    if both:
        before, why_not = _op_times(replace(timed, model=original), runner, ())
        timelines, why = {models[0][0]: timeline(original, before), "fused": timeline(fused, rows)}, why or why_not
    given, rate = describe_feeds(feeds), copy_rate(provider, LARGE_COPY_BYTES)
    result = Bench(str(path), provider, device(provider), given, counts, contenders, tuple(rows), rate, why, timelines)
    if report and settings.report:
        result = replace(result, report=replace(report, times=_times(result)))
    estimated = report and settings.trace and provider == "cpu"
    return replace(result, estimates=report.estimated_times) if report and estimated else result


def _times(result: Bench) -> Times | None:
    """Return the times of the nodes for a report; None unless nodes of both models were timed."""
    if not all(result.timelines.values()):
        return None
    before, after = (
        tuple(
            NodeTime(name, op.fusion, op.how, op.seconds or 0.0, op.bytes, op.flops, op.roofline) for name, op in nodes
        )
        for nodes in result.timelines.values()
    )
    dtypes = sorted({op.dtype for nodes in result.timelines.values() for _, op in nodes if op.flops})
    rates = {dtype: rate for dtype in dtypes if (rate := product_rate(result.provider, dtype))}
    return Times(result.device["name"], dict(result.inputs), before, after, result.copy_rate, rates)


def _load(path: Path, inputs: Mapping[str, Array]) -> tuple[onnx.ModelProto, Path | None]:
    """Load the original.  Raises VerificationError if its outputs are random, so that they cannot be compared."""
    model, folder = load(path)
    if drawn := describe_random_node(model, inputs, seeded=True):
        raise VerificationError(drawn)
    return model, folder


def _named(against: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Map a name to each of the other models: the name of its file, or its path if two files have the same name."""
    paths = list(dict.fromkeys(map(Path, against)))
    names = [path.name for path in paths]
    return {str(path) if names.count(path.name) > 1 else path.name: path for path in paths}


def _timed(
    runner: _Runner,
    models: Sequence[tuple[str, onnx.ModelProto, Path | None]],
    feeds: dict[str, Array],
    first: BoundSession,
    runs: int | None,
) -> tuple[tuple[Contender, ...], Mapping[tuple[str, Mode], BoundSession]]:
    """Time models, and compare their outputs with the original's; the original is the first model.

    Returns the results, and the sessions of the models that run.
    """
    (base, original, folder), *_ = models
    expected = runner.expected(original, folder, feeds, first)
    bound, failed = runner.start(models, base, feeds, first)
    names = [name for name, *_ in models]
    accepted = {name: accepted_of(model, original) for name, model, _ in models}
    found = [*runner.timed(bound, expected, accepted, runs), *failed]
    in_order = sorted(found, key=lambda each: (names.index(each.name), each.mode != PLAIN))
    return tuple(with_speed_ups(in_order, base)), bound


def _fused(
    path: Path, model: onnx.ModelProto, settings: BenchSettings, feeds: Mapping[str, Array], progress: Progress
) -> tuple[onnx.ModelProto, dict[str, int], Report | None]:
    """Fuse the model unless it has fused nodes; return it, the number of fused nodes of each fusion, and the report.

    The report's estimates are for the sizes of `feeds`.
    """
    if not any(map(is_fused, nodes(model.graph))):
        # A verification at large sizes takes long, and the outputs are compared at these sizes below.
        sizes = [f"{name}:{'x'.join(map(str, value.shape))}" for name, value in feeds.items() if value.shape]
        fused, report = optimize(
            path, patterns=settings.patterns, estimate=sizes, verify=settings.report, progress=progress
        )
        return fused, report.counts, report
    if settings.report:
        raise UsageError("--report says how a model is fused, but this one is fused already; give the original")
    names = [next((a.s.decode() for a in node.attribute if a.name == "fusion"), node.op_type)
             for node in nodes(model.graph) if is_fused(node)]  # fmt: skip
    return model, {name: names.count(name) for name in sorted(set(names))}, None


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """The outputs that other models' outputs are compared with."""

    outputs: Mapping[str, Array]  # outputs of the original model
    exact: Mapping[str, Array]  # outputs of the original in float32, if it computes in lower precision
    precision: str  # float16, bfloat16 or tf32; empty if the original computes in none of them
    rounded: set[str]  # the outputs that are computed in lower precision than float32
    on_cpu: Callable[[], Reference]  # runs the original on the CPU, to measure its rounding noise

    def compare(self, outputs: Mapping[str, Array], accepted: Accepted) -> tuple[str, dict[str, str]]:
        """Return why the first output that is wrong by the rules of `verify` is wrong, or "".

        Also returns the outputs that cannot be compared, with reasons.

        accepted  the differences from the original that `optimize` accepted for this model
        """
        errors = tuple(self._difference(name, outputs.get(name), accepted) for name in self.outputs)
        hidden = too_coarse(accepted)
        if not all(each.passed for each in errors):
            with suppress(VerificationError):  # raised if the original does not run on the CPU
                reference = replace(self.on_cpu(), accepted=accepted)
                errors, hidden = settled(reference, [outputs] * len(reference.runs), errors)
        return next((each.reason for each in errors if not each.passed), ""), hidden

    def _difference(self, name: str, value: Array | None, accepted: Accepted) -> OutputDifference:
        exact, precision = (self.exact.get(name), self.precision) if name in self.rounded else (None, "")
        standard = Standard(precision, accepted.tolerances.get(name), accepted.set_by)
        return compare_output(name, self.outputs[name], value, exact, standard)


@dataclass(frozen=True)
class _Runner:
    """Runs the models on one provider, without CUDA graphs and with them."""

    provider: Provider
    progress: Progress
    cuda_graph: bool  # whether the models also run with CUDA graphs
    tune: TunePolicy

    @property
    def modes(self) -> Sequence[Mode]:
        """The modes that every model runs in."""
        return (PLAIN, CUDA_GRAPH) if self.cuda_graph else (PLAIN,)

    def first(
        self, model: onnx.ModelProto, folder: Path | None, choices: Sequence[dict[str, Array]]
    ) -> tuple[dict[str, Array], BoundSession]:
        """Return the first of the inputs in `choices` that the original runs on, and its session.

        On the CPU it runs in a process of its own first, because some sizes end onnxruntime.
        """
        try:
            session = start_session(model, folder, self.provider)
        except OnnxfuseError:
            raise
        except Exception as error:
            raise VerificationError(f"onnxruntime cannot run the model: {first_line(error)}") from error
        check_outputs(session)
        failures = []
        with own_process(DEFAULT_TIMEOUT, at_once=self.provider == "cpu"):
            for feeds in choices:
                try:
                    if self.provider == "cpu":
                        _require_no_crash(model, folder, feeds)
                    bound = bind(session, feeds, self.provider)
                    bound.run()
                    return feeds, bound
                except Exception as error:  # onnxruntime's errors have no common class
                    failures.append(first_line(error))
        raise VerificationError(f"the model does not run on generated inputs ({failures[0]}); {GIVE_SIZES}")

    def expected(
        self, model: onnx.ModelProto, folder: Path | None, feeds: dict[str, Array], first: BoundSession
    ) -> _Expected:
        """Return the original's outputs, and if it computes in lower precision, also its outputs in float32."""
        outputs, half = first.outputs(), half_precision_of(model)

        @functools.cache
        def on_cpu() -> Reference:
            tell: Callable[[str], None] = lambda step: self.progress(step, 0, 0)  # noqa: E731
            return run_original(model, folder, feeds, tell, extent=WITHOUT_EXTREMES)

        if half:
            exact = self._in_float32(model, folder, feeds)
            return _Expected(outputs, exact, half, half_precision_tensors(model), on_cpu)
        if self.provider == "cpu" or not has_products(model):
            return _Expected(outputs, {}, "", set(), on_cpu)
        # If TF32 is allowed, onnxfuse's kernels always use it, but cuDNN only sometimes, so its error is tolerated.
        exact = self._in_float32(model, folder, feeds)
        return _Expected(outputs, exact, TF32, set(exact), on_cpu)

    def _in_float32(self, model: onnx.ModelProto, folder: Path | None, feeds: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs of the original in float32, without TF32; an empty dict if it does not run in float32."""
        self.progress("run in float32", 0, 0)
        with suppress(Exception):  # if this fails, outputs are compared only with those of the unconverted model
            options = {"use_tf32": 0} if self.provider == "cuda" else {}
            session = start_session(model_to_float32(model), folder, self.provider, options=options)
            wide = bind(session, arrays_to_float32(feeds), self.provider)
            wide.run()
            return wide.outputs()
        return {}

    def start(
        self,
        models: Sequence[tuple[str, onnx.ModelProto, Path | None]],
        base: str,
        feeds: Mapping[str, Array],
        first: BoundSession,
    ) -> tuple[dict[tuple[str, Mode], BoundSession], list[Contender]]:
        """Start and warm up every model in every mode; return the sessions, and the contenders that do not run."""
        bound: dict[tuple[str, Mode], BoundSession] = {(base, PLAIN): first}
        failed: list[Contender] = []
        names = [(name, mode, model, folder) for name, model, folder in models for mode in self.modes]
        for done, (name, mode, model, folder) in enumerate(names):
            self.progress("start", done, len(names))
            try:
                if (name, mode) not in bound:
                    options = {} if mode == PLAIN else {"enable_cuda_graph": 1}
                    kernels = None if name == base else partial(InferenceSession, tune=self.tune, wait=True)
                    session = start_session(model, folder, self.provider, kernels, options=options)
                    check_outputs(session)
                    bound[name, mode] = bind(session, feeds, self.provider, first.shapes() if options else None)
                bound[name, mode].warm_up()
            except Exception as error:
                bound.pop((name, mode), None)
                failed.append(Contender(name, mode, reason=f"does not run: {first_line(error)}"))
        return bound, failed

    def timed(
        self,
        bound: Mapping[tuple[str, Mode], BoundSession],
        expected: _Expected,
        accepted: Mapping[str, Accepted],
        runs: int | None,
    ) -> list[Contender]:
        """Time all sessions in turns, then compare the outputs of their last runs."""
        self.progress("time", 0, 0)
        count = runs or min(runs_within(SECONDS_PER_MODEL, each.run) for each in bound.values())
        all_times = interleaved([each.run for each in bound.values()], count)
        result = []
        for ((name, mode), each), times in zip(bound.items(), all_times, strict=True):
            reason, hidden = expected.compare(each.outputs(), accepted[name])
            result.append(Contender(name, mode, times, not reason, reason, not_compared=hidden))
        return result


def _require_no_crash(model: onnx.ModelProto, folder: Path | None, feeds: Mapping[str, Array]) -> None:
    """Raise OnnxruntimeCrash if a run on the CPU ends the process of `own_process`; let other errors come later."""
    try:
        cpu_session.run(cpu_session.open_session(model, folder), feeds)
    except OnnxruntimeCrash:
        raise
    except Exception as error:
        log.debug("the original, in a process of its own: %s", first_line(error))


def has_products(model: onnx.ModelProto) -> bool:
    """Return whether a node multiplies matrices, which CUDA does in TF32 unless the session forbids it."""
    return any(node.op_type in PRODUCTS for node in nodes(model.graph, *model.functions))


def with_speed_ups(contenders: Sequence[Contender], base: str) -> Iterator[Contender]:
    """Yield the contenders; set the speed-up over the original in the same mode where both outputs are right."""
    usable = {each.mode: each.times.median for each in contenders if each.name == base and each.agrees and each.times}
    for each in contenders:
        if each.name != base and each.agrees and each.times and each.mode in usable:
            each = replace(each, speed_up=usable[each.mode] / each.times.median)
        yield each


def _op_times(timed: TimedModel, runner: _Runner, dispatches: Sequence[NodeDispatch]) -> tuple[list[OpTime], str]:
    """Time each operator alone; the second result is "", or why no operator was timed."""
    try:
        choice: PlanChoice = "first" if runner.tune == "never" else "known"
        return op_times(timed, dispatches, runner.cuda_graph, unfused=True, choice=choice), ""
    except Exception as error:  # such as too little memory for all values at once; the models are timed anyway
        return [], first_line(error)
