"""Judge the outputs of an optimized model by runs of the original: by their dtypes, the original's noise, and ties."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from onnxfuse.ir.extract import extract
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import OutputDifference
from onnxfuse.verify.own_noise import measure_noise, unsteady_outputs
from onnxfuse.verify.reference import Progress, Reference
from onnxfuse.verify.ties import are_ties, source_of_indices
from onnxfuse.verify.widen import arrays_to_float32, model_to_float32

Results = Sequence[Mapping[str, object]]

# An output may differ by this many times the original's own noise.  Fused nodes round elsewhere than onnxruntime's own
# optimizations do, so they may move an output as far, and one sample of noise is seldom the largest.
NOISE_FACTOR: Final = 4.0
MAX_NOISE: Final = 0.5  # of an output's largest value: where so much is allowed, nothing is compared


def differences(
    original: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    results: Results,
    tell: Progress,
    *,
    by_optimizations: bool = True,
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Return the differences of the outputs in all runs, and why some of the outputs turned out to show nothing.

    The original's noise is measured, and ties are looked for, only where an output differs by more than its tolerance.
    `by_optimizations` says whether what onnxruntime's graph optimizations change counts as noise.
    Outputs that depend on random numbers are left out.
    """
    names = [name for name in reference.runs[0].outputs if name not in reference.random]
    errors = tuple(reference.worst_difference(results, name) for name in names)
    hidden: dict[str, str] = {}
    if all(each.passed for each in errors):
        return errors, hidden
    if reference.tolerance is None and any(not each.passed and math.isfinite(each.max_rel) for each in errors):
        tell("measure the noise of the original")
        errors, hidden = _allow_noise(original, folder, reference, errors, by_optimizations)
    if any(not each.passed and not each.tolerance for each in errors):
        hidden |= _find_ties(original, folder, reference, results, errors)
        errors = _excused(errors, hidden)
    if any(not each.passed for each in errors):
        hidden |= unsteady_outputs(original, folder, reference, results, errors, by_optimizations=by_optimizations)
    return _excused(errors, hidden), hidden


def _excused(errors: Sequence[OutputDifference], hidden: Mapping[str, str]) -> tuple[OutputDifference, ...]:
    return tuple(replace(each, passed=True, reason="") if each.name in hidden else each for each in errors)


def _allow_noise(
    model: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    errors: Sequence[OutputDifference],
    by_optimizations: bool,
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Judge outputs that differ again, by a tolerance that the original's own noise sets.

    Also returns why outputs are not compared: what moves by more than MAX_NOISE of itself shows nothing.
    """
    doubtful = [e.name for e in errors if not e.passed and math.isfinite(e.max_rel)]
    noise = measure_noise(model, folder, reference, doubtful, by_optimizations=by_optimizations)
    judged: list[OutputDifference] = []
    unsteady: dict[str, str] = {}
    for error in errors:
        allowed = NOISE_FACTOR * noise.get(error.name, 0.0)
        if error.name not in noise or error.max_rel > max(allowed, error.tolerance):
            told = f", and the original's own noise {allowed:.1e}" if allowed > error.tolerance else ""
            judged.append(replace(error, reason=error.reason + told if error.reason else ""))
        elif allowed > MAX_NOISE:
            moved = f"{noise[error.name]:.1e} of its largest value"
            unsteady[error.name] = f"the original's own runs differ by {moved} there"
            judged.append(replace(error, passed=True, reason=""))
        else:
            judged.append(replace(error, passed=True, reason="", tolerance=allowed))
    return tuple(judged), unsteady


def _find_ties(
    model: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    results: Results,
    errors: Sequence[OutputDifference],
) -> dict[str, str]:
    """Return the outputs whose indices differ only between scores that are equal but for rounding, each with why."""
    found: dict[str, str] = {}
    for error in errors:
        node = None if error.passed or error.tolerance else source_of_indices(model, error.name)
        if node is None:
            continue
        part = extract(model, [node.input[0]])
        session = open_session(model_to_float32(part) if reference.in_float32 else part, folder, optimize=False)
        feeds = [arrays_to_float32(each.feeds) if reference.in_float32 else each.feeds for each in reference.runs]
        scores = [run(session, each)[node.input[0]] for each in feeds]
        half = reference.half_precision if node.input[0] in reference.half_tensors else ""
        old = [each.outputs[error.name] for each in reference.runs]
        if are_ties(node, scores, old, [result.get(error.name) for result in results], half):
            found[error.name] = f"its indices differ, but the scores there ('{node.input[0]}') are ties"
    return found
