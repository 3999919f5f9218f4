"""The command `onnxfuse optimize`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from onnxfuse.cli.options import (
    EXIT_CODES,
    checked_target,
    file_path,
    given_inputs,
    overwrite_option,
    patterns_option,
    verify_option,
    verify_options,
)
from onnxfuse.cli.terminal import console, shown_progress
from onnxfuse.errors import UsageError


@click.command("optimize")
@click.argument("source", type=file_path)
@click.argument("target", type=file_path, required=False)
@click.option("--only", multiple=True, metavar="FUSION", help="Apply only this fusion (repeatable).")
@click.option("--skip", multiple=True, metavar="FUSION", help="Leave this fusion out (repeatable).")
@patterns_option
@verify_options
@click.option(
    "--fallback",
    type=click.Choice(["onnx", "ort"]),
    default="onnx",
    show_default=True,
    help="The operators in the bodies of fused nodes: standard ONNX, or also onnxruntime's own.",
)
@click.option(
    "--emit",
    type=click.Choice(["functions", "standard"]),
    default="functions",
    show_default=True,
    help="What stands for a fusion: functions, for which there are kernels, or ONNX's operators of opset 23 or 24.",
)
@click.option(
    "--layout",
    type=click.Choice(["auto", "nchw", "nhwc"]),
    default="auto",
    show_default=True,
    help="The layout of images around convolutions: channels-last where that pays, nowhere, or wherever it can be.",
)
@click.option(
    "--regions/--no-regions",
    default=True,
    show_default=True,
    help="Let connected operators that no pattern names become fused nodes too.",
)
@click.option(
    "--epilogues",
    is_flag=True,
    help="Let elementwise operators that follow a product or convolution join its kernel. These kernels are not timed.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    help="Convert the model to half precision.  What overflows or loses too much there stays in float32.",
)
@click.option(
    "--io",
    type=click.Choice(["float32", "half"]),
    default="float32",
    show_default=True,
    help="With --dtype: the dtype of the graph's floating-point inputs and outputs.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="With --dtype: let nodes stay in float32 until no output is off by more, relative to its largest value.",
)
@verify_option
@click.option("--report", type=file_path, help="Write the report to a .json or .html file.")
@click.option("--dry-run", is_flag=True, help="Print the report, and write no model.")
@overwrite_option
def optimize_command(
    source: Path,
    target: Path | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    patterns: tuple[Path, ...],
    npz: Path | None,
    tolerance: float | None,
    shapes: tuple[str, ...],
    timeout: float,
    fallback: Literal["onnx", "ort"],
    emit: Literal["functions", "standard"],
    layout: Literal["auto", "nchw", "nhwc"],
    regions: bool,
    epilogues: bool,
    dtype: Literal["float16", "bfloat16"] | None,
    io: Literal["float32", "half"],
    max_error: float | None,
    verify: bool,
    report: Path | None,
    dry_run: bool,
    overwrite: bool,
) -> None:
    """Fuse SOURCE, verify the result, write TARGET.

    Exits with 0 if all was compared and is equal, 3 if some outputs or fused nodes could not be compared, 4 if none
    could; the files are written then too.
    """
    from onnxfuse.ir.save import save
    from onnxfuse.optimizer import optimize
    from onnxfuse.report.report import check_name

    if target is None and not dry_run:
        raise UsageError("give the file to write as a second argument, or --dry-run")
    target = None if target is None or dry_run else checked_target(source, target, overwrite)
    if report:
        check_name(report)
    inputs = given_inputs(npz, source)
    with shown_progress() as progress:
        optimized, result = optimize(
            source, only=only, skip=skip, patterns=patterns, fallback=fallback, emit=emit, layout=layout,
            regions="epilogues" if epilogues and regions else regions, verify=verify, inputs=inputs, shapes=shapes,
            timeout=timeout, tolerance=tolerance, dtype=dtype, io=io, max_error=max_error, progress=progress,
        )  # fmt: skip
    if target:
        save(optimized, target, folder=result.folder)
        result = result.written(target)
    if report:
        result.write(report)
    console().print(result.table())
    sys.exit(EXIT_CODES[result.verified.status] if verify else 0)
