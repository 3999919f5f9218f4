"""Fuse a model once: simplify its graph, fuse what the patterns match, and choose the layout of images.

The bodies of If, Loop and Scan go the same way, before the graph around them is fused: it reads constants and shapes of
that graph, and what a body no longer reads may be fused outside.

This verifies nothing; `optimizer.py` does, and fuses again without what is wrong.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

import onnx

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import Body, read_bodies, write_body
from onnxfuse.control_flow.invariants import read_invariants_outside
from onnxfuse.control_flow.known_branches import with_known_branches
from onnxfuse.control_flow.results import infer_results
from onnxfuse.control_flow.unequal_branches import keep_unequal_branches
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import OperatorSet
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.inline_functions import Inlined, inline_functions
from onnxfuse.ir.node import Node, op_of
from onnxfuse.ir.serde import read_graph, write_model
from onnxfuse.layout.assign import LAYOUT, Layout, LayoutResult, assign_layouts
from onnxfuse.layout.residuals import GATE
from onnxfuse.layout.stand_ins import put_back, stand_in
from onnxfuse.layout.wrapped_rules import CONVOLUTION
from onnxfuse.match import Miss
from onnxfuse.passes import Folded, Pass
from onnxfuse.passes.folded import node_label
from onnxfuse.pipeline import LATE_PASSES, PIPELINE
from onnxfuse.regions.assign import RegionResult, assign_regions
from onnxfuse.regions.defer_to_regions import DeferToRegions
from onnxfuse.regions.only_with_epilogue import OnlyWithEpilogue
from onnxfuse.report.traffic import Traffic, estimate_traffic
from onnxfuse.rewrite.make_keys_row_major import make_keys_row_major
from onnxfuse.rewrite.replace import Fused, LocalFunctions
from onnxfuse.rewrite.select import FusionResult, fuse, leave_none, nearness
from onnxfuse.spell_out import Spelled, SpelledOut, Stays, in_terms_of_model, left_over, spell_out
from onnxfuse.steps import (
    CONTROL_FLOW,
    ESTIMATE,
    INLINING,
    LAYOUTS,
    REGIONS,
    SPELLING,
    LeftOut,
    step,
    without_what_raises,
)
from onnxfuse.verify.parts import UnfusedGraph, unfused_graph

MAX_SIMPLIFY_ROUNDS = 4
MAX_SPELLING_ROUNDS = 4  # in which operators of which something was left over keep their form
T = TypeVar("T")
Progress: TypeAlias = Callable[[str, int, int], None]  # called with the stage, how much of it is done, and of how much


@dataclass
class StageTimer:
    """Measures the seconds of every stage, and reports the stage that begins to `progress`."""

    progress: Progress = lambda stage, done, of: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the stage's seconds."""
        self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


Regions: TypeAlias = bool | Literal["apart"]  # whether there are any; "apart" if none may join a product's kernel


Scores: TypeAlias = frozenset[tuple[str, str]]  # of Softmaxes: the body that each is in, and its output


@dataclass(frozen=True)
class Settings:
    """What `fuse_model` is to do, as its arguments say."""

    fusions: Sequence[Fusion]
    operators: OperatorSet
    layout: Layout
    regions: Regions
    bodies: bool
    exclude: Collection[tuple[str, str]]
    keep_names: frozenset[str]
    keep_unfused: bool
    keep_nodes: Mapping[str, Set[str]]  # the labels of nodes that are not fused, by the body that they are in
    where: str = ""  # what reports call the body that is fused; the main graph is ""
    keep_operators: frozenset[str] = frozenset()  # the first outputs of operators that are not spelled out
    keep_scores: Scores = frozenset()  # the Softmaxes whose scores stay as they are
    left_out: frozenset[str] = frozenset()  # those of LAYOUT_FUSIONS that are not made
    without_passes: frozenset[str] = frozenset()  # names of passes that are not applied
    raised: frozenset[str] = frozenset()  # names of steps that are left out because they raised

    def without(self, raised: frozenset[str]) -> Settings:
        """Return the settings without these steps."""
        return replace(
            self,
            fusions=[fusion for fusion in self.fusions if fusion.step not in raised],
            regions=REGIONS not in raised and self.regions,
            bodies=CONTROL_FLOW not in raised and self.bodies,
            raised=raised,
        )

    def run(self, name: str, function: Callable[[], T], otherwise: T) -> T:
        """Return what a step returns; `otherwise` where it is left out."""
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
    """A model after fusing, and what was done to it; or a body of it, as a model."""

    graph: Graph
    model: onnx.ModelProto
    before: Traffic
    after: Traffic
    folded: tuple[Folded, ...]
    fusing: FusionResult
    layout: LayoutResult
    without_regions: Traffic  # what it would be if the nodes of regions stayed apart
    regions: RegionResult
    unfused: UnfusedGraph | None  # what was fused, for the comparison by parts
    spelling: SpelledOut = field(default_factory=SpelledOut)  # of operators that other tools write for several
    left: Mapping[str, Stays] = field(default_factory=dict)  # spelled out and not fused as a whole, by first outputs
    scores_left: frozenset[str] = frozenset()  # of Softmaxes, rewritten for an attention that was not made
    bodies: tuple[FusedBody, ...] = ()
    inlined: Inlined | None = None  # the model's own functions
    standard: onnx.ModelProto | None = None  # the model in ONNX's own operators, where these are written
    left_out: tuple[LeftOut, ...] = ()  # steps that raised

    @property
    def written(self) -> onnx.ModelProto:
        """The model that is written: the one with fused nodes, or in ONNX's own operators in their place."""
        return self.standard or self.model

    def everywhere(self, where: str = "") -> Iterator[tuple[str, FusedModel]]:
        """Yield this graph and all bodies in it, each with what reports call it; the main graph is ""."""
        yield where, self
        for one in self.bodies:
            yield from one.fused.everywhere(f"{one.body.where} in {where}" if where else one.body.where)

    @property
    def fused(self) -> tuple[Fused, ...]:
        """All fused nodes, those in bodies included; channels-last outputs have the names of those in the original."""
        return tuple(
            replace(one, where=where, output=each.layout.original(one.output))
            for where, each in self.everywhere()
            for one in each.fusing.fused
        )

    @property
    def fused_of_model(self) -> tuple[Fused, ...]:
        """The same, with the operators of the model that nodes replace in place of what was spelled out for them."""
        return in_terms_of_model(self.fused, self.spelled)

    @property
    def all_folded(self) -> tuple[Folded, ...]:
        """All nodes that vanished, those in bodies included."""
        return tuple(one for _, each in self.everywhere() for one in each.folded)

    @property
    def spelled(self) -> tuple[Spelled, ...]:
        """All operators that were spelled out to be fused, those in bodies included."""
        return tuple(one for _, each in self.everywhere() for one in each.spelling.spelled)

    @property
    def stays(self) -> tuple[Stays, ...]:
        """All operators that could be spelled out, and stay as they are."""
        return tuple(one for _, each in self.everywhere() for one in each.spelling.stays)

    @property
    def all_left(self) -> dict[str, Stays]:
        """All operators that were spelled out and not fused as a whole, by their first outputs, and why."""
        return {name: one for _, each in self.everywhere() for name, one in each.left.items()}

    @property
    def all_scores_left(self) -> Scores:
        """All Softmaxes whose scores were rewritten for an attention that was not made."""
        return frozenset((where, name) for where, each in self.everywhere() for name in each.scores_left)

    @property
    def no_region(self) -> dict[str, str]:
        """Why nodes are in no region, by their names, those in bodies included."""
        return {name: why for _, each in self.everywhere() for name, why in each.regions.reasons.items()}

    @property
    def missed(self) -> tuple[Miss, ...]:
        """Every miss, those in bodies included."""
        return tuple(miss for _, each in self.everywhere() for miss in each.fusing.missed)

    def near(self) -> list[Miss]:
        """Return the misses worth reading, those in bodies included, nearest first."""
        return sorted((miss for _, each in self.everywhere() for miss in each.fusing.near()), key=nearness)


def fuse_model(
    model: onnx.ModelProto,
    folder: Path | None,
    fusions: Sequence[Fusion],
    *,
    operators: OperatorSet = "onnx",
    layout: Layout = "auto",
    regions: Regions = False,
    bodies: bool = True,
    exclude: Collection[tuple[str, str]] = frozenset(),
    keep_names: Collection[str] = frozenset(),
    keep_nodes: Mapping[str, Set[str]] = MappingProxyType({}),
    keep_unfused: bool = False,
    left_out: Collection[str] = frozenset(),
    without_passes: Collection[str] = frozenset(),
    timer: StageTimer | None = None,
) -> FusedModel:
    """Simplify and fuse a model that was loaded, without verifying it.

    `folder` is where its external data lies. `operators` says which ones the bodies of fused nodes consist of. `layout`
    and `regions` are as in `optimize`. `bodies` says whether those of If, Loop and Scan are fused, in which images stay
    channels-first. `exclude` holds matches that stay unfused, each by the name of its fusion and of its first output,
    and nodes that stay channels-first, by LAYOUT and the latter. `keep_names` are tensors that are neither folded nor
    fused over. `keep_nodes` are the labels of nodes that no fusion, region or layout takes, by the body that they are
    in. `keep_unfused` remembers the graph as it was before fusing. `left_out` are fusions of layouts that are not made.
    `without_passes` names passes that are not applied.

    A step that raises is left out, as the result says, unless the user can act on its error.
    """
    timer = timer or StageTimer()
    settings = Settings(
        fusions, operators, layout, regions, bodies, exclude, frozenset(keep_names), keep_unfused,
        keep_nodes, left_out=frozenset(left_out), without_passes=frozenset(without_passes),
    )  # fmt: skip
    with _no_garbage_collection():
        result, raised = without_what_raises(lambda names: _fuse_spelled(model, folder, settings.without(names), timer))
    noted = {one.step: one for _, each in result.everywhere() for one in each.left_out}  # for single nodes
    return replace(result, left_out=(*raised, *noted.values()))


def _fuse_spelled(model: onnx.ModelProto, folder: Path | None, settings: Settings, timer: StageTimer) -> FusedModel:
    """Fuse a model, and again while what was written for a fusion is not fused.

    This concerns operators that were spelled out, and scores that were rewritten for an attention.
    """
    kept: dict[str, Stays] = {}
    scores: Scores = frozenset()
    for _ in range(MAX_SPELLING_ROUNDS):
        result = _fuse_once(model, folder, settings, timer, kept, scores)
        if not result.all_left and not result.all_scores_left:
            return result
        kept |= result.all_left
        scores |= result.all_scores_left
    reason = "each round of fusing left something of other operators"
    kept = {one.output: Stays(one.op, one.node, reason) for one in result.spelled} | kept
    rewritten = {(where, name) for where, each in result.everywhere() for name in each.graph.scores.done}
    return _fuse_once(model, folder, settings, timer, kept, scores | rewritten)


def _fuse_once(
    model: onnx.ModelProto,
    folder: Path | None,
    settings: Settings,
    timer: StageTimer,
    kept: Mapping[str, Stays],
    scores: Scores,
) -> FusedModel:
    """Fuse a model, whose operators with the first outputs `kept` are not spelled out, and whose `scores` stay."""
    with timer.stage("normalize"):
        inlined = settings.run(INLINING, lambda: inline_functions(model), Inlined(model))
        graph, shapes, taken = _read(inlined.model, folder, settings.bodies)
    found = _fuse_graph(
        graph, shapes, taken, replace(settings, keep_operators=frozenset(kept), keep_scores=scores), timer
    )
    spelling = replace(found.spelling, stays=(*kept.values(), *found.spelling.stays))
    return replace(found, spelling=spelling, inlined=inlined)


def _read(model: onnx.ModelProto, folder: Path | None, bodies: bool) -> tuple[Graph, ShapeInfo, list[onnx.NodeProto]]:
    """Return the main graph with the branches that are always taken, its shapes, and the Ifs that vanished."""
    taken: list[onnx.NodeProto] = []
    while True:
        graph = read_graph(model, folder)
        graph.sort()
        shapes = infer_shapes(graph)
        with step(CONTROL_FLOW):
            model, known = with_known_branches(model, shapes) if bodies else (model, [])
        taken += known
        if not known:
            return graph, shapes, taken


def _fuse_graph(
    graph: Graph, shapes: ShapeInfo, taken: Iterable[onnx.NodeProto], settings: Settings, timer: StageTimer
) -> FusedModel:
    """Simplify and fuse a sorted graph: the main graph, or a body.  `taken` are the Ifs that vanished."""
    keep = settings.keep_nodes.get(settings.where, frozenset())
    with timer.stage("normalize"):
        graph.fixed_names |= settings.keep_names
        graph.scores.stay = frozenset(name for where, name in settings.keep_scores if where == settings.where)
        with step(CONTROL_FLOW):
            kept_ifs = keep_unequal_branches(graph, shapes)
        before = _traffic(graph, shapes, settings)
        folded = [Folded("branch", node.name or node.output[0], node.output[0]) for node in taken]
        if settings.bodies:
            with step(CONTROL_FLOW):
                folded += read_invariants_outside(graph)
                infer_results(graph, shapes)
        spelling = SpelledOut()
        if settings.fusions:
            spelling = settings.run(SPELLING, lambda: spell_out(graph, shapes, settings.keep_operators), SpelledOut())
        folded += simplify(graph, shapes, settings.without_passes | settings.raised)
        settings.run(
            pass_step(make_keys_row_major), lambda: make_keys_row_major(graph, shapes, settings.fusions, keep), 0
        )
        unfused = unfused_graph(graph, shapes) if settings.keep_unfused else None
    with step(CONTROL_FLOW):
        bodies = tuple(_fuse_bodies(graph, shapes, settings, timer, kept_ifs)) if settings.bodies else ()
    if bodies:  # which may read less of this graph than before
        graph.update_captured()
        graph.remove_dead()
        graph.sort()
    with timer.stage("fuse"):
        progress = functools.partial(timer.progress, "fuse")
        exclude = settings.exclude
        fuse_more = functools.partial(
            fuse, graph, shapes, operators=settings.operators, contrib=spelling.contrib, exclude=exclude, keep=keep
        )
        spelled = {name for one in spelling.spelled for name in one.made}
        joins = settings.regions is True
        joining = {fusion.name: fusion.epilogue for fusion in settings.fusions if fusion.epilogue and joins}
        of_any_layout = {name for name, epilogue in joining.items() if epilogue != "nhwc"}
        functions = LocalFunctions(graph, settings.operators, spelling.contrib)
        only_with_epilogue = OnlyWithEpilogue(
            graph, shapes, settings.fusions if joins else (), functions, exclude, keep
        )
        defer_to_regions = DeferToRegions(graph, shapes, keep | spelled, of_any_layout, only_with_epilogue)
        softmaxes = {node_label(node): graph.scores.name(node) for node in graph.nodes if op_of(node) == "Softmax"}
        products = {node_label(node) for node in graph.nodes if op_of(node) == "MatMul"}
        fusing = fuse_more(
            settings.fusions, leave=defer_to_regions if settings.regions else leave_none, progress=progress
        )
        attended = {label for one in fusing.fused for label in one.replaces if products.intersection(one.replaces)}
        scores_left = graph.scores.done - {name for label, name in softmaxes.items() if label in attended}
        standing = {*exclude, *_kept_outputs(graph, settings.fusions, keep)}
        layouts = settings.run(
            LAYOUTS, lambda: _assign_layouts(graph, shapes, settings, fusing.fused, standing), LayoutResult()
        )
        left = settings.run(SPELLING, lambda: left_over(graph, shapes, spelling, fusing), dict[str, Stays]())
        without_regions = after = _traffic(graph, shapes, settings)
        known = _standing(graph, (*fusing.fused, *layouts.fused))  # layouts have put others in place of some
        made = RegionResult()
        if settings.regions:
            if not left:
                with step(REGIONS):
                    made = _form_regions(graph, shapes, exclude, joining, known, keep, only_with_epilogue)
                known = _standing(graph, known)  # without norms that are parts of regions
            if defer_to_regions.has_left:
                rest = fuse_more([fusion for fusion in settings.fusions if fusion.last]).fused
                known = (*known, *rest)
                fusing = replace(fusing, remaining=fusing.remaining.difference(*(one.replaces for one in rest)))
            after = _traffic(graph, shapes, settings)
        records = {one.node: one for one in (*known, *made.fused)}
        fusing = replace(fusing, fused=tuple(records.values()))
    with timer.stage("write"):
        written = write_model(graph)
    return FusedModel(
        graph, written, before, after, tuple(folded), fusing, layouts, without_regions, made, unfused,
        spelling, left, frozenset(scores_left), bodies, left_out=tuple(shapes.raised.values()),
    )  # fmt: skip


def _traffic(graph: Graph, shapes: ShapeInfo, settings: Settings) -> Traffic:
    """Return the estimated traffic; none where the estimate raised."""
    return settings.run(ESTIMATE, lambda: estimate_traffic(graph, shapes), Traffic(0, 0))


def _form_regions(
    graph: Graph,
    shapes: ShapeInfo,
    exclude: Collection[tuple[str, str]],
    joining: Mapping[str, bool | str],
    known: Collection[Fused],
    keep: Set[str],
    only_with_epilogue: OnlyWithEpilogue,
) -> RegionResult:
    """Make regions, also of operators that channels-last nodes were made of; `known` are the records of fused nodes."""
    stand_ins = stand_in(graph, known)
    made = assign_regions(graph, shapes, exclude, joining, known, keep, only_with_epilogue)
    fused_again = {name for one in put_back(graph, stand_ins) for name in one.replaces}
    return replace(made, reasons={node: why for node, why in made.reasons.items() if node not in fused_again})


def _standing(graph: Graph, fused: Collection[Fused]) -> tuple[Fused, ...]:
    """Return the records of the fused nodes that a graph has."""
    names = {node.name for node in graph.nodes}
    return tuple(one for one in fused if one.node in names)


def _fuse_bodies(
    graph: Graph, shapes: ShapeInfo, settings: Settings, timer: StageTimer, kept_ifs: Collection[Node]
) -> Iterator[FusedBody]:
    """Fuse the bodies in a graph, and put them in place of those that its nodes have."""
    for body in read_bodies(graph, shapes):
        if body.node in kept_ifs:
            continue
        where = f"{body.where} in {settings.where}" if settings.where else body.where
        inside = replace(settings, layout="nchw", where=where)
        fused = _fuse_graph(body.graph, body.shapes, body.taken, inside, timer)
        write_body(graph, body, fused.model)
        yield FusedBody(body, fused)


def _kept_outputs(graph: Graph, fusions: Sequence[Fusion], keep: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield the outputs of kept nodes, which stay channels-first, and which no fusion takes in with another layout."""
    names = {LAYOUT, GATE, *(fusion.name for fusion in fusions)}
    outputs = [tensor.name for node in graph.nodes if keep and node_label(node) in keep for tensor in node.outputs]
    yield from ((name, output) for output in outputs for name in names)


def _assign_layouts(
    graph: Graph,
    shapes: ShapeInfo,
    settings: Settings,
    fused: Collection[Fused],
    exclude: Collection[tuple[str, str]],
) -> LayoutResult:
    if not any(fusion.name == CONVOLUTION for fusion in settings.fusions):  # a channels-last Conv is one of these
        return LayoutResult()
    channels_last = {fusion.name: fusion.channels_last for fusion in settings.fusions}
    return assign_layouts(graph, shapes, settings.layout, channels_last, fused, exclude, settings.left_out)


def simplify(graph: Graph, shapes: ShapeInfo, without: Collection[str] = ()) -> list[Folded]:
    """Apply the passes of the pipeline round by round until none changes anything.  Returns the nodes that vanished.

    Passes that `without` names, also as steps, are not applied.  Raises StepError for a pass that raises.
    """
    passes, late = (
        [each for each in some if each.__name__ not in without and pass_step(each) not in without]
        for some in (PIPELINE, LATE_PASSES)
    )
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
    """Return how a report calls a pass that raised."""
    return f"pass {apply_pass.__name__}"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector: to search many small objects that live on takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
