"""The command `onnxfuse inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.options import examples, file_path
from onnxfuse.cli.terminal import console, json_option, print_json, show_text


@click.command("inspect", epilog=examples("onnxfuse inspect model.onnx", "onnxfuse inspect model.onnx --all | less"))
@click.argument("model", type=file_path)
@click.option("--all", "everything", is_flag=True, help="Print all operators.")
@json_option
def inspect_command(model: Path, everything: bool, as_json: bool) -> None:
    """Show what MODEL is, and what will hurt on a GPU.

    It names operators without a CUDA kernel in onnxruntime, copies between host and GPU, what blocks a CUDA graph,
    float64 and wide masks, and says what to do about each.  Nothing is run, and no GPU is needed.
    """
    from onnxfuse.inspection.inspect_model import inspect_model
    from onnxfuse.inspection.lines import inspection_text
    from onnxfuse.runtime.installed import misfits

    if as_json:
        print_json({**vars(inspect_model(model)), "misfits": misfits()})
        return
    console().print(inspection_text(inspect_model(model), everything))
    for sentence in misfits():
        show_text(f"Here, {sentence}")
