"""Measure the original's own noise: how much rounding and onnxruntime's graph optimizations change its outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from onnxfuse.ir.dtypes import DTYPE_NUMBERS, Array
from onnxfuse.verify.difference import TOLERANCES, OutputDifference, Standard, compare_output, type_and_shape
from onnxfuse.verify.noise import ROUNDINGS, Move, move_by_one_ulp, move_by_rounding, with_moved_weights
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.reference import Reference, Run
from onnxfuse.verify.required_sizes import inferred_shapes
from onnxfuse.verify.rounded_results import model_that_rounds

# Relative error that a value can have after some roundings in another order, such as those of a fused node.
SOME_ROUNDINGS: Final = 1e-6
STEADY_DRAWS: Final = 8  # number of runs with randomly perturbed inputs and weights
# An output is excused if the optimized model changes at most this many times as many of its integers as the original's
# own runs change.
INTEGERS_FACTOR: Final = 4.0


@dataclass(frozen=True)
class _Cause:
    """One source of noise: a variant of the original to run, a change of its inputs, or both."""

    name: str
    model: Callable[[], onnx.ModelProto]
    move: Move
    optimize: bool = False
    of_half_alone: bool = False  # whether only outputs that are computed in or from half precision count


def measure_noise(reference: Reference, names: Sequence[str]) -> dict[str, float]:
    """Return how far outputs of the original change, relative to their largest value.

    The causes are: inputs and weights that are perturbed by one unit in the last place; onnxruntime's graph
    optimizations, if `reference.by_optimizations`; inputs and weights that are perturbed by one rounding error of half
    precision, and results that are rounded to it, if the optimized model alone was converted to it; float32 inputs that
    are perturbed so, if the original was, too; and rounding each result to bfloat16, if a bfloat16 model runs in
    float32.  A run that changes where an output is NaN or infinite does not count for this output.
    """
    found = dict.fromkeys(names, 0.0)
    for cause in _causes(reference):
        if cause.optimize and not reference.by_optimizations:
            continue
        known = reference.noise.setdefault(cause.name, {})
        if missing := [each for each in reference.runs if id(each) not in known]:
            known |= _moved_by(cause, reference, missing)
        moved = [known[id(each)] for each in reference.runs]
        affected = [name for name in names if not cause.of_half_alone or name in reference.half_tensors]
        found |= {name: max(found[name], *(each.get(name, 0.0) for each in moved)) for name in affected}
    return found


def _causes(reference: Reference) -> Iterator[_Cause]:
    model, half = reference.original, reference.half_precision
    yield _Cause("units in the last place", lambda: with_moved_weights(model, move_by_one_ulp), move_by_one_ulp)
    yield _Cause("onnxruntime's optimizations", lambda: model, lambda _, value: value, optimize=True)
    if precision := reference.accepted.precision:  # of the optimized model alone
        rounded = functools.partial(_move_by_half_rounding, precision)
        yield _Cause(f"inputs and weights rounded to {precision}", lambda: with_moved_weights(model, rounded), rounded)
        yield _Cause(f"results rounded to {precision}", lambda: _that_rounds(model, precision), lambda _, value: value)
    if half and reference.is_converted:
        move = functools.partial(_move_by_half_rounding, half)
        yield _Cause("inputs rounded to half precision", lambda: model, move, of_half_alone=True)
    if half and reference.in_float32:
        yield _Cause("results rounded to half precision", lambda: _that_rounds(model), lambda _, value: value,
                     of_half_alone=True)  # fmt: skip


def _moved_by(cause: _Cause, reference: Reference, runs: Sequence[Run]) -> dict[int, dict[str, float]]:
    """Return by id how far a cause of noise changes each output of runs; nothing where onnxruntime fails."""
    found: dict[int, dict[str, float]] = {id(each): {} for each in runs}
    with suppress(OnnxruntimeFailure):  # onnxruntime's optimizations break some models
        session = reference.open(cause.model(), optimize=cause.optimize)
        for each in runs:
            outputs = reference.run(session, {n: cause.move(n, v) for n, v in each.feeds.items()})
            for name, expected in each.outputs.items():
                standard = Standard(scale=reference.scales.get(name, 0.0))
                moved = compare_output(name, expected, outputs.get(name), standard=standard).max_rel
                found[id(each)][name] = moved if math.isfinite(moved) else 0.0
    return found


def _move_by_half_rounding(half: str, name: str, value: Array) -> Array:
    is_cast = value.dtype == np.float32
    return move_by_rounding(name, value, ROUNDINGS[half]) if is_cast else move_by_one_ulp(name, value)


def _that_rounds(model: onnx.ModelProto, precision: str = "") -> onnx.ModelProto:
    """Return a float32 version of the model in which each half-precision result of the main graph is rounded.

    With a `precision`, the results in float32 are rounded to it.
    """
    shapes = inferred_shapes(model, None)
    dtypes = {t.name: shapes.dtype(t) for node in shapes.graph.nodes for t in node.outputs} if shapes else {}
    if precision:
        wide = {name for name, dtype in dtypes.items() if dtype == onnx.TensorProto.FLOAT}
        dtypes = dict.fromkeys(wide, DTYPE_NUMBERS[precision])
    return model_that_rounds(model, dtypes)


def unsteady_outputs(
    reference: Reference, results: Sequence[Mapping[str, object]], errors: Sequence[OutputDifference]
) -> dict[str, str]:
    """Return, with reasons, failed outputs whose shapes or integers differ as much between runs of the original.

    For example, a rounding can change a quantized value by one step, and that step can decide the length of a result.
    The runs perturb inputs and weights of the original by a rounding error, of half precision if the optimized model
    was converted to it.  If `reference.by_optimizations`, one more run uses onnxruntime's graph optimizations.
    """
    pairs = list(zip(reference.runs, results, strict=True))
    differ = {each.name: max(_elements_off(one.outputs[each.name], new.get(each.name)) for one, new in pairs)
              for each in errors if not each.passed}  # fmt: skip
    doubtful = {name: found for name, found in differ.items() if found}
    unsteady: dict[str, str] = {}

    def look(outputs: Mapping[str, object], each: Run, how: str) -> None:
        for name in [*doubtful]:
            if doubtful[name] <= INTEGERS_FACTOR * _elements_off(each.outputs[name], outputs.get(name)):
                del doubtful[name]
                unsteady[name] = f"{_how_unsteady(each.outputs[name], outputs.get(name))} {how}"

    if reference.by_optimizations and not isinstance(reference.optimized, str):
        look(reference.optimized, reference.runs[0], "with onnxruntime's graph optimizations")
    precision = reference.accepted.precision
    rounding, of_what = ROUNDINGS.get(precision, SOME_ROUNDINGS), f" of {precision}" if precision else ""
    for draw in range(STEADY_DRAWS):
        if not doubtful:
            break
        move: Move = functools.partial(_move_some, rounding=rounding, draw=draw)
        session = reference.open(with_moved_weights(reference.original, move))
        for each in reference.runs:
            outputs = reference.run(session, {n: move(n, v) for n, v in each.feeds.items()})
            look(outputs, each, f"where inputs and weights are moved by a rounding{of_what}")
    return unsteady


def _elements_off(expected: object, actual: object) -> float:
    """Return how many integers (or other exact elements) differ; infinity if the shapes differ, and 0 for floats."""
    if not isinstance(expected, np.ndarray) or not isinstance(actual, np.ndarray) or expected.dtype != actual.dtype:
        return 0.0
    if expected.shape != actual.shape:
        return math.inf
    return 0.0 if expected.dtype.name in TOLERANCES else float((expected != actual).sum())


def _how_unsteady(expected: object, actual: object) -> str:
    assert isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray)
    if expected.shape != actual.shape:
        return f"the original itself gives {type_and_shape(actual)} in place of {type_and_shape(expected)}"
    return f"the original itself differs in {int((expected != actual).sum())} of {expected.size} elements"


def _move_some(name: str, value: Array, rounding: float, draw: int) -> Array:
    """Return values perturbed by one unit in the last place; the later half of the draws adds a rounding error."""
    moved = move_by_one_ulp(name, value, draw)
    return move_by_rounding(name, moved, rounding, draw) if draw >= STEADY_DRAWS // 2 else moved
