"""What an optimization did: fused, folded and missed, the estimated gain, and whether it was verified."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onnx import helper
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from onnxfuse.errors import ModelError, UsageError
from onnxfuse.match import Miss
from onnxfuse.model.graph import Graph, Tensor, op_of
from onnxfuse.model.lookups import lookups
from onnxfuse.passes.fold import Folded
from onnxfuse.rewrite.replace import Fused
from onnxfuse.shapes.dims import Size, evaluate, symbols
from onnxfuse.shapes.inference import Shapes
from onnxfuse.verify.verify import Verification

FREE = {"Constant", "Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
BATCH, OTHER = 1, 128  # assumed for dimensions that the model leaves open: those named like a batch, and the rest
SHOWN = 10  # misses in the terminal


@dataclass(frozen=True)
class Traffic:
    """The roofline model: every node reads its inputs and writes its outputs once, in one launch.

    Of a table in which rows are looked up, it reads those.
    """

    bytes: int
    launches: int


@dataclass(frozen=True)
class Dropped:
    """A fusion that the verification took back, and why."""

    fusion: str
    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of `optimize`, besides the model.  `to_json()` documents the fields."""

    input: Mapping[str, Any]
    output: Mapping[str, Any]
    fused: tuple[Fused, ...]
    folded: tuple[Folded, ...]
    missed: tuple[Miss, ...]
    dropped: tuple[Dropped, ...]
    before: Traffic
    after: Traffic
    verified: Verification
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Fused nodes by fusion."""
        return dict(sorted(Counter(one.fusion for one in self.fused).items()))

    def to_json(self) -> dict[str, Any]:
        """Plain data: input, output, counts, fused, folded, missed, dropped, estimate, verified, seconds."""
        return {
            "input": dict(self.input),
            "output": dict(self.output),
            "counts": self.counts,
            "fused": [
                {"fusion": f.fusion, "node": f.node, "replaces": list(f.replaces), "dims": dict(f.dims)}
                for f in self.fused
            ],
            "folded": [asdict(f) for f in self.folded],
            "missed": [miss_json(m) for m in self.missed],
            "dropped": [asdict(d) for d in self.dropped],
            "estimate": {
                "bytes_before": self.before.bytes,
                "bytes_after": self.after.bytes,
                "launches_before": self.before.launches,
                "launches_after": self.after.launches,
            },
            "verified": self.verified.to_json(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def written(self, path: Path) -> Report:
        """The report of a run whose model was written to `path`."""
        return replace(self, output={**self.output, "path": str(path)})

    def write(self, path: Path) -> None:
        """Write as JSON (.json) or a page (.html).  Raises UsageError for other names, ModelError where that fails."""
        check_name(path)
        if path.suffix.lower() == ".html":
            console = Console(record=True, width=120, file=io.StringIO())
            console.print(self.table())
            text = console.export_html()
        else:
            text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ModelError(f"cannot write the report '{path}': {error.strerror}; give another name") from error

    def table(self) -> Group:
        """What the terminal shows."""
        return Group(_fused_table(self), *_lines(self), *_missed_table(self))


def check_name(path: Path) -> None:
    """Raise UsageError unless a report may have this name, ModelError unless its folder exists."""
    if path.suffix.lower() not in (".json", ".html"):
        raise UsageError(f"cannot write the report '{path}': its name must end in .json or .html")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write the report '{path}': there is no folder '{path.parent}'; create it first")


def miss_json(miss: Miss) -> dict[str, Any]:
    """A miss as plain data."""
    return {
        "fusion": miss.fusion.name,
        "node": miss.node,
        "matched": miss.matched,
        "of": miss.of,
        "reason": miss.reason,
        "source": str(miss.span),
    }


def traffic(graph: Graph, shapes: Shapes) -> Traffic:
    """Bytes and launches of a graph; tensors of unknown shape count nothing, open dimensions as BATCH and OTHER say."""
    total, launches = 0, 0
    known: dict[object, int] = {}
    bodies = {f"{f.domain}::{f.name}": f for f in graph.functions}

    def size(tensor: Tensor, first: int = 0) -> int:
        key = shapes.shape(tensor), shapes.dtype(tensor), first
        if key not in known:
            known[key] = _bytes(*key)
        return known[key]

    for node in graph.nodes:
        if (op := op_of(node)) in FREE:
            continue
        launches += 1
        moved = {t.name: size(t) for t in (*node.inputs, *node.outputs) if t.name}
        for place, ids in lookups(op, node.attrs.get("axis"), node.inputs, bodies.get(op)).items():
            table, rows = node.inputs[place], node.inputs[ids]
            if shapes.dtype(rows) and table.name in moved:
                count = size(rows) // int(helper.tensor_dtype_to_np_dtype(shapes.dtype(rows)).itemsize)
                moved[table.name] = min(moved[table.name], count * size(table, 1))
        total += sum(moved.values())
    return Traffic(total, launches)


def _bytes(shape: Sequence[Size] | None, dtype: int, first: int = 0) -> int:
    """Of the axes from `first` on."""
    if shape is None or not dtype:
        return 0
    count = 1
    for size in shape[first:]:
        values = {name: BATCH if "batch" in name.lower() else OTHER for name in symbols(size)}
        count *= max(evaluate(size, values), 0)
    return count * int(helper.tensor_dtype_to_np_dtype(dtype).itemsize)


def _fused_table(report: Report) -> Table:
    table = Table(title="Fused", title_justify="left", box=None, pad_edge=False)
    for name, justify in ("fusion", "left"), ("nodes", "right"), ("replaced", "right"):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, count in report.counts.items():
        replaced = sum(len(f.replaces) for f in report.fused if f.fusion == name)
        table.add_row(name, str(count), str(replaced))
    return table


def _lines(report: Report) -> list[str]:
    folded = Counter(f.what for f in report.folded)
    lines = [f"Folded: {', '.join(f'{count} {what}' for what, count in sorted(folded.items())) or 'nothing'}"]
    lines.append(f"Nodes: {report.input['nodes']} -> {report.output['nodes']}")
    lines.append(
        f"Estimate: {_bytes_text(report.before.bytes)} -> {_bytes_text(report.after.bytes)} of memory traffic, "
        f"{report.before.launches} -> {report.after.launches} launches"
    )
    lines += [f"[yellow]Dropped {d.fusion}[/] at '{escape(d.node)}': {escape(d.reason)}" for d in report.dropped]
    verified = report.verified
    if verified.passed:
        worst = max((o.max_rel / o.tolerance if o.tolerance else 0 for o in verified.outputs), default=0)
        outputs = _counted(len(verified.outputs), "output")
        lines.append(f"[green]Verified[/]: {outputs} equal (at {worst:.0%} of the tolerance)")
    else:
        lines.append(f"[yellow]Not verified[/]: {escape(verified.reason)}")
    return lines


def _missed_table(report: Report) -> list[Any]:
    if not report.missed:
        return []
    table = Table(title=f"Nearly fused ({len(report.missed)})", title_justify="left", box=None, pad_edge=False)
    for name in "fusion", "node", "agreed", "why not":
        table.add_column(name, overflow="fold")
    for miss in report.missed[:SHOWN]:
        table.add_row(miss.fusion.name, escape(miss.node), f"{miss.matched} of {miss.of}", escape(miss.reason))
    return [table, "`onnxfuse explain MODEL` shows where in the pattern each of them differs."]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
