"""The command `onnxfuse tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import (
    examples,
    file_path,
    given_inputs,
    option_option,
    options_by_name,
    run_options,
    use_kernels,
)
from onnxfuse.cli.terminal import console, shown_progress

if TYPE_CHECKING:
    from onnxfuse.tuning.bound_session import Provider


@click.command(
    "tune",
    epilog=examples(
        "onnxfuse tune fused.onnx --shape input_ids:8x128", "onnxfuse tune fused.onnx --shape input_ids:1..8x1..512"
    ),
)
@click.argument("model", type=file_path)
@run_options
@click.option("--device-id", type=click.IntRange(0), default=0, show_default=True, help="The number of the GPU.")
@option_option
def tune_command(
    model: Path,
    patterns: tuple[Path, ...],
    kernels: tuple[Path, ...],
    shapes: tuple[str, ...],
    provider: Provider | None,
    npz: Path | None,
    device_id: int,
    options: tuple[str, ...],
) -> None:
    """Measure which nodes run faster as kernels.

    Each fused node of MODEL is timed as a kernel and as its ONNX function, at the shapes of the inputs. The times are
    kept on disk; later sessions run what is faster.  A --shape may have ranges, as in ids:1..8x1..512: the plans of
    kernels are then measured at the powers of two in them.
    """  # fmt: skip
    from onnxfuse.bench.tune_file import TuneSettings, tune_file, tuning_tables
    from onnxfuse.tuning.bound_session import default_provider

    provider = provider or default_provider()
    use_kernels(kernels, provider)
    given = {**options_by_name(options), **({"device_id": device_id} if device_id else {})}
    settings = TuneSettings(patterns, shapes, given_inputs(npz, model) or {}, provider, given)
    with shown_progress() as progress:
        tuning = tune_file(model, settings, progress)
    console().print(tuning_tables(tuning), crop=False)
