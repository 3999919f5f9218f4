"""The pipeline, readable as a recipe: load, normalize, fold, fuse, verify."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx

from onnxfuse.errors import UsageError, VerificationError
from onnxfuse.language import catalog
from onnxfuse.language.terms import Fusion
from onnxfuse.model.files import load
from onnxfuse.model.graph import Array, Graph
from onnxfuse.model.linking import read_graph, write_model
from onnxfuse.passes.batch_norm import fold_batch_norm
from onnxfuse.passes.fold import Folded, fold_constants, fold_shapes
from onnxfuse.passes.gate_halves import split_gates
from onnxfuse.passes.normalize import normalize
from onnxfuse.passes.patches import patches_to_products
from onnxfuse.passes.thin import thin_masks
from onnxfuse.report import Dropped, Report, Traffic, traffic
from onnxfuse.rewrite.fuse import Fusing, fuse
from onnxfuse.shapes.inference import Shapes, infer_shapes
from onnxfuse.verify.verify import Verification, compare, first_difference

ROUNDS = 4
WEIGHTS = "batch_norm"  # the name under which folding into weights is reported when it is taken back
UNVERIFIED = Verification(None, (), "switched off; `onnxfuse verify A B` compares two models", ())
Progress = Callable[[str, int, int], None]  # stage, done, of


@dataclass
class Clock:
    """Seconds by stage, and a place to tell progress to."""

    tell: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        self.tell(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Fusible:
    """A graph after fusing, and what was done to it."""

    graph: Graph
    model: onnx.ModelProto
    before: Traffic
    after: Traffic
    folded: tuple[Folded, ...]
    fusing: Fusing


def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    patterns: Iterable[str | os.PathLike[str]] = (),
    fallback: Literal["onnx", "ort"] = "onnx",
    verify: bool = True,
    inputs: Mapping[str, Array] | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> tuple[onnx.ModelProto, Report]:
    """Fuse a model.

    model     a path, a serialized model or a ModelProto (which is not changed); external data stays on disk
    only      names of the fusions to apply; all, if none is named
    skip      names of fusions to leave out
    patterns  folders of Python files with further fusions; one of an existing name replaces it
    fallback  which operators the bodies of fused nodes are written in: standard ONNX, or also onnxruntime's own
    verify    run both models in onnxruntime and take back each fusion, or the folding, that changes an output
    inputs    what to verify with, by input name; generated where not given

    Returns the model, in which each fused node calls a model-local function, and the report.  Raises ModelError for a
    model that cannot be read, UsageError for an unknown fusion, VerificationError where the models differ although
    nothing that could be taken back is at fault.
    """
    if fallback not in ("onnx", "ort"):
        raise UsageError(f"fallback is 'onnx' or 'ort', not '{fallback}'")
    fusions = catalog.choose(catalog.with_folders(patterns), only, skip)
    clock = Clock(progress)
    with clock.stage("load"):
        original, folder = load(model)
    run = Run(original, folder, fallback == "ort", inputs, clock)
    dropped: list[Dropped] = []
    while True:
        taken = {d.fusion for d in dropped}
        result = run.apply([f for f in fusions if f.name not in taken], WEIGHTS not in taken)
        verified = run.verify(result.model) if verify else UNVERIFIED
        if verified.passed is not False:
            break
        dropped.append(run.culprit(result, verified, WEIGHTS not in taken))
    path = str(model) if isinstance(model, str | os.PathLike) else None
    report = Report(
        {"path": path, "nodes": len(original.graph.node), "opset": result.graph.opset},
        {"path": None, "nodes": len(result.model.graph.node)},
        result.fusing.fused, result.folded, tuple(result.fusing.near()), tuple(dropped), result.before, result.after,
        verified, clock.seconds,
    )  # fmt: skip
    return result.model, report


@contextmanager
def _without_collector() -> Iterator[None]:
    """Many small objects live to the end of a run; to look for garbage among them takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Run:
    """One model on its way, with what every attempt needs."""

    original: onnx.ModelProto
    folder: Path | None
    ort: bool
    inputs: Mapping[str, Array] | None
    clock: Clock

    def apply(self, fusions: Sequence[Fusion], weights: bool = True) -> Fusible:
        """Everything between reading and verifying.  `weights`: fold BatchNormalization and scales into weights."""
        with _without_collector():
            with self.clock.stage("normalize"):
                graph = read_graph(self.original, self.folder)
                graph.sort()
                shapes = infer_shapes(graph)
                before = traffic(graph, shapes)
                folded = prepare(graph, shapes, weights)
            with self.clock.stage("fuse"):
                told = functools.partial(self.clock.tell, "fuse")
                fusing = fuse(graph, shapes, fusions, ort=self.ort, progress=told)
            with self.clock.stage("write"):
                model = write_model(graph)
        return Fusible(graph, model, before, traffic(graph, shapes), tuple(folded), fusing)

    def verify(self, optimized: onnx.ModelProto) -> Verification:
        """The original against `optimized`."""
        with self.clock.stage("verify"):
            return compare(self.original, optimized, inputs=self.inputs, folder=self.folder)

    def culprit(self, result: Fusible, verified: Verification, weights: bool) -> Dropped:
        """What to take back: folding into weights, if that alone changes an output, or else the first fusion to."""
        alone = self.verify(self.apply([], weights).model)
        if alone.passed is False and not weights:
            raise VerificationError(f"normalizing changed the model: {alone.reason}; please report this model")
        if alone.passed is False:
            node = next((f.node for f in result.folded if f.what in ("batch_norm", "scale")), "")
            return Dropped(WEIGHTS, node, alone.reason)
        order = {t.name: i for i, node in enumerate(result.graph.nodes) for t in node.outputs}
        fused = sorted(result.fusing.fused, key=lambda one: order.get(one.output, -1))
        names = [one.output for one in fused]
        try:
            name = first_difference(self.original, result.model, names, inputs=self.inputs, folder=self.folder)
        except VerificationError:
            name = None
        guilty = next((one for one in fused if one.output == name), fused[-1])
        return Dropped(guilty.fusion, guilty.node, verified.reason)


def prepare(graph: Graph, shapes: Shapes, weights: bool = True) -> list[Folded]:
    """Fold and normalize until nothing changes."""
    folded: list[Folded] = []
    for _ in range(ROUNDS):
        new = [*fold_constants(graph, shapes), *fold_shapes(graph, shapes)]
        changes = normalize(graph, shapes) + thin_masks(graph, shapes) + patches_to_products(graph, shapes)
        if weights:
            new += fold_batch_norm(graph, shapes) + split_gates(graph, shapes)
        folded += new
        if not new and not changes:
            break
    return folded
