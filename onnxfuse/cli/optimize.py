"""The command `onnxfuse optimize`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from onnxfuse.cli.options import (
    EXIT_CODES,
    check_is_not_data,
    checked_target,
    examples,
    file_path,
    fusing_options,
    given_inputs,
    given_regions,
    overwrite_option,
    positive_number,
    verify_option,
    verify_options,
)
from onnxfuse.cli.terminal import console, show_tracebacks, shown_progress
from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from onnxfuse.layout.conversion import Layout


@click.command(
    "optimize",
    epilog=examples(
        "onnxfuse optimize model.onnx fused.onnx",
        "onnxfuse optimize model.onnx --dry-run --report report.html",
        "onnxfuse optimize model.onnx fused.onnx --shape input_ids:8x128",
        "onnxfuse optimize model.onnx fused.onnx --plan plan.json",
    ),
)
@click.argument("source", type=file_path)
@click.argument("target", type=file_path, required=False)
@fusing_options
@click.option(
    "--plan", type=file_path, metavar="FILE", help="Leave out what this file of `onnxfuse plan` has switched off."
)
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
    type=positive_number,
    metavar="X",
    help="With --dtype: let nodes stay in float32 until no output is off by more, relative to its largest value.  "
    "[default: three times the noise of half precision, if a tenth of the nodes suffices]",
)
@verify_option
@click.option("--report", type=file_path, help="Write the report to a .json or .html file.")
@click.option("--all", "everything", is_flag=True, help="Print all operators, reasons and near misses.")
@click.option("--dry-run", is_flag=True, help="Print the report, and write no model.")
@overwrite_option
def optimize_command(
    source: Path,
    target: Path | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    patterns: tuple[Path, ...],
    layout: Layout,
    regions: bool,
    epilogues: bool,
    plan: Path | None,
    npz: Path | None,
    tolerance: float | None,
    shapes: tuple[str, ...],
    timeout: float,
    fallback: Literal["onnx", "ort"],
    emit: Literal["functions", "standard"],
    dtype: Literal["float16", "bfloat16"] | None,
    io: Literal["float32", "half"],
    max_error: float | None,
    verify: bool,
    report: Path | None,
    everything: bool,
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
    from onnxfuse.steps import LeftOut, attempt

    if target is None and not dry_run:
        raise UsageError("give the file to write as a second argument, or --dry-run")
    target = None if target is None or dry_run else checked_target(source, target, overwrite)
    if report:
        check_name(report)
        check_is_not_data(source, report)
    inputs = given_inputs(npz, source)
    with shown_progress() as progress:
        optimized, result = optimize(
            source, only=only, skip=skip, patterns=patterns, fallback=fallback, emit=emit, layout=layout,
            regions=given_regions(regions, epilogues), plan=plan, verify=verify, inputs=inputs, shapes=shapes,
            timeout=timeout, tolerance=tolerance, dtype=dtype, io=io, max_error=max_error, progress=progress,
        )  # fmt: skip
    if target:
        save(optimized, target, folder=result.folder)
        result = result.written(target)
    unwritten: list[LeftOut] = []
    if report:
        attempt(f"writing '{report}'", lambda: result.write(report), None, unwritten)
    result = replace(result, left_out=(*result.left_out, *unwritten))
    console().print(result.table(everything))
    show_tracebacks(result.left_out)
    sys.exit(1 if unwritten else EXIT_CODES[result.verified.status] if verify else 0)
