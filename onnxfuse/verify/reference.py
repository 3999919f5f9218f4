"""Run the original model, as the reference that optimized models are compared with.

It runs without onnxruntime's graph optimizations, which change the results of some models.  Its dynamic dims get two
sets of sizes, and also the sizes 0 and 1.  If an output is all NaN, constant or the like, a comparison would prove
nothing, so the original runs on more inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.verify.accepted import NOTHING_ACCEPTED, Accepted
from onnxfuse.verify.cpu_session import Prepared, open_session, prepare, run
from onnxfuse.verify.difference import (
    GIVEN,
    Base,
    OutputDifference,
    Standard,
    compare_output,
    largest_value,
    with_numbers_for_nan,
    worst,
)
from onnxfuse.verify.extent import EDGES, FLAGS, FULL, MASK_ROWS, OPTIMIZED, OTHER_SIZES, Extent
from onnxfuse.verify.input_uses import trip_counts
from onnxfuse.verify.inputs import check_inputs, model_inputs
from onnxfuse.verify.larger_inputs import depends_on, largest_first
from onnxfuse.verify.mask_rows import mask_inputs, with_mask_rows
from onnxfuse.verify.observed import REDRAWS, inverted_flags, redrawn, what_hides
from onnxfuse.verify.own_process import OnnxruntimeCrash, OnnxruntimeFailure, current_worker
from onnxfuse.verify.random_nodes import random_outputs
from onnxfuse.verify.requested_shapes import Draw, Draws, describe_failures, draws, with_known_ranks
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, half_precision_tensors, model_to_float32

if TYPE_CHECKING:
    from onnxfuse.verify.cpu_session import Session

Progress: TypeAlias = Callable[[str], None]

# If a run with a size >= LARGE_SIZE fails after more than MAX_SECONDS_REFUSED seconds, no further size is tried: it
# could take still more time and memory.  Attention over 32768 positions has 4 GB of scores for each head.
LARGE_SIZE, MAX_SECONDS_REFUSED = 1024, 1.0
MAX_CRASHES = 5  # after this many crashes of onnxruntime, no other size is tried
MAX_SECONDS_AT_EDGES = 30.0  # time limit for the original's runs at sizes 0 and 1


@dataclass(frozen=True)
class Run:
    """The original's outputs for one set of inputs; if it uses half precision, also its outputs in float32."""

    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, object]
    float32_outputs: Mapping[str, object]


RunAt: TypeAlias = Callable[[dict[str, int], dict[str, Array]], Run]


@dataclass(frozen=True)
class Reference:
    """The runs of the original, which the optimized model is compared with.

    `edges` are runs at sizes 0 and 1.  `optimized` holds the outputs of the first run with onnxruntime's graph
    optimizations, or onnxruntime's error if these break the model.  `in_float32` is true if the outputs come from the
    model converted to float32, because the model itself does not run.
    """

    original: onnx.ModelProto
    folder: Path | None  # the folder of the original's external data
    tell: Progress
    runs: list[Run]
    half_precision: str  # "float16", "bfloat16", or "" for none
    half_tensors: set[str]  # names of the tensors that are computed in half precision or from such tensors
    in_float32: bool
    note: str
    not_compared: Mapping[str, str] = field(default_factory=dict)  # outputs that cannot be compared, and why
    random: frozenset[str] = frozenset()  # outputs that depend on random numbers
    numbers_for_nan: bool = False  # where the original gives NaN, any number passes
    accepted: Accepted = NOTHING_ACCEPTED  # the differences that `optimize` accepted
    is_converted: bool = False  # whether the optimized model was converted to half precision, and casts its inputs
    tolerance: float | None = None  # replaces the tolerances by dtype and by the original's noise
    edges: Sequence[Run] = ()
    cut: tuple[str, ...] = ()  # sentences about runs that a time limit left out
    optimized: Mapping[str, object] | str = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)  # by output: the least value that errors are divided by
    # By cause, id of a run and output: how far the output changes.  References with the same runs can share it.
    noise: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    by_optimizations: bool = True  # whether changes by onnxruntime's graph optimizations count as noise

    def open(self, model: onnx.ModelProto, *, optimize: bool = False) -> Session:
        """Open a variant of the original, converted to float32 if the runs of the original were."""
        return open_session(model_to_float32(model) if self.in_float32 else model, self.folder, optimize=optimize)

    def run(self, session: Session, feeds: Mapping[str, Array]) -> dict[str, object]:
        """Run a variant of the original, opened by `open`, and return its outputs by name."""
        return run(session, arrays_to_float32(feeds) if self.in_float32 else feeds)

    def evaluated_in_float32(self, note: str) -> Reference:
        """Return this reference with each output replaced by the one from the evaluation in float32."""
        runs, edges = (
            [replace(each, outputs=dict(each.float32_outputs), float32_outputs={}) for each in some]
            for some in (self.runs, self.edges)
        )
        return replace(self, runs=runs, edges=edges, in_float32=True, note=note, noise={})

    @property
    def base(self) -> Base:
        """What the runs are of, in words: the original, or the model that a conversion to half precision made of it."""
        return "converted model" if self.is_converted else "original"

    @property
    def at_edges(self) -> Reference:
        """Return a reference with only the runs at sizes 0 and 1; errors are relative to outputs of the usual runs."""
        scales = {name: max(largest_value(each.outputs[name]) for each in self.runs) for name in self.runs[0].outputs}
        return replace(self, runs=list(self.edges), edges=(), optimized={}, scales=scales, noise={})

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The sets of dynamic dim sizes that were run, without duplicates."""
        distinct = {tuple(run.sizes.items()): run.sizes for run in self.runs}
        return tuple(distinct.values())

    def worst_difference(self, results: Sequence[Mapping[str, object]], name: str) -> OutputDifference:
        """Return the worst error of one output over the runs."""
        half = self.half_precision if name in self.half_tensors else ""
        standard = Standard(half, *self._limit(name), self.scales.get(name, 0.0), self.base)
        return worst(
            compare_output(
                name, self._expected(each, name, result), result.get(name),
                each.float32_outputs.get(name) if half else None, standard,
            )
            for each, result in zip(self.runs, results, strict=True)
        )  # fmt: skip

    def _limit(self, name: str) -> tuple[float | None, str]:
        """Return an output's tolerance, None for the default of its dtype; and who set it, as a text."""
        accepted = self.accepted.tolerances.get(name)
        return (accepted, self.accepted.set_by) if self.tolerance is None and accepted else (self.tolerance, GIVEN)

    def _expected(self, one: Run, name: str, result: Mapping[str, object]) -> object:
        """Return the original's output; if `numbers_for_nan`, with NaN replaced by the optimized model's numbers."""
        expected, actual = one.outputs[name], result.get(name)
        if not self.numbers_for_nan or not isinstance(expected, np.ndarray) or not isinstance(actual, np.ndarray):
            return expected
        return with_numbers_for_nan(expected, actual)


def run_original(
    model: onnx.ModelProto,
    folder: Path | None,
    given: Mapping[str, Array],
    tell: Progress,
    shapes: Sequence[str] = (),
    *,
    extent: Extent = FULL,
) -> Reference:
    """Run the original as often as `extent` says; if it uses half precision, also run it converted to float32.

    Float16 models get no masks with fully masked rows.  Their results for fully masked rows depend on whether scores
    near -65504 are rounded to -65504, which onnxruntime does not do between nodes whose pair of Casts it removes.
    Raises VerificationError if the original does not run at any sizes.
    """
    ranked = with_known_ranks(model, shapes, given)
    check_inputs(given, model_inputs(ranked))
    half, random = half_precision_of(model), random_outputs(model, given)
    original = _Original(ranked, folder, given, shapes, random, extent, extent.extremes and half != "float16")
    tensors = half_precision_tensors(model) if half else set()
    try:
        prepared = prepare(model, folder)
    except OSError as error:  # such as a full disk, where the model is written for a worker
        raise VerificationError(f"the original cannot be written for onnxruntime: {first_line(error)}") from error
    try:
        runs, at_edges = original.run(prepared, tell)
    except VerificationError as error:
        if half != "bfloat16":
            raise
        try:
            runs, at_edges = original.run(
                prepare(model_to_float32(model), folder), lambda line: tell(f"{line}, in float32"), in_float32=True
            )
        except VerificationError:
            raise error from None
        note, hidden = f"compared in float32: {error}", _hidden_outputs(runs, random) | random
        return Reference(
            model, folder, tell, runs, half, tensors, True, note, hidden, frozenset(random), edges=at_edges,
            cut=tuple(original.cut),
        )  # fmt: skip
    hidden = _hidden_outputs(runs, random) | random
    result = Reference(
        model, folder, tell, runs, half, tensors, False, "", hidden, frozenset(random), edges=at_edges,
        cut=tuple(original.cut),
    )  # fmt: skip
    if extent.extremes and extent.allows(OPTIMIZED):
        result = replace(result, optimized=_run_optimized_by_onnxruntime(prepared, runs[0], tell))
    if not half:
        return result
    try:
        tell("run the original in float32")
        session = open_session(model_to_float32(model), folder, optimize=False)  # optimizing drops Casts that round
        every = (*runs, *at_edges)
        exact = [replace(r, float32_outputs=run(session, arrays_to_float32(r.feeds))) for r in every]
    except Exception as error:
        note = f"compared with the original directly: it does not run in float32 ({first_line(error)})"
        return replace(result, note=note)
    return replace(result, runs=exact[: len(runs)], edges=exact[len(runs) :])


def _run_optimized_by_onnxruntime(model: Prepared, first: Run, tell: Progress) -> dict[str, object] | str:
    """Return the outputs with onnxruntime's graph optimizations, or its error where the model then does not run."""
    tell("run the original with onnxruntime's optimizations")
    try:
        return run(open_session(model), first.feeds)
    except Exception as error:  # any exception of onnxruntime is reported as the result
        return first_line(error)


def _hidden_outputs(runs: Sequence[Run], random: Collection[str]) -> dict[str, str]:
    """Return, with reasons, the outputs whose values hide errors (all NaN, constant, ...), except `random` ones."""
    reasons = {n: what_hides([r.outputs[n] for r in runs]) for n in runs[0].outputs if n not in random}
    return {name: reason for name, reason in reasons.items() if reason}


@dataclass(frozen=True)
class _Original:
    """The original, the arguments of `run_original`, and the outputs that depend on random numbers.

    In `model`, inputs of unknown rank have the ranks of the given arrays and requested shapes.
    """

    model: onnx.ModelProto
    folder: Path | None
    given: Mapping[str, Array]
    shapes: Sequence[str]
    random: Collection[str]
    extent: Extent
    mask_rows: bool
    cut: list[str] = field(default_factory=list)  # see Reference

    def run(self, model: Prepared, tell: Progress, *, in_float32: bool = False) -> tuple[list[Run], list[Run]]:
        """Run the original, or its float32 version; return the usual runs, and the runs at sizes 0 and 1.

        The usual runs use the first sizes at which the model runs: `extent.sizes` sets of sizes if it has dynamic dims.
        One more run inverts boolean flags, because they can select branches, and `mask_rows` adds runs on masks with
        fully masked rows.  If all runs so far hide errors of an output, runs at a larger size and on other values
        follow.  Outputs in `random` are never compared.  Raises VerificationError if the model does not run at any
        sizes.
        """
        begun, budget = time.monotonic(), self.extent.budget
        session = _session_of_original(model)

        def run_at(sizes: dict[str, int], feeds: dict[str, Array]) -> Run:
            found = Run(sizes, feeds, run(session, arrays_to_float32(feeds) if in_float32 else feeds), {})
            if budget:
                budget.begin(begun)
            return found

        drawn = draws(self.model, self.shapes, self.given)
        left = drawn.usual()
        runs = _first_runs(left, run_at, tell, bool(self.given), self.extent)
        with suppress(VerificationError):  # after a run that exceeds the time limit, no others are tried
            self._run_more(runs, left, run_at, tell)
        return runs, list(self._at_edges(drawn, runs, run_at, tell)) if self.extent.extremes else []

    def _run_more(self, runs: list[Run], left: Iterator[Draw], run_at: RunAt, tell: Progress) -> None:
        """Run the original on further inputs, and append to `runs`.  Raises VerificationError at the time limit."""

        def add(told: str, sizes: dict[str, int], feeds: dict[str, Array]) -> bool:
            tell(f"run the original{told}")
            try:
                runs.append(run_at(sizes, feeds))
            except VerificationError:
                raise
            except Exception:  # sizes and values that the model refuses are skipped
                return False
            return True

        first, last, may_show = runs[0], runs[-1], self._may_show_more(runs)
        for sizes, feeds in largest_first(self.model, self.folder, left) if may_show else ():
            if add(_named(sizes), sizes, feeds):
                break
        flags = inverted_flags(first.feeds, self.given) if self.extent.repeats else {}
        if flags and self.extent.allows(FLAGS):
            add(" with flags inverted", first.sizes, first.feeds | flags)
        for feeds in with_mask_rows(last.feeds, mask_inputs(self.model, self.given)) if self.mask_rows else ():
            if not self.extent.allows(MASK_ROWS):
                break
            add(" on masks that leave nothing", last.sizes, feeds)
        for kind in REDRAWS if may_show else ():
            feeds = redrawn(first.feeds, kind, self.given)
            if not feeds or not self._may_show_more(runs):
                break
            add(f" on {kind} values", first.sizes, first.feeds | feeds)

    def _at_edges(self, drawn: Draws, runs: Sequence[Run], run_at: RunAt, tell: Progress) -> Iterator[Run]:
        """Yield runs at sizes 0 and 1, and with Loops of 0 iterations, until MAX_SECONDS_AT_EDGES have passed.

        Sizes at which the model fails are left out.  If models run in this process, size 0 is skipped, because some
        kernels of onnxruntime divide by the size, which would crash this process.
        """
        done = [each.sizes for each in runs]
        started = time.monotonic()
        for draw in (*self._without_iterations(runs[0]), *drawn.at_edges(done[0])):
            if draw.sizes in done or (0 in draw.sizes.values() and current_worker() is None):
                continue
            if time.monotonic() - started > MAX_SECONDS_AT_EDGES:
                self.cut.append(f"runs at {EDGES} ended after {MAX_SECONDS_AT_EDGES:g} s, before all of them were made")
                break
            if not self.extent.allows(EDGES):
                break
            tell("run the original" + _named(draw.sizes))
            try:
                yield run_at(draw.sizes, draw.make())
            except (OnnxruntimeCrash, VerificationError):  # other edge sizes would crash or take too long as well
                break
            except Exception:  # sizes at which the original fails cannot be compared
                continue

    def _without_iterations(self, usual: Run) -> Iterator[Draw]:
        """Yield the usual inputs with all Loop trip counts set to 0; nothing if no generated input is a trip count."""
        drawn = trip_counts(self.model) & usual.feeds.keys() - self.given.keys()
        if none := {name: np.zeros_like(usual.feeds[name]) for name in sorted(drawn)}:
            yield Draw(usual.sizes | dict.fromkeys(none, 0), lambda: usual.feeds | none)

    def _may_show_more(self, runs: Sequence[Run]) -> bool:
        """Return whether more runs can help: an output that would hide errors depends on an input that can change."""
        drawn = {each.name for each in model_inputs(self.model)}.difference(self.given)
        return any(depends_on(self.model, name, drawn) for name in _hidden_outputs(runs, self.random))


def _named(sizes: Mapping[str, int]) -> str:
    return "".join(f", {name}={size}" for name, size in sizes.items())


def _first_runs(left: Iterator[Draw], run_at: RunAt, tell: Progress, is_given: bool, extent: Extent) -> list[Run]:
    """Run the original on sets of drawn inputs (`left`), in order; return the first `extent.sizes` runs that succeed.

    Raises VerificationError if none succeeds.
    """
    runs: list[Run] = []
    failures: list[tuple[dict[str, int], str]] = []
    crashes = 0
    for draw in left:
        if runs and not extent.allows(OTHER_SIZES):
            break
        tell("run the original" + _named(draw.sizes))
        started = time.monotonic()
        try:
            runs.append(run_at(draw.sizes, draw.make()))
        except VerificationError:  # such as the time limit: other sizes would exceed it as well
            raise
        except Exception as error:
            failures.append((draw.sizes, first_line(error)))
            crashes += isinstance(error, OnnxruntimeCrash)
            if crashes == MAX_CRASHES:
                break
            is_large = max(draw.sizes.values(), default=0) >= LARGE_SIZE
            if is_large and time.monotonic() - started > MAX_SECONDS_REFUSED:
                break
        if len(runs) == extent.sizes:
            break
    if not runs:
        raise VerificationError(describe_failures(failures, is_given))
    return runs


def _session_of_original(model: Prepared) -> Session:
    try:
        return open_session(model, optimize=False)
    except OnnxruntimeFailure as error:
        raise VerificationError(f"onnxruntime cannot run the original on the CPU: {first_line(error)}") from error
