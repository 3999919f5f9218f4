"""Original against optimized: the same inputs through plain onnxruntime on the CPU, and an error for every output."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.model import files
from onnxfuse.model.widen import from_half, half_of, widened, widened_arrays
from onnxfuse.verify.difference import OutputError, difference, worst
from onnxfuse.verify.draws import drawing
from onnxfuse.verify.inputs import check_inputs, generate, inputs_of, roles_of, sizes_to_try
from onnxfuse.verify.session import first_line, open_session, run

Array: TypeAlias = NDArray[Any]
Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto
Progress: TypeAlias = Callable[[str], None]

ROUNDS = 2
GIVE_INPUTS = "give inputs that the model accepts: --input x.npz"


@dataclass(frozen=True)
class Verification:
    """Whether the outputs agree (None: nothing could be compared), and the sizes of the dynamic dims, per round.

    `reason` says why not, and how half-precision models were compared where they could not be as usual.
    """

    passed: bool | None
    outputs: tuple[OutputError, ...]
    reason: str
    sizes: tuple[dict[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; an infinite error, which JSON cannot write, is None."""
        rows = [
            {key: _finite(getattr(o, key)) for key in ("name", "max_abs", "max_rel", "tolerance")} for o in self.outputs
        ]
        return {"passed": self.passed, "reason": self.reason, "outputs": rows}


@dataclass(frozen=True)
class _Round:
    """What the original makes of some inputs, as it is and (half precision only) evaluated in float32."""

    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, Any]
    exact: Mapping[str, Any]


@dataclass(frozen=True)
class _Expected:
    """Every round of the original; `widened`: `outputs` are of the model in float32, since it does not run as it is."""

    rounds: list[_Round]
    half: str
    from_half: set[str]
    widened: bool
    note: str

    def errors(self, results: Sequence[Mapping[str, Any]], name: str) -> OutputError:
        """The worst error of one output over the rounds."""
        pairs = zip(self.rounds, results, strict=True)
        if name not in self.from_half or not (self.widened or self.rounds[0].exact):
            return worst(difference(name, r.outputs[name], x.get(name)) for r, x in pairs)
        return worst(difference(name, r.outputs[name], x.get(name), r.exact.get(name), self.half) for r, x in pairs)


def compare(
    original: Source, optimized: Source, *, inputs: Mapping[str, Array] | None = None, folder: Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run both models at two sizes of every dynamic dim and compare their outputs.

    Half precision is judged by the original evaluated in float32 (see `difference.TOLERANCES`).  A bfloat16 model that
    the CPU provider cannot run is compared in float32.
    `inputs` replaces generated ones.  `folder` is where the external data of a ModelProto lies; for `optimized` it is
    by default the folder of `original`.  Raises UsageError for `inputs` that the model does not have, ModelError where
    `original` cannot be read.
    """
    say = progress or (lambda line: None)
    try:
        before, folder = _open(original, folder)
        expected = _run_original(before, folder, inputs or {}, say)
    except VerificationError as error:
        return Verification(None, (), str(error), ())
    sizes = tuple(r.sizes for r in expected.rounds)
    try:
        say("run the optimized model")
        after, after_folder = _open(optimized, folder)
        expected, results = _run_optimized(after, after_folder, expected)
    except Exception as error:  # whatever onnxruntime or the file system raises is the finding
        return Verification(False, (), f"the optimized model does not run: {first_line(error)}", sizes)
    errors = tuple(expected.errors(results, name) for name in expected.rounds[0].outputs)
    errors = _retyped(before, after, errors) if expected.widened else errors
    failed = next((e for e in errors if not e.passed), None)
    reason = "; ".join(text for text in (failed.reason if failed else "", expected.note) if text)
    return Verification(failed is None, errors, reason, sizes)


def first_difference(
    original: Source, optimized: Source, names: Sequence[str], *, inputs: Mapping[str, Array] | None = None,
    folder: Path | None = None,
) -> str | None:
    """The first of the intermediate tensors `names` (in execution order, of both models) that differs; None: none.

    Raises VerificationError where one of the models does not run.
    """
    before, folder = _open(original, folder)
    after, after_folder = _open(optimized, folder)
    both = {o for n in before.graph.node for o in n.output} & {o for n in after.graph.node for o in n.output}
    wanted = [name for name in names if name in both]
    expected = _run_original(_with_outputs(before, wanted), folder, inputs or {}, lambda line: None)
    try:
        expected, results = _run_optimized(_with_outputs(after, wanted), after_folder, expected)
    except Exception as error:
        raise VerificationError(f"the optimized model does not run: {first_line(error)}") from error
    return next((name for name in wanted if not expected.errors(results, name).passed), None)


def _open(source: Source, folder: Path | None) -> tuple[onnx.ModelProto, Path | None]:
    return (source, folder) if isinstance(source, onnx.ModelProto) else files.load(source)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {o.name for o in model.graph.output}
    result.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    return result


def _run_original(
    model: onnx.ModelProto, folder: Path | None, given: Mapping[str, Array], say: Progress
) -> _Expected:
    """The original's rounds as it is, and in float32 where it computes in half precision.

    Raises VerificationError where none runs.
    """
    check_inputs(given, inputs_of(model))
    half = half_of(model)
    try:
        rounds = _run_rounds(model, folder, given, say)
    except VerificationError as error:
        if half != "bfloat16":
            raise
        try:
            rounds = _run_rounds(model, folder, given, lambda line: say(f"{line}, in float32"), widen=True)
        except VerificationError:
            raise error from None
        return _Expected(rounds, half, from_half(model), True, f"compared in float32: {error}")
    result = _Expected(rounds, half, from_half(model) if half else set(), False, "")
    if not half:
        return result
    try:
        say("run the original in float32")
        session = open_session(widened(model), folder)
        exact = [replace(r, exact=run(session, widened_arrays(r.feeds))) for r in rounds]
    except Exception as error:
        note = f"compared with the original directly: it does not run in float32 ({first_line(error)})"
        return replace(result, note=note)
    return replace(result, rounds=exact)


def _run_rounds(
    model: onnx.ModelProto, folder: Path | None, given: Mapping[str, Array], say: Progress, widen: bool = False
) -> list[_Round]:
    """Inputs and outputs at the first plans that run: two of them where dims are dynamic.

    Raises VerificationError where none runs.
    """
    if drawn := drawing(model, given):
        raise VerificationError(drawn)
    inputs, roles = inputs_of(model), roles_of(model)
    session = _session_of_original(widened(model) if widen else model, folder)
    rounds: list[_Round] = []
    failures: list[str] = []
    for sizes in sizes_to_try(inputs, given):
        if len(rounds) == ROUNDS:
            break
        say("run the original" + "".join(f", {k}={v}" for k, v in sizes.items()))
        try:
            feeds = generate(inputs, sizes, roles, given)
            rounds.append(_Round(sizes, feeds, run(session, widened_arrays(feeds) if widen else feeds), {}))
        except Exception as error:
            failures.append(first_line(error))
    if not rounds:
        which = "the given" if given else "generated"
        raise VerificationError(f"the original does not run on {which} inputs ({failures[0]}); {GIVE_INPUTS}")
    return rounds


def _session_of_original(model: onnx.ModelProto, folder: Path | None) -> Any:
    try:
        return open_session(model, folder)
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(f"onnxruntime cannot run the original on the CPU: {first_line(error)}") from error


def _run_optimized(
    model: onnx.ModelProto, folder: Path | None, expected: _Expected
) -> tuple[_Expected, list[dict[str, Any]]]:
    """The optimized model's outputs for every round.

    Where only the original's bfloat16 nodes have CPU kernels, both models are compared in float32 after all.
    """
    try:
        return expected, _results(widened(model) if expected.widened else model, folder, expected)
    except Exception as error:
        if expected.half != "bfloat16" or expected.widened or not expected.rounds[0].exact:
            raise
        rounds = [replace(r, outputs=dict(r.exact), exact={}) for r in expected.rounds]
        note = f"compared in float32: onnxruntime cannot run the optimized model on the CPU: {first_line(error)}"
        expected = replace(expected, rounds=rounds, widened=True, note=note)
        return expected, _results(widened(model), folder, expected)


def _results(model: onnx.ModelProto, folder: Path | None, expected: _Expected) -> list[dict[str, Any]]:
    session = open_session(model, folder)
    return [run(session, widened_arrays(r.feeds) if expected.widened else r.feeds) for r in expected.rounds]


def _retyped(
    before: onnx.ModelProto, after: onnx.ModelProto, errors: tuple[OutputError, ...]
) -> tuple[OutputError, ...]:
    """The errors, with outputs whose declared dtype changed, which models in float32 do not show, as failures."""
    old, new = ({o.name: o.type.tensor_type.elem_type for o in m.graph.output} for m in (before, after))
    name_of = onnx.TensorProto.DataType.Name
    changed = {n: f"output '{n}' is {name_of(new[n])}; the original has {name_of(t)}" for n, t in old.items()
               if new.get(n, t) != t}  # fmt: skip
    return tuple(replace(e, passed=False, reason=changed[e.name]) if e.name in changed else e for e in errors)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
