"""Options that several commands share, and functions that check and convert their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from onnxfuse.fuse_model import Regions
    from onnxfuse.ir.dtypes import Array
    from onnxfuse.tuning.bound_session import Provider

Command = TypeVar("Command", bound=Callable[..., Any])

EXIT_CODES: Final = {"verified": 0, "failed": 1, "partly": 3, "none": 4}  # exit codes of optimize and verify


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator that adds several options to a command; --help lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def examples(*commands: str) -> str:
    """Return the examples at the end of a command's help text, one call per line."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


file_path = click.Path(path_type=Path)
patterns_option = click.option(
    "--patterns", multiple=True, type=file_path, metavar="DIR", help="Also use the fusions in this folder (repeatable)."
)
kernels_option = click.option(
    "--kernels", multiple=True, type=file_path, metavar="DIR", help="Also run the kernels in this folder (repeatable)."
)
shape_option = click.option(
    "--shape", "shapes", multiple=True, metavar="INPUT:8x512", help="Set the sizes of an input (repeatable)."
)
option_option = click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Set an option of the provider (repeatable)."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Let TARGET replace SOURCE, if both are one file.")
verify_option = together(  # --verify is the second, because click 8.1 takes the default of the last option
    click.option("--no-verify", "verify", flag_value="off", default="full", help="The same as --verify off."),
    click.option(
        "--verify",
        type=click.Choice(["full", "quick", "off"]),
        default="full",
        show_default=True,
        help="Run both models in onnxruntime and compare them; quick does so at one combination of sizes.",
    ),
)
run_options = together(  # options of commands that run a model to time it
    patterns_option,
    kernels_option,
    shape_option,
    click.option(
        "--provider",
        type=click.Choice(["cpu", "cuda"]),
        help="Where to run.  [default: cuda if onnxruntime has it, else cpu]",
    ),
    click.option("--input", "npz", type=file_path, help="Run on the inputs in this .npz file."),
)
fusing_options = together(  # options of commands that fuse a model
    click.option("--only", multiple=True, metavar="FUSION", help="Apply only this fusion (repeatable)."),
    click.option("--skip", multiple=True, metavar="FUSION", help="Leave this fusion out (repeatable)."),
    patterns_option,
    click.option(
        "--layout",
        type=click.Choice(["auto", "nchw", "nhwc"]),
        default="auto",
        show_default=True,
        help="The layout of images around convolutions: channels-last where that pays, nowhere, or wherever it can be.",
    ),
    click.option(
        "--regions/--no-regions",
        default=True,
        show_default=True,
        help="Let connected operators that no pattern names become fused nodes too.",
    ),
    click.option(
        "--epilogues/--no-epilogues",
        default=True,
        show_default=True,
        help="Let elementwise operators that follow a product or convolution join its kernel.",
    ),
)


class _PositiveNumber(click.FloatRange):
    """A number above 0; unlike click's own range, it rejects NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number above 0.", param, ctx)
        return number


positive_number = _PositiveNumber(0, min_open=True)
verify_options = together(
    click.option("--input", "npz", type=file_path, help="Verify with the inputs in this .npz file."),
    click.option(
        "--tolerance",
        type=positive_number,
        metavar="X",
        help="The largest error of an output, relative to its largest value.  "
        "[default: by its dtype, or more where the original's own noise is larger]",
    ),
    shape_option,
    click.option(
        "--timeout",
        type=positive_number,
        default=600,
        show_default=True,
        metavar="SECONDS",
        help="How long opening a model in onnxruntime, or one run of it, may take.",
    ),
)


def given_regions(regions: bool, epilogues: bool) -> Regions:
    """Return the argument `regions` of `optimize` for the values of --regions and --epilogues."""
    return "apart" if regions and not epilogues else regions


def options_by_name(options: tuple[str, ...]) -> dict[str, str]:
    """Parse texts of the form "name=value" into a dict.  Raises UsageError for other texts."""
    found: dict[str, str] = {}
    for option in options:
        name, equals, found[name] = option.partition("=")
        if not (name and equals):
            raise UsageError(f"--option '{option}' is not of the form NAME=VALUE; give it as in --option use_tf32=0")
        if name == "device_id":
            raise UsageError("give --device-id, not --option device_id")
    return found


def checked_target(source: Path, target: Path, overwrite: bool | None = None) -> Path:
    """Return the file to write.  Raises an error, before any work, if it is not writable or must not be overwritten.

    The target must not be a file that holds external data of `source`.

    overwrite  whether the target is allowed to be `source` itself; None for a command without that option
    """
    from onnxfuse.ir.read import external_files
    from onnxfuse.ir.save import check_target

    check_target(target)
    if target.exists() and any(target.samefile(data) for data in external_files(source)):
        raise UsageError(f"'{target}' holds weights of the model to read; give another name")
    if target.exists() and source.exists() and target.samefile(source) and not overwrite:
        hint = "" if overwrite is None else ", or --overwrite to replace it"
        raise UsageError(f"'{target}' is the model to read; give another name{hint}")
    return target


def given_inputs(npz: Path | None, model: Path) -> dict[str, Array] | None:
    """Read a model's inputs from the file of --input; None without a file.  Raises UsageError if they do not fit."""
    from onnxfuse.ir.load import load
    from onnxfuse.verify.inputs import load_inputs

    return load_inputs(npz, load(model)[0]) if npz else None


def use_kernels(folders: tuple[Path, ...], provider: Provider) -> None:
    """Make the kernels in these folders available to the sessions of a command.

    Raises an error, before any work, if these kernels, or kernels of an installed package, do not load.
    """
    from onnxfuse.runtime.kernel_folders import add_kernels, kernel_folders

    for folder in folders:
        add_kernels(folder)
    if provider == "cuda":
        kernel_folders()
