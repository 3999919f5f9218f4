"""The command `onnxfuse optimize`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from onnxfuse.cli.options import (
    EXIT_CODES,
    checked_target,
    examples,
    file_path,
    fusing_options,
    given_inputs,
    given_regions,
    positive_number,
    verify_option,
    verify_options,
)
from onnxfuse.cli.terminal import console, show_tracebacks, shown_progress
from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from onnxfuse.layout.conversion import Layout
    from onnxfuse.report.report import Report
    from onnxfuse.verify.extent import Level


@click.command(
    "optimize",
    epilog=examples(
        "onnxfuse optimize model.onnx fused.onnx",
        "onnxfuse optimize model.onnx --dry-run --report report.html",
        "onnxfuse optimize model.onnx fused.onnx --shape input_ids:8x128",
        "onnxfuse optimize model.onnx fused.onnx --plan plan.json",
        "onnxfuse optimize model.onnx int8.onnx --dtype int8 --calibrate samples.npz",
        "onnxfuse optimize llama_int4 llama_int4_fused --arch sm_90",
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
    type=click.Choice(["float16", "bfloat16", "int8", "float8"]),
    help="Convert the model to half precision, where nodes that overflow or lose too much stay in float32; or quantize "
    "convolutions and products, with --calibrate, by onnxruntime's quantizer.",
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
@click.option(
    "--weights",
    type=click.Choice(["int4", "int8"]),
    help="Quantize the weights of MatMuls before fusing, by onnxruntime's quantizer.  The report tells the errors.",
)
@click.option(
    "--calibrate",
    type=file_path,
    metavar="FILE",
    help="With --dtype int8 or float8: take the ranges of tensors from inputs in this .npz file.  Each array has one "
    "more axis than the input, the first, which counts samples; or all arrays together are one sample.",
)
@click.option(
    "--reference",
    type=file_path,
    metavar="FILE",
    help="The float model of a quantized model: report the errors of its outputs beside this one's, before and after.",
)
@verify_option
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="sm_90",
    help="Of a folder, compile for this GPU (repeatable).",
)
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="The same, by the GPU's name (repeatable).")
@click.option(
    "--report",
    type=file_path,
    help="Write the report to a .json or .html file; a second model of a folder has r.2.json beside r.json.",
)
@click.option("--all", "everything", is_flag=True, help="Print all operators, reasons and near misses.")
@click.option("--dry-run", is_flag=True, help="Print the report, and write no model.")
@click.option(
    "--overwrite", is_flag=True, help="Let TARGET replace SOURCE, if both are one file; or let it replace a folder."
)
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
    dtype: Literal["float16", "bfloat16", "int8", "float8"] | None,
    io: Literal["float32", "half"],
    max_error: float | None,
    weights: Literal["int4", "int8"] | None,
    calibrate: Path | None,
    reference: Path | None,
    verify: Level,
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    report: Path | None,
    everything: bool,
    dry_run: bool,
    overwrite: bool,
) -> None:
    """Fuse SOURCE, verify the result, write TARGET.

    Both are ONNX files, or folders of onnxruntime-genai. In a folder, the models that genai_config.json names are
    fused, and all other files are copied. Kernels are compiled for its models that run on CUDA, for the GPUs that
    --arch and --gpu name, by default the GPUs here.

    Exits with 0 if all was compared and is equal, 3 if some outputs or fused nodes could not be compared, 4 if none
    could; the files are written then too.
    """
    from onnxfuse.verify.own_process import own_process

    if target is None and not dry_run:
        raise UsageError("give the file to write as a second argument, or --dry-run")
    target = None if dry_run else target
    options: dict[str, Any] = {
        "only": only, "skip": skip, "patterns": patterns, "fallback": fallback, "emit": emit, "layout": layout,
        "regions": given_regions(regions, epilogues), "plan": plan, "verify": verify, "shapes": shapes,
        "timeout": timeout, "tolerance": tolerance, "dtype": dtype, "io": io, "max_error": max_error,
        "weights": weights, "calibrate": calibrate, "reference": reference,
    }  # fmt: skip
    # The process that runs models starts first: it imports onnxruntime while this one imports the optimizer and fuses.
    with own_process(timeout, at_once=verify != "off"):
        from onnxfuse.report.report import check_name

        if report:
            check_name(report)
        if source.is_dir():
            options |= {"archs": archs, "gpus": gpus, "overwrite": overwrite}
            found: Iterable[_Optimized] = _optimize_folder(source, target, npz, report, options)
        elif archs or gpus:
            raise UsageError("--arch and --gpu are for folders; give them to `onnxfuse compile` after this command")
        else:
            found = [_optimize_file(source, target, npz, report, overwrite, options)]
        codes = [_show(one, number, report, everything, verify) for number, one in enumerate(found, 1)]
    sys.exit(1 if 1 in codes else max(codes))


class _Optimized(NamedTuple):
    """The report of a model, and the texts that are printed before and after it."""

    report: Report
    before: str = ""
    after: RenderableType = ""


def _optimize_file(
    source: Path, target: Path | None, npz: Path | None, report: Path | None, overwrite: bool, options: dict[str, Any]
) -> _Optimized:
    """Optimize a model and write it, if there is a target."""
    from onnxfuse.ir.save import save
    from onnxfuse.optimizer import optimize

    target = None if target is None else checked_target(source, target, overwrite)
    if report:
        checked_target(source, report)
        if target and report.resolve() == target.resolve():
            raise UsageError(f"'{report}' is the model to write; give the report another name")
    inputs = given_inputs(npz, source)
    with shown_progress() as progress:
        optimized, result = optimize(source, inputs=inputs, progress=progress, **options)
    if target:
        save(optimized, target, folder=result.folder)
        result = result.written(target)
    return _Optimized(result)


def _optimize_folder(
    source: Path, target: Path | None, npz: Path | None, report: Path | None, options: dict[str, Any]
) -> Iterator[_Optimized]:
    """Optimize the models of a folder and write it, if there is a target; then yield each model."""
    from onnxfuse.compile.summary import summary
    from onnxfuse.genai.folder import read_folder
    from onnxfuse.genai.optimize_folder import optimize_folder
    from onnxfuse.printing import Line, escape

    if report and report.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"'{report}' is in the folder to read, which is not changed; give another name")
    if options["reference"]:
        raise UsageError("--reference is for a model; give its file in place of a folder")
    folder = read_folder(source)
    inputs = given_inputs(npz, folder.file(folder.models[0]))
    with shown_progress() as progress:
        found = optimize_folder(source, target, inputs=inputs, progress=progress, **options)
    for one in found:
        why = Line(f"Fused nodes run as their bodies: {escape(one.why_bodies)}") if one.why_bodies else ""
        yield _Optimized(one.report, f"[bold]{escape(one.name)}[/]", summary(one.compiled) if one.compiled else why)


def _show(one: _Optimized, number: int, path: Path | None, everything: bool, verify: Level) -> int:
    """Print a model's report, and write it to a file if `path` is given; return the exit code."""
    from onnxfuse.steps import LeftOut, attempt

    unwritten: list[LeftOut] = []
    if path:
        path = path if number == 1 else path.with_stem(f"{path.stem}.{number}")
        attempt(f"writing '{path}'", lambda: one.report.write(path), None, unwritten)
    result = replace(one.report, left_out=(*one.report.left_out, *unwritten))
    for each in (one.before, result.table(everything), one.after):
        if each:
            console().print(each)
    show_tracebacks(result.left_out)
    return 1 if unwritten else EXIT_CODES[result.verified.status] if verify != "off" else 0
