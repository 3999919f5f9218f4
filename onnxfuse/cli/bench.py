"""The command `onnxfuse bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import checked_target, examples, file_path, given_inputs, run_options, use_kernels
from onnxfuse.cli.terminal import console, shown_progress
from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from onnxfuse.tuning.bound_session import Provider
    from onnxfuse.tuning.dispatch import TunePolicy


@click.command(
    "bench",
    epilog=examples(
        "onnxfuse bench model.onnx --shape input_ids:8x128",
        "onnxfuse bench model.onnx --against other.onnx --chart times.html",
        "onnxfuse bench model.onnx --provider cpu --no-ops --runs 50",
        "onnxfuse bench model.onnx --trace trace.json",
        "onnxfuse bench model.onnx --report report.html",
    ),
)
@click.argument("model", type=file_path)
@run_options
@click.option("--against", multiple=True, type=file_path, help="Time another model beside it (repeatable).")
@click.option(
    "--runs", type=click.IntRange(2), help="Runs of each model in each mode.  [default: as many as take two seconds]"
)
@click.option(
    "--cuda-graph/--no-cuda-graph", default=True, show_default=True, help="On CUDA, also run with CUDA graphs."
)
@click.option("--ops/--no-ops", default=True, show_default=True, help="Also time each operator alone.")
@click.option(
    "--tune",
    type=click.Choice(["never", "cached", "now"]),
    default="cached",
    show_default=True,
    help="never: run every kernel; cached: run the kernels and bodies that `onnxfuse tune` found to be faster; "
    "now: tune first.",
)
@click.option("--json", "json_file", type=file_path, help="Write the result to a JSON file.")
@click.option("--chart", "chart_file", type=file_path, help="Draw the result to a .html or .png file.")
@click.option(
    "--trace", "trace_file", type=file_path, help="Write the operators of both models to a file for ui.perfetto.dev."
)
@click.option(
    "--report", "report_file", type=file_path, help="Write a report with times to a .html or .json file; also verifies."
)
def bench_command(
    model: Path,
    patterns: tuple[Path, ...],
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    provider: Provider | None,
    npz: Path | None,
    against: tuple[Path, ...],
    runs: int | None,
    cuda_graph: bool,
    ops: bool,
    tune: TunePolicy,
    json_file: Path | None,
    chart_file: Path | None,
    trace_file: Path | None,
    report_file: Path | None,
) -> None:
    """Time MODEL and the same model fused.

    Both run in turns, and their outputs are compared; exits with 1 if one is wrong or does not run.
    """
    from onnxfuse.bench import chart
    from onnxfuse.bench.bench import BenchSettings, bench
    from onnxfuse.bench.trace import write_trace
    from onnxfuse.report.report import check_name
    from onnxfuse.tuning.bound_session import default_provider

    if chart_file:
        chart.check_name(chart_file)
    if report_file:
        check_name(report_file)
    for option, given in (("--trace", trace_file), ("--report", report_file)):
        if given and not ops:
            raise UsageError(f"{option} shows the time of each operator, which --no-ops leaves out; give one of them")
    for file in filter(None, (json_file, chart_file, trace_file, report_file)):
        for each in (model, *against):
            checked_target(each, file)
    provider = provider or default_provider()
    use_kernels(kernels, provider)
    inputs = given_inputs(npz, model) or {}
    settings = BenchSettings(
        patterns, shapes, inputs, against, runs, provider, cuda_graph, ops, tune, bool(trace_file), bool(report_file)
    )
    with shown_progress() as progress:
        result = bench(model, settings, progress)
    if json_file:
        result.write(json_file)
    if chart_file:
        chart.draw(result, chart_file)
    if trace_file:
        write_trace(result, trace_file)
    if report_file and result.report:
        result.report.write(report_file)
    console().print(chart.tables(result))
    sys.exit(0 if result.passed else 1)
