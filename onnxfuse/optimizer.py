"""Optimize a model: load it, fuse it, verify the result, and fuse it again without what is wrong."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import onnx

from onnxfuse.analysis.tensor_bytes import ASSUMED_SIZE, assumed_size
from onnxfuse.choices import Choices, ChosenFuse, choices_of, read_choices
from onnxfuse.dsl import catalogue
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import OperatorSet
from onnxfuse.emit_standard import in_newest_opset, in_standard_operators, needs_newer_opset, what_was_written
from onnxfuse.errors import ModelError, UsageError, VerificationError
from onnxfuse.fuse_model import FusedModel, Progress, Regions, StageTimer, fuse_model
from onnxfuse.half.result import HalfResult
from onnxfuse.halving import Halving, Request, request
from onnxfuse.ir.convert_opset import describe_change, opset_of
from onnxfuse.ir.digest import graph_digest
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.file_bytes import file_bytes
from onnxfuse.ir.load import load
from onnxfuse.ir.protos import nodes
from onnxfuse.layout.assign import LAYOUT, Layout
from onnxfuse.layout.fusions import LAYOUT_FUSIONS
from onnxfuse.match import Miss
from onnxfuse.passes import Folded
from onnxfuse.pipeline import PASS_NAMES, WEIGHT_PASSES
from onnxfuse.report.facts import gather_facts
from onnxfuse.report.operators import count_operators
from onnxfuse.report.outline import Rewritten, outline
from onnxfuse.report.report import Dropped, Report, Subgraph, quantized_operators
from onnxfuse.report.unmatched import why_no_region, why_not_made, why_unmatched
from onnxfuse.rewrite.replace import REGION, Fused
from onnxfuse.steps import REPORT, LeftOut, attempt
from onnxfuse.unfuse_model import has_fused_nodes, in_operators
from onnxfuse.verifier import WEIGHT_FOLDING, Verifier, Written
from onnxfuse.verify.check_bodies import faults_of_bodies
from onnxfuse.verify.compare import NOT_VERIFIED, Verification
from onnxfuse.verify.compare_parts import PartFinding, PartsVerification
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.own_process import DEFAULT_TIMEOUT, own_process

Emit: TypeAlias = Literal["functions", "standard"]  # what stands for a fusion in the optimized model

MAX_ROUNDS_OF_PARTS = 3  # in which nodes of one fusion are taken back; a fusion that is wrong more often is left out
CONSTANT_FOLDING = "constant"  # the name in the report when the folding of a constant is taken back
BODIES = "subgraphs"  # the name in the report when all that was done inside If, Loop and Scan is taken back


def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    patterns: Iterable[str | os.PathLike[str]] = (),
    fallback: Literal["onnx", "ort"] = "onnx",
    emit: Emit = "functions",
    layout: Layout = "auto",
    regions: Regions = True,
    plan: str | os.PathLike[str] | None = None,
    verify: bool = True,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    timeout: float | None = DEFAULT_TIMEOUT,
    tolerance: float | None = None,
    dtype: Literal["float16", "bfloat16"] | None = None,
    io: Literal["float32", "half"] = "float32",
    max_error: float | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> tuple[onnx.ModelProto, Report]:
    """Fuse a model.

    model     a path, a serialized model or a ModelProto (which is not changed); external data stays on disk
    only      names of the fusions to apply; all if empty
    skip      names of fusions to leave out
    patterns  folders of Python files with further fusions; a fusion replaces one of the same name
    fallback  operators that the bodies of fused nodes consist of: standard ONNX, or also onnxruntime's own
    emit      what stands for a fusion: a node that calls a function ("functions"), or ONNX's own operators of opset 23
              or 24 ("standard"), which other runtimes have kernels for.  Images then stay channels-first, and there are
              no regions
    layout    of images around convolutions: channels-last where that pays ("auto") or wherever it can be ("nhwc"), or
              channels-first everywhere ("nchw")
    regions   let connected operators that no pattern names become fused nodes too, where that should save memory
              traffic or launches; `only` names "region" to make nothing else.  Elementwise ones that follow a product
              or a convolution join its kernel, unless regions are "apart"
    plan      a file that `onnxfuse plan` wrote for this model, which switches matches on and off.  The nodes of a match
              that is off stay as they are: no other fusion, no region and no layout takes them
    verify    run each fused node and what it replaced, and both models, in onnxruntime; take back what differs
    inputs    arrays to verify with, by input name; others are generated
    shapes    sizes to verify with, as "input:8x512"; others are chosen
    timeout   seconds that opening a model in onnxruntime, or one run of it, may take in a process of its own; None runs
              models in this process, without a limit, and not at sizes of 0, at which onnxruntime may crash
    tolerance the largest error of an output, relative to its largest value; by default that of its dtype, or more where
              the original's own noise is larger
    dtype     the half precision that the model is converted to; what overflows, or loses too much, stays in float32.
              External weights then lie in `report.folder`, as long as the report exists
    io        the dtype of the graph's floating-point inputs and outputs where the model is converted: that of the
              original ("float32"), or `dtype` ("half")
    max_error the largest error of an output that is allowed against float32, relative to its largest value; as many
              nodes stay in float32 as that takes.  By default up to a tenth of the nodes stay so that errors are within
              three times the noise of half precision, and the report says where that is not enough
    progress  called with the stage, how much of it is done, and of how much

    Returns the model, in which each fused node calls a model-local function, and the report.  Raises ModelError if the
    model cannot be read, or for emit="standard" has a node that cannot be written in opset 24, UsageError for an
    unknown fusion or a plan of another model, VerificationError if the models differ although no fusion and no folding
    causes it, or `max_error` cannot be kept.
    """
    if fallback not in ("onnx", "ort"):
        raise UsageError(f"fallback is 'onnx' or 'ort', not '{fallback}'")
    _check_layout(layout)
    only, skip = list(only), list(skip)
    fusions, regions, left_out = _selected(only, skip, patterns, regions)
    operators = _operators(fallback, emit, layout, REGION in only)
    half = request(dtype, io, max_error)
    if half and plan is not None:
        raise UsageError(
            "a plan lists the matches of the model as it is; save the model that dtype gives, and make a plan of that"
        )
    if operators == "standard":
        layout, regions = "nchw", False
    with own_process(timeout, at_once=verify):  # without verification, only half precision runs models
        return _optimize(
            model, fusions, only, operators, layout, regions, None if plan is None else Path(plan), verify, inputs,
            shapes, tolerance, half, left_out, StageTimer(progress),
        )  # fmt: skip


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
    _check_layout(layout)
    fusions, regions, left_out = _selected(list(only), list(skip), patterns, regions)
    original, folder = load(model)
    result = fuse_model(
        original, folder, fusions, layout=layout, regions=regions, left_out=left_out, timer=StageTimer(progress)
    )
    name = Path(model).name if isinstance(model, str | os.PathLike) else original.graph.name
    return Choices(name, graph_digest(original), choices_of(result.fused_of_model), result.left_out)


def _check_layout(layout: Layout) -> None:
    if layout not in get_args(Layout):
        raise UsageError(f"layout is 'auto', 'nchw' or 'nhwc', not '{layout}'")


def _selected(
    only: Sequence[str], skip: Sequence[str], patterns: Iterable[str | os.PathLike[str]], regions: Regions
) -> tuple[list[Fusion], Regions, frozenset[str]]:
    """Return the fusions to apply, whether there are regions, and which fusions layouts do not make.

    Where `only` names some of the latter, they make no others.  Raises UsageError for an unknown fusion.
    """
    fusions = catalogue.select(catalogue.with_folders(patterns), only, skip, also=[REGION, *LAYOUT_FUSIONS])
    named = LAYOUT_FUSIONS.keys() & set(only)
    left_out = frozenset(LAYOUT_FUSIONS.keys() & set(skip)) | (LAYOUT_FUSIONS.keys() - named if named else frozenset())
    if REGION in skip or (only and REGION not in only):
        return fusions, False, left_out
    return fusions, (regions or True) if REGION in only else regions, left_out


def _operators(fallback: Literal["onnx", "ort"], emit: Emit, layout: Layout, of_regions: bool) -> OperatorSet:
    """Return which operators bodies consist of.  Raises UsageError where the options contradict each other."""
    if emit not in get_args(Emit):
        raise UsageError(f"emit is 'functions' or 'standard', not '{emit}'")
    if emit == "functions":
        return fallback
    options = {"fallback ort": fallback == "ort", "layout nhwc": layout == "nhwc", "only region": of_regions}
    if wrong := next((name for name, given in options.items() if given), None):
        raise UsageError(f"emit standard writes no functions, so that {wrong} has no effect; leave one of the two out")
    return "standard"


def _optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    fusions: Sequence[Fusion],
    only: Sequence[str],
    operators: OperatorSet,
    layout: Layout,
    regions: Regions,
    plan: Path | None,
    verify: bool,
    inputs: Mapping[str, Array] | None,
    shapes: Sequence[str],
    tolerance: float | None,
    half: Request | None,
    left_out: frozenset[str],
    timer: StageTimer,
) -> tuple[onnx.ModelProto, Report]:
    """Return the optimized model and its report, as `optimize` does, of fusions that are known."""
    with timer.stage("load"):
        original, folder = load(model)
    is_standard = operators == "standard"
    source = original
    if (is_standard or half) and has_fused_nodes(original):  # whose bodies hold dtypes, and operators of one opset
        source = in_operators(original, folder)[0]
    choices = None if plan is None else read_choices(plan, original)
    options = _Options(
        fusions, operators, layout, regions, choices, verify, inputs, shapes, tolerance, opset_of(original), left_out
    )

    def fuse_source(given: onnx.ModelProto) -> tuple[_Found, Path | None, Halving | None, HalfResult | None]:
        if half is None:
            return _fuse_verified(original, given, folder, options, timer), folder, None, None
        halving = Halving(original, given, folder, half, fusions, inputs, shapes, timer, verify)
        found, its_folder, told = _fuse_in_half(halving, options)
        return found, its_folder, halving, told

    fuse = functools.partial(
        fuse_model, folder=folder, fusions=fusions, operators=operators, layout=layout, regions=regions, timer=timer
    )
    found, its_folder, halving, told = fuse_source(in_newest_opset(source, fuse) if is_standard else source)
    is_raised = opset_of(found.model.written) > options.opset > 0
    if is_standard and is_raised and not needs_newer_opset(found.model, options.opset):
        found, its_folder, halving, told = fuse_source(source)
    result, taken_back, off = found.model, found.taken_back, found.switched_off
    first = halving.plain if halving else result
    found_raised = (*first.left_out, *(halving.raised if halving else ()), *result.left_out, *found.raised)
    raised = list({one.step: one for one in found_raised}.values())
    told_of = functools.partial(attempt, REPORT, raised=raised)
    known = {one.fusion for one in taken_back.dropped} | {name.partition(":")[0] for name in off}
    path = str(model) if isinstance(model, str | os.PathLike) else None
    size = file_bytes(Path(path), original) if path else None
    facts = told_of(
        lambda: gather_facts(original, result.written, path, fusions, _graphs(result), _why_not_fused(result)),
        None,
    )
    report = Report(
        {"path": path, "nodes": len(original.graph.node), "opset": opset_of(original),
         "bytes": size, "digest": graph_digest(original)},
        {"path": None, "nodes": len(result.written.graph.node), "bytes": None},
        result.fused_of_model, (*(first.all_folded if halving else ()), *result.all_folded),
        told_of(lambda: tuple(result.near()), ()),
        tuple(taken_back.dropped), first.before, result.after, found.verified, timer.seconds, result.layout,
        result.without_regions, tuple(_subgraphs(result)), first.inlined, result.stays,
        quantized_operators(result.written), what_was_written(result) if is_standard else None,
        told_of(lambda: count_operators(original, result.written), ()), _assumed_sizes(result.written),
        told_of(lambda: _unmatched(result, fusions, only, known), {}), off, facts, told, its_folder, tuple(raised),
    )  # fmt: skip
    return result.written, report


@dataclass(frozen=True)
class _Options:
    """What `optimize` was asked to do with a model."""

    fusions: Sequence[Fusion]
    operators: OperatorSet
    layout: Layout
    regions: Regions
    choices: Choices | None
    verify: bool
    inputs: Mapping[str, Array] | None
    shapes: Sequence[str]
    tolerance: float | None
    opset: int  # of the original
    left_out: frozenset[str] = frozenset()  # fusions that layouts do not make
    is_converted: bool = False  # to half precision


@dataclass(frozen=True)
class _Found:
    """The fused model, whether it agrees with the original, and what was left out for that, or by a plan."""

    model: FusedModel
    verified: Verification
    taken_back: TakenBack
    switched_off: tuple[str, ...] = ()
    raised: tuple[LeftOut, ...] = ()  # the verification, where it raised


def _fuse_verified(
    original: onnx.ModelProto, source: onnx.ModelProto, folder: Path | None, options: _Options, timer: StageTimer
) -> _Found:
    """Return the fused model, whether it agrees with the original, and what was taken back for that.

    source  the original in the opset in which it is fused
    """
    fuse_again: Callable[..., FusedModel]
    fuse_again = functools.partial(
        _fuse, source, folder, options.opset, operators=options.operators, left_out=options.left_out, timer=timer
    )
    chosen = ChosenFuse(fuse_again, options.choices) if options.choices else None
    fuse_again = chosen or fuse_again
    taken_back = TakenBack()
    verifier = Verifier(
        original, folder, options.inputs, timer, options.shapes, options.tolerance, options.is_converted,
        options.operators == "standard",
    ) if options.verify else None  # fmt: skip
    try:
        result, verified = _fuse_until_equal(
            fuse_again, options.fusions, options.layout, options.regions, verifier, taken_back,
            _written(folder, options),
        )  # fmt: skip
    except VerificationError:
        if verifier is not None:
            _check_converted(verifier, source)
        raise
    if chosen:
        chosen.check_known()
    return _Found(
        result,
        verified,
        taken_back,
        tuple(chosen.switched_off) if chosen else (),
        tuple(verifier.raised) if verifier else (),
    )


def _written(folder: Path | None, options: _Options) -> Written:
    """Return what makes the model that is written of one with fused nodes."""
    if options.operators != "standard":
        return lambda model: model
    return lambda model: in_standard_operators(model, folder, options.opset)[0]


def _fuse_in_half(halving: Halving, options: _Options) -> tuple[_Found, Path | None, HalfResult]:
    """Return the fused model in half precision, as `_fuse_verified` does, where its weights lie, and its errors."""

    def attempt(verify: bool) -> tuple[tuple[_Found, Path | None], HalfResult]:
        converted = halving.convert()
        inputs = None if options.inputs is None else halving.feeds(options.inputs)
        given = replace(options, inputs=inputs, is_converted=True, verify=options.verify and verify)
        found = _fuse_verified(converted.model, converted.model, converted.folder, given, halving.timer)
        told = replace(halving.judge(found.model.written), scratch=converted.scratch)
        return (found, converted.folder), told

    (found, folder), told = halving.settle(attempt)
    return found, folder, told


def _assumed_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Return the sizes that the estimate assumes for the dynamic dims of a model's inputs, by their names."""
    dims = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    named = {dim.dim_param: assumed_size(dim.dim_param) for dim in dims if dim.dim_param}
    has_others = any(dim.WhichOneof("value") is None for dim in dims)
    return named | ({"dims without a name": ASSUMED_SIZE} if has_others else {})


def _unmatched(
    result: FusedModel, fusions: Sequence[Fusion], only: Sequence[str], told: Collection[str]
) -> dict[str, str]:
    """Return for each fusion that `only` names and that matches nothing why that is; not for those in `told`."""
    made = {*told, *(one.fusion for one in result.fused)}
    lacking = [fusion for fusion in fusions if fusion.name in only and fusion.name not in made]
    present = {node.op_type for node in nodes(result.model.graph)} if lacking else set()
    found = why_unmatched(lacking, result.missed, present)
    others = [name for name in only if name in LAYOUT_FUSIONS and name not in made]
    found |= {name: why_not_made(LAYOUT_FUSIONS[name], fusions, result.layout, result.model.graph) for name in others}
    return found | ({REGION: why_no_region()} if REGION in only and REGION not in made else {})


def _check_converted(verifier: Verifier, source: onnx.ModelProto) -> None:
    """Raise ModelError if the model that is fused differs from the original, which has an older opset."""
    is_raised = opset_of(source) != opset_of(verifier.original)
    converted = verifier.verify(source) if is_raised else NOT_VERIFIED
    if converted.passed is False:
        raise ModelError(describe_change(verifier.original, source, converted.reason))


def _fuse(
    source: onnx.ModelProto, folder: Path | None, opset: int, fusions: Sequence[Fusion], *, operators: OperatorSet,
    **options: Any,
) -> FusedModel:  # fmt: skip
    """Return the fused model, as `fuse_model` does, in ONNX's own operators where these are asked for.

    `opset` is that of the original, whose number the result has where it has all that is written.
    """
    result = fuse_model(source, folder, fusions, operators=operators, **options)
    if operators != "standard":
        return result
    standard, after = in_standard_operators(result.model, folder, opset)
    return replace(result, standard=standard, after=after)


def _subgraphs(result: FusedModel) -> Iterator[Subgraph]:
    """Yield what was done to each body of an If, Loop or Scan."""
    for where, each in result.everywhere():
        if where:
            counts = Counter(one.fusion for one in each.fusing.fused)
            nodes = len(each.graph.model.graph.node), len(each.model.graph.node)
            yield Subgraph(where, *nodes, dict(sorted(counts.items())))


def _graphs(result: FusedModel) -> Iterator[Rewritten]:
    """Yield the main graph and each body of an If, Loop or Scan as it was and as it is."""
    for where, each in result.everywhere():
        new = each.model if where else result.written
        originals = {name: original for name, (original, _) in each.layout.originals.items()}
        yield Rewritten(where, outline(each.graph.model.graph), outline(new.graph), originals)


def _why_not_fused(result: FusedModel) -> dict[str, str]:
    """Return what the fusion that came nearest, and the regions, say against nodes, by the labels of the nodes."""
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
    """What was found wrong, and is left out when the model is fused again."""

    dropped: list[Dropped] = field(default_factory=list)  # all of it, for the report
    names: set[str] = field(default_factory=set)  # of fusions, passes, the layout and the folding into weights
    constants: set[str] = field(default_factory=set)  # names of tensors that are not folded
    matches: dict[tuple[str, str], int] = field(default_factory=dict)  # the round in which each was taken back
    rounds: int = 0  # in which matches were taken back

    @property
    def passes(self) -> frozenset[str]:
        """The names of the passes that are left out: those that change weights are taken back together."""
        of_weights = WEIGHT_PASSES if WEIGHT_FOLDING in self.names else frozenset()
        return of_weights.union(self.names.intersection(PASS_NAMES))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `fuse_model` that say what else than fusions, layouts and matches is left out."""
        return {
            "keep_names": self.constants,
            "bodies": BODIES not in self.names,
            "without_passes": self.passes,
        }

    def take(self, dropped: Dropped) -> None:
        """Leave out a fusion, the layout, the folding into weights, or a pass."""
        self.dropped.append(dropped)
        self.names.add(dropped.fusion)

    def take_constants(self, folded: Sequence[Folded], wrong: Mapping[str, str]) -> None:
        """Leave constants unfolded, each of which has a reason."""
        into = {one.into: one.node for one in folded if one.kind == CONSTANT_FOLDING}
        self.constants |= wrong.keys()
        self.dropped += [Dropped(CONSTANT_FOLDING, into.get(name, name), why) for name, why in wrong.items()]

    def take_matches(self, wrong: Iterable[tuple[Fused, bool, str]]) -> None:
        """Leave nodes unfused, or channels-first; and a fusion as a whole that was wrong in several rounds.

        wrong  fused nodes, whether they compute a Transpose of what the original has, and what is wrong with them
        """
        for fused, is_transposed, reason in wrong:
            what = LAYOUT if is_transposed else fused.fusion
            if (what, fused.output) in self.matches:  # as a fusion of layouts that is made again in another form
                self.names.add(LAYOUT if fused.fusion in LAYOUT_FUSIONS else what)
            self.matches[what, fused.output] = self.rounds
            self.dropped.append(Dropped(what, fused.node, reason))
        self.rounds += 1
        self.names |= {name for name, _ in self.matches if self._rounds_of(name) >= MAX_ROUNDS_OF_PARTS}

    def _rounds_of(self, fusion: str) -> int:
        return len({number for (name, _), number in self.matches.items() if name == fusion})


def _fuse_until_equal(
    fuse_again: Callable[..., FusedModel],
    fusions: Sequence[Fusion],
    layout: Layout,
    regions: Regions,
    verifier: Verifier | None,
    taken_back: TakenBack,
    written: Written,
) -> tuple[FusedModel, Verification]:
    """Fuse and verify, and fuse again without what is wrong, until nothing is.

    Without a verifier, what is wrong is only what ONNX refuses.

    fuse_again  `fuse_model`, of the model
    written     returns what is written of a model with fused nodes
    """
    while True:
        fuse_kept = _without(fuse_again, fusions, layout, regions, taken_back)
        result = fuse_kept(keep_unfused=verifier is not None)
        if invalid := list(_invalid(result)):
            taken_back.take_matches(invalid)
            continue
        if verifier is None:
            return result, NOT_VERIFIED
        if constants := verifier.wrong_constants(result):
            taken_back.take_constants(result.all_folded, constants)
            continue
        parts = verifier.verify_parts(result)
        if parts.wrong:
            found = _fused_nodes(result, parts.wrong)
            taken_back.take_matches((fused, one.part.is_transposed, one.reason) for one, fused in found)
            continue
        verified = verifier.verify(result.written)
        if verified.passed is not False:
            return result, _with_parts(verified, result, parts)
        culprits = verifier.culprits(result, verified, written)
        is_of_layout = result.layout.nodes and not (culprits and all(one.differs_alone for one in culprits))
        if is_of_layout and verifier.verify(fuse_kept(layout="nchw").written).passed is not False:
            taken_back.take(Dropped(LAYOUT, result.layout.first, verified.reason))
            continue
        if culprits:
            taken_back.take_matches((one.node.fused, one.node.is_transposed, one.reason) for one in culprits)
            continue
        if result.bodies and verifier.verify(fuse_kept(bodies=False).written).passed is not False:
            taken_back.take(Dropped(BODIES, result.bodies[0].body.where, verified.reason))
            continue
        taken_back.take(
            _wrong_step(functools.partial(fuse_again, [], **taken_back.options), result, verifier, taken_back)
        )


def _invalid(result: FusedModel) -> Iterator[tuple[Fused, bool, str]]:
    """Yield the fused nodes whose bodies ONNX refuses, whether they compute a Transpose, and why."""
    records = {(one.where, one.node): one for one in result.fused}
    for where, graph in result.everywhere():
        faults = faults_of_bodies(graph.model)
        for node in graph.model.graph.node if faults else ():
            fused = records.get((where, node.name))
            if fused is not None and node.op_type in faults:
                is_transposed = graph.layout.is_transposed(node.output)
                yield fused, is_transposed, f"ONNX refuses its body: {faults[node.op_type]}"


def _wrong_step(
    fuse_nothing: Callable[..., FusedModel], result: FusedModel, verifier: Verifier, taken_back: TakenBack
) -> Dropped:
    """Return which step before fusing makes a model differ: the folding into weights, or a pass.

    fuse_nothing  `fuse_model`, of the model without fusions

    Raises VerificationError if no step does.
    """
    differs = verifier.verify(fuse_nothing().written)
    if differs.passed is not False:  # then it is how the fusions are written in standard operators
        reason = verifier.verify(result.written).reason
        if not result.fused:
            raise VerificationError(f"operators that were spelled out changed the model: {reason}; please report this")
        return Dropped(result.fused[-1].fusion, result.fused[-1].node, reason)

    def differs_without(left_out: frozenset[str]) -> bool:
        return verifier.verify(fuse_nothing(without_passes=left_out).written).passed is False

    if WEIGHT_FOLDING not in taken_back.names and not differs_without(taken_back.passes | WEIGHT_PASSES):
        node = next((one.node for one in result.folded if one.kind in ("batch_norm", "scale")), "")
        return Dropped(WEIGHT_FOLDING, node, differs.reason)
    passes = [name for name in PASS_NAMES if name not in taken_back.names]

    def is_bad(count: int) -> bool:
        """Return whether the model differs although only the first passes are applied."""
        return differs_without(taken_back.passes.union(passes[count:]))

    low, high = 0, len(passes)
    if is_bad(low):
        raise VerificationError(f"reading and writing changed the model: {differs.reason}; please report this model")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle, high)
    return Dropped(passes[low], "", differs.reason)


def _without(
    fuse_again: Callable[..., FusedModel],
    fusions: Sequence[Fusion],
    layout: Layout,
    regions: Regions,
    taken_back: TakenBack,
) -> Callable[..., FusedModel]:
    """Return `fuse_model` of the model, without what was taken back."""
    return functools.partial(
        fuse_again,
        [fusion for fusion in fusions if fusion.name not in taken_back.names],
        layout="nchw" if LAYOUT in taken_back.names else layout,
        regions=REGION not in taken_back.names and regions,
        exclude=taken_back.matches,
        **taken_back.options,
    )


def _fused_nodes(result: FusedModel, wrong: Iterable[PartFinding]) -> Iterator[tuple[PartFinding, Fused]]:
    """Yield every fused node that a finding is about, those that equal the one that was compared included."""
    by_name = {fused.node: fused for fused in result.fused}
    for finding in wrong:
        for node in (finding.part.fused, *finding.part.equal):
            yield finding, by_name[node.name]


def _with_parts(verified: Verification, result: FusedModel, parts: PartsVerification) -> Verification:
    """Return the verification of the outputs together with that of the fused nodes."""
    missing = [NotCompared(fused.node, one.reason) for one, fused in _fused_nodes(result, parts.not_compared)]
    equal = len(result.fused) - len(missing)
    return verified if verified.passed is None and not equal else verified.with_parts(equal, missing)
