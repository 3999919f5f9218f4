"""Compare two models: run both on the same inputs in plain onnxruntime on the CPU, and measure every output's error."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx

from onnxfuse.algebra.sizes import evaluate
from onnxfuse.errors import ModelError, VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import load
from onnxfuse.printing import finite
from onnxfuse.verify.accepted import NOTHING_ACCEPTED, Accepted, accepted_of, with_dtypes
from onnxfuse.verify.cpu_session import Prepared, open_session, prepare
from onnxfuse.verify.default_optimizations import with_default_optimizations
from onnxfuse.verify.difference import OutputDifference
from onnxfuse.verify.extent import FULL, Extent, Level
from onnxfuse.verify.inputs import input_dtypes
from onnxfuse.verify.judge import differences
from onnxfuse.verify.observed import NotCompared
from onnxfuse.verify.own_process import OnnxruntimeFailure, TimeLimitExceeded
from onnxfuse.verify.reference import Progress, Reference, Run, run_original
from onnxfuse.verify.required_sizes import inferred_shapes
from onnxfuse.verify.widen import half_precision_of, model_to_float32

Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto
Result: TypeAlias = dict[str, object] | str  # the outputs of a run, or onnxruntime's error

NO_OUTPUTS = "the model has no outputs"
# Operators written by `--emit standard` and `--fallback ort` whose CPU kernels refuse empty tensors.
WITHOUT_EMPTY_TENSORS: Final = {"Attention", "GroupQueryAttention", "MultiHeadAttention"}
DOES_NOT_RUN: Final = "the optimized model does not run"


@dataclass(frozen=True)
class Verification:
    """The result of a comparison: whether values agree (`passed`; None if none were compared), and the dim sizes used.

    `reason` says what differs or why nothing was compared.  If half precision was compared in an unusual way, because
    a model does not run, `reason` says how.  `outputs` has the errors of the compared outputs; `not_compared` names
    outputs and fused nodes left out.  `equal_parts` counts the fused nodes that equal the nodes that they replaced; it
    is 0 where whole models were compared.  `notes` are sentences about the effect of onnxruntime's own graph
    optimizations on the original, about integers that are one step of a quantizer off, and about runs that a quick
    verification left out.
    """

    passed: bool | None
    outputs: tuple[OutputDifference, ...]
    reason: str
    sizes: tuple[dict[str, int], ...]
    not_compared: tuple[NotCompared, ...] = ()
    equal_parts: int = 0
    notes: tuple[str, ...] = ()
    level: Level = "full"

    @property
    def status(self) -> Literal["verified", "partly", "none", "failed"]:
        """Return "verified" if everything was compared and agrees, "partly" if only a part of it was compared.

        Returns "none" if nothing was compared, and "failed" if something differs.
        """
        if self.passed is None:
            return "none"
        if not self.passed:
            return "failed"
        return "partly" if self.not_compared else "verified"

    def with_parts(self, equal: int, not_compared: Sequence[NotCompared]) -> Verification:
        """Return this verification with the comparison of fused nodes added; `equal` is how many passed."""
        missing = (*self.not_compared, *not_compared)
        passed = True if self.passed is None and equal else self.passed
        return replace(self, passed=passed, not_compared=missing, equal_parts=equal)

    def within(self, extent: Extent) -> Verification:
        """Return this verification with the level of its runs, and a sentence about those that were left out."""
        return replace(self, level=extent.level, notes=(*self.notes, *extent.notes))

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values; an infinite error, which JSON cannot write, becomes None."""
        rows = [
            {key: finite(getattr(o, key)) for key in ("name", "max_abs", "max_rel", "tolerance", "set_by", "base")}
            for o in self.outputs
        ]
        missing = [{"name": each.name, "reason": each.reason} for each in self.not_compared]
        return {"level": self.level, "status": self.status, "passed": self.passed, "reason": self.reason,
                "outputs": rows, "equal_parts": self.equal_parts, "not_compared": missing,
                "notes": list(self.notes)}  # fmt: skip


NOT_VERIFIED: Final = Verification(None, (), "switched off; `onnxfuse verify A B` compares two models", (), level="off")


def compare(
    original: Source,
    optimized: Source,
    *,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress = lambda line: None,
    tolerance: float | None = None,
    extent: Extent = FULL,
) -> Verification:
    """Run both models at two sizes of every dynamic dim, and at sizes 0 and 1, and compare their outputs.

    `extent` can leave out some of these runs.

    These runs do not use onnxruntime's graph optimizations, which change the results of some models.  One more run uses
    them: if the original runs with them, the optimized model must run too, and compute the same.  The tolerance of an
    output depends on its dtype, or is `judge.NOISE_FACTOR` times the original's own noise; `tolerance` replaces both.
    A half-precision output is compared with the original evaluated in float32 (see `difference.TOLERANCES`).  A
    bfloat16 model that the CPU provider cannot run is compared in float32.  `inputs` are used in place of generated
    inputs, and `shapes` sets the sizes of generated ones, as "input:8x512".  `folder` contains the external data of a
    ModelProto; the default for `optimized` is the folder of `original`.  Differences that `optimize` accepted, as after
    a conversion to half precision, are listed in the metadata of `optimized`, and are allowed.  `progress` is called
    with one line before each step.  Raises UsageError for inputs or shapes that the model does not take, and ModelError
    if `original` cannot be read.
    """
    before, folder = _open(original, folder)
    accepted = _accepted(before, optimized)
    try:
        runs = replace(extent, extremes=extent.extremes and not accepted.is_converted)
        reference = run_original(before, folder, inputs or {}, progress, shapes, extent=runs)
    except VerificationError as error:
        return nothing_compared(before, error).within(extent)
    reference = replace(reference, tolerance=tolerance, accepted=accepted, numbers_for_nan=accepted.numbers_for_nan)
    return compare_with(reference, optimized).within(extent)


def _accepted(original: onnx.ModelProto, optimized: Source) -> Accepted:
    try:
        return accepted_of(_open(optimized, None)[0], original)
    except ModelError:  # the comparison opens the model again, and reports the error
        return NOTHING_ACCEPTED


def compare_with(reference: Reference, optimized: Source) -> Verification:
    """Compare an optimized model with runs of the original, as `compare` does."""
    try:
        return _compare(reference, optimized)
    except TimeLimitExceeded as error:
        return Verification(None, (), str(error), reference.sizes)


def _compare(reference: Reference, optimized: Source) -> Verification:
    """Compare an optimized model with runs of the original.  Raises TimeLimitExceeded."""
    try:
        reference.tell("run the optimized model")
        after = prepare(*_open(optimized, reference.folder))
        if text := _other_inputs(reference, after.model):
            return Verification(False, (), text, reference.sizes)
        reference, results, at_edges = _run_optimized(after, reference)
    except TimeLimitExceeded:
        raise
    except Exception as error:  # any exception of onnxruntime or the file system is reported as the result
        return Verification(False, (), f"{DOES_NOT_RUN}: {first_line(error)}", reference.sizes)
    errors, hidden = differences(reference, results)
    errors = _fail_changed_dtypes(reference.original, after.model, errors) if reference.in_float32 else errors
    found = _verdict(errors, replace(reference, not_compared={**reference.not_compared, **hidden}))
    if found.passed is not False:
        fault = _fault_at_edges(reference, at_edges)
        found = replace(found, passed=False, reason=fault) if fault else found
    if found.passed is False:
        return found
    refused = next((each for each in at_edges if isinstance(each, str) and _refuses_empty_tensors(each)), None)
    empty = () if refused is None else (f"nothing was compared at sizes of 0: {refused}",)
    fault, notes = with_default_optimizations(reference, after)
    notes = (*found.notes, *notes, *empty, *reference.cut)
    return replace(found, passed=False if fault else found.passed, reason=fault or found.reason, notes=notes)


def _other_inputs(reference: Reference, optimized: onnx.ModelProto) -> str:
    """Return a sentence about inputs that only the optimized model has; "" if there are none."""
    known = reference.runs[0].feeds
    if not (others := [name for name in input_dtypes(optimized) if name not in known]):
        return ""
    have, lacking = (", ".join(f"'{name}'" for name in names) or "none" for names in (known, others))
    return f"the optimized model has inputs that the original lacks: {lacking}; those of the original are: {have}"


def _fault_at_edges(reference: Reference, results: Sequence[Result]) -> str:
    """Return how the outputs differ in those runs at sizes 0 and 1 in which the original runs; "" if they agree."""
    edges = reference.at_edges
    for each, result in zip(edges.runs, results, strict=True):
        at = ", ".join(f"{name}={size}" for name, size in each.sizes.items())
        if isinstance(result, str):
            if 0 in each.sizes.values() and _refuses_empty_tensors(result):
                continue
            return f"{DOES_NOT_RUN} at {at}, where the original does: {result}"
        errors, _ = differences(replace(edges, runs=[each]), [result])
        failed = [error for error in errors if not error.passed]
        reasons = [error.reason for error in failed if not _is_misshapen(reference, each, error.name)]
        if reasons:
            return f"at {at} {reasons[0]}"
    return ""


def _is_misshapen(reference: Reference, each: Run, name: str) -> bool:
    """Return whether an empty output of the original has another shape than the original's own sizes give.

    A Reshape copies an axis of its input where its target has a size of 0.  TensorFlow's Tensordot reads the sizes of
    batch and rows for such a target; where both are 0, its result has as many rows as columns.
    """
    shapes, output = inferred_shapes(reference.original, reference.folder), each.outputs[name]
    tensor = None if shapes is None else shapes.graph.linked.tensors().get(name)
    shape = None if shapes is None or tensor is None else shapes.shape(tensor)
    if shape is None or not isinstance(output, np.ndarray) or output.size or output.ndim != len(shape):
        return False
    try:
        return list(output.shape) != [evaluate(size, each.sizes) for size in shape]
    except KeyError:  # a size that no input has
        return False


def _refuses_empty_tensors(message: str) -> bool:
    """Return whether an error comes from a CPU kernel that refuses empty tensors, although ONNX allows them."""
    found = re.search(r"while running (\w+) node", message)
    return found is not None and found[1] in WITHOUT_EMPTY_TENSORS


def _verdict(errors: Sequence[OutputDifference], reference: Reference) -> Verification:
    """Return the result of the comparison: the optimized model passes if no output in `errors` failed."""
    sizes = reference.sizes
    failed = next((e for e in errors if not e.passed), None)
    reason = "; ".join(text for text in (failed.reason if failed else "", reference.note) if text)
    different = {e.name for e in errors if not e.passed}
    hidden = tuple(NotCompared(name, why) for name, why in reference.not_compared.items() if name not in different)
    compared = (e for e in errors if not e.passed or e.name not in reference.not_compared)
    seen = tuple(replace(e, base=reference.base) for e in compared)
    if failed is None and not seen:
        reason = "; ".join(f"output '{each.name}' is not compared: {each.reason}" for each in hidden) or NO_OUTPUTS
        return Verification(None, (), reason, sizes, hidden)
    notes = tuple(each.note for each in seen if each.note)
    return Verification(failed is None, seen, reason, sizes, hidden, notes=notes)


def nothing_compared(original: onnx.ModelProto, error: VerificationError) -> Verification:
    """Return the verification of a model whose outputs could not be computed; `error` says why."""
    outputs = tuple(NotCompared(output.name, str(error)) for output in original.graph.output)
    return Verification(None, (), str(error), (), outputs)


def _open(source: Source, folder: Path | None) -> tuple[onnx.ModelProto, Path | None]:
    return (source, folder) if isinstance(source, onnx.ModelProto) else load(source)


def _run_optimized(model: Prepared, reference: Reference) -> tuple[Reference, list[dict[str, object]], list[Result]]:
    """Return the reference to compare with, and the optimized model's outputs in the usual runs and the edge runs.

    The edge runs are those at sizes 0 and 1; see `_outputs_of`.  If the CPU provider has kernels for the original's
    bfloat16 nodes, but not for the optimized model's, both models are compared in float32.
    """
    try:
        return reference, *_outputs_of(_in_float32(model) if reference.in_float32 else model, reference)
    except Exception as error:
        if reference.accepted.is_converted and half_precision_of(model.model) == "bfloat16":
            return reference, *_outputs_of(_in_float32(model), reference)
        if reference.half_precision != "bfloat16" or reference.in_float32 or not reference.runs[0].float32_outputs:
            raise
        note = f"compared in float32: onnxruntime cannot run the optimized model on the CPU: {first_line(error)}"
        reference = reference.evaluated_in_float32(note)
        return reference, *_outputs_of(_in_float32(model), reference)


def _in_float32(model: Prepared) -> Prepared:
    return prepare(model_to_float32(model.model), model.folder)


def _outputs_of(model: Prepared, reference: Reference) -> tuple[list[dict[str, object]], list[Result]]:
    """Return the outputs of all usual runs, and for each run at sizes 0 and 1 its outputs or onnxruntime's error."""
    session = open_session(model, optimize=False)

    dtypes = input_dtypes(model.model) if reference.accepted.is_converted else {}

    def outputs(each: Run) -> dict[str, object]:
        found = reference.run(session, with_dtypes(each.feeds, dtypes))
        expected = {name: value.dtype for name, value in each.outputs.items() if isinstance(value, np.ndarray)}
        return with_dtypes(found, expected) if dtypes else found

    def at_edge(each: Run) -> Result:
        try:
            return outputs(each)
        except OnnxruntimeFailure as error:
            return first_line(error)

    return [outputs(each) for each in reference.runs], [at_edge(each) for each in reference.edges]


def _fail_changed_dtypes(
    before: onnx.ModelProto, after: onnx.ModelProto, errors: tuple[OutputDifference, ...]
) -> tuple[OutputDifference, ...]:
    """Mark each output whose declared dtype changed as failed: a comparison in float32 would not notice the change."""
    old, new = ({o.name: o.type.tensor_type.elem_type for o in m.graph.output} for m in (before, after))
    name_of = onnx.TensorProto.DataType.Name
    changed = {n: f"output '{n}' is {name_of(new[n])}; the original has {name_of(t)}" for n, t in old.items()
               if new.get(n, t) != t}  # fmt: skip
    return tuple(replace(e, passed=False, reason=changed[e.name]) if e.name in changed else e for e in errors)
