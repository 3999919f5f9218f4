"""The command line: parse the arguments, call the library, print the result.

Each command imports what it needs when it runs: `--version` and `--help` import neither onnx, NumPy nor onnxruntime.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.version import __version__

if TYPE_CHECKING:
    import onnx
    from rich.console import Console

    from onnxfuse.tuning.bound_session import Provider
    from onnxfuse.tuning.dispatch import TunePolicy

SECONDS_WITHOUT_PROGRESS: Final = 2.0  # before a progress bar appears
PACKAGES: Final = (
    "onnx", "onnx-graphsurgeon", "onnxruntime", "onnxruntime-gpu", "numpy", "cupy-cuda13x", "click", "rich",
)  # fmt: skip

EXIT_CODES: Final = {"verified": 0, "failed": 1, "partly": 3, "none": 4}  # of optimize and verify

file_path = click.Path(path_type=Path)
only_option = click.option("--only", multiple=True, metavar="FUSION", help="Apply only this fusion (repeatable).")
skip_option = click.option("--skip", multiple=True, metavar="FUSION", help="Leave this fusion out (repeatable).")
patterns_option = click.option(
    "--patterns", multiple=True, type=file_path, metavar="DIR", help="Also use the fusions in this folder (repeatable)."
)
kernels_option = click.option(
    "--kernels", multiple=True, type=file_path, metavar="DIR", help="Also run the kernels in this folder (repeatable)."
)
shape_option = click.option(
    "--shape", "shapes", multiple=True, metavar="INPUT:8x512", help="Set the sizes of an input (repeatable)."
)
provider_option = click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]),
    help="Where to run.  [default: cuda if onnxruntime has it, else cpu]",
)  # fmt: skip
tune_option = click.option(
    "--tune", type=click.Choice(["never", "cached", "now"]), default="cached", show_default=True,
    help="never: run every kernel; cached: run the kernels and bodies that `onnxfuse tune` found to be faster; "
    "now: tune first.",
)  # fmt: skip
tolerance_option = click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True), metavar="X",
    help="The largest error of an output, relative to its largest value.  "
    "[default: by its dtype, or more where the original's own noise is larger]",
)  # fmt: skip
input_option = click.option("--input", "npz", type=file_path, help="Verify with the inputs in this .npz file.")

option_option = click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Set an option of the provider (repeatable)."
)
timeout_option = click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=600, show_default=True, metavar="SECONDS",
    help="How long opening a model in onnxruntime, or one run of it, may take.",
)  # fmt: skip


class Commands(click.Group):
    """Turns errors that users can act on into one line and an exit code: 2 for wrong usage, 1 for other failures."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and print an OnnxfuseError as one line."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if interrupts.seen():
                raise KeyboardInterrupt from None
            if not isinstance(error, OnnxfuseError):
                raise
            from rich.markup import escape

            message = f"[red]error[/]: {escape(str(error))}"
            console(stderr=True).print(message, highlight=False, soft_wrap=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


@functools.cache
def console(stderr: bool = False) -> Console:
    """Return rich's console on stdout or stderr."""
    from rich.console import Console

    return Console(stderr=stderr)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onnxfuse")
def main() -> None:
    """Fuse the subgraphs of an ONNX model that one kernel could run."""


@main.command("optimize")
@click.argument("source", type=file_path)
@click.argument("target", type=file_path, required=False)
@only_option
@skip_option
@patterns_option
@input_option
@tolerance_option
@shape_option
@timeout_option
@click.option(
    "--fallback",
    type=click.Choice(["onnx", "ort"]),
    default="onnx",
    show_default=True,
    help="The operators in the bodies of fused nodes: standard ONNX, or also onnxruntime's own.",
)
@click.option(
    "--layout",
    type=click.Choice(["auto", "nchw", "nhwc"]),
    default="auto",
    show_default=True,
    help="The layout of images around convolutions: channels-last where that pays, nowhere, or wherever it can be.",
)
@click.option(
    "--verify/--no-verify", default=True, show_default=True, help="Run both models in onnxruntime and compare them."
)
@click.option("--report", type=file_path, help="Write the report to a .json or .html file.")
@click.option("--dry-run", is_flag=True, help="Print the report, and write no model.")
@click.option("--overwrite", is_flag=True, help="Let TARGET be the file that SOURCE is.")
def optimize_command(
    source: Path,
    target: Path | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    patterns: tuple[Path, ...],
    npz: Path | None,
    shapes: tuple[str, ...],
    timeout: float,
    tolerance: float | None,
    fallback: Literal["onnx", "ort"],
    layout: Literal["auto", "nchw", "nhwc"],
    verify: bool,
    report: Path | None,
    dry_run: bool,
    overwrite: bool,
) -> None:
    """Fuse SOURCE, verify the result, write TARGET.

    Exits with 0 if all was compared and is equal, 3 if some outputs or fused nodes could not be compared, 4 if none
    could; the files are written then too.
    """
    from onnxfuse.ir.load import load
    from onnxfuse.ir.save import check_target, save
    from onnxfuse.optimizer import optimize
    from onnxfuse.report.report import check_name
    from onnxfuse.verify.inputs import load_inputs

    if target is None and not dry_run:
        raise UsageError("give the file to write as a second argument, or --dry-run")
    if report:
        check_name(report)
    if target is not None and not dry_run:
        check_target(target)
        if target.exists() and source.exists() and target.samefile(source) and not overwrite:
            raise UsageError(f"'{target}' is the model to read; give another name, or --overwrite to replace it")
    inputs = load_inputs(npz, load(source)[0]) if npz else None
    with _progress() as progress:
        optimized, result = optimize(
            source, only=only, skip=skip, patterns=patterns, fallback=fallback, layout=layout, verify=verify,
            inputs=inputs, shapes=shapes, timeout=timeout, tolerance=tolerance, progress=progress,
        )  # fmt: skip
    if target is not None and not dry_run:
        save(optimized, target, folder=source.parent)
        result = result.written(target)
    if report:
        result.write(report)
    console().print(result.table())
    sys.exit(EXIT_CODES[result.verified.status] if verify else 0)


@main.command("explain")
@click.argument("source", type=file_path)
@click.argument("fusion", required=False)
@click.option("--node", help="Show only what was tried around this node.")
@click.option("--limit", type=click.IntRange(0), default=5, show_default=True, help="How many misses to show.")
@patterns_option
def explain_command(source: Path, fusion: str | None, node: str | None, limit: int, patterns: tuple[Path, ...]) -> None:
    """Show where SOURCE nearly matches a fusion.

    Each miss names the node that differs, what was found and what the fusion requires.
    """
    from rich.markup import escape

    from onnxfuse.dsl import catalogue
    from onnxfuse.explain import explain, nearest, where_fused, where_inside
    from onnxfuse.ir.load import load
    from onnxfuse.optimizer import StageTimer, fuse_model

    fusions = catalogue.with_folders(patterns)
    if fusion:
        catalogue.require_known(fusion, [f.name for f in fusions])
    model, folder = load(source)
    if node and (sentence := where_inside(model, node)):
        console().print(escape(sentence))
        return
    if node:
        _require_node(node, model)
    with _progress() as progress:
        fusing = fuse_model(model, folder, fusions, timer=StageTimer(progress)).fusing
    if node and (sentence := where_fused(fusing.fused, node)):
        console().print(escape(sentence))
        return
    misses = nearest(fusing.missed if fusion or node else fusing.near(), fusion, node)
    for miss in misses[:limit]:
        click.echo(explain(miss) + "\n")
    if not misses:
        done = sum(fusion in (None, one.fusion) for one in fusing.fused)
        click.echo(f"Nothing {'else ' if done else ''}comes near; {done} subgraphs were fused.")
    elif len(misses) > limit:
        click.echo(f"{len(misses) - limit} more; --limit {len(misses)} shows all.")


def _require_node(name: str, model: onnx.ModelProto) -> None:
    """Raise UsageError, with the most similar name, unless a node or one of its outputs has this name."""
    from difflib import get_close_matches

    names = [known for node in model.graph.node for known in (node.name, *node.output) if known]
    if name not in names:
        near = get_close_matches(name, names, 1)
        raise UsageError(f"there is no node '{name}'" + (f". Did you mean '{near[0]}'?" if near else " in the model"))


@main.command("list")
@patterns_option
def list_command(patterns: tuple[Path, ...]) -> None:
    """List all fusions, each with what it computes."""
    from rich.markup import escape
    from rich.table import Table

    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import summary

    table = Table(box=None, pad_edge=False)
    table.add_column("fusion")
    table.add_column("what it computes", overflow="fold")
    for fusion in catalogue.with_folders(patterns):
        table.add_row(fusion.name, escape(summary(fusion)))
    console().print(table)


@main.command("show")
@click.argument("fusion")
@patterns_option
def show_command(fusion: str, patterns: tuple[Path, ...]) -> None:
    """Show one fusion: its operator and its pattern."""
    from rich.markup import escape
    from rich.syntax import Syntax

    from onnxfuse.dsl import catalogue
    from onnxfuse.dsl.documentation import signature

    fusions = {f.name: f for f in catalogue.with_folders(patterns)}
    catalogue.require_known(fusion, list(fusions))
    found = fusions[fusion]
    text = f"[bold]{escape(signature(found))}[/]\n\n{escape(found.doc)}\n\n{found.span}"
    console().print(text, highlight=False)
    console().print(Syntax(found.source, "python", background_color="default"))


@main.command("verify")
@click.argument("original", type=file_path)
@click.argument("optimized", type=file_path)
@tolerance_option
@input_option
@shape_option
@timeout_option
def verify_command(
    original: Path,
    optimized: Path,
    npz: Path | None,
    shapes: tuple[str, ...],
    timeout: float,
    tolerance: float | None,
) -> None:
    """Compare two models in onnxruntime.

    Exits with 0 if all outputs are equal, 1 if one differs, 3 if some could not be compared, 4 if none could.
    """
    from rich.markup import escape
    from rich.table import Table

    from onnxfuse.ir.load import load
    from onnxfuse.verify.compare import compare
    from onnxfuse.verify.inputs import load_inputs
    from onnxfuse.verify.own_process import own_process

    model, _ = load(original)
    load(optimized)  # a file that cannot be read is an error here, and would be a difference to `compare`
    inputs = load_inputs(npz, model) if npz else None
    with own_process(timeout), _progress() as progress:
        result = compare(
            original, optimized, inputs=inputs, shapes=shapes, tolerance=tolerance,
            progress=lambda step: progress(step, 0, 0),
        )  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for name in "output", "largest error", "relative", "tolerance":
        table.add_column(name)
    for one in result.outputs:
        table.add_row(escape(one.name), f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.tolerance:.3g}")
    console().print(table)
    for each in result.not_compared:
        console().print(f"output '{escape(each.name)}' is not compared: {escape(each.reason)}", soft_wrap=True)
    console().print("equal" if result.passed else escape(result.reason), soft_wrap=True)
    sys.exit(EXIT_CODES[result.status])


@main.command("bench")
@click.argument("model", type=file_path)
@patterns_option
@kernels_option
@shape_option
@click.option("--against", multiple=True, type=file_path, help="Time another model beside it (repeatable).")
@click.option(
    "--runs", type=click.IntRange(2), help="Runs of each model in each mode.  [default: as many as take two seconds]"
)
@provider_option
@click.option(
    "--cuda-graph/--no-cuda-graph", default=True, show_default=True, help="On CUDA, also run with CUDA graphs."
)
@click.option("--ops/--no-ops", default=True, show_default=True, help="Also time each operator alone.")
@tune_option
@click.option("--input", "npz", type=file_path, help="Run on the inputs in this .npz file.")
@click.option("--json", "json_file", type=file_path, help="Write the result to a JSON file.")
@click.option("--chart", "chart_file", type=file_path, help="Draw the result to a .html or .png file.")
def bench_command(
    model: Path,
    patterns: tuple[Path, ...],
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    against: tuple[Path, ...],
    runs: int | None,
    provider: Provider | None,
    cuda_graph: bool,
    ops: bool,
    tune: TunePolicy,
    npz: Path | None,
    json_file: Path | None,
    chart_file: Path | None,
) -> None:
    """Time MODEL and the same model fused.

    Both run in turns, and their outputs are compared; exits with 1 if one is wrong or does not run.
    """
    from onnxfuse.bench import chart
    from onnxfuse.bench.bench import bench
    from onnxfuse.ir.load import load
    from onnxfuse.tuning.bound_session import default_provider
    from onnxfuse.verify.inputs import load_inputs

    if chart_file:
        chart.check_name(chart_file)
    provider = provider or default_provider()
    _add_kernels(kernels, provider)
    inputs = load_inputs(npz, load(model)[0]) if npz else None
    with _progress() as progress:
        result = bench(
            model, patterns=patterns, shapes=shapes, against=against, runs=runs, provider=provider,
            cuda_graph=cuda_graph, inputs=inputs, ops=ops, tune=tune, progress=progress,
        )  # fmt: skip
    if json_file:
        result.write(json_file)
    if chart_file:
        chart.draw(result, chart_file)
    console().print(chart.tables(result))
    sys.exit(0 if result.passed else 1)


@main.command("tune")
@click.argument("model", type=file_path)
@patterns_option
@kernels_option
@shape_option
@click.option("--device-id", type=click.IntRange(0), default=0, show_default=True, help="The number of the GPU.")
@provider_option
@option_option
@click.option("--input", "npz", type=file_path, help="Run on the inputs in this .npz file.")
def tune_command(
    model: Path,
    patterns: tuple[Path, ...],
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    device_id: int,
    provider: Provider | None,
    options: tuple[str, ...],
    npz: Path | None,
) -> None:
    """Measure where kernels beat bodies in MODEL.

    Times are taken at the shapes of the inputs and kept on disk; later sessions run what is faster.  A --shape may have
    ranges, as in ids:1..8x1..512: the plans of kernels are then measured at the powers of two in them.
    """  # fmt: skip
    from onnxfuse.bench.tune_file import tune_file, tuning_tables
    from onnxfuse.ir.load import load
    from onnxfuse.tuning.bound_session import default_provider
    from onnxfuse.verify.inputs import load_inputs

    provider = provider or default_provider()
    _add_kernels(kernels, provider)
    inputs = load_inputs(npz, load(model)[0]) if npz else {}
    with _progress() as progress:
        tuning = tune_file(
            model, patterns=patterns, shapes=shapes, inputs=inputs, provider=provider, device_id=device_id,
            options=dict(map(_named, options)), progress=progress,
        )  # fmt: skip
    console().print(tuning_tables(tuning), crop=False)


def _add_kernels(folders: tuple[Path, ...], provider: Provider) -> None:
    """Let the sessions of a command run the kernels in these folders too.

    Raises an error before any work if these, or those of an installed package, do not load.
    """
    from onnxfuse.runtime.kernel_folders import add_kernels, kernel_folders

    for folder in folders:
        add_kernels(folder)
    if provider == "cuda":
        kernel_folders()


@main.command("compile")
@click.argument("model", type=file_path)
@click.option("-o", "--output", "target", type=file_path, help="The file to write.  [default: MODEL.plans]")
@click.option("--arch", "archs", multiple=True, metavar="sm_90", help="Compile for a compute capability (repeatable).")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Compile for a GPU of this name (repeatable).")
@kernels_option
@shape_option
@option_option
def compile_command(
    model: Path,
    target: Path | None,
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    """Compile the kernels of a fused MODEL into a plan file.

    Sessions that find the file, beside the model or by plans=, plan and compile nothing.  It is made for the GPUs of
    this machine, with what `onnxfuse tune` measured on them, or for those that --arch and --gpu name, which need not be
    here.  A --shape may have ranges, as in ids:1..8x1..512, within which plans are chosen; other sizes run too.
    """
    from onnxfuse.compile.compile_file import compile_file
    from onnxfuse.compile.summary import summary
    from onnxfuse.ir.save import check_target

    target = target or model.with_name(f"{model.name}.plans")
    check_target(target)
    _add_kernels(kernels, "cuda")
    with _progress() as progress:
        compiled = compile_file(
            model, target, archs=archs, gpus=gpus, shapes=shapes, options=dict(map(_named, options)), progress=progress
        )
    console().print(summary(compiled), soft_wrap=True)


def _named(option: str) -> tuple[str, str]:
    """Split "name=value".  Raises UsageError for other texts."""
    name, equals, value = option.partition("=")
    if not (name and equals):
        raise UsageError(f"--option '{option}' is not of the form NAME=VALUE; give it as in --option use_tf32=0")
    if name == "device_id":
        raise UsageError("give --device-id, not --option device_id")
    return name, value


@main.command("export-triton")
@click.argument("source", type=file_path)
@click.argument("repository", type=file_path)
@click.option("--plans", type=file_path, help="The plan file of SOURCE.  [default: SOURCE.plans]")
@click.option("--name", help="The name of the model in the repository.  [default: that of the file]")
@click.option(
    "--served-from", metavar="PATH",
    help="Where the server sees the repository, as in a container.  [default: where it is written]",
)  # fmt: skip
@click.option(
    "--max-batch-size", type=click.IntRange(0),
    help="The largest batch that the server makes of requests.  [default: 32 if one dynamic dim is the first of all "
    "inputs and outputs, else 0]",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a model of that name.")
def export_triton_command(
    source: Path,
    repository: Path,
    plans: Path | None,
    name: str | None,
    served_from: str | None,
    max_batch_size: int | None,
    overwrite: bool,
) -> None:
    """Write a model repository for Triton.

    The fused model SOURCE, the native library and the plan file of `onnxfuse compile` go into REPOSITORY, where Triton
    Inference Server runs the kernels without Python.
    """
    from onnxfuse.triton import export_triton

    folder = export_triton(
        source, repository, plans=plans, name=name, served_from=served_from, max_batch_size=max_batch_size,
        overwrite=overwrite,
    )  # fmt: skip
    click.echo(f"wrote {folder}; start the server with --model-repository={served_from or repository.resolve()}")


@main.command("env")
def env_command() -> None:
    """Show the versions that a bug report should name."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from onnxfuse.packages import extending_packages
    from onnxfuse.runtime.native_library import library_path

    rows = {"onnxfuse": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    rows |= {name: f"{found} (adds fusions or kernels)" for name, found in extending_packages().items()}
    rows["native library"] = str(library_path() or "not built")
    for name, value in rows.items():
        click.echo(f"{name:20} {value}")
    try:
        import onnxruntime
    except ImportError:
        return
    click.echo(f"{'providers':20} {', '.join(onnxruntime.get_available_providers())}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar once the work has taken SECONDS_WITHOUT_PROGRESS."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    shown, task = "load", bar.add_task("load", total=None)

    def show(stage: str, done: int, of: int) -> None:
        """Show a stage; each begins a new bar, which moves to and fro while nobody knows how much there is to do."""
        nonlocal shown, task
        if interrupts.seen():  # and something swallowed the exception
            raise KeyboardInterrupt
        if stage != shown or not of:
            bar.remove_task(task)
            shown, task = stage, bar.add_task(stage, total=None)
        bar.update(task, completed=done, total=of or None)

    timer = threading.Timer(SECONDS_WITHOUT_PROGRESS, bar.start)
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:  # stopping prints a newline
            bar.stop()
