"""The command `onnxfuse verify`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxfuse.cli.options import EXIT_CODES, examples, file_path, given_inputs, verify_options
from onnxfuse.cli.terminal import console, json_option, print_json, show_text, shown_progress

if TYPE_CHECKING:
    from onnxfuse.verify.compare import Verification


@click.command(
    "verify",
    epilog=examples(
        "onnxfuse verify model.onnx fused.onnx",
        "onnxfuse verify model.onnx fused.onnx --input inputs.npz --tolerance 1e-3",
    ),
)
@click.argument("original", type=file_path)
@click.argument("optimized", type=file_path)
@verify_options
@json_option
def verify_command(
    original: Path,
    optimized: Path,
    npz: Path | None,
    tolerance: float | None,
    shapes: tuple[str, ...],
    timeout: float,
    as_json: bool,
) -> None:
    """Compare two models in onnxruntime.

    Exits with 0 if all outputs are equal, 1 if one differs, 3 if some could not be compared, 4 if none could.
    """
    from onnxfuse.ir.load import load
    from onnxfuse.printing import cell, columns
    from onnxfuse.report.lines import not_compared_lines
    from onnxfuse.report.similar import group
    from onnxfuse.verify.compare import compare
    from onnxfuse.verify.own_process import own_process

    for path in original, optimized:
        load(path)  # fails for an unreadable file, which `compare` would report as a difference
    inputs = given_inputs(npz, original)
    with own_process(timeout), shown_progress() as progress:
        result = compare(
            original, optimized, inputs=inputs, shapes=shapes, tolerance=tolerance,
            progress=lambda step: progress(step, 0, 0),
        )  # fmt: skip
    if as_json:
        print_json(result.to_json())
        sys.exit(EXIT_CODES[result.status])
    table = columns("output", "largest error", "relative", "tolerance")
    for one in result.outputs:
        errors = (f"{error:.3g}" if math.isfinite(error) else "-" for error in (one.max_abs, one.max_rel))
        table.add_row(cell(one.name), *errors, f"{one.tolerance:.3g}")
    if result.outputs:
        console().print(table)
    for same in group([one for one in result.outputs if one.set_by], lambda one: one.set_by):
        more = f" and {len(same.items) - 1} more" if len(same.items) > 1 else ""
        show_text(f"the tolerance of '{same.items[0].name}'{more} is {same.sentence}")
    for line in not_compared_lines(result.not_compared, everything=True):
        console().print(line)
    for note in result.notes:
        show_text(note)
    show_text(_verdict(result))
    sys.exit(EXIT_CODES[result.status])


def _verdict(result: Verification) -> str:
    """Return the last line: whether the outputs that were compared are equal, and if not, why."""
    verdicts = {"verified": "equal", "partly": "equal, as far as compared"}
    if result.status == "none":
        return "nothing was compared" + ("" if result.not_compared else f": {result.reason}")
    return verdicts.get(result.status, f"different: {result.reason}")
