"""What `onnxfuse compile` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from onnxfuse.compile.compile_file import Compiled, CompiledGpu, LeftOut
from onnxfuse.runtime.gpu_kinds import describe


def summary(compiled: Compiled) -> Group:
    """Return what the file has for each GPU, and which nodes have nothing in it, with the reasons."""
    parts: list[RenderableType] = [_gpus(compiled.gpus)]
    kernels = sum(each.kernels for each in compiled.gpus)
    templates = sum(each.templates for each in compiled.gpus)
    parts.append(
        f"{escape(str(compiled.path))}: {templates} templates, {kernels} kernels, {compiled.size / 1e6:.1f} MB, "
        f"{compiled.seconds:.1f} s"
    )
    if compiled.left_out:
        parts += ["", _left_out(compiled.left_out)]
    if compiled.bodies:
        parts += ["", _bodies(compiled)]
    return Group(*parts)


def _gpus(gpus: Sequence[CompiledGpu]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("GPU", overflow="fold")
    for name in "templates", "variants", "measured", "kernels":
        table.add_column(name, justify="right", no_wrap=True)
    for each in gpus:
        counts = each.templates, each.variants, each.tuned, each.kernels
        table.add_row(escape(describe(each.device)), *map(str, counts))
    return table


def _left_out(left_out: Sequence[LeftOut]) -> Table:
    """Return one row for each reason, with the first of its nodes and how many there are."""
    rows: dict[tuple[int, str, str], list[str]] = {}
    for each in left_out:
        rows.setdefault((each.device.arch, each.fusion, each.why), []).append(each.node)
    table = Table(title="Without a kernel in the file", title_justify="left", box=None, pad_edge=False)
    for name in "GPU", "fusion", "node", "nodes", "why":
        table.add_column(name, justify="right" if name == "nodes" else "left", overflow="fold")
    for (arch, fusion, why), nodes in rows.items():
        table.add_row(f"sm_{arch}", escape(fusion), escape(nodes[0]), str(len(nodes)), escape(why))
    return table


def _bodies(compiled: Compiled) -> Table:
    table = Table(title="Run as bodies where there is no Python", title_justify="left", box=None, pad_edge=False)
    table.add_column("function", overflow="fold")
    table.add_column("why", overflow="fold")
    for op, why in compiled.bodies.items():
        table.add_row(escape(op), escape(why))
    return table
