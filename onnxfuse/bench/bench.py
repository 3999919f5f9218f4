"""Original and fused side by side in one process: times, agreement, and what each fused operator takes."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.bench.op_times import OpTime, op_times
from onnxfuse.bench.timing import (
    WARM_UP,
    Bound,
    Provider,
    Spread,
    bind,
    check_outputs,
    copy_rate,
    device,
    interleaved,
    runs_within,
    start,
)
from onnxfuse.errors import ModelError, OnnxfuseError, VerificationError
from onnxfuse.model.files import load
from onnxfuse.model.graph import DOMAIN
from onnxfuse.model.widen import from_half, half_of, widened, widened_arrays
from onnxfuse.optimize import optimize
from onnxfuse.provider.preferences import GRAPH, PLAIN, Tune
from onnxfuse.verify.difference import difference
from onnxfuse.verify.draws import drawing
from onnxfuse.verify.given_shapes import described, feeds_to_try
from onnxfuse.verify.inputs import Array
from onnxfuse.verify.session import first_line

SCHEMA = 1
SECONDS = 2.0  # of runs for each model and mode, unless their number is given
PACKAGES = "onnxfuse", "onnx", "onnxruntime", "onnxruntime-gpu", "cupy-cuda13x", "numpy"
GIVE_SIZES = "give sizes that it takes: --shape input:8x512, or inputs: --input x.npz"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Contender:
    """One model in one mode.  `agrees`: whether its outputs are those of the original; None where it did not run."""

    name: str
    mode: str  # PLAIN or GRAPH
    spread: Spread | None = None
    agrees: bool | None = None
    reason: str = ""  # why it does not agree, or did not run
    speed_up: float | None = None  # over the original in the same mode; only where both agree

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        times = self.spread.to_json() if self.spread else None
        factor = None if self.speed_up is None else round(self.speed_up, 4)
        return {"name": self.name, "mode": self.mode, "agrees": self.agrees, "reason": self.reason,
                "speed_up": factor, "time": times}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """The result of `bench`; `to_json()` documents the fields."""

    model: str
    provider: Provider
    device: Mapping[str, str]
    inputs: Mapping[str, str]
    counts: Mapping[str, int]
    contenders: tuple[Contender, ...]
    ops: tuple[OpTime, ...]  # fused ones, and those that nothing fused
    copy_rate: float | None  # bytes per second of a large copy
    ops_error: str = ""  # why no operator was timed alone

    @property
    def passed(self) -> bool:
        """Whether every model ran and is right; that a model cannot be captured as a CUDA graph does not count."""
        return all(each.agrees or (each.agrees is None and each.mode != PLAIN) for each in self.contenders)

    def to_json(self) -> dict[str, Any]:
        """Plain data: schema, date, model, provider, device, versions, inputs, fused, models, ops, copy rate."""
        return {
            "schema": SCHEMA, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": self.model, "provider": self.provider, "device": dict(self.device), "versions": versions(),
            "inputs": dict(self.inputs), "fused": dict(self.counts),
            "models": [each.to_json() for each in self.contenders], "ops": [each.to_json() for each in self.ops],
            "ops_error": self.ops_error, "copy_bytes_per_second": self.copy_rate,
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Write as JSON.  Raises ModelError where that fails."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a result.  Raises ModelError where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(f"cannot write '{path}': {error.strerror}; give another name") from error


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Of Python and of the packages that matter to the times."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def bench(
    model: str | os.PathLike[str],
    *,
    shapes: Sequence[str] = (),
    against: Sequence[str | os.PathLike[str]] = (),
    runs: int | None = None,
    provider: Provider = "cpu",
    cuda_graph: bool = True,
    inputs: Mapping[str, Array] | None = None,
    ops: bool = True,
    tune: Tune = "cached",
    progress: Progress = lambda stage, done, of: None,
) -> Bench:
    """Time a model and the same model fused, in turns, on inputs and outputs that stay on the device.

    An unfused model is fused here; of a fused one, the bodies are the original.
    shapes      `input:8x512`: sizes of dynamic dims; the others as verification chooses them
    against     further models with the same inputs and outputs
    runs        of each model and mode; as many as fit into two seconds by default
    cuda_graph  also with CUDA graphs, on CUDA
    ops         also time each fused operator alone
    tune        how the fused model chooses between kernel and body: see onnxfuse.InferenceSession

    Raises UsageError for a shape that the model does not take, VerificationError where the original does not run, or
    has outputs that cannot be compared.
    """
    path = Path(model)
    progress("load", 0, 0)
    original, folder = load(path)
    if drawn := drawing(original, inputs or {}, seeded=True):
        raise VerificationError(drawn)
    others = [(name, *load(other)) for name, other in _named(against).items()]
    choices = list(feeds_to_try(original, shapes, inputs or {}))
    fused, counts = _fused(path, original, progress)
    base = "bodies" if fused is original else "original"
    modes = (PLAIN, GRAPH) if cuda_graph and provider == "cuda" else (PLAIN,)
    run = _Run(provider, progress, modes, "cached" if tune == "now" else tune)
    feeds, first = run.first(original, folder, choices)
    if tune == "now":
        from onnxfuse.provider.tune import tune as tuned

        tuned(fused, folder, feeds, provider, progress=progress)
    expected = run.expected(original, folder, feeds, first)
    bound, failed = run.start([(base, original, folder), ("fused", fused, folder), *others], base, feeds, first)
    contenders = _in_order([*run.timed(bound, expected, runs), *failed], [base, "fused", *_named(against)])
    rows, why = _op_times(fused, folder, feeds, run, bound) if ops and counts else ([], "")
    return Bench(str(path), provider, device(provider), described(feeds), counts,
                 tuple(with_speed_ups(contenders, base)), tuple(rows), copy_rate(provider, 2**29), why)  # fmt: skip


def _named(against: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """The other models by file name, or by path where that is not unique."""
    paths = list(dict.fromkeys(map(Path, against)))
    names = [path.name for path in paths]
    return {str(path) if names.count(path.name) > 1 else path.name: path for path in paths}


def _in_order(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    return sorted(contenders, key=lambda each: (names.index(each.name), each.mode != PLAIN))


def _fused(path: Path, model: onnx.ModelProto, progress: Progress) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The fused model, which may be the same, and its nodes by fusion."""
    if not any(node.domain == DOMAIN for node in model.graph.node):
        fused, report = optimize(path, verify=False, progress=progress)
        return fused, report.counts
    names = [next((a.s.decode() for a in node.attribute if a.name == "fusion"), node.op_type)
             for node in model.graph.node if node.domain == DOMAIN]  # fmt: skip
    return model, {name: names.count(name) for name in sorted(set(names))}


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """What the original computes, and in float32, where it computes in half precision."""

    outputs: Mapping[str, Any]
    exact: Mapping[str, Any]
    half: str
    rounded: set[str]

    def judge(self, outputs: Mapping[str, Any]) -> tuple[bool, str]:
        """Whether these outputs are right, and the reason of the first that is not."""
        for name, value in self.outputs.items():
            exact, half = (self.exact.get(name), self.half) if name in self.rounded else (None, "")
            error = difference(name, value, outputs.get(name), exact, half)
            if not error.passed:
                return False, error.reason
        return True, ""


@dataclass(frozen=True)
class _Run:
    """Where and how the models run."""

    provider: Provider
    progress: Progress
    modes: Sequence[str]
    tune: Tune

    def first(
        self, model: onnx.ModelProto, folder: Path | None, choices: Sequence[dict[str, Array]]
    ) -> tuple[dict[str, Array], Bound]:
        """The first inputs that the original runs on."""
        try:
            session = start(model, folder, self.provider)
        except OnnxfuseError:
            raise
        except Exception as error:
            raise VerificationError(f"onnxruntime cannot run the model: {first_line(error)}") from error
        check_outputs(session)
        failures = []
        for feeds in choices:
            try:
                bound = bind(session, feeds, self.provider)
                bound.run()
                return feeds, bound
            except Exception as error:  # onnxruntime's errors have no common class
                failures.append(first_line(error))
        raise VerificationError(f"the model does not run on generated inputs ({failures[0]}); {GIVE_SIZES}")

    def expected(self, model: onnx.ModelProto, folder: Path | None, feeds: dict[str, Array], first: Bound) -> _Expected:
        """The original's outputs, and those of the original in float32 where that runs."""
        half, exact = half_of(model), dict[str, Any]()
        if half:
            self.progress("run in float32", 0, 0)
            with suppress(Exception):  # then the original's own outputs are the measure
                options = {"use_tf32": 0} if self.provider == "cuda" else {}
                session = start(widened(model), folder, self.provider, options=options)
                wide = bind(session, widened_arrays(feeds), self.provider)
                wide.run()
                exact = wide.outputs()
        return _Expected(first.outputs(), exact, half, from_half(model) if half else set())

    def start(
        self,
        models: Sequence[tuple[str, onnx.ModelProto, Path | None]],
        base: str,
        feeds: Mapping[str, Array],
        first: Bound,
    ) -> tuple[dict[tuple[str, str], Bound], list[Contender]]:
        """Every model in every mode, warmed up; and those that do not run."""
        bound, failed = {(base, PLAIN): first}, list[Contender]()
        names = [(name, mode, model, folder) for name, model, folder in models for mode in self.modes]
        for done, (name, mode, model, folder) in enumerate(names):
            self.progress("start", done, len(names))
            try:
                if (name, mode) not in bound:
                    options = {} if mode == PLAIN else {"enable_cuda_graph": 1}
                    how: dict[str, Any] = {"kernels": name != base, "tune": self.tune, "options": options}
                    session = start(model, folder, self.provider, **how)
                    check_outputs(session)
                    bound[name, mode] = bind(session, feeds, self.provider, first.shapes() if options else None)
                for _ in range(WARM_UP):
                    bound[name, mode].run()
            except Exception as error:
                bound.pop((name, mode), None)
                failed.append(Contender(name, mode, reason=f"does not run: {first_line(error)}"))
        return bound, failed

    def timed(self, bound: Mapping[tuple[str, str], Bound], expected: _Expected, runs: int | None) -> list[Contender]:
        """All of them in turns; then the outputs of their last runs are compared."""
        self.progress("time", 0, 0)
        count = runs or min(runs_within(SECONDS, each.run) for each in bound.values())
        spreads = interleaved([each.run for each in bound.values()], count)
        result = []
        for ((name, mode), each), times in zip(bound.items(), spreads, strict=True):
            agrees, reason = expected.judge(each.outputs())
            result.append(Contender(name, mode, times, agrees, reason))
        return result


def with_speed_ups(contenders: Sequence[Contender], base: str) -> Iterator[Contender]:
    """The contenders, each that is right compared with the original in the same mode."""
    usable = {each.mode: each.spread.median for each in contenders if each.name == base and each.agrees and each.spread}
    for each in contenders:
        if each.name != base and each.agrees and each.spread and each.mode in usable:
            each = replace(each, speed_up=usable[each.mode] / each.spread.median)
        yield each


def _op_times(
    fused: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Array],
    run: _Run,
    bound: Mapping[tuple[str, str], Bound],
) -> tuple[list[OpTime], str]:
    """The times, or why there are none."""
    from onnxfuse.provider.session import explain_session

    session = bound.get(("fused", PLAIN))
    how = explain_session(session.session) if session else ()
    try:
        graphs = GRAPH in run.modes
        return op_times(fused, folder, feeds, run.provider, how, graphs, run.progress, others=True, tune=run.tune), ""
    except Exception as error:  # such as too little memory for all values at once; the models are measured
        return [], first_line(error)
