"""Compare two models: run both on the same inputs in plain onnxruntime on the CPU, and measure every output's error."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.extract import extract
from onnxfuse.ir.load import load
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import OutputDifference, compare_output
from onnxfuse.verify.noise import ROUNDINGS, move_by_one_ulp, move_by_rounding
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.own_process import TimeLimitExceeded
from onnxfuse.verify.reference import Progress, Reference, run_original
from onnxfuse.verify.ties import are_ties, source_of_indices
from onnxfuse.verify.widen import arrays_to_float32, model_to_float32

Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto

NO_OUTPUTS = "the model has no outputs"
# An output may differ by this many times the original's own noise.  Fused nodes round elsewhere than onnxruntime's own
# optimizations do, so they may move an output as far, and one sample of noise is seldom the largest.
NOISE_FACTOR = 4.0
MAX_NOISE = 0.5  # of an output's largest value: where so much is allowed, nothing is compared


@dataclass(frozen=True)
class Verification:
    """Whether what was compared agrees (`passed` is None if nothing was), and at which sizes of the dynamic dims.

    `reason` says what differs or why nothing was compared, and how half precision was compared if not as usual.
    `outputs` were compared; `not_compared` names the other outputs, and fused nodes, that were not.  `equal_parts` is
    how many fused nodes compute what the nodes do that they replaced; 0 where whole models were compared.
    """

    passed: bool | None
    outputs: tuple[OutputDifference, ...]
    reason: str
    sizes: tuple[dict[str, int], ...]
    not_compared: tuple[NotCompared, ...] = ()
    equal_parts: int = 0

    @property
    def status(self) -> Literal["verified", "partly", "none", "failed"]:
        """Return "verified" where all was compared and agrees, "partly" where that is true of a part of it."""
        if self.passed is None:
            return "none"
        if not self.passed:
            return "failed"
        return "partly" if self.not_compared else "verified"

    def with_parts(self, equal: int, not_compared: Sequence[NotCompared]) -> Verification:
        """Return the verification together with that of fused nodes, of which `equal` ones were found equal."""
        missing = (*self.not_compared, *not_compared)
        passed = True if self.passed is None and equal else self.passed
        return replace(self, passed=passed, not_compared=missing, equal_parts=equal)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite error, which JSON cannot write, is None."""
        rows = [
            {key: _finite(getattr(o, key)) for key in ("name", "max_abs", "max_rel", "tolerance")} for o in self.outputs
        ]
        missing = [{"name": each.name, "reason": each.reason} for each in self.not_compared]
        return {"status": self.status, "passed": self.passed, "reason": self.reason, "outputs": rows,
                "equal_parts": self.equal_parts, "not_compared": missing}  # fmt: skip


NOT_VERIFIED: Final = Verification(None, (), "switched off; `onnxfuse verify A B` compares two models", ())


def compare(
    original: Source,
    optimized: Source,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress | None = None,
    reference: Reference | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Run both models at two sizes of every dynamic dim and compare their outputs.

    The tolerance of an output is that of its dtype, or NOISE_FACTOR times the original's own noise; `tolerance`
    replaces both.  Half precision is judged by the original evaluated in float32 (see `difference.TOLERANCES`).  A
    bfloat16 model that the CPU provider cannot run is compared in float32.
    `inputs` replaces generated ones, and `shapes` sets the sizes of others, as "input:8x512".  `folder` is where the
    external data of a ModelProto lies; for `optimized` it is by default the folder of `original`.  `progress` is called
    with one line before each step.  `reference` holds the runs of the original, where these were made before.
    Raises UsageError for inputs or shapes that the model does not take, ModelError if `original` cannot be read.
    """
    tell = progress or (lambda line: None)
    before, folder = _open(original, folder)
    try:
        reference = reference or run_original(before, folder, inputs or {}, tell, shapes)
    except VerificationError as error:
        return nothing_compared(before, error)
    reference = replace(reference, tolerance=tolerance)
    sizes = reference.sizes
    try:
        tell("run the optimized model")
        after, after_folder = _open(optimized, folder)
        reference, results = _run_optimized(after, after_folder, reference)
    except TimeLimitExceeded as error:
        return Verification(None, (), str(error), sizes)
    except Exception as error:  # whatever onnxruntime or the file system raises is the finding
        return Verification(False, (), f"the optimized model does not run: {first_line(error)}", sizes)
    return _verdict(*_differences(before, after, folder, reference, results, tell))


def _differences(
    original: onnx.ModelProto,
    optimized: onnx.ModelProto,
    folder: Path | None,
    reference: Reference,
    results: Sequence[Mapping[str, object]],
    tell: Progress,
) -> tuple[tuple[OutputDifference, ...], Reference]:
    """Return the differences of the outputs, and the reference with those outputs that turned out to show nothing.

    The original's noise is measured, and ties are looked for, only where an output differs by more than its tolerance.
    """
    names = [name for name in reference.runs[0].outputs if name not in reference.random]
    errors = tuple(reference.worst_difference(results, name) for name in names)
    if reference.tolerance is None and any(not e.passed and math.isfinite(e.max_rel) for e in errors):
        tell("measure the noise of the original")
        errors, unsteady = _allow_noise(original, folder, reference, errors)
        reference = replace(reference, not_compared={**reference.not_compared, **unsteady})
    if any(not e.passed and not e.tolerance for e in errors):
        ties = _find_ties(original, folder, reference, results, errors)
        errors = tuple(replace(e, passed=True, reason="") if e.name in ties else e for e in errors)
        reference = replace(reference, not_compared={**reference.not_compared, **ties})
    return _fail_changed_dtypes(original, optimized, errors) if reference.in_float32 else errors, reference


def _verdict(errors: Sequence[OutputDifference], reference: Reference) -> Verification:
    """Return what the differences of the outputs say of the optimized model."""
    sizes = reference.sizes
    failed = next((e for e in errors if not e.passed), None)
    reason = "; ".join(text for text in (failed.reason if failed else "", reference.note) if text)
    hidden = tuple(NotCompared(name, why) for name, why in reference.not_compared.items())
    seen = tuple(e for e in errors if not e.passed or e.name not in reference.not_compared)
    if failed is None and not seen:
        reason = "; ".join(f"output '{each.name}' is not compared: {each.reason}" for each in hidden) or NO_OUTPUTS
        return Verification(None, (), reason, sizes, hidden)
    return Verification(failed is None, seen, reason, sizes, hidden)


def nothing_compared(original: onnx.ModelProto, error: VerificationError) -> Verification:
    """Return the verification of a model whose outputs could not be computed, and why."""
    outputs = tuple(NotCompared(output.name, str(error)) for output in original.graph.output)
    return Verification(None, (), str(error), (), outputs)


def _allow_noise(
    model: onnx.ModelProto, folder: Path | None, reference: Reference, errors: Sequence[OutputDifference]
) -> tuple[tuple[OutputDifference, ...], dict[str, str]]:
    """Judge outputs that differ again, by a tolerance that the original's own noise sets.

    Also returns why outputs are not compared: what moves by more than MAX_NOISE of itself shows nothing.
    """
    doubtful = [e.name for e in errors if not e.passed and math.isfinite(e.max_rel)]
    noise = measure_noise(model, folder, reference, doubtful)
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
    results: Sequence[Mapping[str, object]],
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


def measure_noise(
    model: onnx.ModelProto, folder: Path | None, reference: Reference, names: Sequence[str]
) -> dict[str, float]:
    """Return how far outputs of the original move, relative to their largest value.

    Two causes are measured: inputs that move by one unit in the last place, and onnxruntime without its own graph
    optimizations.  Where a model was converted to half precision, its float32 inputs move by one rounding to that too.
    An output whose NaN or infinite values move shows nothing of its noise.
    """
    if reference.in_float32:
        model = model_to_float32(model)
    found = dict.fromkeys(names, 0.0)
    rounded = [name for name in names if reference.is_converted and name in reference.half_tensors]
    half = reference.half_precision if rounded else ""
    causes: list[tuple[bool, Callable[[str, Array], Array], Sequence[str]]] = [
        (True, move_by_one_ulp, names), (False, lambda _, value: value, names),
        *([(True, functools.partial(_move_by_half_rounding, half), rounded)] if half else []),
    ]  # fmt: skip
    for optimize, move, affected in causes:
        session = open_session(model, folder, optimize=optimize)
        for each in reference.runs:
            feeds = {n: move(n, v) for n, v in each.feeds.items()}
            outputs = run(session, arrays_to_float32(feeds) if reference.in_float32 else feeds)
            for name in affected:
                other = compare_output(name, each.outputs[name], outputs.get(name)).max_rel
                found[name] = max(found[name], other if math.isfinite(other) else 0.0)
        del session  # one model is open at a time
    return found


def _move_by_half_rounding(half: str, name: str, value: Array) -> Array:
    is_cast = value.dtype == np.float32
    return move_by_rounding(name, value, ROUNDINGS[half]) if is_cast else move_by_one_ulp(name, value)


def first_difference(
    original: Source,
    optimized: Source,
    names: Sequence[str],
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    folder: Path | None = None,
) -> str | None:
    """Return the first of the tensors `names` (in execution order) that both models compute and that differs, or None.

    Raises VerificationError if one of the models does not run.
    """
    before, folder = _open(original, folder)
    after, after_folder = _open(optimized, folder)
    both = {o for n in before.graph.node for o in n.output} & {o for n in after.graph.node for o in n.output}
    wanted = [name for name in names if name in both]
    reference = run_original(_with_outputs(before, wanted), folder, inputs or {}, lambda line: None, shapes)
    try:
        reference, results = _run_optimized(_with_outputs(after, wanted), after_folder, reference)
    except Exception as error:
        raise VerificationError(f"the optimized model does not run: {first_line(error)}") from error
    wanted = [name for name in wanted if name not in reference.random]
    return next((name for name in wanted if not reference.worst_difference(results, name).passed), None)


def _open(source: Source, folder: Path | None) -> tuple[onnx.ModelProto, Path | None]:
    return (source, folder) if isinstance(source, onnx.ModelProto) else load(source)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {o.name for o in model.graph.output}
    result.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    return result


def _run_optimized(
    model: onnx.ModelProto, folder: Path | None, reference: Reference
) -> tuple[Reference, list[dict[str, object]]]:
    """Return the optimized model's outputs for every run, and the reference that they compare with.

    If only the original's bfloat16 nodes have CPU kernels, both models are compared in float32 after all.
    """
    try:
        return reference, _outputs_of(model_to_float32(model) if reference.in_float32 else model, folder, reference)
    except Exception as error:
        if reference.half_precision != "bfloat16" or reference.in_float32 or not reference.runs[0].float32_outputs:
            raise
        runs = [replace(r, outputs=dict(r.float32_outputs), float32_outputs={}) for r in reference.runs]
        note = f"compared in float32: onnxruntime cannot run the optimized model on the CPU: {first_line(error)}"
        reference = replace(reference, runs=runs, in_float32=True, note=note)
        return reference, _outputs_of(model_to_float32(model), folder, reference)


def _outputs_of(model: onnx.ModelProto, folder: Path | None, reference: Reference) -> list[dict[str, object]]:
    session = open_session(model, folder)
    return [run(session, arrays_to_float32(r.feeds) if reference.in_float32 else r.feeds) for r in reference.runs]


def _fail_changed_dtypes(
    before: onnx.ModelProto, after: onnx.ModelProto, errors: tuple[OutputDifference, ...]
) -> tuple[OutputDifference, ...]:
    """Mark outputs whose declared dtype changed as failed; models converted to float32 do not show such a change."""
    old, new = ({o.name: o.type.tensor_type.elem_type for o in m.graph.output} for m in (before, after))
    name_of = onnx.TensorProto.DataType.Name
    changed = {n: f"output '{n}' is {name_of(new[n])}; the original has {name_of(t)}" for n, t in old.items()
               if new.get(n, t) != t}  # fmt: skip
    return tuple(replace(e, passed=False, reason=changed[e.name]) if e.name in changed else e for e in errors)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
