"""The lines of a report in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from onnxfuse.ir.inline_functions import Inlined
from onnxfuse.layout.assign import LayoutResult
from onnxfuse.match import Miss
from onnxfuse.printing import Line, cell, columns, counted, escape, short
from onnxfuse.report.operators import OperatorCount
from onnxfuse.report.similar import group
from onnxfuse.rewrite.select import has_softmax
from onnxfuse.spell_out import Stays
from onnxfuse.verify.compare import Verification
from onnxfuse.verify.difference import OutputDifference
from onnxfuse.verify.observed import NotCompared

MAX_SHOWN: Final = 10  # maximum number of operators, reasons or outputs, unless the user asks for all


def operator_table(operators: Sequence[OperatorCount], everything: bool) -> Table | None:
    """Return a table of the number of nodes per operator before and after; None if there are no operators."""
    if not operators:
        return None
    table = columns("Other operators", "before", "after")
    shown = operators if everything or len(operators) <= MAX_SHOWN + 1 else operators[:MAX_SHOWN]
    for one in shown:
        table.add_row(cell(one.op), str(one.before), str(one.after))
    rest = operators[len(shown) :]
    if rest:
        sums = str(sum(one.before for one in rest)), str(sum(one.after for one in rest))
        table.add_row(f"{len(rest)} more kinds (--all)", *sums)
    return table


def estimate_line(assumed: Mapping[str, int], has_bodies: bool) -> Line:
    """Return a line that names the graph and the dim sizes for which launches and memory traffic are estimated."""
    sizes = ", ".join(f"{escape(short(name))} = {size}" for name, size in assumed.items())
    of_main = " of the main graph" if has_bodies else ""
    return Line(f"[dim]Launches and traffic{of_main} are estimated{f', for {sizes}' if sizes else ''}.[/]")


def subgraph_lines(subgraphs: Sequence[Any], everything: bool) -> Iterator[Line]:
    """Yield a line per subgraph that changed, with its numbers of nodes and fused nodes; those with most come first."""
    ordered = sorted(subgraphs, key=lambda each: (-sum(each.counts.values()), each.nodes_before == each.nodes_after))
    changed = [each for each in ordered if each.counts or each.nodes_before != each.nodes_after]
    shown = ordered if everything else changed[:MAX_SHOWN]
    for each in shown:
        counts = "".join(f", {count} {fusion}" for fusion, count in each.counts.items())
        if each.nodes_after > each.nodes_before:
            counts += "".join(f", {counted(count, escape(op))} added" for op, count in each.added.items())
        yield Line(f"In {escape(each.where)}: {each.nodes_before} -> {counted(each.nodes_after, 'node')}{counts}")
    rest = ordered[len(shown) :]
    if rest:
        fused = sum(sum(each.counts.values()) for each in rest)
        what = f": {counted(fused, 'fused node')}" if fused else " nothing was fused"
        yield Line(f"In {counted(len(rest), 'more subgraph' if shown else 'subgraph')}{what}")


def function_lines(inlined: Inlined | None) -> Iterator[Line]:
    """Yield lines on how many calls of the model's own functions were inlined, and which functions stay."""
    if inlined is None:
        return
    if inlined.calls:
        yield Line(f"Inlined: {counted(inlined.calls, 'call')} of the model's own functions")
    yield from (Line(f"Not inlined: {escape(why)}") for why in inlined.kept)


def layout_lines(layout: LayoutResult, everything: bool) -> Iterator[Line]:
    """Yield lines on channels-last nodes, and the reasons for remaining Transposes and channels-first convolutions."""
    if layout.nodes:
        joined = f" ({layout.joined} of them in regions and epilogues)" if layout.joined else ""
        transposes = counted(len(layout.ends), "Transpose")
        yield Line(f"Layout: {counted(layout.nodes, 'node')} channels-last{joined}, {transposes} at borders")
        yield from _reason_lines([end.reason for end in layout.ends], "more Transpose", everything)
    if layout.stays:
        yield Line(f"Layout: {counted(len(layout.stays), 'convolution')} channels-first")
        yield from _reason_lines([one.reason for one in layout.stays], "more convolution", everything)


def _reason_lines(reasons: Sequence[str], more: str, everything: bool) -> Iterator[Line]:
    """Yield a line for each group of similar reasons, with its count, and a line with the number of hidden ones."""
    groups = group(reasons, lambda reason: reason)
    shown = groups if everything else groups[:MAX_SHOWN]
    for one in shown:
        yield Line(f"because {escape(one.sentence)}", f"{len(one.items):>4}x ")
    if rest := sum(len(one.items) for one in groups[len(shown) :]):
        yield Line(f"and {counted(rest, more)} (--all)", " " * 6)


def stays_lines(stays: Sequence[Stays]) -> Iterator[Line]:
    """Yield, for each operator and reason, a line that says how many nodes stay as they are."""
    for one in group(stays, lambda stay: stay.reason, lambda stay: stay.op):
        yield Line(f"Not fused: {len(one.items)} {escape(one.items[0].op)}, because {escape(one.sentence)}")


def quantized_lines(quantized: Mapping[str, int]) -> Iterator[Line]:
    """Yield one line with the operators on quantized numbers; none where there are none."""
    if quantized:
        counts = ", ".join(f"{count} {escape(op)}" for op, count in quantized.items())
        yield Line(f"Quantized operators that are not fused: {counts}")


def missed_lines(missed: Sequence[Miss], everything: bool) -> Iterator[Line]:
    """Yield near misses by reason; without `everything`, only those with at least half of the pattern's nodes matched.

    A near miss of attention is also shown if nothing else is shown for its node, because unfused attention costs most.
    """
    half = {id(miss): miss for miss in missed if everything or 2 * miss.matched >= miss.of}
    explained = {miss.node for miss in half.values()}
    near = list(half.values())
    attentions = [miss for miss in missed if has_softmax(miss.fusion) and miss.node not in explained]
    named = {each.node for each in (*near, *attentions)}
    hidden = [miss for miss in missed if miss.node not in named]
    for title, misses in ("Nearly fused", near), ("Not fused, though it is an attention,", attentions):
        if misses:
            yield Line(f"[bold]{title}[/] at {_nodes_of(misses)}")
            yield from _groups_of(misses, everything)
    if hidden:
        where = _nodes_of(hidden, "other node" if named else "node")
        yield Line(
            f"At {where}, less than half of a pattern agrees; --all shows {'it' if where[:2] == '1 ' else 'them'}."
        )
    if named:
        yield Line("`onnxfuse explain MODEL` shows the line of the pattern that differs.")


def _groups_of(misses: Sequence[Miss], everything: bool) -> Iterator[Line]:
    """Yield two lines for each reason: where the fusion is missed, and why."""
    groups = group(misses, lambda miss: miss.reason, lambda miss: (miss.fusion.name, str(miss.span)))
    shown = groups if everything else groups[:MAX_SHOWN]
    for one in shown:
        first = one.items[0]
        where = f"{', first ' if len(one.items) > 1 else ' '}at '{escape(first.node)}'"
        head = f"{first.fusion.name}: {first.matched} of {first.of} nodes agree{where}"
        yield Line(head, f"{len(one.items):>4}x ", 8)
        yield Line(escape(one.sentence), " " * 6)
    if rest := groups[len(shown) :]:
        yield Line(f"and {counted(len(rest), 'more reason')} (--all)", " " * 6)


def _nodes_of(missed: Sequence[Miss], what: str = "node") -> str:
    return counted(len({miss.node for miss in missed}), what)


def verification_lines(verified: Verification, everything: bool = False) -> Iterator[Line]:
    """Yield lines on the verification: its result, what was not compared and why, and notes on onnxruntime."""
    yield from _compared_lines(verified, everything)
    yield from (Line(escape(note), "  ", 4) for note in verified.notes)


def _compared_lines(verified: Verification, everything: bool) -> Iterator[Line]:
    if not verified.passed:
        yield Line(f"[yellow]Not verified[/]: {escape(verified.reason)}")
        return
    nodes = [f"{counted(verified.equal_parts, 'fused node')} equal"] if verified.equal_parts else []
    equal = ", ".join([*_equal_outputs(verified.outputs), *nodes])
    if verified.status == "verified":
        yield Line(f"[green]Verified[/]: {equal}")
        return
    yield Line(f"[yellow]Partly verified[/]: {equal}")
    yield from not_compared_lines(verified.not_compared, everything)


def not_compared_lines(not_compared: Sequence[NotCompared], everything: bool = False) -> Iterator[Line]:
    """Yield lines on the outputs and fused nodes that were not compared; those with the same reason share a line."""
    missing = group(not_compared, lambda each: each.reason)
    shown = missing if everything else missing[:MAX_SHOWN]
    for one in shown:
        first, *more = one.items
        others = f" and {len(more)} more are" if more else " is"
        yield Line(f"'{escape(first.name)}'{others} not compared: {escape(one.sentence)}", "  ", 4)
    if rest := sum(len(one.items) for one in missing[len(shown) :]):
        yield Line(f"{rest} more are not compared (--all)", "  ")


def _equal_outputs(outputs: Sequence[OutputDifference]) -> Iterator[str]:
    """Yield, for each model that outputs were compared with, how many are equal to its outputs."""
    bases = sorted({each.base for each in outputs})
    for base in bases:
        some = [each for each in outputs if each.base == base]
        whose = "" if bases == ["original"] else f" to {'that' if len(some) == 1 else 'those'} of the {base}"
        yield f"{counted(len(some), 'output')} equal{whose}{_share_of_tolerance(some)}"


def _share_of_tolerance(outputs: Sequence[OutputDifference]) -> str:
    """Return the worst output's error as a share of its tolerance, and who set the tolerance unless the dtype did."""
    shares = [(each.max_rel / each.tolerance if each.tolerance else 0, each.set_by) for each in outputs]
    share, set_by = max(shares, default=(0.0, ""))
    return f" (at {share:.0%} of {set_by or 'the tolerance'})"


def folded_line(kinds: Sequence[str]) -> Line:
    """Return a line on how many nodes were folded, by kind."""
    counts = sorted(Counter(kinds).items())
    return Line(f"Folded: {', '.join(f'{count} {kind}' for kind, count in counts) or 'nothing'}")
