"""`onnxfuse tune`: a model file tuned, and the tables of what was measured."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onnxfuse.bench.timing import Provider
from onnxfuse.model.files import load
from onnxfuse.model.graph import DOMAIN
from onnxfuse.optimize import optimize
from onnxfuse.provider import verdicts
from onnxfuse.provider.preferences import shapes_text
from onnxfuse.verify.given_shapes import feeds_of_known_sizes
from onnxfuse.verify.inputs import Array

if TYPE_CHECKING:
    from onnxfuse.provider.tune import Tuning, Whole

GIVE_SIZES = "--shape input:8x512, or inputs: --input x.npz"
Progress = Callable[[str, int, int], None]


def tune_file(
    path: str | os.PathLike[str],
    *,
    shapes: Sequence[str] = (),
    inputs: Mapping[str, Array] | None = None,
    provider: Provider = "cuda",
    device_id: int = 0,
    options: Mapping[str, str] | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> Tuning:
    """Tune a model, which is fused first where it is not, at these shapes, with these options of the provider.

    Raises UsageError where a dynamic dim has no size or nothing can be tuned.
    """
    from onnxfuse.provider.tune import tune  # needs onnxruntime

    progress("load", 0, 0)
    original, folder = load(Path(path))
    feeds = feeds_of_known_sizes(original, shapes, inputs or {}, GIVE_SIZES)
    fused: onnx.ModelProto | None = None
    if not any(node.domain == DOMAIN for node in original.graph.node):
        fused, _ = optimize(path, verify=False, progress=progress)
    model, before = (fused, original) if fused else (original, None)
    given = {**(options or {}), **({"device_id": device_id} if device_id else {})}
    return tune(model, folder, feeds, provider, given, original=before, progress=progress)


def tuning_tables(tuning: Tuning) -> Group:
    """What the terminal shows: nodes, then the whole model, then where the verdicts are."""
    parts: list[Any] = [_nodes(tuning)] if tuning.ops else []
    parts += [f"Nodes were not timed alone: {escape(tuning.ops_error)}"] if tuning.ops_error else []
    failed = dict.fromkeys(f"{op.fusion}: not timed alone: {op.error}" for op in tuning.ops if op.error)
    parts += [*map(escape, failed), _models(tuning.whole)]
    parts += [f"{each.mode}: nothing chosen: {escape(each.reason)}" for each in tuning.whole if each.reason]
    parts += [
        f"{each.mode}: the original model is faster than all variants of the fused one; run the original"
        for each in tuning.whole
        if each.chosen and each.seconds.get("original", math.inf) < each.seconds[each.chosen]
    ]
    where = f"Kept in {verdicts.cache_folder()}" if tuning.kept else "Not kept; the lines above or the log say why."
    return Group(*parts, Text(where, overflow="ignore", no_wrap=True))  # a path that is broken cannot be copied


def _nodes(tuning: Tuning) -> Table:
    table = Table(title="Fused nodes", title_justify="left", box=None, pad_edge=False)
    table.add_column("node", overflow="fold")
    table.add_column("shapes", overflow="fold")
    for name in "nodes", "kernel us", "body us":
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chosen", no_wrap=True)
    for op in tuning.ops:
        times = ["-" if value is None else f"{1e6 * value:.2f}" for value in (op.kernel, op.body)]
        table.add_row(escape(op.fusion), escape(shapes_text(op.shapes)), str(len(op.nodes)), *times, op.faster or "-")
    return table


def _models(whole: Sequence[Whole]) -> Table:
    table = Table(title="The whole model", title_justify="left", box=None, pad_edge=False)
    for name in "mode", "variant":
        table.add_column(name)
    table.add_column("median ms", justify="right")
    table.add_column("chosen")
    for row in _rows(whole):
        table.add_row(*row)
    return table


def _rows(whole: Sequence[Whole]) -> Iterator[tuple[str, ...]]:
    for each in whole:
        for name, seconds in each.seconds.items():
            yield each.mode, name.partition(" ")[0], f"{1e3 * seconds:.4f}", "chosen" if name == each.chosen else ""
