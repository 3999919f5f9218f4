"""The command `onnxfuse unfuse`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import (
    EXIT_CODES,
    checked_target,
    examples,
    file_path,
    given_inputs,
    overwrite_option,
    verify_option,
    verify_options,
)
from onnxfuse.cli.terminal import console, shown_progress

if TYPE_CHECKING:
    from onnxfuse.verify.extent import Level


@click.command("unfuse", epilog=examples("onnxfuse unfuse fused.onnx plain.onnx"))
@click.argument("source", type=file_path)
@click.argument("target", type=file_path)
@verify_options
@verify_option
@overwrite_option
def unfuse_command(
    source: Path,
    target: Path,
    npz: Path | None,
    tolerance: float | None,
    shapes: tuple[str, ...],
    timeout: float,
    verify: Level,
    overwrite: bool,
) -> None:
    """Write fused SOURCE with plain operators to TARGET.

    Every fused node becomes the operators of its body. What optimizing folded into weights stays folded. Exits as
    `onnxfuse optimize` does.
    """
    from onnxfuse.ir.protos import count_nodes
    from onnxfuse.ir.read import read
    from onnxfuse.ir.save import save
    from onnxfuse.report.lines import verification_lines
    from onnxfuse.unfuse_model import unfuse

    checked_target(source, target, overwrite)
    inputs = given_inputs(npz, source)
    with shown_progress() as progress:
        model, verified = unfuse(
            source, verify=verify, inputs=inputs, shapes=shapes, timeout=timeout, tolerance=tolerance, progress=progress
        )
    before, after = count_nodes(read(source).graph), count_nodes(model.graph)
    save(model, target, folder=source.parent)
    for line in (f"Nodes: {before} -> {after}", *verification_lines(verified)):
        console().print(line)
    sys.exit(EXIT_CODES[verified.status] if verify != "off" else 0)
