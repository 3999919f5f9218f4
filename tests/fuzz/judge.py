"""Judge an optimized model: it must compute what the original computes in onnxruntime without optimizations.

A float may differ by rounding.  How much rounding does to a model is measured on the original: by how far its outputs
move when its float32 inputs and all that it computes move by an ulp, and by how far they are from the same model in
float64, or in float32 if it computes in half precision, which is right as well.  A conversion to half precision may
differ by as much as the original does if it rounds so.  Where a model only rounds to half precision and back, few
values may differ: each rounding must stay.  Where a value overflows in float32 alone, overflow.py tells what is right.

Judge inside `own_process`: onnxruntime crashes on some of the originals, such as InstanceNormalization of no elements,
which then do not count.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from differences import difference, is_wrong, rounds_on_purpose
from draws import Dims, draws
from onnx import TensorProto
from overflow import allow_exact, in_float64, largest_inside, to_float64, to_float64_arrays, without_overflow
from roundings import HALF_ULPS, ULP, ULPS, nudged, rounded_otherwise, rounded_to
from sessions import Arrays, Session, outputs_of
from undetermined import (
    LOST_VALUE,
    MISSING_AXIS,
    REDUCES_SCALAR,
    adds_zero,
    bounds_masks,
    broadcasts_data_to_slopes,
    computes_nothing,
    confuses_optimizations,
    copies_sizes_of_empty_axes,
    expands_to_several_axes,
    has_huge_scales,
    has_lost_value,
    has_matrix_as_scale,
    has_rows_of_no_iterations,
    has_windows_beyond_data,
    hides_nan,
    joins_unequal_sizes,
    never_runs,
    normalizes_few_elements,
    normalizes_nothing,
    normalizes_other_channels,
    outputs_of_attention,
    overflows_int32,
    pools_nothing,
    relies_on_empty_slices,
    reuses_memory_of_a_slice,
    scales_zero_by_infinity,
    scans_rows_of_false_shapes,
    sums_infinity,
    takes_other_steps,
    without_false_shapes,
)

from onnxfuse import OnnxfuseError, VerificationError, optimize, unfuse
from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.extract import extract, without_unused_nodes
from onnxfuse.report.report import Report
from onnxfuse.unfuse_model import has_fused_nodes
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, half_precision_tensors, model_to_float32

SECONDS = 20.0  # of this process in one call of optimize(), or of one run of a model in its own process
NO_KERNEL = ("Could not find an implementation", "Failed to find kernel")  # of an operator in some dtype
LARGEST_SQUARED = 2.0**63  # in float32
LARGEST_FLOAT16 = 65504.0
LARGE_INPUT = 1e4  # products of inputs below it are finite in half precision too, but for long sums
OF_ONE_NODE = ("inference of ", "spelling ")  # steps whose errors leave out one node, which may be invalid
FAILURES = ("wrong", "unrunnable", "traceback", "hang", "crash")


@dataclass(frozen=True)
class Verdict:
    """What became of a model.

    "same", "idle" (onnxruntime does not run the original), "refused" (by onnxfuse), "lost" (its verification compares
    less than all, or fails), or a failure: "wrong", "unrunnable" (onnxruntime refuses the result), "traceback", "hang",
    or "crash", where the process ended.
    """

    kind: str
    sentence: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES

    @property
    def key(self) -> str:
        """What verdicts of the same cause have in common: the kind, and the sentence without names and numbers."""
        words = [word for word in self.sentence.split() if word.isalpha()]
        return f"{self.kind} {' '.join(words[:12])}"


class Hang(BaseException):
    """A call took too long.  It is not an Exception, because verification catches those, and tries other inputs."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in this thread, the main one, once this process has computed for so long.

    Processor time counts, as a busy machine leaves a process waiting, and so does verification while the original runs
    in another process, which has a time limit of its own.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True)
class Options:
    """How a model is optimized; `then` is what is done with the result before it is judged."""

    dtype: Literal["float16", "bfloat16"] | None = None
    emit: Literal["functions", "standard"] = "functions"
    layout: Literal["auto", "nhwc"] = "auto"
    regions: bool = True
    fallback: Literal["onnx", "ort"] = "onnx"
    verify: bool = False
    then: Literal["", "unfuse", "optimize"] = ""

    def optimized(self, model: onnx.ModelProto | bytes) -> tuple[onnx.ModelProto, Report]:
        """Return the optimized model, and the report of optimizing it the first time."""
        given = {name: value for name, value in asdict(self).items() if name != "then"}
        result, report = optimize(model, **given, timeout=None)  # in the process that `own_process` has started
        if self.then == "optimize":
            result, _ = optimize(result, verify=False)
        elif self.then == "unfuse" and has_fused_nodes(result):
            result, _ = unfuse(result, verify=False)
        return result, report

    def __str__(self) -> str:
        """Return the options that are not as usual, as `dtype=float16 verify=True`."""
        given = asdict(self).items()
        return " ".join(f"{name}={value}" for name, value in given if value != getattr(Options, name)) or "default"


def judge(
    model: onnx.ModelProto | bytes,
    sizes: Mapping[str, int],
    seed: int,
    options: Options = Options(),
    *,
    dims: Dims | None = None,
    special: bool = False,
) -> Verdict:
    """Optimize a model and compare what both compute on inputs that `seed` and the first sizes of symbols determine.

    dims     of inputs whose shapes the model does not declare
    special  whether inputs hold special values too
    """
    drawn_inputs = Inputs(sizes, seed, dims, special)
    try:
        with limited(SECONDS):
            optimized, report = options.optimized(model)
    except OnnxfuseError as error:
        return _of_refused(model, drawn_inputs, error)
    except Hang as error:
        return Verdict("hang", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]} in {last.name}"
        return Verdict("traceback", f"{type(error).__name__} {where}: {' '.join(str(error).split())[:200]}")
    if raised := [one for one in report.left_out if not one.step.startswith(OF_ONE_NODE)]:
        return Verdict("traceback", str(raised[0]))
    if isinstance(model, bytes):
        return Verdict("idle", "damaged bytes")
    verdict = compare_on(model, optimized, drawn_inputs, options)
    if report.left_out and verdict.kind == "same":  # rules may raise at nodes that do not run
        return Verdict("traceback", str(report.left_out[0]))
    if verdict.kind == "same" and options.verify and report.verified.status != "verified":
        missing = [each.reason for each in report.verified.not_compared]
        return Verdict("lost", f"{report.verified.status}: {'; '.join([report.verified.reason, *missing[:1]])}")
    return verdict


@dataclass(frozen=True)
class Inputs:
    """What determines the inputs on which models are compared, as `draws` takes it."""

    sizes: Mapping[str, int]
    seed: int
    dims: Dims | None = None
    special: bool = False

    def of(self, model: onnx.ModelProto) -> Iterator[dict[str, Any]]:
        """Yield inputs of a model."""
        return draws(model, self.sizes, self.seed, self.dims, self.special)


def _of_refused(model: onnx.ModelProto | bytes, inputs: Inputs, error: OnnxfuseError) -> Verdict:
    """Return "refused" for a model that onnxruntime runs, "lost" if it differed, and "idle" if it does not run."""
    said = str(error)
    if not said.isprintable():
        return Verdict("traceback", f"the message has control characters: {said[:200]!r}")
    said = " ".join(said.split())[:250]
    if isinstance(model, bytes):
        return Verdict("idle", said)
    session = Session(model)
    if all(outputs_of(session, feeds) is None for feeds in inputs.of(model)):
        return Verdict("idle", said)
    return Verdict("lost" if isinstance(error, VerificationError) else "refused", said)


def compare(
    model: onnx.ModelProto, optimized: onnx.ModelProto, sizes: Mapping[str, int], seed: int, ort: bool = False
) -> Verdict:
    """Return "same", "idle", "wrong" or "unrunnable" for a model and what was made of it."""
    options = Options(fallback="ort" if ort else "onnx")
    return compare_on(model, optimized, Inputs(sizes, seed), options)


def compare_on(
    model: onnx.ModelProto, optimized: onnx.ModelProto, inputs: Inputs, options: Options, half: str = ""
) -> Verdict:
    """Run the optimized model without onnxruntime's optimizations and with them, and compare it with the original.

    `half` is the half precision that both were in before they were widened, as the CPU provider has few kernels for it.

    These differences do not count: with attention in place of operators, rows in which a score under the mask is NaN or
    infinite, and of onnxruntime's or ONNX's, NaN in rows (docs/fusions.md, docs/design.md); NaN where a conversion
    bounds masks; that `--emit standard` writes operators which refuse empty tensors (docs/design.md); elements that
    onnxruntime leaves unwritten; that it crashes on an InstanceNormalization of no elements; what it accepts because it
    infers no rows for a Slice that has some, nothing of what is expanded, nothing of what a Loop without iterations
    computes, or nothing of an output that is declared falsely, a reduction of a scalar along axes, a Softmax of no
    elements along an axis beyond them, a PRelu whose slopes are larger than its data, a pool whose window is, and a
    norm of other channels (undetermined.py); that without its optimizations 1.31 loses what a branch reads after two
    Casts of an initializer; how groups of one element and rows that vary little round; few steps of quantizers with its
    optimizations, and any with huge scales; the shape of the rows of a Loop without iterations, or of a Reshape to two
    sizes of 0; and what its own optimizations change in the original too, as it is or without the nodes that nothing
    reads, or are known to take for something else. A Scan whose rows have the shape of a false declaration is compared
    element by element.
    """
    original = Original(model, inputs.seed, options, half)
    if half_precision_of(model) == "bfloat16" and any(said in original.session.error for said in NO_KERNEL):
        return compare_on(model_to_float32(model), model_to_float32(optimized), inputs, options, "bfloat16")
    ran, result = False, Optimized(optimized, original)
    for feeds in inputs.of(model):
        expected = outputs_of(original.session, feeds)
        if expected is None:
            continue
        ran = True
        verdict = _compare_sessions(result, feeds, expected)
        if verdict and (declared := without_false_shapes(optimized, model, expected)):
            again = _compare_sessions(Optimized(declared, original), feeds, expected)
            verdict = verdict if again and verdict.kind == "wrong" else again
        if verdict:
            return verdict
    return Verdict("same" if ran else "idle", "" if ran else f"onnxruntime does not run it: {original.session.error}")


class Optimized:
    """An optimized model in sessions of onnxruntime, without its optimizations and with them."""

    def __init__(self, model: onnx.ModelProto, original: Original) -> None:
        self.model, self.original, self.plain = model, original, Session(model)
        if original.options.dtype == "bfloat16" and any(said in self.plain.error for said in NO_KERNEL):
            self.model, original.is_widened = model_to_float32(model), True
            self.plain = Session(self.model)

    @functools.cached_property
    def usual(self) -> Session:
        """The session with onnxruntime's optimizations."""
        return Session(self.model, optimize=True)


def _compare_sessions(optimized: Optimized, feeds: Arrays, expected: Arrays) -> Verdict | None:
    """Return "wrong" or "unrunnable" if the optimized model differs on some inputs in one of its sessions."""
    original, model = optimized.original, optimized.model
    verdict = _compare_outputs(original, model, optimized.plain, feeds, expected)
    if verdict:
        return verdict
    if original.half == "bfloat16" and any(said in optimized.usual.error for said in NO_KERNEL):
        return None
    verdict = _compare_outputs(original, model, optimized.usual, feeds, expected)
    is_excused = verdict and confuses_optimizations(model, feeds, optimized.usual.error)
    if verdict and not is_excused and not original.is_changed_by_onnxruntime(feeds, expected):
        return Verdict(verdict.kind, f"with onnxruntime's optimizations {verdict.sentence}")
    return None


def _compare_outputs(
    original: Original, optimized: onnx.ModelProto, other: Session, feeds: Arrays, expected: Arrays
) -> Verdict | None:
    """Return "wrong" or "unrunnable" if a session of the optimized model differs on some inputs."""
    model = original.model
    given, feeds = feeds, arrays_to_float32(feeds) if original.is_widened else feeds
    found = outputs_of(other, feeds)
    if found is None and LOST_VALUE in other.error:
        found = outputs_of(Session(optimized, optimize=True), feeds)
    at = f"at {', '.join(f'{name} {value.dtype}{list(value.shape)}' for name, value in feeds.items())}"
    if found is None:
        excused = (
            ("SIGSEGV" in other.error and normalizes_nothing(optimized, feeds))
            or joins_unequal_sizes(model, list(expected), given)
            or relies_on_empty_slices(model, given)
            or expands_to_several_axes(model, other.error)
            or reuses_memory_of_a_slice(optimized, other.error)
            or broadcasts_data_to_slopes(model, given)
            or has_windows_beyond_data(model, given)
            or normalizes_other_channels(model, given, other.error)
            or never_runs(model, given, other.error)
            or pools_nothing(model, given, other.error)
            or has_matrix_as_scale(model, other.error)
            or has_lost_value(model, given, other.error)
            or REDUCES_SCALAR in other.error
            or (MISSING_AXIS in other.error and not all(map(np.size, expected.values())))
            or (original.options.emit == "standard" and computes_nothing(optimized, other.error, feeds, expected))
        )
        return None if excused else Verdict("unrunnable", f"the optimized model does not run: {other.error} ({at})")
    attention = outputs_of_attention(optimized)
    is_operator = original.options.fallback == "ort" or original.options.emit == "standard"
    may_hide = hides_nan(model) and any(map(_is_special, given.values()))
    has_bounds = bounds_masks(optimized, original.options.dtype)
    for name, value in expected.items():
        if original.is_widened and isinstance(value, np.ndarray) and found[name].dtype == np.float32:
            found[name] = found[name].astype(value.dtype)
        is_nan = _is_nan_anywhere(value)
        may_differ = is_nan or may_hide or (is_operator and _is_nan_anywhere(found[name]))
        if (has_bounds and is_nan) or (name in attention and may_differ):
            continue
        has_other_axes = np.size(value) == np.size(found[name]) and np.shape(value) != np.shape(found[name])
        if has_other_axes and scans_rows_of_false_shapes(model, expected, given):
            found[name] = found[name].reshape(value.shape)
        reason = original.difference(given, name, value, found[name])
        is_excused = reason and (
            joins_unequal_sizes(model, [name], given)
            or (may_differ and name in original.attention_in_operators)
            or (value.shape != found[name].shape and broadcasts_data_to_slopes(model, given))
            or has_rows_of_no_iterations(model, value, found[name])
            or copies_sizes_of_empty_axes(model, given, value, found[name])
            or takes_other_steps(model, value, found[name], other.is_optimized)
            or (other.is_optimized and has_huge_scales(original._part(name), given))
            or normalizes_few_elements(model, optimized, given, value, found[name])
            or scales_zero_by_infinity(model, optimized, value, found[name])
            or sums_infinity(original._part(name), value, found[name])
            or overflows_int32(original._part(name))
            or adds_zero(model, value, found[name])
        )
        if reason and not is_excused:
            return Verdict("wrong", f"output {name} {reason} ({at})")
    return None


class Original:
    """A model as it came, and how far its outputs move where it rounds otherwise; that is measured if they differ."""

    def __init__(self, model: onnx.ModelProto, seed: int, options: Options, half: str = "") -> None:
        self.model, self.seed, self.options, self.session = model, seed, options, Session(model)
        self.is_widened = False  # whether the optimized model runs in float32 in the place of bfloat16
        own = half_precision_of(model)
        self.half = options.dtype or half or own
        self.rounds_to = options.dtype or half  # the dtype to which float32 results may be rounded
        is_all_half = bool(self.rounds_to)  # else only tensors computed in or from half precision
        self.in_half = {o.name for o in model.graph.output} if is_all_half else half_precision_tensors(model)
        self.on_purpose = bool(own) and not is_all_half and rounds_on_purpose(model)
        self._wide: Session | None = None
        self._shaken: list[Session] | None = None
        self._shaken_more: list[Session] | None = None
        self._usual: list[Session] | None = None
        self._runs: dict[Session, dict[str, Any] | None] = {}  # on these inputs, as random numbers are new in each run
        self._feeds: Arrays = {}

    @functools.cached_property
    def attention_in_operators(self) -> set[str]:
        """The outputs that depend on a fused attention in whose place the options leave operators (seed 1110048059)."""
        if self.options.then != "unfuse" and self.options.emit != "standard":
            return set()
        fused, _ = replace(self.options, emit="functions", verify=False, then="").optimized(self.model)
        return outputs_of_attention(fused)

    def difference(self, feeds: Arrays, name: str, want: Any, got: Any) -> str | None:
        """Return in what an output differs; None if by no more than it moves where the original rounds otherwise."""
        first, half = None if self.on_purpose else want, self.half if name in self.in_half else ""
        if difference(want, got, [], first, half, self.on_purpose) is None:
            return None
        moved = [self._nudged(feeds, direction) for direction in (1, -1)]
        moved += [rounded_to(self.rounds_to, feeds)] if self.rounds_to else []
        near = [each[name] for one in moved if (each := outputs_of(self.session, one))]
        near += [each[name] for session in self.shaken if (each := self.outputs_of(session, feeds))]
        exact = self._exact(feeds, name, want)
        reason = difference(want, got, near, exact, half, self.on_purpose)
        if reason and not half and (unbounded := without_overflow(self._part(name), feeds)):
            exact_values, largest = unbounded
            want, near = allow_exact(want, got, near, exact_values[name], largest, hides_nan(self._part(name)))
            reason = difference(want, got, near, exact, half, self.on_purpose)
        if reason:
            near += [each[name] for session in self.shaken_more if (each := self.outputs_of(session, feeds))]
            reason = difference(want, got, near, exact, half, self.on_purpose)
        is_value = isinstance(got, np.ndarray) and (got.dtype, got.shape) == (want.dtype, want.shape)
        if reason and not half and is_value and largest_inside(self._part(name), feeds) > LARGEST_SQUARED:
            got = np.where(is_wrong(want, exact), want, got)  # the square of a value overflows, in kernels too
            reason = difference(want, got, near, exact, half, self.on_purpose)
        if reason and is_value and half == "bfloat16" and half_precision_of(self.model) == "float16":
            with np.errstate(all="ignore"):  # a number that only float16 has no room for
                got = np.where(np.isinf(want) & (np.abs(got) > LARGEST_FLOAT16), want, got)
            reason = difference(want, got, near, exact, half, self.on_purpose)
        if reason and half and is_value and self._overflows(feeds, half, got):
            return None  # an order of sums may overflow, and a conversion was made for smaller inputs
        return reason

    def is_changed_by_onnxruntime(self, feeds: Arrays, expected: Arrays) -> bool:
        """Return whether onnxruntime's optimizations break the original, or change an output by more than rounding.

        They drop quantizers, for example, whose results have one reader: what they do without the nodes that nothing
        reads counts too, as every optimizer drops these.
        """
        if self._usual is None:
            self._usual = [Session(each, optimize=True) for each in (self.model, without_unused_nodes(self.model))]
        usual, live = (outputs_of(each, feeds) for each in self._usual)
        if usual is None or live is None:
            return True
        return any(self.difference(feeds, n, expected[n], each[n]) for each in (usual, live) for n in expected)

    def outputs_of(self, session: Session, feeds: Arrays) -> dict[str, Any] | None:
        """Return what a session computed the first time on these inputs."""
        if self._feeds is not feeds:
            self._feeds, self._runs = feeds, {}
        if session not in self._runs:
            self._runs[session] = outputs_of(session, feeds)
        return self._runs[session]

    def _overflows(self, feeds: Arrays, half: str, got: Any) -> bool:
        """Return whether a value on the way to outputs is too large for half precision, or may be in an order of sums.

        Only the former explains a result that is finite: masks have the lowest number.
        """
        limit = min(float(ml_dtypes.finfo(dtype).max) for dtype in (half, got.dtype))
        with np.errstate(all="ignore"):
            is_finite = bool(np.isfinite(got.astype(np.float64)).all())
        return largest_inside(self.model, feeds) > (limit if is_finite else limit / 4)

    def _part(self, name: str) -> onnx.ModelProto:
        """Return what computes an output."""
        return extract(in_execution_order(self.model), [name])

    @property
    def shaken(self) -> list[Session]:
        """The model with each result moved by up to an ulp at random."""
        if self._shaken is None:
            self._shaken = self._shake(self.seed)
        return self._shaken

    @property
    def shaken_more(self) -> list[Session]:
        """The same at other random numbers, for what moves seldom: a sum near 0, or a quantizer's scale."""
        if self._shaken_more is None:
            self._shaken_more = [each for more in range(1, 6) for each in self._shake(self.seed + 1000 * more)]
        return self._shaken_more

    def _shake(self, seed: int) -> list[Session]:
        dtypes = [TensorProto.FLOAT] if self.on_purpose else list(ULPS)
        ulps = dict.fromkeys(ULPS, HALF_ULPS[self.rounds_to]) if self.rounds_to else ULPS
        return list(rounded_otherwise(self.model, seed, dtypes, ulps))

    def _nudged(self, feeds: Arrays, direction: int) -> dict[str, Any]:
        ulp = HALF_ULPS[self.rounds_to] if self.rounds_to else ULP
        return nudged(feeds, direction * ulp)

    def _exact(self, feeds: Arrays, name: str, want: Any) -> Any:
        """Return an output in float32 for a model of half precision, in float64 for others; None if that cannot run."""
        if self.on_purpose:
            return None
        has_half = bool(half_precision_of(self.model))
        if self._wide is None:
            self._wide = Session(model_to_float32(self.model) if has_half else to_float64(self.model))
        wide = outputs_of(self._wide, arrays_to_float32(feeds) if has_half else to_float64_arrays(feeds))
        if wide is None and not has_half:
            wide = in_float64(self.model, feeds)
        if wide is None:
            return None if has_half else want
        value = wide[name]
        if not has_half and isinstance(value, np.ndarray) and value.dtype == np.float64:
            with np.errstate(all="ignore"):
                value = value.astype(want.dtype)
        return value


def _is_special(value: Any) -> bool:
    """Return whether an input has NaN, infinite or very large elements."""
    with np.errstate(all="ignore"):
        return value.dtype.kind in "fV" and not bool((np.abs(value.astype(np.float64)) < LARGE_INPUT).all())


def _is_nan_anywhere(value: Any) -> bool:
    return isinstance(value, np.ndarray) and bool(value.dtype.kind in "fV" and np.isnan(value.astype(np.float32)).any())
