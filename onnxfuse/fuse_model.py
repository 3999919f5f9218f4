"""Fuse a model: the stages that a graph goes through, and the loop that repeats them without steps that failed.

The bodies of If, Loop and Scan go through the same stages.  They are fused after the graph around them is simplified,
so that they can use its constants and shapes.  They are fused before that graph is fused, so that it can fuse tensors
that bodies do not read any more.

This module verifies nothing: `optimizer.py` does, and then chooses the settings for fusing the model again.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import onnx

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import Body, read_bodies, write_body
from onnxfuse.control_flow.invariants import read_invariants_outside
from onnxfuse.control_flow.known_branches import with_known_branches
from onnxfuse.control_flow.results import infer_results
from onnxfuse.control_flow.unequal_branches import keep_unequal_branches
from onnxfuse.dsl.declaration import Fusion, Rewrite
from onnxfuse.dsl.terms import OperatorSet
from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.inline_functions import Inlined, inline_functions
from onnxfuse.ir.node import Node, op_of
from onnxfuse.ir.noted_sizes import note_sizes
from onnxfuse.ir.serde import write_model
from onnxfuse.layout.assign import LAYOUT, LayoutResult, assign_layouts
from onnxfuse.layout.conversion import Layout, LayoutOptions
from onnxfuse.layout.fusions import CONVOLUTION, GATE
from onnxfuse.layout.products import store_rows, store_sums
from onnxfuse.match import Miss
from onnxfuse.passes import Folded, Pass
from onnxfuse.passes.folded import STORED, node_label
from onnxfuse.pipeline import LATE_PASSES, PIPELINE
from onnxfuse.recurrences.assign import ScanResult, assign_scans
from onnxfuse.recurrences.form import NoScan
from onnxfuse.recurrences.linear_attention import LINEAR_ATTENTION, LinearAttentionResult, assign_linear_attention
from onnxfuse.recurrences.mlstm import assign_mlstm
from onnxfuse.regions.assign import RegionResult, assign_regions
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.prologue_fusion import fuse_prologues
from onnxfuse.regions.quantized_images import fuse_quantizers
from onnxfuse.report.traffic import Traffic, estimate_traffic, relate_to_bodies
from onnxfuse.rewrite.apply_rules import near_misses
from onnxfuse.rewrite.make_keys_row_major import make_keys_row_major
from onnxfuse.rewrite.replace import Fused, LocalFunctions, write_deferred
from onnxfuse.rewrite.select import FusionResult, Selection, fuse, leave_none, nearness
from onnxfuse.spell_out import Spelled, SpelledOut, Stays, in_terms_of_model, left_by_regions, left_over, spell_out
from onnxfuse.steps import (
    CONTROL_FLOW,
    ESTIMATE,
    INLINING,
    LAYOUTS,
    REGIONS,
    SCANS,
    SPELLING,
    LeftOut,
    Progress,
    StepError,
    also_raised,
    step,
)
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.parts import UnfusedGraph, unfused_graph

MAX_SIMPLIFY_ROUNDS = 4
MAX_SPELLING_ROUNDS = 4  # after this many rounds, operators that are not fused keep their original form
T = TypeVar("T")


@dataclass
class StageTimer:
    """Measures the seconds of every stage, and calls `progress` when a stage begins."""

    progress: Progress = lambda stage, done, of: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the stage's seconds; without a name, the block's parts time themselves."""
        if not name:
            yield
            return
        self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def tell(self, name: str, step: str) -> None:
        """Call `progress` for a step of a stage."""
        self.progress(f"{name}: {step}", 0, 0)


Regions: TypeAlias = bool | Literal["apart"]  # whether to make regions; "apart": yes, without epilogue fusion


Scores: TypeAlias = frozenset[tuple[str, str]]  # Softmaxes, each by the name of its graph and of its output
NO_TRAFFIC: Final = Traffic(0, 0)


@dataclass(frozen=True)
class Settings:
    """How `fuse_model` fuses a model.

    `operators` says which operators the bodies of fused nodes consist of.  `layout` and `regions` are as in `optimize`.
    `scans` says whether recurrences are fused.
    `bodies` says whether bodies of If, Loop and Scan are fused; images in these stay channels-first.  `spelling` says
    whether composite operators are decomposed.  `exclude` holds matches that stay unfused, as pairs of the fusion's
    name and the first output, and nodes that stay channels-first, as pairs of LAYOUT and the first output.
    `keep_names` are tensors that are neither folded nor fused away.  `keep_nodes` maps a body to the labels of its
    nodes that no fusion, region or layout is allowed to take.  `keep_unfused` keeps a copy of the graph before fusing,
    with which fused nodes are compared.  `left_out` names layout fusions that are not made, and `without_passes` names
    passes that are not applied.  `rules` are the rewrite rules whose misses are recorded in addition to the misses of
    fusions.  `sizes` are the shapes of inputs for which traffic is estimated, by name.
    """

    fusions: Sequence[Fusion]
    operators: OperatorSet = "onnx"
    layout: Layout = "auto"
    regions: Regions = False
    scans: bool = False
    bodies: bool = True
    spelling: bool = True
    exclude: Collection[tuple[str, str]] = frozenset()
    keep_names: Collection[str] = frozenset()
    keep_nodes: Mapping[str, Set[str]] = field(default_factory=dict)
    keep_unfused: bool = False
    left_out: Collection[str] = frozenset()
    without_passes: Collection[str] = frozenset()
    rules: Sequence[Rewrite] = ()
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Learned:
    """The steps and rewrites that a model is fused without: they raised in an earlier round, or led to no fusion."""

    raised: Mapping[str, LeftOut] = field(default_factory=dict)  # steps that raised, by name
    operators: Mapping[str, Stays] = field(default_factory=dict)  # operators not to be decomposed, by first output
    scores: Scores = frozenset()  # the Softmaxes whose scores must not be rewritten
    rounds: int = 0  # number of rounds that did not fuse all decomposed operators and rewritten scores

    def applied(self, settings: Settings) -> Settings:
        """Return the settings without the steps that raised."""
        return replace(
            settings,
            fusions=[fusion for fusion in settings.fusions if fusion.step not in self.raised],
            rules=[rule for rule in settings.rules if rule.left.step not in self.raised],
            regions=REGIONS not in self.raised and settings.regions,
            scans=SCANS not in self.raised and settings.scans,
            bodies=CONTROL_FLOW not in self.raised and settings.bodies,
            without_passes={*settings.without_passes, *self.raised},
        )

    def run(self, name: str, function: Callable[[], T], otherwise: T) -> T:
        """Run a step and return its result; return `otherwise` if the step is left out."""
        if name in self.raised:
            return otherwise
        with step(name):
            return function()


@dataclass(frozen=True)
class FusedBody:
    """A body of an If, Loop or Scan after fusing, as a model of its own."""

    body: Body
    fused: FusedModel


@dataclass(frozen=True)
class FusedModel:
    """A model after fusing, or one body of its Ifs, Loops and Scans as a model; with the record of all changes."""

    graph: Graph
    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    before: Traffic = NO_TRAFFIC
    after: Traffic = NO_TRAFFIC
    folded: tuple[Folded, ...] = ()
    fusing: FusionResult = field(default_factory=FusionResult)
    layout: LayoutResult = field(default_factory=LayoutResult)
    without_regions: Traffic = NO_TRAFFIC  # the traffic if no regions were made
    regions: RegionResult = field(default_factory=RegionResult)
    scans: ScanResult = field(default_factory=ScanResult)
    chunks: LinearAttentionResult = field(default_factory=LinearAttentionResult)
    unfused: UnfusedGraph | None = None  # the graph before fusing, with which fused nodes are compared
    spelling: SpelledOut = field(default_factory=SpelledOut)  # operators of other tools that were decomposed
    left: Mapping[str, Stays] = field(default_factory=dict)  # by first output: operators decomposed, but not fused
    scores_left: frozenset[str] = frozenset()  # Softmaxes with rewritten scores that are in no fused attention
    bodies: tuple[FusedBody, ...] = ()
    inlined: Inlined | None = None  # the result of inlining the model's own functions
    standard: onnx.ModelProto | None = None  # the model in ONNX's own operators, if requested
    left_out: tuple[LeftOut, ...] = ()  # steps that raised

    @property
    def written(self) -> onnx.ModelProto:
        """The model to write: with fused nodes or, if requested, with ONNX's own operators in their place."""
        return self.standard or self.model

    def everywhere(self, where: str = "") -> Iterator[tuple[str, FusedModel]]:
        """Yield this graph and all bodies of If, Loop and Scan in it, with their names in reports ("": main graph)."""
        yield where, self
        for one in self.bodies:
            yield from one.fused.everywhere(f"{one.body.where} in {where}" if where else one.body.where)

    @property
    def fused(self) -> tuple[Fused, ...]:
        """The records of all fused nodes, including nodes in bodies of If, Loop and Scan.

        If a node computes a channels-last tensor, its record names the original model's tensor instead; the
        channels-last tensor is a Transpose of it.
        """
        return tuple(
            replace(one, where=where, output=each.layout.original(one.output))
            for where, each in self.everywhere()
            for one in each.fusing.fused
        )

    @property
    def fused_of_model(self) -> tuple[Fused, ...]:
        """The records of `fused`, with the names of decomposed operators instead of the nodes that replaced them."""
        return in_terms_of_model(self.fused, self.spelled)

    @property
    def all_folded(self) -> tuple[Folded, ...]:
        """All nodes that were folded, including nodes in bodies of If, Loop and Scan, but no Constants."""
        return tuple(one for _, each in self.everywhere() for one in each.folded if one.kind != STORED)

    @property
    def spelled(self) -> tuple[Spelled, ...]:
        """All operators that were decomposed to be fused, including those in bodies of If, Loop and Scan."""
        return tuple(one for _, each in self.everywhere() for one in each.spelling.spelled)

    @property
    def stays(self) -> tuple[Stays, ...]:
        """All operators that have a rule to decompose them, but were neither decomposed nor fused as a whole."""
        whole = {name for one in self.fused for name in one.replaces}
        return tuple(one for _, each in self.everywhere() for one in each.spelling.stays if one.node not in whole)

    @property
    def all_left(self) -> dict[str, Stays]:
        """All operators that were decomposed but not fused as a whole, with the reasons, by the first output's name."""
        return {name: one for _, each in self.everywhere() for name, one in each.left.items()}

    @property
    def all_scores_left(self) -> Scores:
        """All Softmaxes whose scores were rewritten although no attention was fused."""
        return frozenset((where, name) for where, each in self.everywhere() for name in each.scores_left)

    @property
    def no_region(self) -> dict[str, str]:
        """The reasons why nodes, including those in control-flow bodies, are in no region, by the nodes' names."""
        return {name: why for _, each in self.everywhere() for name, why in each.regions.reasons.items()}

    @property
    def no_scan(self) -> dict[str, str]:
        """The reasons why Loops, Scans and unrolled steps do not become scans, by the nodes' names."""
        return {name: why for _, each in self.everywhere() for name, why in each.scans.reasons.items()}

    @property
    def missed(self) -> tuple[Miss, ...]:
        """All near misses, including those in bodies of If, Loop and Scan."""
        return tuple(miss for _, each in self.everywhere() for miss in each.fusing.missed)

    def near(self, with_regions: bool = False) -> list[Miss]:
        """Return the near misses worth reading, including control-flow bodies, nearest first; see FusionResult.near."""
        found = (miss for _, each in self.everywhere() for miss in each.fusing.near(with_regions))
        return sorted(found, key=nearness)


# --- the driver -----------------------------------------------------------------------------------------------------

# Returns the fused model, possibly with additions, or the settings with which to fuse again.
Check: TypeAlias = Callable[[FusedModel, Settings], "FusedModel | Settings"]


def fuse_model(
    model: onnx.ModelProto,
    folder: Path | None,
    settings: Settings,
    timer: StageTimer | None = None,
    checks: Sequence[Check] = (),
) -> FusedModel:
    """Simplify and fuse a loaded model; repeat this without the steps that raised, led to no fusion or failed a check.

    folder  where the model's external data lies
    checks  are called with the fused model in this order, until one returns other settings

    A step that raises is left out, and recorded in the result, unless the user can act on its error.  If an operator
    was decomposed, or the scores of an attention rewritten, and no fusion followed, the original form is kept.
    """
    timer, learned = timer or StageTimer(), Learned()
    with no_garbage_collection():
        while True:
            try:
                result = _fuse_once(model, folder, learned.applied(settings), learned, timer)
            except StepError as error:
                # Each attempt starts from the original, so no step is half done.
                learned = Learned(also_raised(learned.raised, error))
                continue
            if (result.all_left or result.all_scores_left) and learned.rounds < MAX_SPELLING_ROUNDS:
                learned = _with_left(learned, result)
                continue
            # Steps that raised for single nodes, and were left out for these nodes only.
            noted = {one.step: one for _, each in result.everywhere() for one in each.left_out}
            found: FusedModel | Settings = replace(result, left_out=(*learned.raised.values(), *noted.values()))
            for check in checks:
                if isinstance(found, FusedModel):
                    found = check(found, settings)
            if isinstance(found, FusedModel):
                return found
            settings, learned = found, Learned()


def _with_left(learned: Learned, result: FusedModel) -> Learned:
    """Return `learned` plus the decomposed operators and rewritten scores that were not fused.

    In later rounds, these operators and scores keep their original form.  After MAX_SPELLING_ROUNDS rounds, all
    composite operators and scores keep their original form.
    """
    operators, scores = {**learned.operators, **result.all_left}, learned.scores | result.all_scores_left
    if learned.rounds + 1 == MAX_SPELLING_ROUNDS:
        reason = "each round of fusing left something of other operators"
        operators = {one.output: Stays(one.op, one.node, reason) for one in result.spelled} | operators
        scores |= {(where, name) for where, each in result.everywhere() for name in each.graph.scores.done}
    return replace(learned, operators=operators, scores=scores, rounds=learned.rounds + 1)


def _fuse_once(
    model: onnx.ModelProto, folder: Path | None, settings: Settings, learned: Learned, timer: StageTimer
) -> FusedModel:
    """Inline the functions of a model, and take its graph through the stages."""
    with timer.stage("normalize"):
        inlined = learned.run(INLINING, lambda: inline_functions(model), Inlined(model))
        graph, shapes, taken = _read(inlined.model, folder, settings.bodies)
        learned.run(ESTIMATE, lambda: relate_to_bodies(graph, shapes), None)
    found = _fuse_graph(Work(graph, shapes, taken, settings, learned, timer))
    stays = (*learned.operators.values(), *found.spelling.stays)
    return replace(found, spelling=replace(found.spelling, stays=stays), inlined=inlined)


def _read(model: onnx.ModelProto, folder: Path | None, bodies: bool) -> tuple[Graph, ShapeInfo, list[onnx.NodeProto]]:
    """Return the main graph, with branches that are always taken inlined; its shapes; and the Ifs thus removed."""
    taken: list[onnx.NodeProto] = []
    while True:
        shapes = read_and_infer(model, folder)
        with step(CONTROL_FLOW):
            model, known = with_known_branches(model, shapes) if bodies else (model, [])
        taken += known
        if not known:
            return shapes.graph, shapes, taken


def _fuse_graph(work: Work) -> FusedModel:
    """Take a sorted graph through the stages: the main graph, or the body of an If, Loop or Scan."""
    for stage in STAGES:
        if stage.step not in work.learned.raised:
            with work.timer.stage(stage.timed), step(stage.step):
                stage.run(work)
    return work.found


# --- the stages -----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """A graph that goes through the stages, and their results; `taken` holds the Ifs that were inlined."""

    graph: Graph
    shapes: ShapeInfo
    taken: Sequence[onnx.NodeProto]
    settings: Settings
    learned: Learned
    timer: StageTimer
    where: str = ""  # the body's name in reports; the main graph is ""
    kept_ifs: Collection[Node] = ()  # Ifs whose branches must not change
    found: FusedModel = field(init=False)
    joining: Joining = field(init=False)

    def __post_init__(self) -> None:
        """Start with empty results."""
        self.found = FusedModel(self.graph)

    @property
    def keep(self) -> Set[str]:
        """The labels of nodes that must not be fused."""
        return self.settings.keep_nodes.get(self.where, frozenset())

    @property
    def selection(self) -> Selection:
        """The settings that say which matches are allowed to be fused."""
        return Selection(self.settings.operators, self.found.spelling.contrib, self.settings.exclude, self.keep)

    def traffic(self) -> Traffic:
        """Return the estimated traffic; NO_TRAFFIC if the estimate raised."""
        sizes = self.settings.sizes
        return self.learned.run(ESTIMATE, lambda: estimate_traffic(self.graph, self.shapes, sizes), NO_TRAFFIC)


@dataclass(frozen=True)
class Stage:
    """A stage of fusing a graph: its name in docs/design.md, its function, and the timer that counts its seconds.

    `step` names the step to leave out if the stage raises; "" if the parts of the stage have names of their own.
    """

    name: str
    run: Callable[[Work], None]
    timed: str = ""  # "" if the parts of the stage are timed separately
    step: str = ""


def keep_names(work: Work) -> None:
    """Mark the tensors that keep their names, and the Ifs and Softmaxes that must not be rewritten.

    Tensors whose folding was wrong keep their names.  So do the tensors that an If's branches read, if onnxruntime
    would refuse the If after a rewrite of its branches.
    """
    work.graph.fixed_names |= frozenset(work.settings.keep_names)
    work.graph.scores.stay = frozenset(name for where, name in work.learned.scores if where == work.where)
    with step(CONTROL_FLOW):
        work.kept_ifs = keep_unequal_branches(work.graph, work.shapes)
    folded = tuple(Folded("branch", node.name or node.output[0], node.output[0]) for node in work.taken)
    work.found = replace(work.found, before=work.traffic(), folded=folded)


def look_into_bodies(work: Work) -> None:
    """Replace values that a Loop or Scan carries unchanged by their initial values; infer shapes of Loop results."""
    if work.settings.bodies:
        invariants = read_invariants_outside(work.graph)
        work.found = replace(work.found, folded=(*work.found.folded, *invariants))
        infer_results(work.graph, work.shapes)


def spell_operators_out(work: Work) -> None:
    """Decompose composite operators into the operators that they consist of."""
    if work.settings.fusions and work.settings.spelling:
        work.found = replace(work.found, spelling=spell_out(work.graph, work.shapes, work.learned.operators))


def normalize(work: Work) -> None:
    """Normalize the graph; keep a copy if requested, because verification compares each fused node with it."""
    graph, shapes, settings = work.graph, work.shapes, work.settings
    folded = simplify(graph, shapes, settings.without_passes)
    rows = pass_step(make_keys_row_major)
    work.learned.run(rows, lambda: make_keys_row_major(graph, shapes, settings.fusions, work.keep), 0)
    unfused = unfused_graph(graph, shapes) if settings.keep_unfused else None
    work.found = replace(work.found, folded=(*work.found.folded, *folded), unfused=unfused)


def fuse_recurrences(work: Work) -> None:
    """Replace recurrences over a sequence by fused nodes, before the bodies of Loops and Scans are fused."""
    graph, settings = work.graph, work.settings
    if settings.scans and settings.bodies and not graph.is_subgraph:
        functions = LocalFunctions(graph, settings.operators)
        fold = functools.partial(simplify, without=settings.without_passes)
        scans = assign_scans(work.shapes, functions, fold, settings.exclude, work.keep)
        mlstms, reasons = assign_mlstm(work.shapes, functions, _opened, settings.exclude, work.keep)
        scans = ScanResult((*scans.fused, *mlstms), {**scans.reasons, **reasons})
        work.found = replace(work.found, scans=scans)
    for fusion in settings.fusions:
        if fusion.name == LINEAR_ATTENTION and settings.operators != "standard" and not graph.is_subgraph:
            functions = LocalFunctions(graph, settings.operators)
            chunks = assign_linear_attention(work.shapes, fusion, functions, _opened, settings.exclude, work.keep)
            work.found = replace(work.found, chunks=chunks)


def _opened(model: onnx.ModelProto) -> Callable[[Mapping[str, Array]], Mapping[str, object]]:
    """Open a model in onnxruntime on the CPU, and return a function that runs it.  Raises NoScan where it does not."""

    def run_opened(feeds: Mapping[str, Array]) -> Mapping[str, object]:
        with _as_no_scan():
            return run(session, feeds)

    with _as_no_scan():
        session = open_session(model, optimize=False)
    return run_opened


@contextmanager
def _as_no_scan() -> Iterator[None]:
    try:
        yield
    except (OnnxruntimeFailure, VerificationError) as error:
        raise NoScan(f"onnxruntime does not run it in float64: {first_line(error)}") from error


def fuse_bodies(work: Work) -> None:
    """Fuse recurrences, then replace the bodies of the remaining Ifs, Loops and Scans by fused ones."""
    work.learned.run(SCANS, lambda: fuse_recurrences(work), None)
    bodies = tuple(_fuse_bodies(work)) if work.settings.bodies else ()
    work.found = replace(work.found, bodies=bodies)
    if bodies:  # fused bodies can read fewer tensors of this graph than before
        work.graph.update_captured()
        work.graph.remove_dead()
        work.graph.sort()


def _fuse_bodies(work: Work) -> Iterator[FusedBody]:
    for body in read_bodies(work.graph, work.shapes):
        if body.node in work.kept_ifs:
            continue
        where = f"{body.where} in {work.where}" if work.where else body.where
        settings = replace(work.settings, layout="nchw")
        fused = _fuse_graph(Work(body.graph, body.shapes, body.taken, settings, work.learned, work.timer, where))
        write_body(work.graph, body, fused.model)
        yield FusedBody(body, fused)


def fuse_matches(work: Work) -> None:
    """Replace matches of the patterns by fused nodes, except matches that are cheaper as part of a region."""
    graph, settings = work.graph, work.settings
    spelled = {name for one in work.found.spelling.of_patterns for name in one.made}
    fusions = settings.fusions if settings.regions is True else ()
    functions = LocalFunctions(graph, settings.operators, work.found.spelling.contrib)
    work.joining = Joining(graph, work.shapes, fusions, functions, settings.exclude, work.keep, spelled)
    softmaxes = {node_label(node): graph.scores.name(node) for node in graph.nodes if op_of(node) == "Softmax"}
    products = {node_label(node) for node in graph.nodes if op_of(node) == "MatMul"}
    leave = work.joining.leaves_to_regions if settings.regions else leave_none
    progress = functools.partial(work.timer.progress, "fuse")
    missed = near_misses(graph, work.shapes, settings.rules) if settings.rules else []
    fusing = fuse(graph, work.shapes, settings.fusions, replace(work.selection, leave=leave), progress)
    fusing = replace(fusing, missed=(*missed, *work.found.chunks.missed, *fusing.missed))
    attended = {label for one in fusing.fused for label in one.replaces if products.intersection(one.replaces)}
    scores_left = graph.scores.done - {name for label, name in softmaxes.items() if label in attended}
    work.found = replace(work.found, fusing=fusing, scores_left=frozenset(scores_left))


def lay_images_out(work: Work) -> None:
    """Make parts of the graph around convolutions channels-last; store weights in the layouts that kernels read."""
    settings, fused, layouts = work.settings, work.found.fusing.fused, LayoutResult()
    stored = store_rows(work.shapes, fused)
    # Without CONVOLUTION, the fusion of channels-last Convs, all images stay channels-first.
    if any(fusion.name == CONVOLUTION for fusion in settings.fusions):
        channels_last = {fusion.name: fusion.channels_last for fusion in settings.fusions}
        standing = {*settings.exclude, *_kept_outputs(work.graph, settings.fusions, work.keep)}
        options = LayoutOptions(settings.layout, channels_last, standing, settings.left_out)
        layouts = assign_layouts(work.graph, work.shapes, options, fused)
    store_sums(work.shapes)
    originals = {**layouts.originals, **stored, **work.found.chunks.originals}
    work.found = replace(work.found, layout=replace(layouts, originals=originals))


def _kept_outputs(graph: Graph, fusions: Sequence[Fusion], keep: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield, for LAYOUT and each layout fusion, the outputs of kept nodes, which stay channels-first and unfused."""
    names = {LAYOUT, GATE, *(fusion.name for fusion in fusions)}
    outputs = [tensor.name for node in graph.nodes if keep and node_label(node) in keep for tensor in node.outputs]
    yield from ((name, output) for output in outputs for name in names)


def find_left_over(work: Work) -> None:
    """Find the decomposed operators that were fused only in part."""
    left = left_over(work.graph, work.shapes, work.found.spelling, work.found.fusing)
    work.found = replace(work.found, left=left)


def form_regions(work: Work) -> None:
    """Make regions of the remaining operators, then apply the patterns to the nodes in no region."""
    graph, fusing, made, without = work.graph, work.found.fusing, RegionResult(), work.traffic()
    after = without
    # The layout stage replaced some fused nodes; `_standing` drops their records.
    recurrences = (*work.found.scans.fused, *work.found.chunks.fused)
    known = _standing(graph, (*recurrences, *fusing.fused, *work.found.layout.fused))
    if work.settings.regions and not work.found.left:
        with step(REGIONS):
            quantized = {one.node: one for one in fuse_quantizers(work.joining, {one.node: one for one in known})}
            known = tuple(quantized.get(one.node, one) for one in known)
            made = assign_regions(work.joining, known)
        known = _standing(graph, known)  # without the fused nodes that became parts of regions
    write_deferred(work.shapes)
    if work.settings.regions and work.joining.left:
        last = [fusion for fusion in work.settings.fusions if fusion.last]
        rest = fuse(graph, work.shapes, last, work.selection).fused
        known = (*known, *rest)
        fusing = replace(fusing, remaining=fusing.remaining.difference(*(one.replaces for one in rest)))
    records = {one.node: one for one in (*known, *made.fused)}
    if work.settings.regions:
        after = work.traffic()
        with step(REGIONS):
            joined = {one.node: one for one in fuse_prologues(work.joining, records)}
        if joined:
            of_regions, after = after, work.traffic()
            without = _without_gain(without, of_regions, after)  # what norms in prologues save is not a gain of regions
        records = {one.node: one for one in _standing(graph, (records | joined).values())}
    fusing = replace(fusing, fused=tuple(records.values()))
    left = work.found.left
    if work.settings.operators != "standard":  # other runtimes have no operators of com.microsoft, and no regions
        left = left or left_by_regions(graph, work.found.spelling, made.reasons)
    layout = work.found.layout.counted(graph)
    work.found = replace(
        work.found, fusing=fusing, layout=layout, regions=made, without_regions=without, after=after, left=left
    )


def _without_gain(traffic: Traffic, before: Traffic, after: Traffic) -> Traffic:
    """Return the traffic less what a step saved, which had the traffic `before` and left `after`."""
    saved, launches = before.bytes - after.bytes, before.launches - after.launches
    return replace(traffic, bytes=traffic.bytes - saved, launches=traffic.launches - launches)


def _standing(graph: Graph, fused: Collection[Fused]) -> tuple[Fused, ...]:
    """Return the records of those fused nodes that are still in the graph."""
    names = {node.name for node in graph.nodes}
    return tuple(one for one in fused if one.node in names)


def write(work: Work) -> None:
    """Write the graph as a model, even if it is the body of an If, Loop or Scan."""
    model = write_model(work.graph)
    note_sizes(model, work.shapes.to_note(work.graph.recorded_types))
    work.found = replace(work.found, model=model, left_out=tuple(work.shapes.raised.values()))


STAGES: Final = (
    Stage("Keep", keep_names, "normalize"),
    Stage("Look inside", look_into_bodies, "normalize", CONTROL_FLOW),
    Stage("Spell out", spell_operators_out, "normalize", SPELLING),
    Stage("Normalize", normalize, "normalize"),
    Stage("Bodies", fuse_bodies, step=CONTROL_FLOW),
    Stage("Fuse", fuse_matches, "fuse"),
    Stage("Layout", lay_images_out, "fuse", LAYOUTS),
    Stage("Left over", find_left_over, "fuse", SPELLING),
    Stage("Regions", form_regions, "fuse"),
    Stage("Write", write, "write"),
)


# --- passes ---------------------------------------------------------------------------------------------------------


def simplify(graph: Graph, shapes: ShapeInfo, without: Collection[str] = ()) -> list[Folded]:
    """Apply the passes of the pipeline round by round until none changes anything.  Returns the nodes that vanished.

    Nodes that nothing reads are removed first, because passes remove them only after other changes.  Passes named in
    `without`, by their own names or their step names, are not applied.  Raises StepError for a pass that raises.
    """
    passes, late = (
        [each for each in some if each.__name__ not in without and pass_step(each) not in without]
        for some in (PIPELINE, LATE_PASSES)
    )
    graph.remove_dead()
    folded = _rounds(graph, shapes, passes)
    changes = [_apply(each, graph, shapes) for each in late]
    if any(changes):
        folded += _rounds(graph, shapes, passes)
    return folded


def _rounds(graph: Graph, shapes: ShapeInfo, passes: Sequence[Pass]) -> list[Folded]:
    folded: list[Folded] = []
    for _ in range(MAX_SIMPLIFY_ROUNDS):
        changes = [_apply(each, graph, shapes) for each in passes]
        folded += [one for change in changes if isinstance(change, list) for one in change]
        if not any(changes):
            break
    return folded


def _apply(apply_pass: Pass, graph: Graph, shapes: ShapeInfo) -> list[Folded] | int:
    with step(pass_step(apply_pass)):
        return apply_pass(graph, shapes)


def pass_step(apply_pass: Callable[..., object]) -> str:
    """Return the step name of a pass, for reports on steps that raised."""
    return f"pass {apply_pass.__name__}"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector in the block: scanning long-lived objects takes a quarter of the run time."""
    enabled = gc.isenabled()
    gc.disable()
    move_to_oldest_generation()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def move_to_oldest_generation() -> None:
    """Spare the collection that often follows an optimization what exists before it, such as imported modules.

    A process does so once: counting what a caller has frozen takes 30 ms for a million objects.
    """
    if not gc.get_freeze_count():  # else `unfreeze` would change what a caller has frozen
        gc.freeze()
        gc.unfreeze()
