"""Format the output of `onnxfuse inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from onnxfuse.inspection.inspect_model import Inspection, Value
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.printing import Line, bytes_text, cell, columns, counted, escape, short
from onnxfuse.report.lines import MAX_SHOWN


def inspection_text(found: Inspection, everything: bool = False) -> Group:
    """Return the text of `onnxfuse inspect`: facts about the model, problems with remedies, and last the verdict."""
    return Group(*_head(found), "", _values(found), "", _operators(found, everything), *_blocks(found),
                 *_quantized(found), "", *_findings(found))  # fmt: skip


def _head(found: Inspection) -> Iterator[RenderableType]:
    size = f", {bytes_text(found.bytes)} on disk" if found.bytes is not None else ""
    maker = f", made by {escape(found.maker)}" if found.maker else ""
    yield Line(f"[bold]{escape(found.name)}[/]: opset {found.opset}{maker}{size}")
    for dtype, one in found.weights.items():
        yield Line(
            f"{one.elements:,} {dtype} {'constant' if one.elements == 1 else 'constants'}, {bytes_text(one.bytes)}",
            "  ",
            4,
        )


def _values(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("name", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    table.add_column("dims", overflow="fold")
    for kind, values in (("input", found.inputs), ("output", found.outputs)):
        for value in values:
            table.add_row(kind, cell(value.name), cell(value.dtype), cell(_dims(value)))
    return table


def _dims(value: Value) -> str:
    return "unknown rank" if value.dims is None else ", ".join(map(short, value.dims)) or "a scalar"


def _operators(found: Inspection, everything: bool) -> Table:
    total = sum(found.operators.values())
    table = columns(f"{counted(total, 'operator')} of {counted(len(found.operators), 'kind')}", "nodes")
    rows = list(found.operators.items())
    shown = rows if everything or len(rows) <= MAX_SHOWN + 1 else rows[:MAX_SHOWN]
    for op, count in shown:
        table.add_row(cell(op), str(count))
    if rest := rows[len(shown) :]:
        table.add_row(f"{len(rest)} more kinds (--all)", str(sum(count for _, count in rest)))
    return table


def _blocks(found: Inspection) -> Iterator[RenderableType]:
    if found.blocks:
        yield ""
        yield "[bold]Repeated blocks[/]"
    for one in found.blocks:
        yield Line(f"{one.length} operators, first from '{escape(one.first)}'", f"{one.copies:>4}x ")


def _quantized(found: Inspection) -> Iterator[RenderableType]:
    """Yield lines on the quantized operators and how they run, if there are any."""
    if found.quantized:
        yield ""
        yield "[bold]Quantized operators and caches[/], as onnxruntime's CUDA provider runs them"
    for one in found.quantized:
        size = f", {bytes_text(one.bytes)} of constants" if one.bytes else ""
        yield Line(f"{escape(one.what)}{size}: {escape(one.how)}", f"{one.nodes:>4}x ")


def _findings(found: Inspection) -> Iterator[RenderableType]:
    yield Line(f"[bold]On a GPU[/], by the kernels of onnxruntime {found.onnxruntime}")
    for number, one in enumerate(found.findings, 1):
        yield Line(f"[yellow]{escape(one.what)}[/]", f"{number:>3}. ")
        yield from (Line(escape(detail), "     ") for detail in one.details)
        yield Line(escape(one.advice), "     -> ")
    if not found.findings:
        yield Line("[green]nothing that hurts[/]: all operators have CUDA kernels, and nothing is copied", "  ")
    if found.no_cuda_graph:
        yield Line(f"[yellow]No CUDA graph[/]: {escape('; '.join(found.no_cuda_graph))}")
    else:
        dynamic = any(not dim.isdigit() for value in found.inputs for dim in value.dims or ())
        yield Line(f"[green]A CUDA graph can hold it[/]{', one graph for each set of sizes' if dynamic else ''}")
    fused = sum(count for op, count in found.operators.items() if op.startswith(f"{DOMAIN}::"))
    if fused:
        yield Line(f"{counted(fused, 'node is', 'nodes are')} fused already.")
    else:
        yield Line("`onnxfuse optimize MODEL --dry-run` says what would be fused.")
