"""The report of an optimization: nodes fused, folded and missed, the estimated gain, and the verification."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import onnx
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from onnxfuse.errors import ModelError, UsageError
from onnxfuse.half.result import HalfResult, half_lines
from onnxfuse.ir.inline_functions import Inlined
from onnxfuse.layout.assign import LayoutResult
from onnxfuse.match import Miss
from onnxfuse.passes.folded import Folded
from onnxfuse.report.standard import Standard, standard_lines
from onnxfuse.report.traffic import Traffic
from onnxfuse.rewrite.replace import REGION, Fused
from onnxfuse.spell_out import Stays
from onnxfuse.verify.compare import Verification

QUANTIZED: Final = (  # what the names of operators on quantized numbers begin with
    "Quantize", "Dequantize", "DynamicQuantize", "MatMulInteger", "ConvInteger", "QLinear", "MatMulNBits", "MatMulBnb4",
    "QAttention", "QGemm", "QEmbed", "QOrdered", "QMoE", "GatherBlockQuantized",
)  # fmt: skip
MAX_MISSES_SHOWN = 10  # in the terminal
MAX_NOT_COMPARED_SHOWN = 10
MAX_REGION_ENDS_SHOWN = 5
MAX_SUBGRAPHS_SHOWN = 10


@dataclass(frozen=True)
class Dropped:
    """A fusion, the layout, or the folding into weights or constants, that the verification took back, and why."""

    fusion: str
    node: str
    reason: str


@dataclass(frozen=True)
class RegionGain:
    """The regions, the nodes that they replace, those that joined others, and what is saved, as estimated."""

    nodes: int
    replaced: int
    joined: int
    bytes_saved: int
    launches_saved: int


@dataclass(frozen=True)
class Subgraph:
    """A body of an If, Loop or Scan: its nodes before and after, and how many fused ones of each fusion."""

    where: str
    nodes_before: int
    nodes_after: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Report:
    """What `optimize` did to a model.  `to_json()` names the fields."""

    input: Mapping[str, str | int | None]
    output: Mapping[str, str | int | None]
    fused: tuple[Fused, ...]
    folded: tuple[Folded, ...]
    missed: tuple[Miss, ...]
    dropped: tuple[Dropped, ...]
    before: Traffic
    after: Traffic
    verified: Verification
    seconds: Mapping[str, float] = field(default_factory=dict)
    layout: LayoutResult = field(default_factory=LayoutResult)
    without_regions: Traffic | None = None  # the traffic if the nodes of regions stayed apart; None for none
    subgraphs: tuple[Subgraph, ...] = ()
    inlined: Inlined | None = None  # the model's own functions
    stays: tuple[Stays, ...] = ()  # operators that could be spelled out to be fused, and stay as they are
    quantized: Mapping[str, int] = field(default_factory=dict)  # operators on quantized numbers, which are not fused
    standard: Standard | None = None  # what stands for the fused nodes, with emit="standard"
    half: HalfResult | None = None  # what the conversion to half precision did, with a dtype
    folder: Path | None = None  # where the external data of the model lies until it is saved

    @property
    def counts(self) -> dict[str, int]:
        """The number of fused nodes by fusion."""
        return dict(sorted(Counter(one.fusion for one in self.fused).items()))

    @property
    def regions(self) -> RegionGain:
        """What regions save of the traffic that is left by the other fusions."""
        fused = [one for one in self.fused if one.fusion == REGION]
        apart = self.without_regions or self.after
        return RegionGain(
            len(fused), sum(len(one.replaces) for one in fused), sum(len(one.joined) for one in self.fused),
            apart.bytes - self.after.bytes, apart.launches - self.after.launches,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return plain data.

        Its keys are input, output, counts, subgraphs, functions, fused, folded, missed, stays, quantized, dropped,
        layout, regions, estimate, standard, half, verified and seconds.
        """
        return {
            "input": dict(self.input),
            "output": dict(self.output),
            "counts": self.counts,
            "subgraphs": [asdict(each) for each in self.subgraphs],
            "functions": {"inlined": self.inlined.calls, "kept": list(self.inlined.kept)} if self.inlined else {},
            "fused": [
                {
                    "fusion": f.fusion,
                    "node": f.node,
                    "where": f.where,
                    "replaces": list(f.replaces),
                    "dims": dict(f.dims),
                }
                for f in self.fused
            ],
            "folded": [{"what": f.kind, "node": f.node, "into": f.into} for f in self.folded],
            "missed": [miss_json(m) for m in self.missed],
            "stays": [asdict(one) for one in self.stays],
            "quantized": dict(self.quantized),
            "dropped": [asdict(d) for d in self.dropped],
            "layout": {
                "nodes": self.layout.nodes,
                "transposes": len(self.layout.ends),
                "ends": [asdict(end) for end in self.layout.ends],
            },
            "regions": asdict(self.regions),
            "estimate": {
                "bytes_before": self.before.bytes,
                "bytes_after": self.after.bytes,
                "launches_before": self.before.launches,
                "launches_after": self.after.launches,
            },
            "standard": self.standard.to_json() if self.standard else {},
            "half": self.half.to_json() if self.half else {},
            "verified": self.verified.to_json(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def written(self, path: Path) -> Report:
        """Return the report with the path that the model was written to."""
        return replace(self, output={**self.output, "path": str(path)})

    def write(self, path: Path) -> None:
        """Write as JSON (.json) or as a page (.html).

        Raises UsageError for other suffixes, ModelError if the file cannot be written.
        """
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
        """Return the tables and lines for the terminal; one line for a model in which nothing can be fused."""
        if not self.input["opset"]:
            return Group("Unchanged: the model has no operator of the ONNX domain, and no other operators are fused.")
        return Group(_fused_table(self), *_lines(self), *_missed_table(self))


def quantized_operators(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of the main graph work on quantized numbers, by operator, the most frequent first."""
    names = (node.op_type for node in model.graph.node if node.op_type.startswith(QUANTIZED))
    return dict(Counter(names).most_common())


def check_name(path: Path) -> None:
    """Raise UsageError unless the name ends as that of a report must, ModelError unless its folder exists."""
    if path.suffix.lower() not in (".json", ".html"):
        raise UsageError(f"cannot write the report '{path}': its name must end in .json or .html")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write the report '{path}': there is no folder '{path.parent}'; create it first")


def miss_json(miss: Miss) -> dict[str, Any]:
    """Return a miss as plain data."""
    return {
        "fusion": miss.fusion.name,
        "node": miss.node,
        "matched": miss.matched,
        "of": miss.of,
        "reason": miss.reason,
        "source": str(miss.span),
    }


def _fused_table(report: Report) -> Table:
    table = Table(title="Fused", title_justify="left", box=None, pad_edge=False)
    table.add_column("fusion")
    for name in "nodes", "replaced":
        table.add_column(name, justify="right")
    for name, count in report.counts.items():
        replaced = sum(len(f.replaces) for f in report.fused if f.fusion == name)
        table.add_row(name, str(count), str(replaced))
    return table


def _lines(report: Report) -> list[str]:
    folded = Counter(f.kind for f in report.folded)
    lines = [f"Folded: {', '.join(f'{count} {kind}' for kind, count in sorted(folded.items())) or 'nothing'}"]
    lines.append(f"Nodes: {report.input['nodes']} -> {report.output['nodes']}")
    lines.append(
        f"Estimate: {_bytes_text(report.before.bytes)} -> {_bytes_text(report.after.bytes)} of memory traffic, "
        f"{report.before.launches} -> {report.after.launches} launches"
    )
    lines += [*_subgraph_lines(report.subgraphs), *_function_lines(report.inlined)]
    lines += [*_region_lines(report.regions), *_layout_lines(report.layout)]
    lines += [*_stays_lines(report.stays), *_quantized_lines(report.quantized), *standard_lines(report.standard)]
    lines += half_lines(report.half)
    return [*lines, *_dropped_lines(report.dropped), *verification_lines(report.verified)]


def _subgraph_lines(subgraphs: Sequence[Subgraph]) -> list[str]:
    """Return the nodes of each subgraph, those with fused nodes first, and its fused ones."""
    ordered = sorted(subgraphs, key=lambda each: -sum(each.counts.values()))
    lines = [
        f"In {escape(each.where)}: {each.nodes_before} -> {each.nodes_after} nodes"
        + "".join(f", {count} {fusion}" for fusion, count in each.counts.items())
        for each in ordered[:MAX_SUBGRAPHS_SHOWN]
    ]
    rest = ordered[MAX_SUBGRAPHS_SHOWN:]
    fused = sum(sum(each.counts.values()) for each in rest)
    return [*lines, *([f"In {_counted(len(rest), 'more subgraph')}: {_counted(fused, 'fused node')}"] if rest else [])]


def _function_lines(inlined: Inlined | None) -> list[str]:
    """Return how many calls of the model's own functions were inlined, and which functions stay."""
    if inlined is None:
        return []
    calls = [f"Inlined: {_counted(inlined.calls, 'call')} of the model's own functions"] if inlined.calls else []
    return [*calls, *(f"Not inlined: {escape(why)}" for why in inlined.kept)]


def _region_lines(regions: RegionGain) -> list[str]:
    """Return what regions save; nothing where there are none."""
    if not regions.nodes + regions.joined:
        return []
    joined = f", {_counted(regions.joined, 'node')} in epilogues" if regions.joined else ""
    saved = f"{_bytes_text(regions.bytes_saved)} and {_counted(regions.launches_saved, 'launch', 'launches')} saved"
    return [f"Regions: {_counted(regions.nodes, 'node')} in place of {regions.replaced}{joined}, {saved}"]


def _layout_lines(layout: LayoutResult) -> list[str]:
    """Return how many nodes are channels-last, and why Transposes stand between these and the others."""
    if not layout.nodes:
        return []
    reasons = Counter(end.reason for end in layout.ends).most_common()
    shown = [f"  {_counted(count, 'Transpose')}: {escape(why)}" for why, count in reasons[:MAX_REGION_ENDS_SHOWN]]
    rest = sum(count for _, count in reasons[MAX_REGION_ENDS_SHOWN:])
    more = [f"  {_counted(rest, 'more Transpose')}"] if rest else []
    total = f"{_counted(layout.nodes, 'node')} channels-last, {_counted(len(layout.ends), 'Transpose')} at borders"
    return [f"Layout: {total}", *shown, *more]


def _stays_lines(stays: Sequence[Stays]) -> list[str]:
    """Return one line for each operator and reason, which says how many nodes stay as they are."""
    counts = Counter((one.op, one.reason) for one in stays).most_common()
    return [f"Not fused: {count} {escape(op)}, because {escape(reason)}" for (op, reason), count in counts]


def _quantized_lines(quantized: Mapping[str, int]) -> list[str]:
    """Return one line with the operators on quantized numbers; nothing where there are none."""
    listed = ", ".join(f"{count} {escape(op)}" for op, count in quantized.items())
    return [f"Quantized, which is not fused: {listed}"] if listed else []


def _dropped_lines(dropped: Sequence[Dropped]) -> list[str]:
    """Return one line for each fusion and reason, which names the first node and how many more there are."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for each in dropped:
        nodes.setdefault((each.fusion, each.reason), []).append(each.node)
    return [
        f"[yellow]Dropped {fusion}[/] at '{escape(first)}'{_more(more)}: {escape(reason)}"
        for (fusion, reason), (first, *more) in nodes.items()
    ]


def _more(names: Sequence[str]) -> str:
    return f" and at {_counted(len(names), 'equal node')}" if names else ""


def verification_lines(verified: Verification) -> list[str]:
    """Return what was compared, and each output and fused node that was not."""
    if not verified.passed:
        return [f"[yellow]Not verified[/]: {escape(verified.reason)}"]
    worst = max((o.max_rel / o.tolerance if o.tolerance else 0 for o in verified.outputs), default=0)
    outputs = f"{_counted(len(verified.outputs), 'output')} equal (at {worst:.0%} of the tolerance)"
    nodes = f"{_counted(verified.equal_parts, 'fused node')} equal"
    equal = ", ".join([*([outputs] if verified.outputs else []), *([nodes] if verified.equal_parts else [])])
    if verified.status == "verified":
        return [f"[green]Verified[/]: {equal}"]
    missing = [f"  '{escape(each.name)}' is not compared: {escape(each.reason)}" for each in verified.not_compared]
    more = [f"  {len(missing) - MAX_NOT_COMPARED_SHOWN} more are not compared"]
    shown = missing[:MAX_NOT_COMPARED_SHOWN] + (more if len(missing) > MAX_NOT_COMPARED_SHOWN else [])
    return [f"[yellow]Partly verified[/]: {equal}", *shown]


def _missed_table(report: Report) -> list[Any]:
    if not report.missed:
        return []
    table = Table(title=f"Nearly fused ({len(report.missed)})", title_justify="left", box=None, pad_edge=False)
    for name in "fusion", "node", "agreed", "why not":
        table.add_column(name, overflow="fold")
    for miss in report.missed[:MAX_MISSES_SHOWN]:
        table.add_row(miss.fusion.name, escape(miss.node), f"{miss.matched} of {miss.of}", escape(miss.reason))
    return [table, "`onnxfuse explain MODEL` shows where in the pattern each of them differs."]


def _counted(count: int, what: str, several: str = "") -> str:
    return f"{count} {what}" if count == 1 else f"{count} {several or f'{what}s'}"


def _bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
