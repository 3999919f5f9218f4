"""The command line: parse the arguments, call the library, print the result.

Each command has a file of its name, and imports what it needs when it runs: `--version` and `--help` import neither
onnx, NumPy nor onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language
from onnxfuse.cli.bench import bench_command
from onnxfuse.cli.compile import compile_command
from onnxfuse.cli.env import env_command
from onnxfuse.cli.explain import explain_command
from onnxfuse.cli.export_triton import export_triton_command
from onnxfuse.cli.fusions import list_command, show_command
from onnxfuse.cli.inspect import inspect_command
from onnxfuse.cli.optimize import optimize_command
from onnxfuse.cli.plan import plan_command
from onnxfuse.cli.terminal import console
from onnxfuse.cli.tune import tune_command
from onnxfuse.cli.unfuse import unfuse_command
from onnxfuse.cli.verify import verify_command
from onnxfuse.errors import OnnxfuseError, UsageError, printable
from onnxfuse.version import __version__


@contextmanager
def printable_usage_errors() -> Iterator[None]:
    """Let click quote arguments, which may be names of strangers' files, without what does not print."""
    try:
        yield
    except click.ClickException as error:
        error.message = printable(error.message)  # type: ignore[misc]  # click shows what is here
        raise


class Commands(click.Group):
    """Turns errors that users can act on into one line and an exit code: 2 for wrong usage, 1 for other failures."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Read the options of the program."""
        with printable_usage_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and print an OnnxfuseError as one line."""
        try:
            with printable_usage_errors():
                return super().invoke(ctx)
        except Exception as error:
            if interrupts.seen():
                raise KeyboardInterrupt from None
            if not isinstance(error, OnnxfuseError):
                raise
            from onnxfuse.printing import escape

            message = f"[red]error[/]: {escape(str(error))}"
            console(stderr=True).print(message, highlight=False, soft_wrap=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onnxfuse")
def main() -> None:
    """Fuse the subgraphs of an ONNX model that one kernel could run."""


for command in (
    bench_command,
    compile_command,
    env_command,
    explain_command,
    export_triton_command,
    inspect_command,
    list_command,
    show_command,
    optimize_command,
    plan_command,
    tune_command,
    unfuse_command,
    verify_command,
):
    main.add_command(command)
