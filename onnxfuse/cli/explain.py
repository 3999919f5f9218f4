"""The command `onnxfuse explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from onnxfuse.cli.options import examples, file_path, patterns_option
from onnxfuse.cli.terminal import json_option, print_json, show_text, show_tracebacks, shown_progress


@click.command(
    "explain",
    epilog=examples(
        "onnxfuse explain model.onnx",
        "onnxfuse explain model.onnx attention --limit 3",
        "onnxfuse explain model.onnx --node /encoder/layer.0/MatMul_1",
    ),
)
@click.argument("source", type=file_path)
@click.argument("fusion", required=False)
@click.option("--node", help="Show only what was tried around this node.")
@click.option("--limit", type=click.IntRange(0), default=5, show_default=True, help="How many misses to show.")
@patterns_option
@json_option
def explain_command(
    source: Path, fusion: str | None, node: str | None, limit: int, patterns: tuple[Path, ...], as_json: bool
) -> None:
    """Show where SOURCE nearly matches a fusion or a rule.

    Each miss names the node that differs, what was found and what the fusion requires.  For the fusion region, and for
    a single node, it also says why nodes are in no region; for convolutions, why they are channels-first.
    """
    from onnxfuse.dsl import catalogue
    from onnxfuse.explain import explanations, require_node, where_fused, where_inside, why_channels_first
    from onnxfuse.fuse_model import Settings, StageTimer, fuse_model
    from onnxfuse.ir.inline_functions import inline_functions
    from onnxfuse.ir.load import load
    from onnxfuse.layout.fusions import LAYOUT_FUSIONS
    from onnxfuse.printing import counted
    from onnxfuse.recurrences import SCAN
    from onnxfuse.rewrite.replace import REGION
    from onnxfuse.rules import RULES

    fusions = catalogue.with_folders(patterns)
    if fusion:
        known = [*fusions, *(rule.left for rule in RULES)]
        catalogue.require_known(fusion, [*(each.name for each in known), REGION, SCAN, *LAYOUT_FUSIONS])
    model, folder = load(source)
    inlined = inline_functions(model)
    if node and (sentence := where_inside(model, inlined, node)):
        _show([sentence], as_json)
        return
    if node:
        require_node(node, inlined.model)
    with shown_progress() as progress:
        result = fuse_model(
            model, folder, Settings(fusions, regions=True, scans=True, rules=RULES), StageTimer(progress)
        )
    show_tracebacks(result.left_out)
    if node and (sentence := where_fused(result.fused_of_model, node)):
        _show([sentence, *why_channels_first(result, node=node)], as_json)
        return
    shown = explanations(result, fusion, node)
    _show(shown if as_json else shown[:limit], as_json)
    if as_json:
        return
    if not shown:
        done = sum(fusion in (None, one.fusion) for one in result.fused)
        count = counted(done, "fused node was made", "fused nodes were made")
        show_text(f"There are no near misses{f' of {fusion}' if fusion else ''}; {count}.")
    elif len(shown) > limit:
        show_text(f"{len(shown) - limit} more; --limit {len(shown)} shows all.")


def _show(texts: Sequence[str], as_json: bool) -> None:
    """Print explanations; as JSON, an object with the list of them."""
    if as_json:
        print_json({"explanations": texts})
        return
    for text in texts:
        show_text(text)
