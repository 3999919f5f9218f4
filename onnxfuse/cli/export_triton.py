"""The command `onnxfuse export-triton`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.options import examples, file_path, kernels_option, use_kernels
from onnxfuse.cli.terminal import echo


@click.command(
    "export-triton",
    epilog=examples(
        "onnxfuse export-triton fused.onnx model_repository",
        "onnxfuse export-triton fused.onnx repo --name bert --served-from /models",
    ),
)
@click.argument("source", type=file_path)
@click.argument("repository", type=file_path)
@click.option("--plans", type=file_path, help="The plan file of SOURCE.  [default: SOURCE.plans]")
@kernels_option
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
    kernels: tuple[Path, ...],
    name: str | None,
    served_from: str | None,
    max_batch_size: int | None,
    overwrite: bool,
) -> None:
    """Write a model repository for Triton.

    The fused model SOURCE, the native library and the plan file of `onnxfuse compile` go into REPOSITORY, where Triton
    Inference Server runs the kernels without Python. If `onnxfuse compile` was given folders of kernels by --kernels,
    give them here, too.
    """
    from onnxfuse.triton import TritonSettings, export_triton

    use_kernels(kernels, "cuda")
    settings = TritonSettings(name, served_from, max_batch_size, overwrite)
    folder = export_triton(source, repository, plans, settings)
    echo(f"wrote {folder}; start the server with --model-repository={served_from or repository.resolve()}")
