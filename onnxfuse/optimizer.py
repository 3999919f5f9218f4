"""Optimize a model: load it, fuse it, verify the result, and fuse it again without the matches that are wrong."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import onnx

from onnxfuse.choices import Choices, Chosen, choices_of, read_choices
from onnxfuse.culprits import fused_nodes
from onnxfuse.dsl import catalogue
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.emit_standard import in_newest_opset, in_standard_operators, needs_newer_opset, what_was_written
from onnxfuse.errors import ModelError, UsageError, VerificationError
from onnxfuse.fuse_model import (
    Check,
    FusedModel,
    Regions,
    Settings,
    StageTimer,
    fuse_model,
    no_garbage_collection,
)
from onnxfuse.half.result import HalfResult
from onnxfuse.halving import Halving, Request, request
from onnxfuse.ir.convert_opset import convert_opset, describe_change, state_ir_version
from onnxfuse.ir.digest import graph_digest
from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.file_bytes import file_bytes
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.load import load
from onnxfuse.ir.protos import count_nodes, is_constant, nodes, opset_of
from onnxfuse.layout.assign import LAYOUT
from onnxfuse.layout.conversion import Layout
from onnxfuse.layout.fusions import LAYOUT_FUSIONS
from onnxfuse.match import Miss
from onnxfuse.passes import Folded
from onnxfuse.pipeline import PASS_NAMES, WEIGHT_PASSES
from onnxfuse.quantize.quantize_static import MAX_SAMPLES_COMPARED, OPTIMISTIC, STATIC, quantize_static
from onnxfuse.quantize.quantize_weights import BITS, quantize_weights
from onnxfuse.quantize.result import QuantizedModel
from onnxfuse.quantize.with_errors import Stored, beside_reference, with_errors
from onnxfuse.recurrences import SCAN
from onnxfuse.report.facts import gather_facts
from onnxfuse.report.operators import count_operators
from onnxfuse.report.outline import Rewritten, outline
from onnxfuse.report.report import Dropped, Report, Subgraph, quantized_operators
from onnxfuse.report.unmatched import why_no_region, why_no_scan, why_not_made, why_unmatched
from onnxfuse.rewrite.replace import REGION, Fused
from onnxfuse.steps import REPORT, SPELLING, LeftOut, Progress, attempt
from onnxfuse.unfuse_model import has_fused_nodes, in_operators
from onnxfuse.verifier import WEIGHT_FOLDING, Verifier
from onnxfuse.verify.accepted import NOTHING_ACCEPTED, Accepted, state_accepted
from onnxfuse.verify.check_bodies import faults_of_bodies
from onnxfuse.verify.compare import NOT_VERIFIED, Verification
from onnxfuse.verify.compare_parts import PartFinding, PartsVerification
from onnxfuse.verify.extent import CUT, FULL, LEFT_OUT_BY_QUICK, Budget, Extent, Level, extent_of
from onnxfuse.verify.inputs import load_samples, model_inputs
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.own_process import DEFAULT_TIMEOUT, own_process
from onnxfuse.verify.requested_shapes import parse_shapes, with_known_ranks

Emit: TypeAlias = Literal["functions", "standard"]  # the form of a fusion in the optimized model

LONG_VERIFICATION = 10.0  # seconds, after which the report names the quick verification
MAX_ROUNDS_OF_PARTS = 3  # a fusion whose nodes were undone in this many rounds is left out as a whole
CONSTANT_FOLDING = "constant"  # the name in the report when the folding of a constant is undone
TWICE = 2.0  # the tolerance that is stored with a quantized model, relative to the errors that were measured
BODIES = "subgraphs"  # the name in the report when all that was done inside If, Loop and Scan is undone


def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, *,
    only: Iterable[str] = (), skip: Iterable[str] = (), patterns: Iterable[str | os.PathLike[str]] = (),
    fallback: Literal["onnx", "ort"] = "onnx", emit: Emit = "functions", layout: Layout = "auto",
    regions: Regions = True, plan: str | os.PathLike[str] | None = None, verify: bool | Level = True,
    inputs: Mapping[str, Array] | None = None, shapes: Sequence[str] = (), timeout: float | None = DEFAULT_TIMEOUT,
    tolerance: float | None = None, dtype: Literal["float16", "bfloat16", "int8", "float8"] | None = None,
    io: Literal["float32", "half"] = "float32", max_error: float | None = None,
    weights: Literal["int4", "int8"] | None = None,
    calibrate: str | os.PathLike[str] | Mapping[str, Array] | None = None,
    reference: str | os.PathLike[str] | bytes | onnx.ModelProto | None = None,
    estimate: Sequence[str] | None = None, progress: Progress = lambda stage, done, of: None,
) -> tuple[onnx.ModelProto, Report]:  # fmt: skip
    """Fuse a model.

    model     a path, a serialized model or a ModelProto (which is not changed); external data stays on disk
    only      names of the fusions to apply; all if empty.  "region" alone makes nothing but regions
    skip      names of fusions to leave out
    patterns  folders of Python files with further fusions; a fusion replaces one of the same name
    fallback  operators that the bodies of fused nodes consist of: standard ONNX, or also onnxruntime's own
    emit      the form of a fusion in the result: a node that calls a function, or ONNX's own operators of opset 23 or
              24 ("standard"), for other runtimes; images then stay channels-first, and there are no regions
    layout    the layout of images around convolutions: channels-last where that pays ("auto") or wherever possible, or
              channels-first
    regions   whether connected operators that no pattern names become fused nodes (regions) where that should save
              traffic or launches, or join the kernel of a product or convolution before them.  "apart" makes regions,
              and lets no operators join
    plan      a file of `onnxfuse plan` for this model; the nodes of a match that it switches off stay unfused
    verify    run each fused node and the nodes that it replaced, and both models, in onnxruntime; undo fusions that
              differ.  True is "full", False is "off".  "quick" compares at one combination of sizes.  "full" goes on
              like that after about ten times the original's own run, and at least 30 s; the report says what is left
              out
    inputs    arrays to verify with, by input name; others are generated
    shapes    sizes to verify and to estimate traffic with, as "input:8x512"; others are chosen
    timeout   seconds that opening a model in onnxruntime, or one run of it, may take in a process of its own; None runs
              models in this process, without a limit, and not at sizes of 0, at which onnxruntime can crash
    tolerance the largest relative error of an output; by default it depends on the dtype and the original's noise
    dtype     the half precision that the model is converted to; nodes that overflow or lose too much stay in float32.
              External weights then lie in `report.folder`, as long as the report exists.  Or "int8": onnxruntime's
              quantizer makes int8 of the weights of convolutions and products, and uint8 of the tensors that they read.
              Or "float8": it makes float8 (e4m3fn) of both
    io        the dtype of floating-point inputs and outputs where the model is converted: float32, or `dtype` ("half")
    max_error the largest relative error that is allowed against float32; as many nodes stay in float32 as are needed
              for it.  By default, nodes stay in float32 until errors are within three times the noise of half
              precision, but at most a tenth of all nodes
    weights   the integers that weights of MatMuls are quantized to before fusing, by onnxruntime's quantizer, in blocks
              of 32 with one scale each; needs the package onnx_ir
    calibrate for dtype="int8" or "float8", inputs that give the ranges of tensors: an .npz file, or arrays by input
              name.  Each has one more axis than the input: the first, which counts samples.  If an array lacks this
              axis, all arrays together are one sample
    reference the float model of a quantized model, with the same inputs and outputs: the report then has the errors of
              `model` and of the optimized model against the float model
    estimate  sizes to estimate traffic with, in place of `shapes`
    progress  called with the stage, the amount of it that is done, and the total amount

    Returns the model, whose fused nodes call model-local functions, and the report.  Raises ModelError for a model that
    cannot be read, or that changes in a newer opset that emit="standard" requires; UsageError for an unknown fusion, a
    plan of another model or inputs that do not fit; VerificationError if the models differ, and no fusion or folding is
    the cause, or `max_error` is exceeded.
    """
    only, half = list(only), request(None if dtype in STATIC else dtype, io, max_error)
    path = str(model) if isinstance(model, str | os.PathLike) else None
    settings = _with_operators(_settings(only, list(skip), patterns, layout, regions), fallback, emit, only)
    _check_conversions(dtype, weights, plan, calibrate)
    extent = extent_of(verify)
    _check_reference(reference, dtype or weights, extent)
    timer = StageTimer(progress)
    # Without verification, only a conversion to half precision runs models.
    with own_process(timeout, at_once=extent is not None, shared=True):
        with timer.stage("load"):
            original, folder = load(model)
        sizes = shapes if estimate is None else estimate
        wanted = model_inputs(with_known_ranks(original, sizes, inputs)) if sizes else []
        settings = replace(settings, sizes=parse_shapes(sizes, wanted))
        choices = None if plan is None else read_choices(Path(plan), original)
        job = _Job(
            original, folder, settings, timer, only, choices, extent, inputs, shapes, tolerance, half,
            opset_of(original),
        )  # fmt: skip
        samples = [] if calibrate is None else load_samples(calibrate, original)
        quantized = _quantized(job, weights, dtype, samples, f"'{path}'" if path else "the model")
        if quantized is None:
            return _optimize(job, path) if reference is None else _beside(reference, job, path)
        made, report = _optimize(replace(job, original=quantized.model, opset=opset_of(quantized.model)), path)
        told = quantized.result
        if extent:
            compared, sizes = (samples[:MAX_SAMPLES_COMPARED], ()) if samples else ([inputs or {}], shapes)
            with timer.stage("verify"):
                tell = functools.partial(timer.tell, "verify")
                told = with_errors(told, (original, folder), made, compared, sizes, tell)
            if samples and told.errors:
                told = replace(told, note=OPTIMISTIC)
            allowed = {each.name: TWICE * each.max_rel for each in told.errors if 0 < each.max_rel < math.inf}
            if allowed:
                state_accepted(made, original, Accepted(allowed, "twice the error that quantizing was reported with"))
        return made, replace(report, weights=told)


def _check_conversions(dtype: str | None, weights: str | None, plan: object, calibrate: object) -> None:
    """Raise UsageError for conversions that do not exist, or that do not go together."""
    if weights is not None and weights not in BITS:
        raise UsageError(f"weights is 'int4' or 'int8', not '{weights}'")
    if weights and dtype:
        raise UsageError("dtype and weights are two steps; save the model that dtype gives, and quantize that")
    if dtype in STATIC and calibrate is None:
        raise UsageError(
            f"dtype {dtype} takes the ranges of tensors from inputs; give calibrate, an .npz file of these"
        )
    if dtype not in STATIC and calibrate is not None:
        kinds = " or ".join(STATIC)
        raise UsageError(f"calibrate gives the ranges of tensors for dtype {kinds}; give that dtype, or leave it out")
    if plan is not None and (dtype or weights):
        text, given = "a plan lists the matches of the model as it is", "dtype" if dtype else "weights"
        raise UsageError(f"{text}; save the model that {given} gives, and make a plan of that")


def _check_reference(reference: object, converted: str | None, verify: Extent | None) -> None:
    """Raise UsageError for a reference that would not be used."""
    if reference is not None and converted:
        raise UsageError(f"{converted} is compared with the model itself; leave the reference out")
    if reference is not None and not verify:
        raise UsageError("the reference is run in verification, which is switched off; leave one of the two out")


def _beside(
    reference: str | os.PathLike[str] | bytes | onnx.ModelProto, job: _Job, path: str | None
) -> tuple[onnx.ModelProto, Report]:
    """Return the optimized model and its report, with the errors of both models relative to the reference."""
    float_model = _reference(reference, job)
    made, report = _optimize(job, path)
    name = str(reference) if isinstance(reference, str | os.PathLike) else "the reference"
    models = (job.original, job.folder), (made, report.folder or job.folder)
    with job.timer.stage("verify"):
        tell = functools.partial(job.timer.tell, "verify")
        found = beside_reference(name, float_model, models, job.inputs or {}, job.shapes, tell)
    return made, replace(report, reference=found)


def _reference(reference: str | os.PathLike[str] | bytes | onnx.ModelProto, job: _Job) -> Stored:
    """Load the float model of a quantized one.  Raises UsageError if its inputs or outputs have other names."""
    model, folder = load(reference)
    graphs = job.original.graph, model.graph
    stored = [{tensor.name for tensor in graph.initializer} for graph in graphs]
    inputs = [{each.name for each in graph.input} - names for graph, names in zip(graphs, stored, strict=True)]
    outputs = [{each.name for each in graph.output} for graph in graphs]
    for what, (expected, found) in (("inputs", inputs), ("outputs", outputs)):
        if expected != found:
            names = ", ".join(f"'{name}'" for name in sorted(expected ^ found))
            raise UsageError(f"the reference needs the {what} of the model; only one of the two has {names}")
    return model, folder


def _quantized(
    job: _Job, weights: str | None, dtype: str | None, samples: Sequence[Mapping[str, Array]], name: str
) -> QuantizedModel | None:
    """Return the quantized original: only its weights if `weights` is given, else activations too, by `samples`.

    Returns None if neither is given.  Before activations are quantized, operators such as BatchNormalization are folded
    into weights, and the result is verified.
    """
    if weights:
        with job.timer.stage("quantize"):
            return quantize_weights(job.original, job.folder, weights, name)
    if dtype is None or dtype not in STATIC:
        return None
    source = in_operators(job.original, job.folder)[0] if has_fused_nodes(job.original) else job.original
    raised = convert_opset(source, STATIC[dtype].oldest_opset)
    if raised is not source:
        state_ir_version(raised)
    folded = _fuse_verified(replace(job, settings=Settings((), layout="nchw"), only=()), raised)
    with job.timer.stage("quantize"):
        return quantize_static(folded.model.written, job.folder, dtype, samples, name, job.settings.sizes)


def find_matches(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    patterns: Iterable[str | os.PathLike[str]] = (),
    layout: Layout = "auto",
    regions: Regions = True,
    progress: Progress = lambda stage, done, of: None,
) -> Choices:
    """Return the matches that `optimize` applies with these arguments before it verifies, all switched on.

    Raises ModelError if the model cannot be read, UsageError for an unknown fusion.
    """
    settings = _settings(list(only), list(skip), patterns, layout, regions)
    original, folder = load(model)
    result = fuse_model(original, folder, settings, StageTimer(progress))
    name = Path(model).name if isinstance(model, str | os.PathLike) else original.graph.name
    return Choices(name, graph_digest(original), choices_of(result.fused_of_model), result.left_out)


def _settings(
    only: Sequence[str],
    skip: Sequence[str],
    patterns: Iterable[str | os.PathLike[str]],
    layout: Layout,
    regions: Regions,
) -> Settings:
    """Return the settings that correspond to these arguments of `optimize`.

    If `only` names fusions, the layout step makes no others, either.  Raises UsageError for an unknown fusion or
    layout.
    """
    if layout not in get_args(Layout):
        raise UsageError(f"layout is 'auto', 'nchw' or 'nhwc', not '{layout}'")
    fusions = catalogue.select(catalogue.with_folders(patterns), only, skip, also=[REGION, SCAN, *LAYOUT_FUSIONS])
    left_out = frozenset(name for name in LAYOUT_FUSIONS if name in skip or (only and name not in only))
    scans = SCAN in only or (regions is not False and SCAN not in skip and not only)
    if REGION in skip or (only and REGION not in only):
        regions = False
    elif REGION in only:
        regions = regions or True
    return Settings(fusions, layout=layout, regions=regions, scans=scans, left_out=left_out)


def _with_operators(
    settings: Settings, fallback: Literal["onnx", "ort"], emit: Emit, only: Collection[str]
) -> Settings:
    """Return the settings with the operators that bodies consist of.  Raises UsageError for contradictory options."""
    if fallback not in ("onnx", "ort"):
        raise UsageError(f"fallback is 'onnx' or 'ort', not '{fallback}'")
    if emit not in get_args(Emit):
        raise UsageError(f"emit is 'functions' or 'standard', not '{emit}'")
    if emit == "functions":
        return replace(settings, operators=fallback)
    options = {
        "fallback ort": fallback == "ort", "layout nhwc": settings.layout == "nhwc", "only region": REGION in only,
    }  # fmt: skip
    if wrong := next((name for name, given in options.items() if given), None):
        raise UsageError(f"emit standard writes no functions, so that {wrong} has no effect; leave one of the two out")
    return replace(settings, operators="standard", layout="nchw", regions=False, scans=False)


@dataclass(frozen=True)
class _Job:
    """A model, and the settings of `optimize`."""

    original: onnx.ModelProto
    folder: Path | None
    settings: Settings
    timer: StageTimer
    only: Sequence[str]
    choices: Choices | None
    verify: Extent | None
    inputs: Mapping[str, Array] | None
    shapes: Sequence[str]
    tolerance: float | None
    half: Request | None
    opset: int  # opset of the original
    is_converted: bool = False  # whether the model is in half precision

    @property
    def is_standard(self) -> bool:
        """Whether fusions are written as ONNX's own operators."""
        return self.settings.operators == "standard"

    def written(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return the form in which a fused model is written: unchanged, or in ONNX's own operators."""
        return in_standard_operators(model, self.folder, self.opset)[0] if self.is_standard else model


@dataclass(frozen=True)
class _Found:
    """The fused model, the result of its verification, and the matches left out because of this result or of a plan."""

    model: FusedModel
    verified: Verification
    taken_back: TakenBack
    switched_off: tuple[str, ...] = ()
    raised: tuple[LeftOut, ...] = ()  # the verification step, if it raised
    folder: Path | None = None  # the folder of the fused model's weights
    halving: Halving | None = None
    half: HalfResult | None = None  # the errors of the model in half precision

    @property
    def before(self) -> FusedModel:
        """The model before its conversion to half precision; `model` if no conversion was requested."""
        return self.halving.plain if self.halving else self.model

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The steps that raised, without duplicates."""
        of_half = self.halving.raised if self.halving else ()
        every = (*self.before.left_out, *of_half, *self.model.left_out, *self.raised)
        return tuple({one.step: one for one in every}.values())


def _optimize(job: _Job, path: str | None) -> tuple[onnx.ModelProto, Report]:
    """Return the optimized model and its report, as `optimize` does."""
    source = job.original
    # Unfuse them: fused nodes fit one dtype and one opset only.
    if (job.is_standard or job.half) and has_fused_nodes(source):
        source = in_operators(source, job.folder)[0]
    found = _fuse_standard(job, source) if job.is_standard else _fuse_source(job, source)
    accepted = _accepted(job, found)
    if accepted != NOTHING_ACCEPTED and found.model.written is not job.original:
        state_accepted(found.model.written, job.original, accepted)
    if found.halving:
        written = found.model.written
        found = replace(found, verified=found.halving.compare_noisy(found.verified, written, accepted))
    return found.model.written, _report(job, path, found)


def _accepted(job: _Job, found: _Found) -> Accepted:
    """Return the differences from the original that were accepted; default tolerances of dtypes are not included."""
    if found.half is not None:
        set_by = f"the error that was allowed for {found.half.dtype}"
        return Accepted(found.half.tolerances, set_by, found.half.dtype, job.is_standard)
    given = {} if job.tolerance is None else {each.name: job.tolerance for each in found.verified.outputs}
    return Accepted(given, "the tolerance that `optimize` was given" if given else "", "", job.is_standard)


def _fuse_standard(job: _Job, source: onnx.ModelProto) -> _Found:
    """Fuse a model in the newest opset, or in its own opset if no operator to be written needs a newer one."""

    def fuse(model: onnx.ModelProto) -> FusedModel:
        return fuse_model(model, job.folder, job.settings, job.timer)

    newest = in_newest_opset(source)
    try:
        found = _fuse_source(job, newest)
        if not opset_of(found.model.written) > job.opset > 0 or needs_newer_opset(found.model, job.opset):
            return found
    except ModelError:  # onnxruntime refuses some quantized models in opset 21 that it accepts in opset 20
        if newest is source or needs_newer_opset(fuse(newest), job.opset):
            raise
    return _fuse_source(job, source)


def _fuse_source(job: _Job, source: onnx.ModelProto) -> _Found:
    """Fuse the original, given in the opset for fusing, and convert it to half precision if requested."""
    if job.half is None:
        return _fuse_verified(job, source)
    halving = Halving(
        job.original, source, job.folder, job.half, job.settings, job.inputs, job.shapes, job.timer, job.verify
    )

    def attempt(verify: bool) -> tuple[_Found, HalfResult]:
        converted = halving.convert()
        inputs = None if job.inputs is None else halving.feeds(job.inputs)
        given = replace(
            job, original=converted.model, folder=converted.folder, inputs=inputs, is_converted=True,
            verify=job.verify if verify else None,
        )  # fmt: skip
        found = _fuse_verified(given, converted.model)
        return found, replace(halving.judge(found.model.written), scratch=converted.scratch)

    found, told = halving.settle(attempt)
    return replace(found, halving=halving, half=told)


def _fuse_verified(job: _Job, source: onnx.ModelProto) -> _Found:
    """Fuse a model and verify it; return the fused model, the verification, and everything that was undone.

    source  the original in the opset in which it is fused
    """
    chosen = Chosen(job.choices) if job.choices else None
    verifier = Verifier(
        job.original, job.folder, job.inputs, job.timer, job.shapes, job.tolerance, job.is_converted, job.is_standard,
        replace(job.verify, budget=Budget()),
    ) if job.verify else None  # fmt: skip
    search = _Search(job, source, verifier, chosen)
    try:
        result = search.fuse(replace(job.settings, keep_unfused=job.verify is not None), verdict=search)
    except VerificationError:
        if verifier is not None:
            _check_converted(verifier, source)
        raise
    if chosen:
        chosen.check_known()
    off, raised = tuple(chosen.switched_off) if chosen else (), tuple(verifier.raised) if verifier else ()
    return _Found(result, search.verified, search.taken_back, off, raised, job.folder)


def _check_converted(verifier: Verifier, source: onnx.ModelProto) -> None:
    """Raise ModelError if converting the original to a newer opset, before fusing, has changed its results."""
    is_raised = opset_of(source) != opset_of(verifier.original)
    converted = verifier.verify(source) if is_raised else NOT_VERIFIED
    if converted.passed is False:
        raise ModelError(describe_change(verifier.original, source, converted.reason))


# --- the report -----------------------------------------------------------------------------------------------------


@no_garbage_collection()
def _report(job: _Job, path: str | None, found: _Found) -> Report:
    """Return the report; a part is left out if creating it raised."""
    original, result, raised = job.original, found.model, list(found.left_out)
    fusions = job.settings.fusions
    told_of = functools.partial(attempt, REPORT, raised=raised)
    given = told_of(lambda: inline_functions(original).model, original).graph
    known = {one.fusion for one in found.taken_back.dropped}
    known |= {name.partition(":")[0] for name in found.switched_off}
    facts = told_of(
        lambda: gather_facts(original, result.written, path, fusions, _graphs(result), _why_not_fused(result)), None
    )
    return Report(
        {"path": path, "nodes": count_nodes(given), "fused": sum(map(is_fused, nodes(given))),
         "opset": opset_of(original),
         "bytes": file_bytes(Path(path), original) if path else None, "digest": graph_digest(original)},
        {"path": None, "nodes": count_nodes(result.written.graph), "bytes": None},
        result.fused_of_model, (*(found.before.all_folded if found.halving else ()), *result.all_folded),
        told_of(lambda: tuple(result.near()), ()),
        tuple(found.taken_back.dropped), found.before.before, result.after, _with_duration(job, found.verified),
        job.timer.seconds, result.layout, result.without_regions, tuple(_subgraphs(result, found.before)),
        found.before.inlined, result.stays,
        quantized_operators(result.written), what_was_written(result) if job.is_standard else None,
        told_of(lambda: count_operators(given, result.written.graph), ()),
        told_of(lambda: _unmatched(result, fusions, job.only, known), {}), found.switched_off, facts, found.half,
        found.folder, tuple(raised),
    )  # fmt: skip


def _with_duration(job: _Job, verified: Verification) -> Verification:
    """Add a note with its duration and what "quick" leaves out to a long full verification that left nothing out."""
    seconds = job.timer.seconds.get("verify", 0.0)
    is_cut = any(note.startswith(CUT) for note in verified.notes)
    if job.verify != FULL or seconds <= LONG_VERIFICATION or is_cut:
        return verified
    note = f"the verification took {seconds:.0f} s; with `--verify quick` it leaves out {LEFT_OUT_BY_QUICK}"
    return replace(verified, notes=(*verified.notes, note))


def _unmatched(
    result: FusedModel, fusions: Sequence[Fusion], only: Sequence[str], told: Collection[str]
) -> dict[str, str]:
    """Return why fusions named by `only` match nothing, by the fusion's name; fusions in `told` are left out."""
    made = {*told, *(one.fusion for one in result.fused)}
    lacking = [fusion for fusion in fusions if fusion.name in only and fusion.name not in made]
    present = {node.op_type for node in nodes(result.model.graph)} if lacking else set()
    found = why_unmatched(lacking, result.missed, present)
    others = [name for name in only if name in LAYOUT_FUSIONS and name not in made]
    found |= {name: why_not_made(LAYOUT_FUSIONS[name], fusions, result.layout, result.model.graph) for name in others}
    if SCAN in only and SCAN not in made:
        found[SCAN] = why_no_scan(result.no_scan)
    return found | ({REGION: why_no_region()} if REGION in only and REGION not in made else {})


def _subgraphs(result: FusedModel, before: FusedModel) -> Iterator[Subgraph]:
    """Yield the record of changes for each body of an If, Loop or Scan; `before` was not converted to half precision.

    Where only the converted model has a body, because the condition of an If became unknown, its own nodes are counted.
    """
    given = {where: _operators_of(each.graph.model) for where, each in before.everywhere()}
    for where, each in result.everywhere():
        if where:
            counts = Counter(one.fusion for one in each.fusing.fused)
            old, new = given.get(where) or _operators_of(each.graph.model), _operators_of(each.model)
            fused = {node.op_type for node in each.model.graph.node if is_fused(node)}
            added = {op: count for op, count in sorted((new - old).items()) if op not in fused}
            yield Subgraph(where, old.total(), new.total(), dict(sorted(counts.items())), added)


def _operators_of(model: onnx.ModelProto) -> Counter[str]:
    """Return how many nodes of each operator the main graph of a model has, without Constants."""
    return Counter(node.op_type for node in model.graph.node if not is_constant(node))


def _graphs(result: FusedModel) -> Iterator[Rewritten]:
    """Yield the main graph and each body of an If, Loop or Scan, before and after fusing."""
    for where, each in result.everywhere():
        new = each.model if where else result.written
        originals = {name: original for name, (original, _) in each.layout.originals.items()}
        yield Rewritten(where, outline(each.graph.model.graph), outline(new.graph), originals)


def _why_not_fused(result: FusedModel) -> dict[str, str]:
    """Return why the nearest fusion and the regions did not fuse nodes, by the nodes' labels."""
    nearest: dict[str, Miss] = {}
    for miss in result.missed:
        known = nearest.get(miss.node)
        if miss.matched and (known is None or miss.matched > known.matched):
            nearest[miss.node] = miss
    no_region, reasons = result.no_region, dict[str, str]()
    for label in (node.name or node.output[0] for _, each in result.everywhere() for node in each.model.graph.node):
        found = [f"{nearest[label].fusion.name}: {nearest[label].reason}"] if label in nearest else []
        if label in no_region:
            found.append(f"{REGION}: {no_region[label]}")
        if found:
            reasons[label] = "; ".join(found)
    return reasons


@dataclass
class TakenBack:
    """The matches, fusions, passes and constants found wrong, which are left out when the model is fused again."""

    dropped: list[Dropped] = field(default_factory=list)  # everything that was undone, for the report
    names: set[str] = field(default_factory=set)  # names of the fusions, passes and steps (as LAYOUT) that are left out
    constants: set[str] = field(default_factory=set)  # names of tensors that are not folded
    matches: dict[tuple[str, str], int] = field(default_factory=dict)  # match -> the round in which it was undone
    rounds: int = 0  # rounds in which matches were undone

    @property
    def passes(self) -> frozenset[str]:
        """The names of the passes to leave out; the passes that change weights are left out together."""
        of_weights = WEIGHT_PASSES if WEIGHT_FOLDING in self.names else frozenset()
        return of_weights.union(self.names.intersection(PASS_NAMES))

    def applied(self, settings: Settings) -> Settings:
        """Return the settings without everything that was undone."""
        return replace(
            settings,
            fusions=[fusion for fusion in settings.fusions if fusion.name not in self.names],
            layout="nchw" if LAYOUT in self.names else settings.layout,
            regions=REGION not in self.names and settings.regions,
            scans=SCAN not in self.names and settings.scans,
            exclude=frozenset(self.matches),
            keep_names=frozenset(self.constants),
            bodies=BODIES not in self.names,
            spelling=SPELLING not in self.names,
            without_passes=self.passes,
        )

    def take(self, dropped: Dropped) -> None:
        """Record a fusion, the layout, the folding into weights or a pass as wrong: the next attempt leaves it out."""
        self.dropped.append(dropped)
        self.names.add(dropped.fusion)

    def take_constants(self, folded: Sequence[Folded], wrong: Mapping[str, str]) -> None:
        """Mark constants that the next attempt must not fold; `wrong` gives the reason for each."""
        into = {one.into: one.node for one in folded if one.kind == CONSTANT_FOLDING}
        self.constants |= wrong.keys()
        self.dropped += [Dropped(CONSTANT_FOLDING, into.get(name, name), why) for name, why in wrong.items()]

    def take_matches(self, wrong: Iterable[tuple[Fused, bool, str]]) -> None:
        """Mark nodes that the next attempt must leave unfused or channels-first.

        A fusion that was wrong in MAX_ROUNDS_OF_PARTS rounds is left out entirely.

        wrong  fused nodes, whether they compute a Transpose of the original's tensor, and a sentence on what is wrong
        """
        for fused, is_transposed, reason in wrong:
            what = LAYOUT if is_transposed else fused.fusion
            if (what, fused.output) in self.matches:  # it was undone before, but made again in another form
                self.names.add(LAYOUT if fused.fusion in LAYOUT_FUSIONS else what)
            self.matches[what, fused.output] = self.rounds
            self.dropped.append(Dropped(what, fused.node, reason))
        self.rounds += 1
        self.names |= {name for name, _ in self.matches if self._rounds_of(name) >= MAX_ROUNDS_OF_PARTS}

    def _rounds_of(self, fusion: str) -> int:
        return len({number for (name, _), number in self.matches.items() if name == fusion})


@dataclass
class _Search:
    """Fuses a model repeatedly, each time without the matches found wrong, until nothing is wrong.

    source  the original in the opset in which it is fused

    Without a verifier, a fused node counts as wrong only if ONNX's checker refuses its body (its ONNX function).
    """

    job: _Job
    source: onnx.ModelProto
    verifier: Verifier | None
    chosen: Chosen | None
    taken_back: TakenBack = field(default_factory=TakenBack)
    verified: Verification = NOT_VERIFIED

    def fuse(self, settings: Settings, verdict: Check | None = None) -> FusedModel:
        """Return the fused model, without switched-off matches, and in ONNX's own operators if requested."""
        checks: list[Check | None] = [self.chosen, self._in_operators, verdict]
        return fuse_model(
            self.source, self.job.folder, settings, self.job.timer, [check for check in checks if check is not None]
        )

    def _in_operators(self, result: FusedModel, _settings: Settings) -> FusedModel:
        """Return the fused model, converted to ONNX's own operators if requested."""
        if not self.job.is_standard:
            return result
        standard, after = in_standard_operators(result.model, self.job.folder, self.job.opset)
        return replace(result, standard=standard, after=after)

    def __call__(self, result: FusedModel, settings: Settings) -> FusedModel | Settings:
        """Return the fused model if it agrees with the original; else settings that leave out what was found wrong."""
        return self.taken_back.applied(settings) if self._takes_back(result, settings) else result

    def _takes_back(self, result: FusedModel, settings: Settings) -> bool:
        """Undo the steps with the first kind of fault that is found, if any; return whether a step was undone."""
        if invalid := list(_invalid(result)):
            self.taken_back.take_matches(invalid)
            return True
        if self.verifier is None:
            return False
        if constants := self.verifier.wrong_constants(result):
            self.taken_back.take_constants(result.all_folded, constants)
            return True
        parts = self.verifier.verify_parts(result)
        if parts.wrong:
            found = _fused_nodes(result, parts.wrong)
            self.taken_back.take_matches((fused, one.part.is_transposed, one.reason) for one, fused in found)
            return True
        verified = self.verifier.verify(result.written)
        if verified.passed is False:
            self._take_cause(self.verifier, result, settings, verified)
            return True
        self.verified = _with_parts(verified, result, parts)
        return False

    def _take_cause(self, verifier: Verifier, result: FusedModel, settings: Settings, verified: Verification) -> None:
        """Undo the nodes, the layout, the fusions in control-flow bodies or the pass that make a model differ.

        This is for a model that differs although none of its fused nodes was found wrong when compared alone.
        """
        culprits = verifier.culprits(result, verified, self.job.written)
        is_of_layout = result.layout.nodes and not (culprits and all(one.differs_alone for one in culprits))
        if is_of_layout and not self._differs(verifier, replace(settings, layout="nchw")):
            self.taken_back.take(Dropped(LAYOUT, result.layout.first, verified.reason))
        elif culprits:
            self.taken_back.take_matches((one.node.fused, one.node.is_transposed, one.reason) for one in culprits)
        elif result.bodies and not self._differs(verifier, replace(settings, bodies=False)):
            self.taken_back.take(Dropped(BODIES, result.bodies[0].body.where, verified.reason))
        elif result.spelled and not self._differs(verifier, replace(settings, spelling=False)):
            self.taken_back.take(Dropped(SPELLING, result.spelled[0].node, verified.reason))
        else:
            self.taken_back.take(self._wrong_step(verifier, result, replace(settings, fusions=(), regions=False)))

    def _differs(self, verifier: Verifier, settings: Settings) -> bool:
        """Return whether the model that is fused with these settings differs from the original."""
        return verifier.verify(self.fuse(settings).written).passed is False

    def _wrong_step(self, verifier: Verifier, result: FusedModel, settings: Settings) -> Dropped:
        """Return which step before fusing makes a model differ: the folding into weights, or a pass.

        settings  settings that fuse nothing

        Raises VerificationError if no step does.
        """
        differs = verifier.verify(self.fuse(settings).written)
        if differs.passed is not False:  # the unfused model agrees, so a fused node is wrong
            reason = verifier.verify(result.written).reason
            if not result.fused:
                text = "operators that were spelled out changed the model"
                raise VerificationError(f"{text}: {reason}; please report this")
            return Dropped(result.fused[-1].fusion, result.fused[-1].node, reason)

        def differs_without(names: Iterable[str]) -> bool:
            return self._differs(verifier, replace(settings, without_passes=self.taken_back.passes.union(names)))

        if WEIGHT_FOLDING not in self.taken_back.names and not differs_without(WEIGHT_PASSES):
            node = next((one.node for one in result.folded if one.kind in ("batch_norm", "scale")), "")
            return Dropped(WEIGHT_FOLDING, node, differs.reason)
        passes = [name for name in PASS_NAMES if name not in self.taken_back.names]
        low, high = 0, len(passes)  # the model differs if the first `high` passes are applied
        if differs_without(passes):
            reason = f"reading and writing changed the model: {differs.reason}"
            raise VerificationError(f"{reason}; please report this model")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if differs_without(passes[middle:]) else (middle, high)
        return Dropped(passes[low], "", differs.reason)


def _invalid(result: FusedModel) -> Iterator[tuple[Fused, bool, str]]:
    """Yield the fused nodes whose functions ONNX refuses, whether their outputs are transposed, and the reasons."""
    faults = {where: faults_of_bodies(graph.model) for where, graph in result.everywhere()}
    for one in fused_nodes(result) if any(faults.values()) else ():
        if fault := faults[one.where].get(one.function):
            yield one.fused, one.is_transposed, f"ONNX refuses its body: {fault}"


def _fused_nodes(result: FusedModel, wrong: Iterable[PartFinding]) -> Iterator[tuple[PartFinding, Fused]]:
    """Yield each finding with every fused node that it concerns: the compared one and all equal ones."""
    by_name = {fused.node: fused for fused in result.fused}
    for finding in wrong:
        for node in (finding.part.fused, *finding.part.equal):
            yield finding, by_name[node.name]


def _with_parts(verified: Verification, result: FusedModel, parts: PartsVerification) -> Verification:
    """Return the verification of the outputs, with the results of comparing fused nodes added."""
    missing = [NotCompared(fused.node, one.reason) for one, fused in _fused_nodes(result, parts.not_compared)]
    equal = len(result.fused) - len(missing)
    return verified if verified.passed is None and not equal else verified.with_parts(equal, missing)
