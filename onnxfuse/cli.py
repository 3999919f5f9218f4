"""The command line: parse, call, print."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import onnx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from onnxfuse import __version__
from onnxfuse.bench import chart
from onnxfuse.bench.bench import bench
from onnxfuse.bench.timing import default_provider
from onnxfuse.bench.tuning import tune_file, tuning_tables
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.explain import explain, nearest, where_fused, where_inside
from onnxfuse.language import catalog
from onnxfuse.language.document import signature, summary
from onnxfuse.model.files import load
from onnxfuse.model.save import save
from onnxfuse.optimize import Clock, Run, optimize
from onnxfuse.report import check_name
from onnxfuse.verify.inputs import load_inputs
from onnxfuse.verify.verify import compare

PATIENCE = 2.0  # seconds before a progress bar appears
PACKAGES = "onnx", "onnx-graphsurgeon", "onnxruntime", "onnxruntime-gpu", "numpy", "cupy-cuda13x", "click", "rich"
out, err = Console(), Console(stderr=True)

model_file = click.Path(path_type=Path)
only_option = click.option("--only", multiple=True, metavar="FUSION", help="Apply this fusion only (repeatable).")
skip_option = click.option("--skip", multiple=True, metavar="FUSION", help="Leave this fusion out (repeatable).")
patterns_option = click.option(
    "--patterns", multiple=True, type=click.Path(path_type=Path), metavar="DIR", help="A folder with your own fusions."
)
shape_option = click.option(
    "--shape", "shapes", multiple=True, metavar="INPUT:8x512", help="Sizes of an input's dims (repeatable)."
)
provider_option = click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), help="[default: cuda, where onnxruntime has it]"
)
tune_option = click.option(
    "--tune", type=click.Choice(["never", "cached", "now"]), default="cached", show_default=True,
    help="Kernel or body: kernels, what `onnxfuse tune` found, or what is found now.",
)  # fmt: skip
input_option = click.option("--input", "npz", type=click.Path(path_type=Path), help="Inputs to verify with, as .npz.")


class Commands(click.Group):
    """Turns errors that users can act on into one line and an exit code: 1 failed or not equal, 2 usage."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except OnnxfuseError as error:
            err.print(f"[red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onnxfuse")
def main() -> None:
    """Fuse the subgraphs of an ONNX model that one kernel could run."""


@main.command("optimize")
@click.argument("source", type=model_file)
@click.argument("target", type=model_file, required=False)
@only_option
@skip_option
@patterns_option
@input_option
@click.option("--fallback", type=click.Choice(["onnx", "ort"]), default="onnx", show_default=True,
              help="What the bodies of fused nodes are written in: standard ONNX, or onnxruntime's own operators too.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Compare both models in onnxruntime.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the report: .json, or .html.")
@click.option("--dry-run", is_flag=True, help="Report what would be fused, write no model.")
def optimize_command(
    source: Path, target: Path | None, only: tuple[str, ...], skip: tuple[str, ...], patterns: tuple[Path, ...],
    npz: Path | None, fallback: Any, verify: bool, report: Path | None, dry_run: bool,
) -> None:
    """Fuse SOURCE and write TARGET."""  # fmt: skip
    if target is None and not dry_run:
        raise UsageError("give the file to write as a second argument, or --dry-run")
    if report:
        check_name(report)
    model, folder = load(source)
    inputs = load_inputs(npz, model) if npz else None
    with _progress() as progress:
        optimized, result = optimize(
            source, only=only, skip=skip, patterns=patterns, fallback=fallback, verify=verify, inputs=inputs,
            progress=progress,
        )  # fmt: skip
    if target is not None and not dry_run:
        save(optimized, target, folder=folder)
        result = result.written(target)
    if report:
        result.write(report)
    out.print(result.table())


@main.command("explain")
@click.argument("source", type=model_file)
@click.argument("fusion", required=False)
@click.option("--node", help="Only what was tried around this node.")
@click.option("--limit", type=click.IntRange(0), default=5, show_default=True, help="How many misses to show.")
@patterns_option
def explain_command(source: Path, fusion: str | None, node: str | None, limit: int, patterns: tuple[Path, ...]) -> None:
    """Show where SOURCE nearly matches a fusion, and what differs."""
    fusions = catalog.with_folders(patterns)
    if fusion:
        catalog.known(fusion, [f.name for f in fusions])
    model, folder = load(source)
    if node and (place := where_inside(model, node)):
        out.print(escape(place))
        return
    if node:
        _known_node(node, model)
    with _progress() as progress:
        fusing = Run(model, folder, False, None, Clock(progress)).apply(fusions).fusing
    if node and (place := where_fused(fusing.fused, node)):
        out.print(escape(place))
        return
    misses = nearest(fusing.missed if fusion or node else fusing.near(), fusion, node)
    for miss in misses[:limit]:
        click.echo(explain(miss) + "\n")
    if not misses:
        done = sum(fusion in (None, one.fusion) for one in fusing.fused)
        click.echo(f"Nothing {'else ' if done else ''}comes near; {done} places were fused.")
    elif len(misses) > limit:
        click.echo(f"{len(misses) - limit} more; --limit {len(misses)} shows all.")


def _known_node(name: str, model: onnx.ModelProto) -> None:
    """Raise UsageError, with the nearest name, unless a node or what it computes has this name."""
    names = [known for node in model.graph.node for known in (node.name, *node.output) if known]
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise UsageError(f"there is no node '{name}'" + (f". Did you mean '{near[0]}'?" if near else " in the model"))


@main.command("list")
@patterns_option
def list_command(patterns: tuple[Path, ...]) -> None:
    """List the fusions."""
    table = Table(box=None, pad_edge=False)
    table.add_column("fusion")
    table.add_column("what it computes", overflow="fold")
    for fusion in catalog.with_folders(patterns):
        table.add_row(fusion.name, escape(summary(fusion)))
    out.print(table)


@main.command("show")
@click.argument("fusion")
@patterns_option
def show_command(fusion: str, patterns: tuple[Path, ...]) -> None:
    """Show one fusion: its operator, and the pattern."""
    fusions = {f.name: f for f in catalog.with_folders(patterns)}
    catalog.known(fusion, list(fusions))
    found = fusions[fusion]
    out.print(f"[bold]{escape(signature(found))}[/]\n\n{escape(found.doc)}\n\n{found.span}", highlight=False)
    out.print(Syntax(found.source, "python", background_color="default"))


@main.command("verify")
@click.argument("original", type=model_file)
@click.argument("optimized", type=model_file)
@input_option
def verify_command(original: Path, optimized: Path, npz: Path | None) -> None:
    """Compare two models in onnxruntime; exit with 1 unless they are equal."""
    model, _ = load(original)
    load(optimized)  # `compare` would call what is wrong with the file a difference
    inputs = load_inputs(npz, model) if npz else None
    result = compare(original, optimized, inputs=inputs)
    table = Table(box=None, pad_edge=False)
    for name in "output", "largest error", "relative", "tolerance":
        table.add_column(name)
    for one in result.outputs:
        table.add_row(escape(one.name), f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.tolerance:.3g}")
    out.print(table)
    out.print("equal" if result.passed else escape(result.reason), soft_wrap=True)
    sys.exit(0 if result.passed else 1)


@main.command("bench")
@click.argument("model", type=model_file)
@shape_option
@click.option("--against", multiple=True, type=model_file, help="Another model to time beside it (repeatable).")
@click.option("--runs", type=click.IntRange(2), help="Runs of each model and mode.  [default: what two seconds allow]")
@provider_option
@click.option("--cuda-graph/--no-cuda-graph", default=True, show_default=True, help="On CUDA, also with CUDA graphs.")
@click.option("--ops/--no-ops", default=True, show_default=True, help="Also time each fused operator alone.")
@tune_option
@click.option("--input", "npz", type=click.Path(path_type=Path), help="Inputs to run on, as .npz.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option("--chart", "chart_file", type=click.Path(path_type=Path), help="Draw it: .html, or .png.")
def bench_command(
    model: Path, shapes: tuple[str, ...], against: tuple[Path, ...], runs: int | None, provider: Any, cuda_graph: bool,
    ops: bool, tune: Any, npz: Path | None, json_file: Path | None, chart_file: Path | None,
) -> None:
    """Time MODEL and MODEL fused in turns; exit with 1 where one of them is wrong or does not run."""
    if chart_file:
        chart.check_name(chart_file)
    inputs = load_inputs(npz, load(model)[0]) if npz else None
    with _progress() as progress:
        result = bench(
            model, shapes=shapes, against=against, runs=runs, provider=provider or default_provider(),
            cuda_graph=cuda_graph, inputs=inputs, ops=ops, tune=tune, progress=progress,
        )  # fmt: skip
    if json_file:
        result.write(json_file)
    if chart_file:
        chart.draw(result, chart_file)
    out.print(chart.tables(result))
    sys.exit(0 if result.passed else 1)


@main.command("tune")
@click.argument("model", type=model_file)
@shape_option
@click.option("--device-id", type=click.IntRange(0), default=0, show_default=True, help="Which GPU.")
@provider_option
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A provider option (repeatable).")
@click.option("--input", "npz", type=click.Path(path_type=Path), help="Inputs to run on, as .npz.")
def tune_command(
    model: Path, shapes: tuple[str, ...], device_id: int, provider: Any, options: tuple[str, ...], npz: Path | None
) -> None:
    """Time kernels against bodies at the shapes of MODEL's inputs, and keep for later sessions what is faster."""
    inputs = load_inputs(npz, load(model)[0]) if npz else {}
    with _progress() as progress:
        tuning = tune_file(
            model, shapes=shapes, inputs=inputs, provider=provider or default_provider(), device_id=device_id,
            options=dict(map(_named, options)), progress=progress,
        )  # fmt: skip
    out.print(tuning_tables(tuning), crop=False)


def _named(option: str) -> tuple[str, str]:
    """Of "name=value".  Raises UsageError where it is something else."""
    name, equals, value = option.partition("=")
    if not (name and equals):
        raise UsageError(f"--option '{option}' is no NAME=VALUE; give one such as --option use_tf32=0")
    if name == "device_id":
        raise UsageError("give --device-id, not --option device_id")
    return name, value


@main.command("env")
def env_command() -> None:
    """Show the versions that matter in a bug report."""
    rows = {"onnxfuse": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    for name, value in rows.items():
        click.echo(f"{name:20} {value}")
    try:
        import onnxruntime
    except ImportError:
        return
    click.echo(f"{'providers':20} {', '.join(onnxruntime.get_available_providers())}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for what takes longer than PATIENCE."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=err, transient=True)
    task = bar.add_task("load", total=None)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.start()
    try:
        yield lambda stage, done, of: bar.update(task, description=stage, completed=done, total=of or None)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:  # stopping prints a newline
            bar.stop()
