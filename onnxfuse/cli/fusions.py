"""The commands `onnxfuse list` and `onnxfuse show`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.options import examples, file_path, patterns_option
from onnxfuse.cli.terminal import console, echo, json_option, print_json, show_text
from onnxfuse.errors import UsageError


@click.command("list", epilog=examples("onnxfuse list", "onnxfuse list --patterns my_fusions"))
@click.option("--rules", is_flag=True, help="List the rules that bring models into one form, by subject.")
@patterns_option
@json_option
def list_command(rules: bool, patterns: tuple[Path, ...], as_json: bool) -> None:
    """List all fusions with their formulas."""
    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import summary
    from onnxfuse.layout.fusions import LAYOUT_FUSIONS
    from onnxfuse.printing import Line, escape
    from onnxfuse.recurrences import SCAN
    from onnxfuse.recurrences import SUMMARY as SUMMARY_OF_SCAN
    from onnxfuse.regions import SUMMARY
    from onnxfuse.rewrite.replace import REGION
    from onnxfuse.rules import SUBJECTS

    if rules:
        subjects = {
            subject: {rule.left.name: summary(rule.left) for rule in table} for subject, table in SUBJECTS.items()
        }
        if as_json:
            print_json(subjects)
            return
        for subject, texts in subjects.items():
            console().print(f"[bold]{subject}[/]", highlight=False)
            for name, text in texts.items():
                console().print(f"  [bold]{name}[/]", highlight=False)
                console().print(Line(escape(text), "    "))
        return
    rows = {fusion.name: summary(fusion) for fusion in catalogue.with_folders(patterns)} | {REGION: SUMMARY}
    rows |= {name: each.summary for name, each in LAYOUT_FUSIONS.items()} | {SCAN: SUMMARY_OF_SCAN}
    if as_json:
        print_json(dict(sorted(rows.items())))
        return
    for name, text in sorted(rows.items()):
        console().print(f"[bold]{name}[/]", highlight=False)
        console().print(Line(escape(text), "    "))


@click.command(
    "show",
    epilog=examples(
        "onnxfuse show layer_norm",
        "onnxfuse show merge_fills",
        "onnxfuse show region fused.onnx",
        "onnxfuse show region fused.onnx --node NAME --cuda --arch sm_90",
    ),
)
@click.argument("fusion")
@click.argument("model", type=file_path, required=False)
@click.option("--node", metavar="NAME", help="Show the program of this region of MODEL.")
@click.option("--cuda", is_flag=True, help="Show the CUDA source that is generated for --node.")
@click.option("--arch", default="sm_90", show_default=True, help="The compute capability that --cuda is for.")
@patterns_option
def show_command(
    fusion: str, model: Path | None, node: str | None, cuda: bool, arch: str, patterns: tuple[Path, ...]
) -> None:
    """Show one fusion, its operator and its pattern, or one rule.

    `show region MODEL` lists the regions of a fused MODEL.  With --node it shows the program of one of them, and with
    --cuda the kernels that are generated for it; that needs no GPU.
    """
    from rich.syntax import Syntax

    from onnxfuse import recurrences, regions
    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import signature
    from onnxfuse.layout.fusions import DESCRIPTION as MADE_BY_LAYOUTS
    from onnxfuse.layout.fusions import LAYOUT_FUSIONS
    from onnxfuse.rewrite.replace import REGION
    from onnxfuse.rules import RULES

    fusions = {f.name: f for f in (*(rule.left for rule in RULES), *catalogue.with_folders(patterns))}
    catalogue.require_known(fusion, [*fusions, REGION, recurrences.SCAN, *LAYOUT_FUSIONS])
    if model is not None or node is not None or cuda:
        _show_regions(fusion, model, node, cuda, arch)
        return
    if fusion not in fusions:
        summary, more = {
            REGION: (regions.SUMMARY, regions.DESCRIPTION),
            recurrences.SCAN: (recurrences.SUMMARY, recurrences.DESCRIPTION),
            **{name: (made.summary, MADE_BY_LAYOUTS) for name, made in LAYOUT_FUSIONS.items()},
        }[fusion]
        _show_text_of(fusion, f"{summary}\n\n{more}")
        return
    found = fusions[fusion]
    _show_text_of(signature(found), f"{found.doc}\n\n{found.span}")
    source = Syntax("", "python", background_color="default").highlight(found.source)
    console().print(source, soft_wrap=True)  # lines wider than the terminal are not broken


def _show_text_of(heading: str, text: str) -> None:
    """Print a heading and paragraphs; on a terminal, those without lists and formulas are broken at its width."""
    from onnxfuse.printing import Line, escape

    console().print(Line(f"[bold]{escape(heading)}[/]"))
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.splitlines()
        is_prose = all(line[:1].isalnum() or line[:1] in "`([" for line in lines)
        echo("")
        for line in [" ".join(lines)] if is_prose else lines:
            show_text(line)


def _show_regions(fusion: str, model: Path | None, node: str | None, cuda: bool, arch: str) -> None:
    """Print the regions that `show region MODEL` asks for.  Raises UsageError if the arguments do not fit."""
    from onnxfuse.rewrite.replace import REGION
    from onnxfuse.show_region import show_regions

    if fusion != REGION:
        raise UsageError(f"only the regions of a model are shown, not its nodes of '{fusion}'; run `show {fusion}`")
    if model is None:
        raise UsageError("give the fused model that has the region, as in `onnxfuse show region fused.onnx`")
    if cuda and node is None:
        raise UsageError("--cuda is of one region; name it with --node")
    (show_text if node is None else echo)("\n".join(show_regions(model, node, cuda, arch)))
