"""The report of an optimization: nodes fused, folded and missed, the estimated gain, and the verification."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import onnx
from rich.console import Group, RenderableType

from onnxfuse.errors import ModelError, UsageError
from onnxfuse.half.result import HalfResult, half_lines
from onnxfuse.ir.file_bytes import file_bytes
from onnxfuse.ir.inline_functions import Inlined
from onnxfuse.ir.plain_files import check_replaceable, write_whole
from onnxfuse.ir.read import read
from onnxfuse.layout.assign import LayoutResult
from onnxfuse.match import Miss
from onnxfuse.passes.folded import Folded
from onnxfuse.printing import Line, bytes_text, cell, columns, counted, escape
from onnxfuse.quantize.result import BesideReference, WeightsResult, reference_lines, weights_lines
from onnxfuse.report.estimated_times import estimated_times
from onnxfuse.report.facts import Facts
from onnxfuse.report.lines import (
    estimate_line,
    folded_line,
    function_lines,
    layout_lines,
    missed_lines,
    operator_table,
    quantized_lines,
    stays_lines,
    subgraph_lines,
    verification_lines,
)
from onnxfuse.report.operators import OperatorCount
from onnxfuse.report.similar import group
from onnxfuse.report.standard import Standard, standard_lines
from onnxfuse.report.times import Times
from onnxfuse.report.traffic import Traffic
from onnxfuse.rewrite.replace import REGION, Fused, count_replaced
from onnxfuse.spell_out import Stays
from onnxfuse.steps import LeftOut
from onnxfuse.verify.compare import Verification

QUANTIZED: Final = (  # prefixes of the names of operators on quantized tensors
    "Quantize", "Dequantize", "DynamicQuantize", "MatMulInteger", "ConvInteger", "QLinear", "MatMulNBits", "MatMulBnb4",
    "QAttention", "QGemm", "QEmbed", "QOrdered", "QMoE", "GatherBlockQuantized",
)  # fmt: skip


@dataclass(frozen=True)
class Dropped:
    """A step that was undone because its result was wrong (a fusion, the layout, a pass or a folding), and the reason.

    `node` is "" if the step was undone for all nodes.
    """

    fusion: str
    node: str
    reason: str


@dataclass(frozen=True)
class RegionGain:
    """The numbers of regions, of nodes that they replace, and of nodes in epilogues, with the estimated savings."""

    nodes: int
    replaced: int
    joined: int
    bytes_saved: int
    launches_saved: int


@dataclass(frozen=True)
class Subgraph:
    """A body of an If, Loop or Scan: how many nodes it has before and after, and how many fused nodes per fusion.

    `added` counts the nodes of each operator that it has more of than before.
    """

    where: str
    nodes_before: int
    nodes_after: int
    counts: Mapping[str, int]
    added: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The record of one optimization.  `to_json()` names the fields."""

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
    without_regions: Traffic | None = None  # the memory traffic before regions were made; None if none were made
    subgraphs: tuple[Subgraph, ...] = ()
    inlined: Inlined | None = None  # the model's own functions, and whether they were inlined
    stays: tuple[Stays, ...] = ()  # operators that could be decomposed to be fused, but stay as they are
    quantized: Mapping[str, int] = field(default_factory=dict)  # operators on quantized numbers, which are not fused
    standard: Standard | None = None  # the operators written for fused nodes, with emit="standard"
    operators: tuple[OperatorCount, ...] = ()  # counts of the operators that are not fused nodes
    unmatched: Mapping[str, str] = field(default_factory=dict)  # fusions named by `only` that match nothing, and why
    switched_off: tuple[str, ...] = ()  # names of matches that a plan leaves out
    facts: Facts | None = None  # facts about the model and the run, for the page
    half: HalfResult | None = None  # the result of a conversion to half precision
    folder: Path | None = None  # the folder of the model's external data until it is saved
    left_out: tuple[LeftOut, ...] = ()  # steps that were skipped because they raised an exception, with tracebacks
    weights: WeightsResult | None = None  # the result of quantizing weights
    reference: BesideReference | None = None  # the errors relative to a given float model
    times: Times | None = None  # the times of nodes before and after, which `onnxfuse bench` measures

    @property
    def estimated_times(self) -> Times | None:
        """Estimates of the times of the main graph's nodes on a GPU; None if there is no basis for them."""
        graph = next(iter(self.facts.graphs), None) if self.facts else None
        return estimated_times(self.before, self.after, graph, self.fused, self.folded) if graph else None

    @property
    def counts(self) -> dict[str, int]:
        """The number of fused nodes of each fusion."""
        return dict(sorted(Counter(one.fusion for one in self.fused).items()))

    @property
    def only_bodies_changed(self) -> bool:
        """Whether only bodies of If, Loop and Scan changed, so that estimates of the main graph say nothing."""
        is_changed = self.input["nodes"] != self.output["nodes"]
        return bool(self.subgraphs) and is_changed and self.before.launches == self.after.launches

    @property
    def regions(self) -> RegionGain:
        """The counts of regions, and the memory traffic that they save in addition to all other fusions."""
        fused = [one for one in self.fused if one.fusion == REGION]
        apart = self.without_regions or self.after
        return RegionGain(
            len(fused), count_replaced(fused), sum(len(one.joined) for one in self.fused),
            apart.bytes - self.after.bytes, apart.launches - self.after.launches,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values.

        Its keys are input, output, counts, subgraphs, functions, fused, folded, missed, stays, quantized, dropped,
        layout, regions, estimate, standard, half, weights, reference, operators, unmatched, switched_off, left_out,
        verified, times and seconds.
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
                    "match": f.match,
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
                "channels_first": [
                    {"node": one.node, "output": one.output, "reason": one.reason} for one in self.layout.stays
                ],
            },
            "regions": asdict(self.regions),
            "estimate": {
                "bytes_before": self.before.bytes,
                "bytes_after": self.after.bytes,
                "launches_before": self.before.launches,
                "launches_after": self.after.launches,
                "flops": self.before.flops,
                "assumed": dict(self.before.assumed),
            },
            "standard": self.standard.to_json() if self.standard else {},
            "operators": [asdict(one) for one in self.operators],
            "unmatched": dict(self.unmatched),
            "switched_off": list(self.switched_off),
            "left_out": [asdict(one) for one in self.left_out],
            "half": self.half.to_json() if self.half else {},
            "weights": self.weights.to_json() if self.weights else {},
            "reference": self.reference.to_json() if self.reference else {},
            "verified": self.verified.to_json(),
            "times": self.times.to_json() if self.times else {},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, as `to_json` does."""
        return self.to_json()

    def _repr_html_(self) -> str:
        """Return a compact summary as HTML, which notebooks display."""
        from onnxfuse.report.page import write_summary  # imported here, because it imports Jinja2

        return write_summary(self)

    def written(self, path: Path) -> Report:
        """Return the report with the path that the model was written to, and the bytes of its files."""
        size = file_bytes(path, read(path))
        return replace(self, output={**self.output, "path": str(path), "bytes": size})

    def write(self, path: Path) -> None:
        """Write the report to a file, as JSON (.json) or as a page (.html).

        Raises UsageError for other suffixes, ModelError if the file cannot be written.
        """
        check_name(path)
        if path.suffix.lower() == ".html":
            from onnxfuse.report.page import write_page  # imported here, because it imports Jinja2

            text = write_page(self)
        else:
            text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            write_whole(path, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise _not_written(path, error) from error

    def table(self, everything: bool = False) -> Group:
        """Return the tables and lines for the terminal: changes, unfused nodes with reasons, and last the verification.

        `everything` shows all operators and reasons, and also near misses in which fewer than half of the pattern's
        nodes matched.
        """
        if not self.input["opset"]:
            return Group("Unchanged: the model has no operator of the ONNX domain, and no other operators are fused.")
        shown: list[RenderableType] = [*_summary(self), "", *_fused_tables(self)]
        if operators := operator_table(self.operators, everything):
            shown.append(operators)
            shown.append("")
        shown.extend(_lines(self, everything))
        if missed := [*missed_lines(self.missed, everything)]:
            shown.append("")
            shown.extend(missed)
        shown.append("")
        raised = [Line(f"[yellow]Left out:[/] {escape(str(one))}") for one in self.left_out]
        return Group(*shown, *_dropped_lines(self.dropped), *raised, *verification_lines(self.verified, everything))


def quantized_operators(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of the main graph work on quantized numbers, by operator, the most frequent first."""
    names = (node.op_type for node in model.graph.node if node.op_type.startswith(QUANTIZED))
    return dict(Counter(names).most_common())


def check_name(path: Path) -> None:
    """Raise UsageError unless the name ends in .json or .html, ModelError if no file can be written there."""
    if path.suffix.lower() not in (".json", ".html"):
        raise UsageError(f"cannot write the report '{path}': its name must end in .json or .html")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write the report '{path}': there is no folder '{path.parent}'; create it first")
    try:
        check_replaceable(path)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> ModelError:
    return ModelError(f"cannot write the report '{path}': {error.strerror}; give another name")


def miss_json(miss: Miss) -> dict[str, Any]:
    """Return a near miss as JSON values."""
    return {
        "fusion": miss.fusion.name,
        "node": miss.node,
        "matched": miss.matched,
        "of": miss.of,
        "reason": miss.reason,
        "source": str(miss.span),
    }


def _summary(report: Report) -> Iterator[RenderableType]:
    """Yield the table of the gain, which has nodes, launches and bytes before and after, and what the estimates are of.

    Estimates are of the main graph, and are left out if only bodies of If, Loop and Scan changed.
    """
    table = columns("", "before", "after")
    before, after = report.before, report.after
    table.add_row("nodes", str(report.input["nodes"]), str(report.output["nodes"]))
    if not report.only_bodies_changed:
        table.add_row("kernel launches", str(before.launches), str(after.launches))
        table.add_row("memory traffic", bytes_text(before.bytes), bytes_text(after.bytes))
    sizes = [report.input.get("bytes"), report.output.get("bytes")]
    if isinstance(sizes[0], int):
        table.add_row("file", *(bytes_text(size) if isinstance(size, int) else "not written" for size in sizes))
    yield table
    if not report.only_bodies_changed:
        yield estimate_line(before.assumed, bool(report.subgraphs))


def _fused_tables(report: Report) -> Iterator[RenderableType]:
    """Yield two tables of fused nodes by fusion: one of nodes that replace several nodes, one of all others."""
    several = [one for one in report.fused if len(one.replaces) > 1]
    table = columns("Fused", "nodes", "replaced")
    for name, count in sorted(Counter(one.fusion for one in several).items()):
        table.add_row(cell(name), str(count), str(count_replaced(one for one in several if one.fusion == name)))
    single = columns("Replaced one to one", "nodes")
    for name, count in sorted(Counter(one.fusion for one in report.fused if len(one.replaces) <= 1).items()):
        single.add_row(cell(name), str(count))
    for each in filter(lambda each: each.row_count, (table, single)):
        yield each
        yield ""
    if not report.fused:
        known = int(report.input["fused"] or 0)
        already = f"; {counted(known, 'node is', 'nodes are')} fused already" if known else ""
        yield Line(f"Nothing was fused{already}.")
        yield ""


def _lines(report: Report, everything: bool) -> Iterator[Line]:
    """Yield the lines that follow the tables: about other changes, and about operators that stay, with the reasons."""
    for fusion, why in report.unmatched.items():
        yield Line(f"[yellow]{escape(fusion)} matches nothing[/]: {escape(why)}")
    yield folded_line([one.kind for one in report.folded])
    yield from subgraph_lines(report.subgraphs, everything)
    yield from function_lines(report.inlined)
    yield from _region_lines(report.regions, bool(report.subgraphs))
    yield from layout_lines(report.layout, everything)
    if report.switched_off:
        yield Line(f"Switched off by the plan: {counted(len(report.switched_off), 'match', 'matches')}")
    yield from stays_lines(report.stays)
    yield from quantized_lines(report.quantized)
    yield from map(Line, standard_lines(report.standard))
    yield from map(Line, half_lines(report.half))
    yield from weights_lines(report.weights)
    yield from reference_lines(report.reference)


def _region_lines(regions: RegionGain, has_bodies: bool) -> Iterator[Line]:
    """Yield a line on regions and epilogues, if there are any, with their savings in the main graph."""
    if not regions.nodes + regions.joined:
        return
    parts = [f"{counted(regions.nodes, 'node')} in place of {regions.replaced}"] if regions.nodes else []
    parts += [f"{counted(regions.joined, 'node')} in epilogues"] if regions.joined else []
    launches = counted(regions.launches_saved, "more launch", "more launches")
    where = " in the main graph" if has_bodies else ""
    traffic = f"{bytes_text(abs(regions.bytes_saved))} {'more' if regions.bytes_saved >= 0 else 'less'} traffic"
    without = f"; without them, there would be {launches} and {traffic}{where}"
    yield Line(f"Regions: {', '.join(parts)}{without if regions.launches_saved else ''}")


def _dropped_lines(dropped: Sequence[Dropped]) -> Iterator[Line]:
    """Yield one line per fusion and reason, with the name of the first node and the number of further ones."""
    for one in group(dropped, lambda each: each.reason, lambda each: each.fusion):
        first, *more = one.items
        others = f" and at {counted(len(more), 'more node')}" if more else ""
        where = f" at '{escape(first.node)}'" if first.node else ""
        yield Line(f"[yellow]Dropped {first.fusion}[/]{where}{others}: {escape(one.sentence)}")
