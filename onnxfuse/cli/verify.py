"""The command `onnxfuse verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from onnxfuse.cli.options import EXIT_CODES, examples, file_path, given_inputs, verify_options
from onnxfuse.cli.terminal import console, json_option, print_json, shown_progress


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
    from onnxfuse.printing import cell, columns, escape
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
        table.add_row(cell(one.name), f"{one.max_abs:.3g}", f"{one.max_rel:.3g}", f"{one.tolerance:.3g}")
    if result.outputs:
        console().print(table)
    for one in filter(lambda one: one.set_by, result.outputs):
        console().print(f"the tolerance of '{escape(one.name)}' is {one.set_by}", soft_wrap=True)
    for each in result.not_compared:
        console().print(f"output '{escape(each.name)}' is not compared: {escape(each.reason)}", soft_wrap=True)
    for note in result.notes:
        console().print(escape(note), soft_wrap=True)
    console().print("equal" if result.passed else escape(result.reason), soft_wrap=True)
    sys.exit(EXIT_CODES[result.status])
