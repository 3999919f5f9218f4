"""Compare models as users run them: with onnxruntime's own graph optimizations, which are on by default.

These optimizations break some models and change the results of others.  If they affect the original, with or without
its unused nodes, that is reported as a note.  If they affect only the optimized model, that is a fault of that model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onnxfuse.errors import first_line
from onnxfuse.ir.extract import without_unused_nodes
from onnxfuse.verify.cpu_session import Prepared, open_session, run
from onnxfuse.verify.judge import differences
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.reference import Reference


def with_default_optimizations(reference: Reference, optimized: Prepared) -> tuple[str, tuple[str, ...]]:
    """Compare both models with the optimizations; return the optimized model's fault or "", and notes on the original.

    The models run on the inputs of the first run.  Nothing is compared if the original was not run with the
    optimizations, or if the models ran only in float32, because onnxruntime's CPU provider lacks bfloat16 kernels.
    """
    if reference.in_float32 or not reference.optimized:
        return "", ()
    first = replace(reference, runs=reference.runs[:1], edges=())
    changed = _changed(first)
    if isinstance(changed, str):
        return "", (f"onnxruntime's graph optimizations break the original: {changed}",)
    notes = tuple(_sentences(changed, "the original"))
    reference.tell("run the optimized model with onnxruntime's optimizations")
    try:
        result = run(open_session(optimized), first.runs[0].feeds)
    except OnnxruntimeFailure as error:
        return f"onnxruntime's graph optimizations break the optimized model, not the original: {first_line(error)}", ()
    errors, _ = differences(first, [result])
    wrong = [each for each in errors if not each.passed and each.name not in changed]
    if wrong:
        also = {name: how for name, how in _changed_if_unused_nodes_go(first).items() if name not in changed}
        notes += tuple(_sentences(also, "the original without the nodes that nothing reads"))
        wrong = [each for each in wrong if each.name not in also]
    return f"with onnxruntime's graph optimizations {wrong[0].reason}" if wrong else "", notes


def _changed(first: Reference) -> dict[str, str] | str:
    """Return how outputs of the original change under the optimizations, or onnxruntime's error."""
    if isinstance(first.optimized, str):
        return first.optimized
    errors, _ = differences(replace(first, by_optimizations=False), [first.optimized])
    return {each.name: each.reason for each in errors if not each.passed}


def _changed_if_unused_nodes_go(first: Reference) -> dict[str, str]:
    """Remove the original's unused nodes, and return how the optimizations then change each of its outputs.

    The result is empty if the original has no unused nodes, or does not run without them.
    """
    used = without_unused_nodes(first.original)
    if used.graph.node == first.original.graph.node:
        return {}
    first.tell("run the original without unused nodes with onnxruntime's optimizations")
    try:
        changed = _changed(replace(first, optimized=run(open_session(used, first.folder), first.runs[0].feeds)))
    except OnnxruntimeFailure:
        return {}
    return {} if isinstance(changed, str) else changed


def _sentences(changed: Mapping[str, str], model: str) -> Iterator[str]:
    for name, reason in changed.items():
        how = reason.removeprefix(f"output '{name}' ")
        yield f"onnxruntime's graph optimizations change output '{name}' of {model}: it {how}"
