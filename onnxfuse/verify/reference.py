"""Run the original, as the reference that optimized models are compared with.

It runs at two sizes of its dynamic dims, and on further inputs as long as outputs show nothing of what it computes.
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
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import OutputDifference, compare_output, with_numbers_for_nan, worst
from onnxfuse.verify.inputs import check_inputs, model_inputs
from onnxfuse.verify.larger_inputs import depends_on, largest_first
from onnxfuse.verify.mask_rows import mask_inputs, with_mask_rows
from onnxfuse.verify.observed import REDRAWS, inverted_flags, redrawn, what_hides
from onnxfuse.verify.random_nodes import random_outputs
from onnxfuse.verify.requested_shapes import Draw, describe_failures, draws
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, half_precision_tensors, model_to_float32

if TYPE_CHECKING:
    from onnxfuse.verify.cpu_session import Session

Progress: TypeAlias = Callable[[str], None]

RUNS_COMPARED = 2  # with different sizes of the dynamic dims
# From this size on, a run that is refused only after so many seconds is the last one: the next one takes longer, and
# more memory.  Attention over 32768 positions has 4 GB of scores for each head.
LARGE_SIZE, MAX_SECONDS_REFUSED = 1024, 1.0


@dataclass(frozen=True)
class Run:
    """The original's outputs for one set of inputs: as it is, and evaluated in float32 if it uses half precision."""

    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, object]
    float32_outputs: Mapping[str, object]


@dataclass(frozen=True)
class Reference:
    """The runs of the original, which the optimized model is compared with.

    `in_float32`: `outputs` are those of the model converted to float32, because it does not run as it is.
    """

    runs: list[Run]
    half_precision: str  # "float16", "bfloat16", or "" for none
    half_tensors: set[str]  # computed in or from half precision
    in_float32: bool
    note: str
    not_compared: Mapping[str, str] = field(default_factory=dict)  # outputs that show nothing, and why
    random: frozenset[str] = frozenset()  # those of them whose values are new in every run
    numbers_for_nan: bool = False  # any numbers may stand for NaN
    is_converted: bool = False  # to half precision, whose Casts of float32 inputs are there for no other reason
    tolerance: float | None = None  # replaces those of the dtypes, and the noise of the original

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The sizes of the dynamic dims of the runs, each set once."""
        distinct = {tuple(run.sizes.items()): run.sizes for run in self.runs}
        return tuple(distinct.values())

    def worst_difference(self, results: Sequence[Mapping[str, object]], name: str) -> OutputDifference:
        """Return the worst error of one output over the runs."""
        half = self.half_precision if name in self.half_tensors else ""
        return worst(
            compare_output(
                name, self._expected(each, name, result), result.get(name),
                each.float32_outputs.get(name) if half else None, half, self.tolerance,
            )
            for each, result in zip(self.runs, results, strict=True)
        )  # fmt: skip

    def _expected(self, one: Run, name: str, result: Mapping[str, object]) -> object:
        """Return the original's output, with numbers of the optimized model for NaN where these may stand for it."""
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
    mask_rows: bool = True,
) -> Reference:
    """Run the original as it is, and converted to float32 if it uses half precision.

    `mask_rows` adds runs on masks with rows that leave nothing; not in float16, where what such a row gives depends on
    whether scores beside -65504 are rounded, which onnxruntime does where no Casts cancel.  Raises VerificationError if
    it runs at no sizes.
    """
    check_inputs(given, model_inputs(model))
    half, random = half_precision_of(model), random_outputs(model, given)
    mask_rows = mask_rows and half != "float16"
    try:
        runs = _run_at_sizes(model, folder, given, shapes, random, tell, mask_rows=mask_rows)
    except VerificationError as error:
        if half != "bfloat16":
            raise
        try:
            runs = _run_at_sizes(
                model,
                folder,
                given,
                shapes,
                random,
                lambda line: tell(f"{line}, in float32"),
                mask_rows=mask_rows,
                in_float32=True,
            )
        except VerificationError:
            raise error from None
        note, hidden = f"compared in float32: {error}", _hidden_outputs(runs, random) | random
        return Reference(runs, half, half_precision_tensors(model), True, note, hidden, frozenset(random))
    tensors = half_precision_tensors(model) if half else set()
    hidden = _hidden_outputs(runs, random) | random
    result = Reference(runs, half, tensors, False, "", hidden, frozenset(random))
    if not half:
        return result
    try:
        tell("run the original in float32")
        session = open_session(model_to_float32(model), folder, optimize=False)  # which would drop pairs of Casts
        exact = [replace(r, float32_outputs=run(session, arrays_to_float32(r.feeds))) for r in runs]
    except Exception as error:
        note = f"compared with the original directly: it does not run in float32 ({first_line(error)})"
        return replace(result, note=note)
    return replace(result, runs=exact)


def _hidden_outputs(runs: Sequence[Run], random: Collection[str]) -> dict[str, str]:
    """Return why outputs show nothing of the model, those of `random` aside."""
    reasons = {n: what_hides([r.outputs[n] for r in runs]) for n in runs[0].outputs if n not in random}
    return {name: reason for name, reason in reasons.items() if reason}


def _may_show_more(
    model: onnx.ModelProto, runs: Sequence[Run], given: Collection[str], random: Collection[str]
) -> bool:
    """Return whether an output that shows nothing in these runs depends on inputs that can be drawn again."""
    drawn = {each.name for each in model_inputs(model)}.difference(given)
    return any(depends_on(model, name, drawn) for name in _hidden_outputs(runs, random))


def _run_at_sizes(
    model: onnx.ModelProto,
    folder: Path | None,
    given: Mapping[str, Array],
    shapes: Sequence[str],
    random: Collection[str],
    tell: Progress,
    *,
    mask_rows: bool,
    in_float32: bool = False,
) -> list[Run]:
    """Return inputs and outputs for the first sizes at which the model runs: two sets of sizes if dims are dynamic.

    Flags, which choose between branches, are inverted in one more run, and masks are drawn again with rows that leave
    nothing, where `mask_rows` says so.  As long as an output that depends on drawn inputs shows nothing, a larger size
    and other values follow; outputs in `random` never show anything.
    Raises VerificationError if it runs at none.
    """
    session = _session_of_original(model_to_float32(model) if in_float32 else model, folder)

    def run_at(sizes: dict[str, int], feeds: dict[str, Array]) -> Run:
        return Run(sizes, feeds, run(session, arrays_to_float32(feeds) if in_float32 else feeds), {})

    left = draws(model, shapes, given)
    runs = _first_runs(left, run_at, tell, bool(given))
    first, last, may_show = runs[0], runs[-1], _may_show_more(model, runs, given, random)
    for sizes, feeds in largest_first(model, folder, left) if may_show else ():
        tell("run the original" + "".join(f", {k}={v}" for k, v in sizes.items()))
        with suppress(Exception):  # sizes and values that the model refuses show nothing either
            runs.append(run_at(sizes, feeds))
            break
    if flags := inverted_flags(first.feeds, given):
        tell("run the original with flags inverted")
        with suppress(Exception):
            runs.append(run_at(first.sizes, first.feeds | flags))
    for feeds in with_mask_rows(last.feeds, mask_inputs(model, given)) if mask_rows else ():
        tell("run the original on masks that leave nothing")
        with suppress(Exception):
            runs.append(run_at(last.sizes, feeds))
    for kind in REDRAWS if may_show else ():
        feeds = redrawn(first.feeds, kind, given)
        if not feeds or not _may_show_more(model, runs, given, random):
            break
        tell(f"run the original on {kind} values")
        with suppress(Exception):
            runs.append(run_at(first.sizes, first.feeds | feeds))
    return runs


def _first_runs(
    left: Iterator[Draw], run_at: Callable[[dict[str, int], dict[str, Array]], Run], tell: Progress, is_given: bool
) -> list[Run]:
    """Return the runs of the first draws that the model takes.  Raises VerificationError if it takes none."""
    runs: list[Run] = []
    failures: list[tuple[dict[str, int], str]] = []
    for draw in left:
        tell("run the original" + "".join(f", {k}={v}" for k, v in draw.sizes.items()))
        started = time.monotonic()
        try:
            runs.append(run_at(draw.sizes, draw.make()))
        except VerificationError:  # such as the time limit, which others would exceed as well
            raise
        except Exception as error:
            failures.append((draw.sizes, first_line(error)))
            is_large = max(draw.sizes.values(), default=0) >= LARGE_SIZE
            if is_large and time.monotonic() - started > MAX_SECONDS_REFUSED:
                break
        if len(runs) == RUNS_COMPARED:
            break
    if not runs:
        raise VerificationError(describe_failures(failures, is_given))
    return runs


def _session_of_original(model: onnx.ModelProto, folder: Path | None) -> Session:
    try:
        return open_session(model, folder)
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(f"onnxruntime cannot run the original on the CPU: {first_line(error)}") from error
