"""The tables and lines that `onnxfuse compile` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from onnxfuse.compile.compile_file import Compiled, CompiledGpu, LeftOut
from onnxfuse.printing import Line, cell, columns, escape
from onnxfuse.runtime.gpu_kinds import describe


def summary(compiled: Compiled) -> Group:
    """Return a table of the file's content for each GPU, and the nodes without templates, with the reasons."""
    parts: list[RenderableType] = [_gpus(compiled.gpus)]
    kernels = sum(each.kernels for each in compiled.gpus)
    templates = sum(each.templates for each in compiled.gpus)
    parts.append(
        f"{escape(str(compiled.path))}: {templates} templates, {kernels} kernels, {compiled.size / 1e6:.1f} MB, "
        f"{compiled.seconds:.1f} s"
    )
    if compiled.left_out:
        parts += ["", *_left_out(compiled.left_out)]
    if compiled.bodies:
        parts += ["", *_bodies(compiled)]
    return Group(*parts)


def _gpus(gpus: Sequence[CompiledGpu]) -> Table:
    table = columns("GPU", "templates", "variants", "measured", "kernels")
    for each in gpus:
        counts = each.templates, each.variants, each.tuned, each.kernels
        table.add_row(cell(describe(each.device)), *map(str, counts))
    return table


def _left_out(left_out: Sequence[LeftOut]) -> Iterator[Line]:
    """Yield a line for each reason why nodes have no template, with the first such node and their number."""
    rows: dict[tuple[int, str, str], list[str]] = {}
    for each in left_out:
        rows.setdefault((each.device.arch, each.fusion, each.why), []).append(each.node)
    yield Line("[bold]Without a kernel in the file[/]")
    for (arch, fusion, why), nodes in rows.items():
        where = f"{', first ' if len(nodes) > 1 else ' '}at '{escape(nodes[0])}'"
        yield Line(f"{escape(fusion)} on sm_{arch}{where}: {escape(why)}", f"{len(nodes):>4}x ")


def _bodies(compiled: Compiled) -> Iterator[Line]:
    """Yield lines on the ONNX functions that onnxruntime itself runs in a process without Python, with the reasons."""
    yield Line("[bold]Run as bodies where there is no Python[/]")
    yield from (Line(f"{escape(op)}: {escape(why)}", "  ", 4) for op, why in compiled.bodies.items())
