"""`onnxfuse tune`: tune a model file, and print tables of the measurements."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import load
from onnxfuse.ir.protos import nodes
from onnxfuse.optimizer import optimize
from onnxfuse.printing import columns, escape, two_lines
from onnxfuse.runtime.cache_folder import cache_folder
from onnxfuse.session import open_session
from onnxfuse.steps import Progress
from onnxfuse.tuning.bound_session import Provider, TimedModel
from onnxfuse.tuning.dispatch import shapes_text
from onnxfuse.tuning.tune import ORIGINAL, ModelTimes, Tuning, check_kernels_run, tune
from onnxfuse.verify.inputs import model_inputs
from onnxfuse.verify.requested_shapes import feeds_of_known_sizes, with_known_ranks
from onnxfuse.verify.shape_ranges import is_range, parse_ranges, spread

if TYPE_CHECKING:  # session.py must be imported before start_provider.py, because it reports a missing onnxruntime
    from onnxfuse.runtime.start_provider import ProviderOptions

GIVE_SIZES: Final = "--shape input:8x512, or inputs: --input x.npz"


@dataclass(frozen=True)
class TuneSettings:
    """The inputs, provider and fusions that a model is tuned with.

    Shapes can be ranges, as "input:1..8x1..512".  The whole model is then timed at the largest sizes, and the candidate
    plans of its kernels also at the other sizes of `spread`.
    """

    patterns: Iterable[str | os.PathLike[str]] = ()  # folders with further fusions
    shapes: Sequence[str] = ()  # sizes of dynamic dims, as "input:8x512"
    inputs: Mapping[str, Array] = field(default_factory=dict)  # inputs to run on, instead of generated ones
    provider: Provider = "cuda"
    options: ProviderOptions = field(default_factory=dict)  # options of the provider


def tune_file(
    path: str | os.PathLike[str], settings: TuneSettings, progress: Progress = lambda stage, done, of: None
) -> Tuning:
    """Tune a model; a model without fused nodes is fused first.

    Raises UsageError if nothing can be tuned here, and if a dynamic dim has no size.
    """
    check_kernels_run(settings.provider)
    progress("load", 0, 0)
    original, folder = load(Path(path))
    first, *others = _spread(original, settings.shapes)
    feeds = feeds_of_known_sizes(original, first, settings.inputs, GIVE_SIZES)
    fused: onnx.ModelProto | None = None
    if not any(map(is_fused, nodes(original.graph))):
        fused, _ = optimize(path, patterns=settings.patterns, verify=False, progress=progress)
    model, before = (fused, original) if fused else (original, None)
    making = [partial(feeds_of_known_sizes, original, each, {}, GIVE_SIZES) for each in others]
    timed = TimedModel(model, folder, feeds, settings.provider, open_session, settings.options, progress)
    return tune(timed, original=before, others=making)


def _spread(model: onnx.ModelProto, shapes: Sequence[str]) -> list[Sequence[str]]:
    """Return the shapes to measure at, the largest first: the given ones, or sizes spread over their ranges."""
    if not is_range(shapes):
        return [shapes]
    wanted = model_inputs(with_known_ranks(model, shapes))
    return list(spread(parse_ranges(shapes, wanted), wanted))


def tuning_tables(tuning: Tuning) -> Group:
    """Return the tables of nodes and of the whole model, and a line that says where the measurements are kept."""
    parts: list[RenderableType] = [_nodes(tuning), ""] if tuning.ops else []
    parts += [f"Nodes were not timed alone: {escape(tuning.ops_error)}"] if tuning.ops_error else []
    failed = dict.fromkeys(f"{op.fusion}: not timed alone: {op.error}" for op in tuning.ops if op.error)
    parts += [*map(escape, failed), _models(tuning.models)]
    parts += [f"{each.mode}: nothing chosen: {escape(each.reason)}" for each in tuning.models if each.reason]
    parts += [
        f"{each.mode}: the original model is faster than all variants of the fused one; run the original"
        for each in tuning.models
        if each.chosen and each.seconds.get(ORIGINAL, math.inf) < each.seconds[each.chosen]
    ]
    where = f"Kept in {cache_folder()}" if tuning.kept else "Not kept; the lines above or the log say why."
    return Group(*parts, Text(where, overflow="ignore", no_wrap=True))  # a path that wraps cannot be copied


def _nodes(tuning: Tuning) -> Table:
    """Return a table with a row for each kind of node; the first cell has the fusion and, below it, the inputs."""
    table = columns("Fused nodes", "nodes", "kernel us", "body us", "chosen")
    for op in tuning.ops:
        times = ["-" if value is None else f"{1e6 * value:.2f}" for value in (op.kernel, op.body)]
        table.add_row(two_lines(op.fusion, shapes_text(op.shapes)), str(len(op.nodes)), *times, op.faster or "-")
    return table


def _models(models: Sequence[ModelTimes]) -> Table:
    """Return a table with a row for each mode and variant of the whole model."""
    table = columns("The whole model", "variant", "median ms", "chosen")
    for row in _rows(models):
        table.add_row(*row)
    return table


def _rows(models: Sequence[ModelTimes]) -> Iterator[tuple[str, ...]]:
    for each in models:
        for name, seconds in each.seconds.items():
            yield each.mode, name.partition(" ")[0], f"{1e3 * seconds:.4f}", "chosen" if name == each.chosen else ""
