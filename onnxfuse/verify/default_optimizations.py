"""Compare models as users run them: with onnxruntime's own graph optimizations, which are on by default.

These break some models and change what others compute.  What they do to the original is told; what they do to the
optimized model alone is a fault of the optimized model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnxfuse.errors import first_line
from onnxfuse.verify.cpu_session import Prepared, open_session, run
from onnxfuse.verify.judge import differences
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.reference import Reference


def with_default_optimizations(reference: Reference, optimized: Prepared) -> tuple[str, tuple[str, ...]]:
    """Return what is wrong with the optimized model in the first run, "" for nothing, and sentences on the original.

    Nothing is compared where both models do not run as they are, because onnxruntime's CPU provider lacks bfloat16.
    """
    if reference.in_float32:
        return "", ()
    first = replace(reference, runs=reference.runs[:1], edges=(), noise={})
    changed = _changed(first)
    notes = tuple(_sentences(changed))
    if isinstance(changed, str):
        return "", notes
    reference.tell("run the optimized model with onnxruntime's optimizations")
    try:
        result = run(open_session(optimized), first.runs[0].feeds)
    except OnnxruntimeFailure as error:
        return f"onnxruntime's graph optimizations break the optimized model, not the original: {first_line(error)}", ()
    errors, _ = differences(first, [result])
    wrong = next((each for each in errors if not each.passed and each.name not in changed), None)
    return f"with onnxruntime's graph optimizations {wrong.reason}" if wrong else "", notes


def _changed(first: Reference) -> dict[str, str] | str:
    """Return how outputs of the original change under the optimizations, or what onnxruntime raises then."""
    if isinstance(first.optimized, str):
        return first.optimized
    errors, _ = differences(replace(first, by_optimizations=False), [first.optimized])
    return {each.name: each.reason for each in errors if not each.passed}


def _sentences(changed: dict[str, str] | str) -> Iterator[str]:
    if isinstance(changed, str):
        yield f"onnxruntime's graph optimizations break the original: {changed}"
        return
    for name, reason in changed.items():
        how = reason.removeprefix(f"output '{name}' ")
        yield f"onnxruntime's graph optimizations change output '{name}' of the original: it {how}"
