"""The commands `onnxfuse list` and `onnxfuse show`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.options import patterns_option
from onnxfuse.cli.terminal import console


@click.command("list")
@patterns_option
def list_command(patterns: tuple[Path, ...]) -> None:
    """List all fusions, each with what it computes."""
    from rich.markup import escape
    from rich.table import Table

    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import summary
    from onnxfuse.regions import SUMMARY
    from onnxfuse.rewrite.replace import REGION

    table = Table(box=None, pad_edge=False)
    table.add_column("fusion")
    table.add_column("what it computes", overflow="fold")
    rows = {fusion.name: summary(fusion) for fusion in catalogue.with_folders(patterns)} | {REGION: SUMMARY}
    for name, text in sorted(rows.items()):
        table.add_row(name, escape(text))
    console().print(table)


@click.command("show")
@click.argument("fusion")
@patterns_option
def show_command(fusion: str, patterns: tuple[Path, ...]) -> None:
    """Show one fusion: its operator and its pattern."""
    from rich.markup import escape
    from rich.syntax import Syntax

    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import signature
    from onnxfuse.regions import DESCRIPTION, SUMMARY
    from onnxfuse.rewrite.replace import REGION

    fusions = {f.name: f for f in catalogue.with_folders(patterns)}
    catalogue.require_known(fusion, [*fusions, REGION])
    if fusion == REGION:
        console().print(f"[bold]{REGION}[/]\n\n{escape(SUMMARY)}\n\n{escape(DESCRIPTION)}", highlight=False)
        return
    found = fusions[fusion]
    text = f"[bold]{escape(signature(found))}[/]\n\n{escape(found.doc)}\n\n{found.span}"
    console().print(text, highlight=False)
    console().print(Syntax(found.source, "python", background_color="default"))
