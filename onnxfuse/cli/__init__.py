"""The command line: parse the arguments, call the library, print the result.

Each command has a file of the same name, which imports other modules only when the command runs: `--version` and
`--help` import neither onnx, NumPy nor onnxruntime.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language
from onnxfuse.cli.bench import bench_command
from onnxfuse.cli.compile import compile_command
from onnxfuse.cli.defaults import read_defaults
from onnxfuse.cli.env import env_command
from onnxfuse.cli.explain import explain_command
from onnxfuse.cli.export_triton import export_triton_command
from onnxfuse.cli.fusions import list_command, show_command
from onnxfuse.cli.inspect import inspect_command
from onnxfuse.cli.optimize import optimize_command
from onnxfuse.cli.plan import plan_command
from onnxfuse.cli.terminal import console, echo, is_debugging, shared_options, was_printing
from onnxfuse.cli.tune import tune_command
from onnxfuse.cli.unfuse import unfuse_command
from onnxfuse.cli.verify import verify_command
from onnxfuse.errors import OnnxfuseError, UsageError, described, printable
from onnxfuse.version import __version__


class Commands(click.Group):
    """A group of commands that prints an error as one line and exits: with 2 for wrong usage, 1 for other failures."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Parse the options before the command, and print --help and --version."""
        with _told_in_one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, with the defaults of pyproject.toml."""
        with _told_in_one_line(ctx):
            ctx.default_map = read_defaults(self.commands)
            return super().invoke(ctx)


@contextmanager
def _told_in_one_line(context: click.Context | None = None) -> Iterator[None]:
    """If the block raises an error, print it as one line, after its traceback if --debug is given, and exit."""
    try:
        yield
    except click.ClickException as error:  # its message can quote untrusted file names
        error.message = printable(error.message)  # type: ignore[misc]
        raise
    except (click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if interrupts.seen():
            raise KeyboardInterrupt from None
        from onnxfuse.printing import escape

        if context is not None and is_debugging(context):
            echo("".join(traceback.format_exception(error)), err=True)
        message = "[red]error[/]: " + escape(_sentence(error), keep="\n")
        console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise click.exceptions.Exit(2 if isinstance(error, UsageError) else 1) from None


def _sentence(error: Exception) -> str:
    """Return the message of an error; for internal errors, also ask the user to report it."""
    if isinstance(error, OnnxfuseError):
        return str(error)
    if isinstance(error, OSError) and was_printing(error):
        return f"the standard output cannot be written: {error.strerror}; what is printed is lost"
    return f"{OnnxfuseError(described(error))}; --debug shows where; please report this"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onnxfuse")
def main() -> None:
    """Fuse the subgraphs of an ONNX model that one kernel could run."""


main.params.extend(shared_options)

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
    command.params.extend(shared_options)
    main.add_command(command)
