"""The command `onnxfuse inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.options import examples, file_path
from onnxfuse.cli.terminal import console


@click.command("inspect", epilog=examples("onnxfuse inspect model.onnx", "onnxfuse inspect model.onnx --all | less"))
@click.argument("model", type=file_path)
@click.option("--all", "everything", is_flag=True, help="Print all operators.")
def inspect_command(model: Path, everything: bool) -> None:
    """Show what MODEL is, and what will hurt on a GPU.

    It names operators without a CUDA kernel in onnxruntime, copies between host and GPU, what blocks a CUDA graph,
    float64 and wide masks, and says what to do about each.  Nothing is run, and no GPU is needed.
    """
    from onnxfuse.inspection.inspect_model import inspect_model
    from onnxfuse.inspection.lines import inspection_text

    console().print(inspection_text(inspect_model(model), everything))
