"""Show the result of a benchmark as tables in the terminal, as a page with bars, or as a picture."""

from __future__ import annotations

import html
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from onnxfuse.bench.bench import Bench, Contender, write_text
from onnxfuse.errors import ModelError, UsageError, printable
from onnxfuse.printing import Line, cell, columns, counted, escape, two_lines
from onnxfuse.tuning.dispatch import PLAIN
from onnxfuse.tuning.op_times import UNFUSED, OpTime

PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }}
svg {{ width: 100%; height: auto; }}
text {{ font: 13px system-ui, sans-serif; fill: currentColor; }}
{colors}
.range {{ stroke: currentColor; stroke-width: 1.5; }}
</style></head><body>
<h1>{title}</h1><p>{subtitle}</p>
{charts}
</body></html>
"""
LONGEST_BAR, CHARACTER, MARGIN, ROW_HEIGHT, BAR_HEIGHT = 440, 7.6, 16, 26, 16  # pixels; CHARACTER: width of a letter
MAX_OPERATORS_SHOWN: Final = 12  # number of rows shown in the terminal
COLORS: Final = {"plain": "#8a94a6", "fused": "#2f6fde", "wrong": "#c9463d"}
BarKind = Literal["plain", "fused", "wrong"]


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: its length, the quartiles if they are known, and the note after it."""

    label: str
    value: float
    quartiles: tuple[float, float] | None
    note: str
    kind: BarKind


def check_name(path: Path) -> None:
    """Raise UsageError unless a chart can be written to a file of this name on this machine."""
    if path.suffix not in (".html", ".png"):
        raise UsageError(f"--chart '{path}' ends in '{path.suffix}'; charts are .html or .png")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--chart '{path}' needs matplotlib, which is not installed; pip install matplotlib, or give "
                         "a name that ends in .html")  # fmt: skip


def draw(result: Bench, path: Path) -> None:
    """Write the chart to a .html or .png file.  Raises ModelError where that fails."""
    if path.suffix == ".html":
        write_text(path, page(result))
    else:
        _picture(result, path)


BODIES_RAN: Final = "Fused nodes ran as their bodies, in onnxruntime's operators, as they do without a GPU."


# --- the terminal ----------------------------------------------------------------------------------------------------


def tables(result: Bench) -> Group:
    """Return the tables and lines to print in the terminal."""
    on_gpu = result.provider == "cuda"
    parts: list[RenderableType] = [Line(escape(_subtitle(result))), "", _models(result.contenders, on_gpu)]
    parts += [Line(f"[red]{escape(_label(each))}[/]: {escape(each.reason)}")
              for each in result.contenders if each.reason]  # fmt: skip
    hidden = {(each.name, name): why for each in result.contenders for name, why in each.not_compared.items()}
    parts += [Line(f"{escape(model)}: '{escape(name)}' is not compared at these inputs: {escape(why)}")
              for (model, name), why in hidden.items()]  # fmt: skip
    parts += ["`onnxfuse verify` also compares at other sizes and values."] if hidden else []
    parts += [Line(f"Operators were not timed alone: {escape(result.ops_error)}")] if result.ops_error else []
    fused = [op for op in result.ops if op.how != UNFUSED]
    parts += [] if on_gpu else [Line(BODIES_RAN)]
    others = [op for op in result.ops if op.how == UNFUSED]
    parts += [*(_ops(fused, on_gpu) if fused else []), *(_others(fused, others) if others else [])]
    inside = sum(result.counts.values()) - sum(len(op.nodes) for op in fused) if result.ops else 0
    those = counted(inside, "fused node is", "fused nodes are")
    return Group(*parts, *([f"{those} in bodies of If, Loop or Scan, and not timed alone"] if inside > 0 else []))


def _models(contenders: Sequence[Contender], on_gpu: bool) -> Table:
    """Return a table with a row per model; on a GPU, a row per model and mode (with or without a CUDA graph)."""
    table = columns("model", *(["mode"] if on_gpu else []), "median ms", "quartiles ms", "runs", "speed-up")
    for each in contenders:
        times = each.times
        cells = ["-", "-", "-"]
        if times:
            cells = [f"{1e3 * times.median:.3f}", f"{1e3 * times.q1:.3f} - {1e3 * times.q3:.3f}", str(times.runs)]
        table.add_row(cell(each.name), *([each.mode] if on_gpu else []), *cells, _outcome(each))
    return table


def _label(each: Contender) -> str:
    """Return the name of a model, with the mode if it runs as a CUDA graph."""
    return each.name if each.mode == PLAIN else f"{each.name}, {each.mode}"


def _outcome(each: Contender) -> str:
    """Return the speed-up, or why there is none."""
    if each.agrees is None:
        return "did not run"
    return "wrong result" if not each.agrees else f"{each.speed_up:.2f}x" if each.speed_up else ""


def _ops(ops: Sequence[OpTime], on_gpu: bool) -> list[RenderableType]:
    """Return a table of the fused nodes, with a row for each fusion and shape of inputs.

    On a GPU, the table has the times of kernels and bodies (ONNX functions).  Its last column has the time of a copy of
    as many bytes, as a share of the node's time.
    """
    names = ("kernel us", "body us", "MB", "of a copy") if on_gpu else ("us each", "MB")
    table = columns("Fused operators", "nodes", *names)
    for op in ops[:MAX_OPERATORS_SHOWN]:
        share = "" if op.share is None else f"{op.share:.0%}"
        megabytes = f"{op.bytes / 1e6:.3g}"
        figures = (_us(op.kernel), _us(op.body), megabytes, share) if on_gpu else (_us(op.body), megabytes)
        table.add_row(two_lines(op.fusion, _inputs(op)), str(len(op.nodes)), *figures)
    hidden = len(ops) - MAX_OPERATORS_SHOWN
    more = [f"{hidden} more; --json FILE writes all of them."] if hidden > 0 else []
    failed = dict.fromkeys(f"{op.fusion}: not timed alone: {op.error}" for op in ops if op.error)
    return ["", table, *more, *(Line(escape(each)) for each in failed)]


def _others(fused: Sequence[OpTime], others: Sequence[OpTime]) -> list[RenderableType]:
    """Return a table of the unfused operators by kind, and a line with the total times of fused and unfused nodes."""
    table = columns("Other operators", "nodes", "us of all")
    kinds = {op.fusion: [each for each in others if each.fusion == op.fusion] for op in others}
    totals = {kind: total_of(each) for kind, each in kinds.items()}
    for kind, each in sorted(kinds.items(), key=lambda pair: -totals[pair[0]]):
        known = any(op.seconds is not None for op in each)
        table.add_row(cell(kind), str(sum(len(op.nodes) for op in each)), _us(totals[kind]) if known else "not alone")
    sums = 1e6 * total_of(fused), 1e6 * total_of(others)
    return ["", table, "In total, each timed alone: fused {:.1f} us, others {:.1f} us".format(*sums)]


def total_of(ops: Sequence[OpTime]) -> float:
    """Return the seconds of all nodes that were timed."""
    return sum((op.seconds or 0.0) * len(op.nodes) for op in ops)


def _inputs(op: OpTime) -> str:
    """Return the dims and dtypes of an operator's inputs; a dtype that all inputs have is named once."""
    pairs = [shape.partition(" ") for shape in op.shapes]
    dtypes = {dtype for _, _, dtype in pairs if dtype}
    if len(dtypes) == 1:
        return f"{', '.join(dims for dims, _, _ in pairs)} {dtypes.pop()}"
    return ", ".join(op.shapes)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"


def _subtitle(result: Bench) -> str:
    inputs = ", ".join(f"{name} {shape}" for name, shape in result.inputs.items())
    rate = f"; copy {result.copy_rate / 1e12:.2f} TB/s" if result.copy_rate and result.provider == "cuda" else ""
    return f"{Path(result.model).name} on {result.device['name']} ({result.provider}); {inputs}{rate}"


# --- bars ------------------------------------------------------------------------------------------------------------


def bars_of_models(contenders: Sequence[Contender]) -> Iterator[Bar]:
    """Yield a bar for each model, as long as its run, in milliseconds."""
    for each in contenders:
        if each.times:
            kind: BarKind = "wrong" if not each.agrees else "fused" if each.name == "fused" else "plain"
            outcome = _outcome(each)
            note = f"{1e3 * each.times.median:.3f} ms" + (f", {outcome}" if outcome else "")
            quartiles = 1e3 * each.times.q1, 1e3 * each.times.q3
            yield Bar(_label(each), 1e3 * each.times.median, quartiles, note, kind)


def bars_of_ops(ops: Sequence[OpTime], on_gpu: bool = True) -> Iterator[Bar]:
    """Yield bars for the fused operators, with the total time of each operator's nodes in microseconds.

    On a GPU, an operator has one bar for its kernel, and one for its body: the ONNX function that its nodes call.
    """
    for op in (each for each in ops if each.how != UNFUSED):
        label = f"{len(op.nodes)} {op.fusion}, {op.shapes[0] if op.shapes else ''}"
        pairs: tuple[tuple[BarKind, str, float | None], ...] = (
            ("fused", ": kernel", op.kernel),
            ("plain", ": body" if on_gpu else "", op.body),
        )
        for kind, name, seconds in pairs:
            if seconds is not None:
                has_share = on_gpu and op.share is not None and name.endswith(op.how)
                share = f", {op.share:.0%} of a copy" if has_share else ""
                total = 1e6 * seconds * len(op.nodes)
                yield Bar(f"{label}{name}", total, None, f"{total:.1f} us{share}", kind)


def page(result: Bench) -> str:
    """Return an HTML page without scripts, which is also well-formed XML."""
    of_ops = list(bars_of_ops(result.ops, result.provider == "cuda"))
    charts = [("Milliseconds of a run, with quartiles", list(bars_of_models(result.contenders))),
              ("Microseconds in fused operators, all nodes", of_ops)]  # fmt: skip
    parts = [f"<h2>{escaped(title)}</h2>\n{svg(bars)}" for title, bars in charts if bars]
    parts += [f"<p>{escaped(f'{_label(each)}: {each.reason}')}</p>"
              for each in result.contenders if each.reason]  # fmt: skip
    title = f"onnxfuse bench {Path(result.model).name}"
    colors = " ".join(f".{kind} {{ fill: {color}; }}" for kind, color in COLORS.items())
    subtitle = escaped(_subtitle(result))
    return PAGE.format(colors=colors, title=escaped(title), subtitle=subtitle, charts="\n".join(parts))


def escaped(text: str) -> str:
    """Return a text as HTML; characters that cannot be printed become escapes."""
    return html.escape(printable(text))


def svg(bars: Sequence[Bar]) -> str:
    """Return a picture of horizontal bars that start at zero, as wide as its labels and notes need."""
    longest = max(max(bar.value, *(bar.quartiles or ())) if bar.quartiles else bar.value for bar in bars) or 1.0
    scale = LONGEST_BAR / longest
    labels = MARGIN + CHARACTER * max(len(bar.label) for bar in bars)
    notes = MARGIN + CHARACTER * max(len(bar.note) for bar in bars)
    box = f"0 0 {labels + LONGEST_BAR + notes:.0f} {ROW_HEIGHT * len(bars) + 4}"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">']
    for row, bar in enumerate(bars):
        top, end = ROW_HEIGHT * row + 4, labels + scale * bar.value
        middle = top + BAR_HEIGHT / 2
        lines.append(f'<text x="{labels - 8:.1f}" y="{top + 13}" text-anchor="end">{escaped(bar.label)}</text>')
        lines.append(f'<rect class="{bar.kind}" x="{labels:.1f}" y="{top}" width="{scale * bar.value:.1f}" '
                     f'height="{BAR_HEIGHT}"/>')  # fmt: skip
        if bar.quartiles:
            low, high = (labels + scale * value for value in bar.quartiles)
            lines.append(f'<line class="range" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>')
            end = max(end, high)
        lines.append(f'<text x="{end + 8:.1f}" y="{top + 13}">{escaped(bar.note)}</text>')
    return "\n".join([*lines, "</svg>"])


def _picture(result: Bench, path: Path) -> None:
    bars = [*bars_of_models(result.contenders)]
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(9, 1 + 0.4 * len(bars)))
    rows = range(len(bars))
    errors = [[max(b.value - b.quartiles[0], 0) if b.quartiles else 0 for b in bars],
              [max(b.quartiles[1] - b.value, 0) if b.quartiles else 0 for b in bars]]  # fmt: skip
    axes.barh(rows, [b.value for b in bars], xerr=errors, color=[COLORS[b.kind] for b in bars])
    axes.set_yticks(rows, [f"{b.label}\n{b.note}" for b in bars])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a run")
    axes.set_title(_subtitle(result), fontsize=8, wrap=True)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ModelError(f"cannot write '{path}': {error.strerror}; give another name") from error
