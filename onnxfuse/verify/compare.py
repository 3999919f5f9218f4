"""Compare two models: run both on the same inputs in plain onnxruntime on the CPU, and measure every output's error."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.extract import extract
from onnxfuse.ir.load import load
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import OutputDifference, compare_output, worst
from onnxfuse.verify.inputs import check_inputs, model_inputs
from onnxfuse.verify.larger_inputs import depends_on, largest_first
from onnxfuse.verify.noise import move_by_one_ulp
from onnxfuse.verify.observed import REDRAWS, NotCompared, inverted_flags, redrawn, what_hides
from onnxfuse.verify.own_process import TimeLimitExceeded
from onnxfuse.verify.random_nodes import random_outputs
from onnxfuse.verify.requested_shapes import Draw, describe_failures, draws
from onnxfuse.verify.ties import are_ties, source_of_indices
from onnxfuse.verify.to_float32 import arrays_to_float32, half_precision_of, half_precision_tensors, model_to_float32

if TYPE_CHECKING:
    from onnxfuse.verify.cpu_session import Session

Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto
Progress: TypeAlias = Callable[[str], None]

NO_OUTPUTS = "the model has no outputs"
# An output may differ by this many times the original's own noise.  Fused nodes round elsewhere than onnxruntime's own
# optimizations do, so they may move an output as far, and one sample of noise is seldom the largest.
NOISE_FACTOR = 4.0
MAX_NOISE = 0.5  # of an output's largest value: where so much is allowed, nothing is compared
RUNS_COMPARED = 2  # with different sizes of the dynamic dims
# From this size on, a run that is refused only after so many seconds is the last one: the next one takes longer, and
# more memory.  Attention over 32768 positions has 4 GB of scores for each head.
LARGE_SIZE, MAX_SECONDS_REFUSED = 1024, 1.0


@dataclass(frozen=True)
class Verification:
    """Whether what was compared agrees (`passed` is None if nothing was), and the sizes of dynamic dims, by run.

    `reason` says what differs or why nothing was compared, and how half precision was compared if not as usual.
    `outputs` were compared; `not_compared` names the other outputs, and fused nodes, that were not.  `equal_parts` is
    how many fused nodes compute what the nodes do that they replaced; 0 where whole models were compared.
    """

    passed: bool | None
    outputs: tuple[OutputDifference, ...]
    reason: str
    sizes: tuple[dict[str, int], ...]
    not_compared: tuple[NotCompared, ...] = ()
    equal_parts: int = 0

    @property
    def status(self) -> Literal["verified", "partly", "none", "failed"]:
        """Return "verified" where all was compared and agrees, "partly" where that is true of a part of it."""
        if self.passed is None:
            return "none"
        if not self.passed:
            return "failed"
        return "partly" if self.not_compared else "verified"

    def with_parts(self, equal: int, not_compared: Sequence[NotCompared]) -> Verification:
        """Return the verification together with that of fused nodes, of which `equal` ones were found equal."""
        missing = (*self.not_compared, *not_compared)
        passed = True if self.passed is None and equal else self.passed
        return replace(self, passed=passed, not_compared=missing, equal_parts=equal)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite error, which JSON cannot write, is None."""
        rows = [
            {key: _finite(getattr(o, key)) for key in ("name", "max_abs", "max_rel", "tolerance")} for o in self.outputs
        ]
        missing = [{"name": each.name, "reason": each.reason} for each in self.not_compared]
        return {"status": self.status, "passed": self.passed, "reason": self.reason, "outputs": rows,
                "equal_parts": self.equal_parts, "not_compared": missing}  # fmt: skip


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
    tolerance: float | None = None  # replaces those of the dtypes, and the noise of the original

    def worst_difference(self, results: Sequence[Mapping[str, object]], name: str) -> OutputDifference:
        """Return the worst error of one output over the runs."""
        half = self.half_precision if name in self.half_tensors else ""
        return worst(
            compare_output(
                name, each.outputs[name], result.get(name), each.float32_outputs.get(name) if half else None, half,
                self.tolerance,
            )
            for each, result in zip(self.runs, results, strict=True)
        )  # fmt: skip


def compare(
    original: Source,
    optimized: Source,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress | None = None,
    reference: Reference | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Run both models at two sizes of every dynamic dim and compare their outputs.

    The tolerance of an output is that of its dtype, or NOISE_FACTOR times the original's own noise; `tolerance`
    replaces both.  Half precision is judged by the original evaluated in float32 (see `difference.TOLERANCES`).  A
    bfloat16 model that the CPU provider cannot run is compared in float32.
    `inputs` replaces generated ones, and `shapes` sets the sizes of others, as "input:8x512".  `folder` is where the
    external data of a ModelProto lies; for `optimized` it is by default the folder of `original`.  `progress` is called
    with one line before each step.  `reference` holds the runs of the original, where these were made before.
    Raises UsageError for inputs or shapes that the model does not take, ModelError if `original` cannot be read.
    """
    tell = progress or (lambda line: None)
    before, folder = _open(original, folder)
    try:
        reference = reference or run_original(before, folder, inputs or {}, tell, shapes)
    except VerificationError as error:
        return nothing_compared(before, error)
    reference = replace(reference, tolerance=tolerance)
    sizes = tuple(r.sizes for r in reference.runs)
    try:
        tell("run the optimized model")
        after, after_folder = _open(optimized, folder)
        reference, results = _run_optimized(after, after_folder, reference)
    except TimeLimitExceeded as error:
        return Verification(None, (), str(error), sizes)
    except Exception as error:  # whatever onnxruntime or the file system raises is the finding
        return Verification(False, (), f"the optimized model does not run: {first_line(error)}", sizes)
    return _verdict(*_differences(before, after, folder, reference, results, tell))


def _differences(
    original: onnx.ModelProto,
    optimized: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    results: Sequence[Mapping[str, object]],
    tell: Progress,
) -> tuple[tuple[OutputDifference, ...], Reference]:
    """Return the differences of the outputs, and the reference with those outputs that turned out to show nothing.

    The original's noise is measured, and ties are looked for, only where an output differs by more than its tolerance.
    """
    names = [name for name in reference.runs[0].outputs if name not in reference.random]
    errors = tuple(reference.worst_difference(results, name) for name in names)
    if reference.tolerance is None and any(not e.passed and math.isfinite(e.max_rel) for e in errors):
        tell("measure the noise of the original")
        errors, unsteady = _allow_noise(original, folder, reference, errors)
        reference = replace(reference, not_compared={**reference.not_compared, **unsteady})
    if any(not e.passed and not e.tolerance for e in errors):
        ties = _find_ties(original, folder, reference, results, errors)
        errors = tuple(replace(e, passed=True, reason="") if e.name in ties else e for e in errors)
        reference = replace(reference, not_compared={**reference.not_compared, **ties})
    return _fail_changed_dtypes(original, optimized, errors) if reference.in_float32 else errors, reference


def _verdict(errors: Sequence[OutputDifference], reference: Reference) -> Verification:
    """Return what the differences of the outputs say of the optimized model."""
    sizes = tuple(run.sizes for run in reference.runs)
    failed = next((e for e in errors if not e.passed), None)
    reason = "; ".join(text for text in (failed.reason if failed else "", reference.note) if text)
    hidden = tuple(NotCompared(name, why) for name, why in reference.not_compared.items())
    seen = tuple(e for e in errors if not e.passed or e.name not in reference.not_compared)
    if failed is None and not seen:
        reason = "; ".join(f"output '{each.name}' is not compared: {each.reason}" for each in hidden) or NO_OUTPUTS
        return Verification(None, (), reason, sizes, hidden)
    return Verification(failed is None, seen, reason, sizes, hidden)


def nothing_compared(original: onnx.ModelProto, error: VerificationError) -> Verification:
    """Return the verification of a model whose outputs could not be computed, and why."""
    outputs = tuple(NotCompared(output.name, str(error)) for output in original.graph.output)
    return Verification(None, (), str(error), (), outputs)


def _allow_noise(
    model: onnx.ModelProto, folder: Path | None, reference: Reference, errors: Sequence[OutputDifference]
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Judge outputs that differ again, by a tolerance that the original's own noise sets.

    Also returns why outputs are not compared: what moves by more than MAX_NOISE of itself shows nothing.
    """
    doubtful = [e.name for e in errors if not e.passed and math.isfinite(e.max_rel)]
    noise = measure_noise(model, folder, reference, doubtful)
    judged: list[OutputDifference] = []
    unsteady: dict[str, str] = {}
    for error in errors:
        allowed = NOISE_FACTOR * noise.get(error.name, 0.0)
        if error.name not in noise or error.max_rel > max(allowed, error.tolerance):
            told = f", and the original's own noise {allowed:.1e}" if allowed > error.tolerance else ""
            judged.append(replace(error, reason=error.reason + told if error.reason else ""))
        elif allowed > MAX_NOISE:
            moved = f"{noise[error.name]:.1e} of its largest value"
            unsteady[error.name] = f"the original's own runs differ by {moved} there"
            judged.append(replace(error, passed=True, reason=""))
        else:
            judged.append(replace(error, passed=True, reason="", tolerance=allowed))
    return tuple(judged), unsteady


def _find_ties(
    model: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    results: Sequence[Mapping[str, object]],
    errors: Sequence[OutputDifference],
) -> dict[str, str]:
    """Return the outputs whose indices differ only between scores that are equal but for rounding, each with why."""
    found: dict[str, str] = {}
    for error in errors:
        node = None if error.passed or error.tolerance else source_of_indices(model, error.name)
        if node is None or reference.in_float32:
            continue
        session = open_session(extract(model, [node.input[0]]), folder, optimize=False)
        scores = [run(session, each.feeds)[node.input[0]] for each in reference.runs]
        old = [each.outputs[error.name] for each in reference.runs]
        if are_ties(node, scores, old, [result.get(error.name) for result in results]):
            found[error.name] = f"its indices differ, but the scores there ('{node.input[0]}') are ties"
    return found


def measure_noise(
    model: onnx.ModelProto, folder: Path | None, reference: Reference, names: Sequence[str]
) -> dict[str, float]:
    """Return how far outputs of the original move, relative to their largest value.

    Two causes are measured: inputs that move by one unit in the last place, and onnxruntime without its own graph
    optimizations.  An output whose NaN or infinite values move shows nothing of its noise.
    """
    if reference.in_float32:
        model = model_to_float32(model)
    found = dict.fromkeys(names, 0.0)
    for optimize, moved in ((True, True), (False, False)):
        session = open_session(model, folder, optimize=optimize)
        for each in reference.runs:
            feeds = {n: move_by_one_ulp(n, v) for n, v in each.feeds.items()} if moved else each.feeds
            outputs = run(session, arrays_to_float32(feeds) if reference.in_float32 else feeds)
            for name in names:
                other = compare_output(name, each.outputs[name], outputs.get(name)).max_rel
                found[name] = max(found[name], other if math.isfinite(other) else 0.0)
        del session  # one model is open at a time
    return found


def first_difference(
    original: Source,
    optimized: Source,
    names: Sequence[str],
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    folder: Path | None = None,
) -> str | None:
    """Return the first of the tensors `names` (in execution order) that both models compute and that differs, or None.

    Raises VerificationError if one of the models does not run.
    """
    before, folder = _open(original, folder)
    after, after_folder = _open(optimized, folder)
    both = {o for n in before.graph.node for o in n.output} & {o for n in after.graph.node for o in n.output}
    wanted = [name for name in names if name in both]
    reference = run_original(_with_outputs(before, wanted), folder, inputs or {}, lambda line: None, shapes)
    try:
        reference, results = _run_optimized(_with_outputs(after, wanted), after_folder, reference)
    except Exception as error:
        raise VerificationError(f"the optimized model does not run: {first_line(error)}") from error
    wanted = [name for name in wanted if name not in reference.random]
    return next((name for name in wanted if not reference.worst_difference(results, name).passed), None)


def _open(source: Source, folder: Path | None) -> tuple[onnx.ModelProto, Path | None]:
    return (source, folder) if isinstance(source, onnx.ModelProto) else load(source)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {o.name for o in model.graph.output}
    result.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    return result


def run_original(
    model: onnx.ModelProto,
    folder: Path | None,
    given: Mapping[str, Array],
    tell: Progress,
    shapes: Sequence[str] = (),
) -> Reference:
    """Run the original as it is, and converted to float32 if it uses half precision.

    Raises VerificationError if it runs at no sizes.
    """
    check_inputs(given, model_inputs(model))
    half, random = half_precision_of(model), random_outputs(model, given)
    try:
        runs = _run_at_sizes(model, folder, given, shapes, random, tell)
    except VerificationError as error:
        if half != "bfloat16":
            raise
        try:
            runs = _run_at_sizes(
                model, folder, given, shapes, random, lambda line: tell(f"{line}, in float32"), in_float32=True
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
    in_float32: bool = False,
) -> list[Run]:
    """Return inputs and outputs for the first sizes at which the model runs: two sets of sizes if dims are dynamic.

    Flags, which choose between branches, are inverted in one more run.  As long as an output that depends on drawn
    inputs shows nothing, a larger size and other values follow; outputs in `random` never show anything.
    Raises VerificationError if it runs at none.
    """
    session = _session_of_original(model_to_float32(model) if in_float32 else model, folder)

    def run_at(sizes: dict[str, int], feeds: dict[str, Array]) -> Run:
        return Run(sizes, feeds, run(session, arrays_to_float32(feeds) if in_float32 else feeds), {})

    left = draws(model, shapes, given)
    runs = _first_runs(left, run_at, tell, bool(given))
    first, may_show = runs[0], _may_show_more(model, runs, given, random)
    for sizes, feeds in largest_first(model, folder, left) if may_show else ():
        tell("run the original" + "".join(f", {k}={v}" for k, v in sizes.items()))
        with suppress(Exception):  # sizes and values that the model refuses show nothing either
            runs.append(run_at(sizes, feeds))
            break
    if flags := inverted_flags(first.feeds, given):
        tell("run the original with flags inverted")
        with suppress(Exception):
            runs.append(run_at(first.sizes, first.feeds | flags))
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


def _run_optimized(
    model: onnx.ModelProto, folder: Path | None, reference: Reference
) -> tuple[Reference, list[dict[str, object]]]:
    """Return the optimized model's outputs for every run, and the reference that they compare with.

    If only the original's bfloat16 nodes have CPU kernels, both models are compared in float32 after all.
    """
    try:
        return reference, _outputs_of(model_to_float32(model) if reference.in_float32 else model, folder, reference)
    except Exception as error:
        if reference.half_precision != "bfloat16" or reference.in_float32 or not reference.runs[0].float32_outputs:
            raise
        runs = [replace(r, outputs=dict(r.float32_outputs), float32_outputs={}) for r in reference.runs]
        note = f"compared in float32: onnxruntime cannot run the optimized model on the CPU: {first_line(error)}"
        reference = replace(reference, runs=runs, in_float32=True, note=note)
        return reference, _outputs_of(model_to_float32(model), folder, reference)


def _outputs_of(model: onnx.ModelProto, folder: Path | None, reference: Reference) -> list[dict[str, object]]:
    session = open_session(model, folder)
    return [run(session, arrays_to_float32(r.feeds) if reference.in_float32 else r.feeds) for r in reference.runs]


def _fail_changed_dtypes(
    before: onnx.ModelProto, after: onnx.ModelProto, errors: tuple[OutputDifference, ...]
) -> tuple[OutputDifference, ...]:
    """Mark outputs whose declared dtype changed as failed; models converted to float32 do not show such a change."""
    old, new = ({o.name: o.type.tensor_type.elem_type for o in m.graph.output} for m in (before, after))
    name_of = onnx.TensorProto.DataType.Name
    changed = {n: f"output '{n}' is {name_of(new[n])}; the original has {name_of(t)}" for n, t in old.items()
               if new.get(n, t) != t}  # fmt: skip
    return tuple(replace(e, passed=False, reason=changed[e.name]) if e.name in changed else e for e in errors)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
