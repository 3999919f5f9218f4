"""Fuse a model once: simplify its graph, fuse what the patterns match, and choose the layout of images.

This verifies nothing; `optimizer.py` does, and fuses again without what is wrong.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import onnx

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.serde import read_graph, write_model
from onnxfuse.layout.assign import Layout, LayoutResult, assign_layouts
from onnxfuse.layout.wrapped_rules import CONVOLUTION
from onnxfuse.passes import PIPELINE, WEIGHT_PASSES, Folded
from onnxfuse.regions.assign import RegionResult, assign_regions
from onnxfuse.report.traffic import Traffic, estimate_traffic
from onnxfuse.rewrite.replace import Fused
from onnxfuse.rewrite.select import FusionResult, fuse
from onnxfuse.spell_out import Spelled, SpelledOut, Stays, left_over, spell_out
from onnxfuse.verify.parts import UnfusedGraph, unfused_graph

MAX_SIMPLIFY_ROUNDS = 4
MAX_SPELLING_ROUNDS = 4  # in which operators are left out of whose spelling something was not fused
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


@dataclass(frozen=True)
class FusedModel:
    """A model after fusing, and what was done to it."""

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
    spelled: tuple[Spelled, ...] = ()  # the operators that were spelled out to be fused
    stays: tuple[Stays, ...] = ()  # the operators that could be spelled out, and stay as they are


def fuse_model(
    model: onnx.ModelProto,
    folder: Path | None,
    fusions: Sequence[Fusion],
    *,
    ort: bool = False,
    layout: Layout = "auto",
    regions: bool = False,
    change_weights: bool = True,
    exclude: Collection[tuple[str, str]] = frozenset(),
    keep_names: Collection[str] = frozenset(),
    keep_unfused: bool = False,
    timer: StageTimer | None = None,
) -> FusedModel:
    """Simplify and fuse a model that was loaded, without verifying it.

    `folder` is where its external data lies.  `ort` lets the bodies of fused nodes consist of com.microsoft operators
    too.  `layout` and `regions` are as in `optimize`.  `change_weights` folds BatchNormalization and scales into
    weights.  `exclude` holds matches that stay unfused, each by the name of its fusion and of its first output, and
    nodes that stay channels-first, by LAYOUT and the latter.  `keep_names` are tensors that are neither folded nor
    fused over.  `keep_unfused` remembers the graph as it was before fusing.
    """
    once = functools.partial(
        _fuse_once, model, folder, fusions, ort=ort, layout=layout, regions=regions, change_weights=change_weights,
        exclude=exclude, keep_names=keep_names, keep_unfused=keep_unfused, timer=timer or StageTimer(),
    )  # fmt: skip
    with _no_garbage_collection():
        stays: dict[str, Stays] = {}
        for _ in range(MAX_SPELLING_ROUNDS):
            result, left = once(keep_operators=stays.keys())
            if not left:
                return replace(result, stays=(*stays.values(), *result.stays))
            stays |= left
        reason = "each round of fusing left something of other operators"
        stays = {one.output: Stays(one.op, one.node, reason) for one in result.spelled} | stays
        result, _ = once(keep_operators=stays.keys())
        return replace(result, stays=(*stays.values(), *result.stays))


def _fuse_once(
    model: onnx.ModelProto,
    folder: Path | None,
    fusions: Sequence[Fusion],
    *,
    ort: bool,
    layout: Layout,
    regions: bool,
    change_weights: bool,
    exclude: Collection[tuple[str, str]],
    keep_names: Collection[str],
    keep_unfused: bool,
    keep_operators: Collection[str],
    timer: StageTimer,
) -> tuple[FusedModel, dict[str, Stays]]:
    """Fuse a model, whose operators with the first outputs `keep_operators` are not spelled out.

    Returns also the operators that were spelled out and not fused as a whole, by their first outputs, and why.
    """
    with timer.stage("normalize"):
        graph = read_graph(model, folder)
        graph.fixed_names |= frozenset(keep_names)
        graph.sort()
        shapes = infer_shapes(graph)
        before = estimate_traffic(graph, shapes)
        spelled = spell_out(graph, shapes, keep_operators) if fusions else SpelledOut()
        folded = simplify(graph, shapes, change_weights)
    with timer.stage("fuse"):
        unfused = unfused_graph(graph, shapes) if keep_unfused else None
        done = functools.partial(timer.progress, "fuse")
        fusing = fuse(graph, shapes, fusions, ort=ort, contrib=spelled.contrib, exclude=exclude, progress=done)
        layouts = _assign_layouts(graph, shapes, fusions, layout, fusing.fused, exclude)
        left = left_over(graph, shapes, spelled, fusing)
        without_regions = after = estimate_traffic(graph, shapes)
        made = assign_regions(graph, shapes, exclude) if regions and not left else RegionResult()
        if made.fused:
            after = estimate_traffic(graph, shapes)
        records = {one.node: one for one in (*fusing.fused, *layouts.fused, *made.fused)}
        fusing = replace(fusing, fused=tuple(records.values()))
    with timer.stage("write"):
        written = model if left else write_model(graph)
    traffic = before, after
    fused = FusedModel(graph, written, *traffic, tuple(folded), fusing, layouts, without_regions, made, unfused)
    return replace(fused, spelled=spelled.spelled, stays=spelled.stays), left


def _assign_layouts(
    graph: Graph,
    shapes: ShapeInfo,
    fusions: Sequence[Fusion],
    layout: Layout,
    fused: Collection[Fused],
    exclude: Collection[tuple[str, str]],
) -> LayoutResult:
    if not any(fusion.name == CONVOLUTION for fusion in fusions):  # a channels-last Conv is one of these
        return LayoutResult()
    channels_last = {fusion.name: fusion.channels_last for fusion in fusions}
    return assign_layouts(graph, shapes, layout, channels_last, fused, exclude)


def simplify(graph: Graph, shapes: ShapeInfo, change_weights: bool = True) -> list[Folded]:
    """Apply the passes of the pipeline round by round until none changes anything.  Returns the nodes that vanished."""
    passes = [each for each in PIPELINE if change_weights or each not in WEIGHT_PASSES]
    folded: list[Folded] = []
    for _ in range(MAX_SIMPLIFY_ROUNDS):
        changes = [apply_pass(graph, shapes) for apply_pass in passes]
        folded += [one for change in changes if isinstance(change, list) for one in change]
        if not any(changes):
            break
    return folded


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
