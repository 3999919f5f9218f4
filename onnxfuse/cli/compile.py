"""The command `onnxfuse compile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import (
    examples,
    file_path,
    kernels_option,
    option_option,
    options_by_name,
    shape_option,
    use_kernels,
)
from onnxfuse.cli.terminal import console, shown_progress

if TYPE_CHECKING:
    from onnxfuse.runtime.plan import Aim


@click.command(
    "compile",
    epilog=examples(
        "onnxfuse compile fused.onnx",
        "onnxfuse compile fused.onnx --arch sm_90 --arch sm_80",
        "onnxfuse compile fused.onnx --shape ids:1..8x1..512 -o fused.plans",
    ),
)
@click.argument("model", type=file_path)
@click.option("-o", "--output", "target", type=file_path, help="The file to write.  [default: MODEL.plans]")
@click.option("--arch", "archs", multiple=True, metavar="sm_90", help="Compile for a compute capability (repeatable).")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Compile for a GPU of this name (repeatable).")
@click.option(
    "--aim",
    type=click.Choice(["latency", "throughput"]),
    default="latency",
    help="What later sessions should have: fast runs [default], or many runs at once.",
)
@kernels_option
@shape_option
@option_option
def compile_command(
    model: Path,
    target: Path | None,
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    aim: Aim,
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    """Compile the kernels of a fused MODEL into a plan file.

    Sessions that find the file, next to the model or given as plans=, need not plan or compile.  By default the file is
    for this machine's GPUs and uses the measurements of `onnxfuse tune`; --arch and --gpu name other GPUs, which this
    machine need not have.  A --shape may have ranges, as in ids:1..8x1..512: plans are chosen for these sizes, but
    other sizes run too.
    """
    from onnxfuse.compile.compile_file import CompileSettings, compile_file
    from onnxfuse.compile.summary import summary
    from onnxfuse.ir.save import check_target
    from onnxfuse.runtime.plan_file import PLANS_SUFFIX

    target = target or Path(f"{model}{PLANS_SUFFIX}")
    check_target(target)
    use_kernels(kernels, "cuda")
    settings = CompileSettings(archs, gpus, shapes, options=options_by_name(options), aim=aim)
    with shown_progress() as progress:
        compiled = compile_file(model, target, settings, progress)
    console().print(summary(compiled), soft_wrap=True)
