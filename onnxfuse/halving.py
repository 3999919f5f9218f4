"""Convert a model to half precision, measure its error, and keep more nodes in float32 until the error is allowed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import onnx

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError, UsageError, VerificationError, first_line
from onnxfuse.fuse_model import FusedModel, Settings, StageTimer, fuse_model
from onnxfuse.half.choose import Known, Unit
from onnxfuse.half.convert import Converted, Io, convert
from onnxfuse.half.operators import STAY, half_inputs
from onnxfuse.half.precision import FLOAT16, PRECISIONS, REAL, Precision
from onnxfuse.half.ranges import Range, observe
from onnxfuse.half.result import USUAL_FACTOR, HalfError, HalfResult, reasons
from onnxfuse.half.rounded import moved, with_moved_weights
from onnxfuse.half.scale_products import scale_products
from onnxfuse.half.scale_queries import scale_queries
from onnxfuse.half.suspects import suspects
from onnxfuse.half.weights import Weights
from onnxfuse.half.widening import fewest
from onnxfuse.ir.convert_opset import convert_opset, describe_change, state_ir_version
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, Array
from onnxfuse.ir.file_bytes import weight_bytes
from onnxfuse.ir.protos import ONNX_DOMAINS, nodes, opset_of
from onnxfuse.ir.serde import write_model
from onnxfuse.steps import LeftOut, attempt
from onnxfuse.verify.accepted import Accepted, with_dtypes
from onnxfuse.verify.compare import Verification, compare_with
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import compare_output
from onnxfuse.verify.extent import Extent
from onnxfuse.verify.inputs import input_dtypes
from onnxfuse.verify.judge import too_coarse
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.reference import Reference, run_original
from onnxfuse.verify.requested_shapes import draws
from onnxfuse.verify.rounded_results import model_that_rounds
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, model_to_float32

BFLOAT16_OPSET: Final = 13  # the first opset with operators in bfloat16
# The opsets that a model is raised to: 14 is the first whose Reshape distinguishes a size of 0 from a copied size, and
# 22 is the first with convolutions in bfloat16.
RAISED_OPSETS: Final = range(14, 23)
# If the model is not verified, at most this many random inputs of different sizes are tried, because the model may
# refuse some of them.  The ranges of tensors are recorded in the first RUNS runs that succeed.
DRAWS_TRIED: Final = 8
RUNS: Final = 2
MAX_KEPT: Final = 0.5  # share of nodes; if errors require more nodes in float32, the conversion is refused
MAX_WIDENED: Final = 0.1  # without max_error, at most this share of nodes stays in float32 to make errors usual
NOISE_DRAWS: Final = 8  # calls of `_noise`, if one does not explain all errors: results can differ tenfold

Model = tuple[onnx.ModelProto, Path | None]
Scaling = Callable[[ShapeInfo, Mapping[str, Range], Weights], dict[str, Range]]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Request:
    """The values of --dtype, --io and --max-error."""

    precision: Precision
    io: Io
    max_error: float | None


def request(dtype: str | None, io: str, max_error: float | None) -> Request | None:
    """Return the requested conversion; None without a dtype.  Raises UsageError where options contradict each other."""
    if dtype is None:
        given = "io" if io != "float32" else "max_error" if max_error is not None else ""
        if given:
            raise UsageError(f"{given} is for half precision; give the dtype too: float16 or bfloat16")
        return None
    if dtype not in PRECISIONS:
        raise UsageError(f"dtype is 'float16', 'bfloat16', 'int8' or 'float8', not '{dtype}'")
    if io not in ("float32", "half"):
        raise UsageError(f"io is 'float32' or 'half', not '{io}'")
    if max_error is not None and not max_error > 0:
        raise UsageError(f"max_error is a number above 0, such as 0.01, not {max_error}")
    return Request(PRECISIONS[dtype], "half" if io == "half" else "float32", max_error)


@dataclass
class Halving:
    """Converts a model to half precision.

    given  the original, without fused nodes, in the requested opset
    """

    original: onnx.ModelProto
    given: onnx.ModelProto
    folder: Path | None
    wanted: Request
    settings: Settings
    inputs: Mapping[str, Array] | None
    shapes: Sequence[str]
    timer: StageTimer
    verify: Extent | None
    asked: dict[str, str] = field(default_factory=dict)  # nodes requested to stay in float32, and why
    converted: Converted | None = None
    noises: list[dict[str, float]] = field(default_factory=list)  # results of `_noise(0)`, `_noise(1)`, ...
    raised: list[LeftOut] = field(default_factory=list)  # steps of the conversion that raised an exception

    @cached_property
    def source(self) -> onnx.ModelProto:
        """The model before conversion, for bfloat16 in a newer opset if operators need it.

        Raises UsageError for a model whose operators have no bfloat16, and ModelError if a newer opset changes results.
        """
        raised = self.given if self.wanted.precision is FLOAT16 else self._in_first_opset()
        if opset_of(raised) != opset_of(self.original) and self.reference is not None:
            with self.timer.stage("verify"):
                found = compare_with(self.reference, raised)
            if found.passed is False:
                raise ModelError(describe_change(self.original, raised, found.reason))
        return raised

    def _in_first_opset(self) -> onnx.ModelProto:
        """Return the model in the first opset whose operators accept the dtype; operators that never do are ignored.

        If a node cannot be converted to that opset, an older one is used.
        """
        opset = opset_of(self.given)
        first = {_first_opset(node, opset, self.wanted.precision) for node in nodes(self.given.graph)}
        refusals: list[ModelError] = []
        for newer in sorted(first - {opset}, reverse=True) if opset else ():
            try:
                raised = convert_opset(self.given, newer)
            except ModelError as error:
                refusals.append(error)
            else:
                state_ir_version(raised)
                return raised
        if refusals and opset < BFLOAT16_OPSET:
            raise UsageError(
                f"the model has opset {opset}, whose operators have no bfloat16, and onnxfuse {refusals[0]}; "
                "or ask for float16"
            ) from refusals[0]
        return self.given

    # --- facts about the model -------------------------------------------------------------------------------

    @cached_property
    def plain(self) -> FusedModel:
        """The model in its original precision, with constants folded and spellings normalized."""
        settings = Settings([], layout="nchw", keep_unfused=True, sizes=self.settings.sizes)
        return fuse_model(self.source, self.folder, settings, self.timer)

    @cached_property
    def types(self) -> dict[str, int]:
        """The dtypes of all tensors by name; a name that stands for several dtypes is left out."""
        found: dict[str, int] = {}
        several: set[str] = set()
        for _, each in self.plain.everywhere():
            assert each.unfused is not None
            for name, (dtype, _shape) in each.unfused.types.items():
                if dtype and found.setdefault(name, dtype) != dtype:
                    several.add(name)
        for name in several:
            del found[name]
        return found

    @cached_property
    def units(self) -> list[Unit]:
        """The groups of nodes that will be fused; values inside a group are never written to memory."""
        in_float32 = {fusion.name for fusion in self.settings.fusions if fusion.casts}
        settings = Settings(self.settings.fusions, layout="nchw")
        found = fuse_model(self.plain.model, self.folder, settings, self.timer).fused
        return [Unit(one.fusion, frozenset(one.replaces), one.fusion in in_float32) for one in found]

    @cached_property
    def reference(self) -> Reference | None:
        """Runs of the original; None if no verification is wanted, or the original does not run."""
        if not self.verify:
            return None
        with self.timer.stage("verify"):
            try:
                # No extremes, because float16 rounds the scores of fully masked rows, so that their results differ.
                inputs, extent = self.inputs or {}, replace(self.verify, extremes=False)
                return run_original(self.original, self.folder, inputs, self._tell, self.shapes, extent=extent)
            except VerificationError:
                return None

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """The range of each tensor's values by name; empty if the model does not run."""
        with self.timer.stage("ranges"):
            if self.reference is not None:
                feeds: list[Mapping[str, Array]] = [each.feeds for each in self.reference.runs]
                return self._observe(feeds)
            found: dict[str, Range] = {}
            runs = 0
            with suppress(VerificationError):  # raised where inputs cannot be drawn
                for draw in itertools.islice(draws(self.original, self.shapes, self.inputs or {}).usual(), DRAWS_TRIED):
                    seen = self._observe([draw.make()])
                    found |= {name: found[name].joined(one) if name in found else one for name, one in seen.items()}
                    runs += bool(seen)
                    if runs == RUNS:
                        break
            return found

    def _observe(self, feeds: Sequence[Mapping[str, Array]]) -> dict[str, Range]:
        model = self.plain.model
        try:
            return observe(model, self.types, self.folder, feeds, self._tell)
        except Exception:  # any exception of onnxruntime: wrong sizes, custom operators
            return {}

    @cached_property
    def prepared(self) -> tuple[onnx.ModelProto, dict[str, Range]]:
        """The plain model after rescaling values into range, and the ranges of its tensors."""
        found = self.plain.model, self.ranges
        for name, scale in (("scaling of queries", scale_queries), ("scaling of products", scale_products)):
            found = attempt(name, partial(self._scaled, scale, *found), found, self.raised)
        return found

    def _scaled(
        self, scale: Scaling, model: onnx.ModelProto, ranges: dict[str, Range]
    ) -> tuple[onnx.ModelProto, dict[str, Range]]:
        shapes = read_and_infer(model, self.folder)
        made = scale(shapes, ranges, self.weights)
        if not made:
            return model, ranges
        shapes.graph.remove_dead()
        shapes.graph.sort()
        return write_model(shapes.graph), ranges | made

    @cached_property
    def weights(self) -> Weights:
        """The weights of the model."""
        return Weights(self.folder, self.wanted.precision)

    def _tell(self, step: str) -> None:
        self.timer.tell("half", step)

    # --- conversion ------------------------------------------------------------------------------------------

    def convert(self) -> Converted:
        """Return the model in half precision, in which the requested nodes stay in float32."""
        model, ranges = self.prepared
        with self.timer.stage("convert"):
            weights = Weights(self.folder, self.wanted.precision, losses=self.weights.losses)
            self.converted = convert(model, Known(weights, self.units, ranges, self.asked), self.wanted.io)
        return self.converted

    def feeds(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return inputs in the dtypes that the converted model takes."""
        assert self.converted is not None
        return with_dtypes(feeds, input_dtypes(self.converted.model))

    # --- errors ----------------------------------------------------------------------------------------------

    def judge(self, written: onnx.ModelProto) -> HalfResult:
        """Return the result of the conversion, with the errors of the optimized model."""
        result = self._result(written)
        with self.timer.stage("verify"):
            if self.reference is None:
                note = "its errors were not measured" + (": the original does not run" if self.verify else "")
                return replace(result, note="; ".join(filter(None, [result.note, note])))
            try:
                return replace(result, errors=self._errors(written))
            except Exception as error:
                return replace(result, note=f"its errors were not measured: {first_line(error)}")

    def compare_noisy(self, verified: Verification, written: onnx.ModelProto, accepted: Accepted) -> Verification:
        """Return a verification of the same outputs as in `onnxfuse verify`, which compares with the original.

        `verified` compares the optimized model with the converted one.  Where the noise is too large for that, the
        error that was allowed decides; the model fails if that is exceeded.  Where even that is too large, the output
        counts as not compared.
        """
        if verified.passed is False or self.reference is None:
            return verified
        coarse = {name: NotCompared(name, why) for name, why in too_coarse(accepted).items()}
        outputs = [each for each in verified.outputs if each.name not in coarse]
        missing = {each.name: each for each in verified.not_compared}
        missing |= {each.name: coarse[each.name] for each in verified.outputs if each.name in coarse}
        if accepted.tolerances.keys() & missing.keys() - coarse.keys():
            reference = replace(self.reference, accepted=accepted, numbers_for_nan=accepted.numbers_for_nan)
            with self.timer.stage("verify"):
                found = compare_with(reference, written)
            added = [each for each in found.outputs if missing.pop(each.name, None)]
            if found.passed is False:
                left = tuple(missing.values())
                return replace(verified, passed=False, reason=found.reason, outputs=found.outputs, not_compared=left)
            outputs += added
        passed = True if outputs or verified.equal_parts else None
        return replace(verified, passed=passed, outputs=tuple(outputs), not_compared=tuple(missing.values()))

    def settle(self, attempt: Callable[[bool], tuple[Made, HalfResult]]) -> tuple[Made, HalfResult]:
        """Try to convert the model with more and more nodes in float32, until its errors are allowed.

        Returns the result of the attempt with the fewest such nodes, and its errors.

        attempt  converts the model, with the nodes in float32 that this object requests, and measures the errors; if
                 its argument is true, it verifies the model first

        By default, errors must be usual (`HalfError.is_usual`), and at most the share MAX_WIDENED of the nodes stays in
        float32.  If that is not enough, the first model with finite outputs is returned, with a note.  Raises
        VerificationError if outputs are not finite, or errors exceed max_error, although the share MAX_KEPT of the
        nodes stays in float32.
        """
        first = attempt(True)
        result = first[1]
        if self._is_allowed(result):
            return first
        must = self.wanted.max_error is not None or not _is_finite(result)
        limit = max(2, int((MAX_KEPT if must else MAX_WIDENED) * result.nodes))  # at least a producer and a consumer
        tried: dict[int, HalfResult] = {0: result}

        def suffices(count: int) -> bool:
            self._ask(count, _why(result, self.wanted.max_error))
            tried[count] = told = attempt(False)[1]
            return self._is_allowed(told) and not (must and len(told.kept) > MAX_KEPT * told.nodes)

        count = fewest(suffices, min(limit, len(self._queue)))
        if count is None and self.wanted.max_error is None:
            count = min((n for n, told in tried.items() if _is_finite(told)), default=None)
        if count is None:
            raise VerificationError(self._refusal(tried[max(tried)]))
        made, last = first
        if count:
            self._ask(count, _why(result, self.wanted.max_error))
            made, last = attempt(True)
            if must and not (_is_finite(last) if self.wanted.max_error is None else self._is_allowed(last)):
                raise VerificationError(self._refusal(last))
        if self.wanted.max_error is None and last.unusual is not None:
            last = replace(last, note="; ".join(filter(None, [last.note, _unexplained(tried)])))
        return made, last

    def _is_allowed(self, result: HalfResult) -> bool:
        """Return whether no error is larger than max_error; if max_error was not given, whether no error is unusual."""
        if self.wanted.max_error is None:
            return result.unusual is None
        return all(each.error <= self.wanted.max_error for each in result.errors)

    def _refusal(self, result: HalfResult) -> str:
        """Return why a model cannot be converted as requested."""
        worst, name = result.worst, self.wanted.precision.name
        share = f"with {len(result.kept)} of {result.nodes} nodes in float32"
        advice = "allow a larger error, or keep float32"
        if worst is None or self._is_allowed(result):
            return f"an error of {self.wanted.max_error} is kept in {name} only {share}; {advice}"
        found = (
            f"is off by {worst.error:.1e} of its largest value"
            if math.isfinite(worst.error)
            else "has another shape or is infinite"
        )
        return f"output '{worst.name}' {found} in {name}, {share}; {advice}"

    def _ask(self, count: int, reason: str) -> None:
        """Request float32 for the `count` nodes that add most to the error, and for all nodes fused with them."""
        queue = self._queue  # the order of the first conversion, before more nodes are requested
        self.asked.clear()
        for name in queue[:count]:
            unit = next((unit.nodes for unit in self.units if name in unit.nodes), frozenset({name}))
            self.asked |= dict.fromkeys(unit, reason)

    def _result(self, written: onnx.ModelProto) -> HalfResult:
        assert self.converted is not None
        note = "" if self.ranges else "the model was not run to see how large its tensors become"
        return HalfResult(
            self.wanted.precision.name, self.wanted.io, self.converted.nodes, self.converted.kept,
            reasons(self.converted.by_rule), weight_bytes(self.original), weight_bytes(written), (),
            self.wanted.max_error, note, added_masks=self.converted.added_masks,
        )  # fmt: skip

    def _errors(self, written: onnx.ModelProto) -> tuple[HalfError, ...]:
        """Return the error of each floating-point output, and the output's noise as `_noise` measures it."""
        assert self.converted is not None and self.reference is not None
        self._tell("errors")
        made = self._outputs(written, as_is=False)
        if self.wanted.precision is FLOAT16:  # onnxruntime's own float16 results may be NaN, which this run shows
            made += self._outputs(written, as_is=True)
        errors = self._distances(made)
        found: tuple[HalfError, ...] = ()
        for draw in range(NOISE_DRAWS):
            if draw == len(self.noises):
                self.noises.append(self._noise(draw))
            found = tuple(
                HalfError(name, error, _root_mean_square([each[name] for each in self.noises]))
                for name, error in errors.items()
            )
            if len(self.noises) == 1 and all(each.error <= USUAL_FACTOR * each.noise for each in found):
                break
        return found

    def _noise(self, draw: int) -> dict[str, float]:
        """Return how far each output changes in float32 if weights and inputs are perturbed by one rounding error.

        draw  the number of the draw: each draw perturbs the values in other random directions
        """
        assert self.reference is not None
        precision = self.wanted.precision
        self._tell(f"noise {draw + 1}")
        wide = model_to_float32_exactly(self.plain.model)
        model, weights = with_moved_weights(wide, self.folder, precision, draw)
        session = open_session(model, self.folder if weights.scratch is None else weights.scratch.path)
        feeds = [moved(arrays_to_float32(each.feeds), precision, draw) for each in self.reference.runs]
        return self._distances([run(session, each) for each in feeds])

    def _distances(self, results: Sequence[Mapping[str, object]]) -> dict[str, float]:
        """Return the largest error of each floating-point output over all runs; several models' runs can follow."""
        assert self.reference is not None
        runs = self.reference.runs
        exact = [{**each.outputs, **each.float32_outputs} for each in runs]
        return {
            name: max(_distance(name, old[name], new[name]) for old, new in zip(itertools.cycle(exact), results))
            for name, value in runs[0].outputs.items()
            if name not in self.reference.not_compared
            and isinstance(value, np.ndarray) and value.dtype.name in DTYPE_NUMBERS and value.dtype.kind in "fV"
        }  # fmt: skip

    def _outputs(self, model: onnx.ModelProto, *, as_is: bool) -> list[dict[str, object]]:
        """Return the outputs of a model in half precision for each run.

        as_is  run the model unchanged in onnxruntime; else in float32, with each node's result rounded
        """
        assert self.converted is not None and self.reference is not None
        runs = [self.feeds(each.feeds) for each in self.reference.runs]
        if as_is:
            session = open_session(model, self.converted.folder)
            return [run(session, feeds) for feeds in runs]
        session = open_session(model_that_rounds(model, self.converted.types), self.converted.folder, optimize=False)
        return [run(session, arrays_to_float32(feeds)) for feeds in runs]

    @cached_property
    def _queue(self) -> list[str]:
        """The nodes in the order in which to keep them in float32: suspects first, then the others from the last on."""
        assert self.converted is not None and self.reference is not None
        feeds, converted = self.reference.runs[0].feeds, self.converted
        half, given = model_that_rounds(converted.model, converted.types), arrays_to_float32(self.feeds(feeds))
        plain, rounded = (self.prepared[0], self.folder), (half, converted.folder)
        found: list[str] = []
        with self.timer.stage("verify"), suppress(Exception):  # any exception of onnxruntime
            reals = {name for name, dtype in self.types.items() if dtype in REAL} | self.prepared[1].keys()
            found = suspects(plain, rounded, reals, feeds, given, self._tell)
        every = [each.name or each.output[0] for each in self.plain.model.graph.node]
        return [*found, *(name for name in reversed(every) if name not in set(found))]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _is_finite(result: HalfResult) -> bool:
    return all(math.isfinite(each.error) for each in result.errors)


def _why(result: HalfResult, max_error: float | None) -> str:
    """Return why the errors of a conversion require more nodes in float32."""
    worst = result.worst if max_error is not None or not _is_finite(result) else result.unusual
    assert worst is not None
    if math.isfinite(worst.error):
        return f"the error of '{worst.name}' was {worst.error:.1e}"
    return f"'{worst.name}' had another shape or was infinite"


def _unexplained(tried: Mapping[int, HalfResult]) -> str:
    """Return the note that an error stayed unusually large, although more nodes were kept in float32."""
    most = max(tried)
    last = tried[most].unusual
    told = f"errors are more than {USUAL_FACTOR:g} times the noise"
    if last is None:
        return told
    return (
        f"{told}; with {most} more nodes in float32, '{last.name}' is still off by {last.error:.1e}. "
        "`--max-error` lets more nodes stay"
    )


def _first_opset(node: onnx.NodeProto, opset: int, precision: Precision) -> int:
    """Return the first opset, from `opset` on, in which a node's first input can have the dtype; `opset` if none."""
    if node.domain not in ONNX_DOMAINS or node.op_type in STAY:
        return opset
    opsets, count = (opset, *(newer for newer in RAISED_OPSETS if newer > opset)), len(node.input)
    return next((each for each in opsets if 0 in half_inputs(node.op_type, count, each, precision)), opset)


def model_to_float32_exactly(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose half-precision parts are evaluated in float32; the model itself if it has no such parts."""
    return model_to_float32(model) if half_precision_of(model) else model


def _distance(name: str, expected: object, actual: object) -> float:
    """Return the error of an output relative to the largest expected value; the two dtypes may differ."""
    assert isinstance(expected, np.ndarray)
    new = np.asarray(actual)
    if new.shape != expected.shape:
        return math.inf
    return compare_output(name, expected.astype(np.float32), new.astype(np.float32)).max_rel
