"""Decide which outputs of an optimized model are wrong, by runs and noise of the original, and nearly equal scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.ir.extract import extract
from onnxfuse.verify.accepted import ENDS_COMPARISONS, Accepted
from onnxfuse.verify.difference import TOLERANCES, OutputDifference
from onnxfuse.verify.own_noise import measure_noise, unsteady_outputs
from onnxfuse.verify.quantizer_steps import source_quantizer
from onnxfuse.verify.reference import Reference
from onnxfuse.verify.ties import are_ties, source_of_indices

Results = Sequence[Mapping[str, object]]

# An output is allowed to differ by this many times the original's own noise.  Fused nodes round at other places than
# the original, just as onnxruntime's own optimizations do.  A few samples of noise seldom show its largest value.
NOISE_FACTOR: Final = 4.0
MAX_NOISE: Final = 0.5  # relative to the output's largest value; an output with more noise is not compared


def differences(reference: Reference, results: Results) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Return the differences of the outputs over all runs, and the outputs that cannot be compared, with reasons.

    Outputs that depend on random numbers are left out.
    """
    names = [name for name in reference.runs[0].outputs if name not in reference.random]
    return settled(reference, results, tuple(reference.worst_difference(results, name) for name in names))


def settled(
    reference: Reference, results: Results, errors: tuple[OutputDifference, ...]
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Return the result of `differences`, given `errors`, which were found with the tolerances of the dtypes.

    If an output exceeds its tolerance, measure the original's noise, and look for ties (nearly equal scores), which can
    excuse it.
    """
    hidden = {} if reference.tolerance is not None else too_coarse(reference.accepted)
    any_shape = {name for name, allowed in reference.accepted.tolerances.items() if math.isinf(allowed)}
    hidden = {n: why for each in errors if (why := hidden.get(n := each.name)) and (each.passed or n in any_shape)}
    if all(each.passed for each in errors):
        return errors, hidden
    if reference.tolerance is None and any(not each.passed and math.isfinite(each.max_rel) for each in errors):
        reference.tell("measure the noise of the original")
        errors, unsteady = _allow_noise(reference, errors)
        hidden |= unsteady
    errors = tuple(_allow_steps(reference, results, each) for each in errors)
    if reference.accepted.is_converted:
        exact = [each for each in errors if not (each.passed or each.tolerance) and each.name in results[0]]
        hidden |= {each.name: f"{each.reason}, and follows from half precision" for each in exact}
        errors = _excused(errors, hidden)
    if any(not each.passed and not each.tolerance for each in errors):
        hidden |= _find_ties(reference, results, errors)
        errors = _excused(errors, hidden)
    if any(not each.passed for each in errors):
        hidden |= unsteady_outputs(reference, results, errors)
    return _excused(errors, hidden), hidden


def too_coarse(accepted: Accepted) -> dict[str, str]:
    """Return the outputs whose accepted error is above MAX_NOISE, so that a comparison would prove nothing."""
    large = {name: each for name, each in accepted.tolerances.items() if each > MAX_NOISE}
    any_error = f"any error was allowed, because rounding weights to {accepted.precision} {ENDS_COMPARISONS}"
    told = {name: f"{accepted.set_by} is {each:.1e} of its largest value" for name, each in large.items()}
    return {name: any_error if math.isinf(large[name]) else text for name, text in told.items()}


def _excused(errors: Sequence[OutputDifference], hidden: Mapping[str, str]) -> tuple[OutputDifference, ...]:
    return tuple(replace(each, passed=True, reason="") if each.name in hidden else each for each in errors)


def _allow_noise(
    reference: Reference, errors: Sequence[OutputDifference]
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Return the differences with a tolerance that allows the original's own noise.

    Also returns, with reasons, the outputs whose noise is above MAX_NOISE: they are not compared.
    """
    doubtful = [e.name for e in errors if not e.passed and math.isfinite(e.max_rel)]
    noise = measure_noise(reference, doubtful)
    precision = reference.accepted.precision
    of_what = f"the noise of {precision}" if precision else f"the {reference.base}'s own noise"
    set_by = f"{NOISE_FACTOR:g} times {of_what}"
    judged: list[OutputDifference] = []
    unsteady: dict[str, str] = {}
    for error in errors:
        allowed = NOISE_FACTOR * noise.get(error.name, 0.0)
        if error.name not in noise or error.max_rel > max(allowed, error.tolerance):
            told = f", and {of_what} {allowed:.1e}" if allowed > error.tolerance else ""
            judged.append(replace(error, reason=error.reason + told if error.reason else ""))
        elif allowed > MAX_NOISE:
            moved = f"{noise[error.name]:.1e} of its largest value"
            unsteady[error.name] = f"{of_what} is {moved} there"
            judged.append(replace(error, passed=True, reason=""))
        else:
            judged.append(replace(error, passed=True, reason="", tolerance=allowed, set_by=set_by))
    return tuple(judged), unsteady


def _find_ties(reference: Reference, results: Results, errors: Sequence[OutputDifference]) -> dict[str, str]:
    """Return the outputs, each with a reason, whose values are indices that differ only where two scores nearly tie."""
    found: dict[str, str] = {}
    for error in errors:
        node = None if error.passed or error.tolerance else source_of_indices(reference.original, error.name)
        if node is None:
            continue
        scores = [each[node.input[0]] for each in _values(reference, node.input[:1])]
        half = reference.half_precision if node.input[0] in reference.half_tensors else ""
        old = [each.outputs[error.name] for each in reference.runs]
        if are_ties(node, scores, old, [result.get(error.name) for result in results], half):
            found[error.name] = f"its indices differ, but the scores there ('{node.input[0]}') are ties"
    return found


def _allow_steps(reference: Reference, results: Results, error: OutputDifference) -> OutputDifference:
    """Return the difference of integers, marked as passed if a quantizer merely rounds ties differently.

    That is so if each differing integer is off by one, and the number that the quantizer rounds to it is nearly a tie.
    """
    quantizer = None if error.passed or error.tolerance else source_quantizer(reference.original, error.name)
    if quantizer is None:
        return error
    half = reference.half_precision if quantizer.x in reference.half_tensors else ""
    pairs = zip(_values(reference, quantizer.inputs), reference.runs, results, strict=True)
    moved = max(
        quantizer.share_moved(values, run.outputs[error.name], result.get(error.name), TOLERANCES, half)
        for values, run, result in pairs
    )
    if not math.isfinite(moved):
        return error
    note = (
        f"{moved:.2%} of the integers of output '{error.name}' are one step of the quantizer off, "
        f"where the numbers that it rounds ('{quantizer.x}') are ties but for rounding"
    )
    return replace(error, passed=True, reason="", note=note, max_abs=1.0, max_rel=0.0)


def _values(reference: Reference, names: Sequence[str]) -> list[dict[str, object]]:
    """Return the values of tensors of the original in each run."""
    session = reference.open(extract(reference.original, list(names)))
    return [reference.run(session, each.feeds) for each in reference.runs]
