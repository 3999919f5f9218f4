"""The command `onnxfuse plan`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import checked_target, examples, file_path, fusing_options, given_regions
from onnxfuse.cli.terminal import show_text, show_tracebacks, shown_progress

if TYPE_CHECKING:
    from onnxfuse.layout.conversion import Layout


@click.command(
    "plan",
    epilog=examples(
        "onnxfuse plan model.onnx -o plan.json",
        "onnxfuse plan model.onnx -o plan.json --only attention --only layer_norm",
    ),
)
@click.argument("source", type=file_path)
@click.option("-o", "--output", "target", type=file_path, required=True, metavar="FILE", help="The file to write.")
@fusing_options
def plan_command(
    source: Path,
    target: Path,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    patterns: tuple[Path, ...],
    layout: Layout,
    regions: bool,
    epilogues: bool,
) -> None:
    """Write what would be fused in SOURCE, to review.

    The file lists each match with the nodes that it replaces and "apply": true.  Where that is false,
    `onnxfuse optimize --plan FILE`, given the same options, leaves the nodes of the match as they are: no other fusion,
    no region and no layout takes them.  For `optimize --emit standard`, give --no-regions --layout nchw here.
    """
    from onnxfuse.optimizer import find_matches
    from onnxfuse.printing import counted

    checked_target(source, target)
    with shown_progress() as progress:
        choices = find_matches(
            source, only=only, skip=skip, patterns=patterns, layout=layout,
            regions=given_regions(regions, epilogues), progress=progress,
        )  # fmt: skip
    choices.write(target)
    counts = Counter(one.fusion for one in choices.matches)
    listed = ", ".join(f"{count} {fusion}" for fusion, count in sorted(counts.items()))
    show_text(f"{counted(len(choices.matches), 'match', 'matches')} in '{target}'{listed and f': {listed}'}")
    for one in choices.left_out:
        show_text(f"Left out: {one}")
    show_tracebacks(choices.left_out)
