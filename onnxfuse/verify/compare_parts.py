"""Compare each fused node with the nodes that it replaced, on values of a run and on drawn (random) values.

A part is a fused node together with the nodes that it replaced; see parts.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, FLOAT_NAMES, HALF_PRECISION, LARGEST_FLOAT8, Array, dtype_name
from onnxfuse.ir.extract import ancestors, extract
from onnxfuse.ir.protos import copy_without
from onnxfuse.verify.cpu_session import input_of, open_session, run
from onnxfuse.verify.difference import (
    MASK_MAGNITUDE,
    MASK_MAGNITUDES,
    describe_misplaced,
    type_and_shape,
    unequal,
    with_numbers_for_nan,
)
from onnxfuse.verify.drawn_operands import LEAVE_NOTHING, ONES, Feeds, draws, operands_by_shape
from onnxfuse.verify.extent import DRAWN, FULL, OF_PARTS, Extent
from onnxfuse.verify.noise import move_by_one_ulp
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.parts import Part, UnfusedGraph
from onnxfuse.verify.quantizer_steps import source_quantizer
from onnxfuse.verify.rounded_results import model_that_rounds
from onnxfuse.verify.widen import (
    arrays_to_float32,
    arrays_to_float64,
    half_precision_of,
    model_to_float32,
    model_to_float64,
)

if TYPE_CHECKING:
    from onnxfuse.verify.cpu_session import Session

# The largest allowed error of an element of a fused node's output, relative to the element's magnitude plus the root
# mean square of the output.  A fused node replaces a few operators, so its errors are a few roundings.  A larger error
# still passes if the replaced nodes have that much noise: see NOISE_FACTOR.
PART_TOLERANCES: Final[Mapping[str, float]] = {
    "float64": 1e-12,  # 2^-53 = 1.1e-16, and sums of some thousand terms
    "float32": 1e-5,  # 2^-24 = 6e-8, and sums of some thousand terms in another order
    "float16": 4e-3,  # eight roundings of 2^-11 = 4.9e-4: replaced nodes round each result, a fused node only the last
    "bfloat16": 3.2e-2,  # 2^-8 = 3.9e-3: eight roundings, as for float16
}
# A fused node is allowed this many times the error of the replaced nodes themselves, measured on the operands and on
# operands perturbed by one unit in the last place.  If attention scores are in the millions and two of them are nearly
# equal, such perturbations change the probabilities by more than any fixed tolerance.  One perturbation, in random
# directions, does not always show the change: of five on 1025 tokens, one changed a result by 0.0005, one by 0.07, and
# three by 0.7 to 1.3.  A gate that multiplies large values amplifies the error of its own sigmoid, which a run in
# float64 shows.  In half precision, the gate also amplifies the rounding of each result.
NOISE_FACTOR: Final = 8.0
NOISE_DRAWS: Final = 6


@dataclass(frozen=True)
class PartFinding:
    """A fused node with the nodes that it replaced, and how their results differ, or why these were not compared."""

    part: Part
    reason: str


@dataclass(frozen=True)
class PartsVerification:
    """The parts (fused nodes with replaced nodes) that differ or were not compared, and the `key` of the equal ones."""

    wrong: tuple[PartFinding, ...]
    not_compared: tuple[PartFinding, ...]
    equal: frozenset[str]


def compare_parts(
    unfused: UnfusedGraph,
    optimized: onnx.ModelProto,
    parts: Sequence[Part],
    feeds: Mapping[str, Array] | None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    numbers_for_nan: bool = False,
    extent: Extent = FULL,
) -> PartsVerification:
    """Compare each part: run its fused node and the nodes that it replaced, without onnxruntime's graph optimizations.

    `feeds` are inputs on which the original runs.  The parts are run on the values that their operands have in that
    run, and on two sets of drawn values if `extent.repeats`.  If `feeds` is None, because the original does not run,
    the parts are run only on drawn values.  `progress` is called with the number of parts compared so far and the
    number of all parts.  With `numbers_for_nan` a fused node may have any numbers where the nodes that it replaced give
    NaN.
    """
    wrong, unseen, equal = list[PartFinding](), list[PartFinding](), set[str]()
    try:
        needed = (name for part in parts for name in _needed(unfused, part) if name in unfused.types)
        values = {} if feeds is None else values_of_run(unfused, needed, feeds)
    except Exception as error:  # the text of any exception becomes the reason why nothing is compared
        reason = f"the original does not run ({first_line(error)})"
        return PartsVerification((), tuple(PartFinding(part, reason) for part in parts), frozenset())
    uses = Counter(name for part in parts for name in _needed(unfused, part))
    for i, part in enumerate(parts):
        progress(i, len(parts))
        try:
            compare = partial(_compare_part, unfused, optimized, part, numbers_for_nan, extent)
            drawn = feeds is None
            fault = _drawn_fault(unfused, part, compare) if drawn else compare(_given(unfused, part, values), True)
        except VerificationError as error:
            unseen.append(PartFinding(part, str(error)))
        except Exception as error:  # such as a lack of memory for the compared values
            unseen.append(PartFinding(part, f"the comparison failed: {type(error).__name__}: {first_line(error)}"))
        else:
            if fault:
                wrong.append(PartFinding(part, fault))
            else:
                equal.add(part.key)
        for name in _needed(unfused, part):
            uses[name] -= 1
            if not uses[name]:
                values.pop(name, None)
    return PartsVerification(tuple(wrong), tuple(unseen), frozenset(equal))


def _needed(unfused: UnfusedGraph, part: Part) -> list[str]:
    """Return the non-constant inputs of a fused node and of the nodes that it replaced.

    The values of these tensors come from a run of the graph.
    """
    return list(dict.fromkeys(name for name in (*part.operands, *part.leaves) if name not in unfused.constants))


def values_of_run(unfused: UnfusedGraph, names: Iterable[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run the graph on `feeds`, and return the values of those tensors in `names` that are not constants.

    Raises OnnxruntimeFailure where the graph does not run.
    """
    needed = list(dict.fromkeys(names))
    values = {name: feeds[name] for name in needed if name in feeds}
    wanted, folder = [name for name in needed if name not in values], unfused.graph.folder
    if wanted:  # no variable keeps the model, so its weights are freed before the run; the session has its own copies
        try:
            results = run(_open(_model_of_run(unfused, wanted), folder), feeds)
        except OnnxruntimeFailure:
            if half_precision_of(unfused.graph.model) != "bfloat16":
                raise
            results = run(
                _open(model_to_float32(_model_of_run(unfused, wanted)), folder), arrays_to_float32(feeds)
            )  # in float32, because onnxruntime's CPU provider has few operators in bfloat16
        values |= {n: _as_recorded(unfused, n, v) for n, v in results.items() if isinstance(v, np.ndarray)}
    return values


def _as_recorded(unfused: UnfusedGraph, name: str, value: Array) -> Array:
    """Return a value in the half-precision dtype that the model declares for it; other values are unchanged."""
    dtype = unfused.types[name][0]
    return value.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype)) if dtype in HALF_PRECISION else value


def _model_of_run(unfused: UnfusedGraph, wanted: Sequence[str]) -> onnx.ModelProto:
    """Return the part of the unfused graph that computes the wanted tensors."""
    source = unfused.graph.model.graph
    defaults = {t.name for t in source.initializer}
    inputs = [i for i in source.input if i.name not in unfused.constants and i.name not in defaults]
    model = unfused.model(ancestors(unfused.nodes, wanted), inputs, wanted)
    present = {t.name for t in model.graph.initializer}
    read = {name for node in model.graph.node for name in unfused.reads(node)} - present
    model.graph.initializer.extend(t for t in source.initializer if t.name in read)
    return model


def _drawn_fault(unfused: UnfusedGraph, part: Part, compare: Callable[[Feeds, bool], str]) -> str:
    """Return how a fused node differs from the nodes that it replaced on random values; "" where it does not.

    If nothing can be compared at the usual sizes, the comparison is repeated with 1 for all dynamic sizes.  The branch
    of an If, for example, can require this.  Raises VerificationError as `_compare_part` does.
    """
    try:
        return compare(operands_by_shape(unfused, part), False)
    except VerificationError:
        with suppress(VerificationError):
            return compare(operands_by_shape(unfused, part, ONES), False)
        raise


def _compare_part(
    unfused: UnfusedGraph,
    optimized: onnx.ModelProto,
    part: Part,
    numbers_for_nan: bool,
    extent: Extent,
    given: Feeds,
    runs: bool,
) -> str:
    """Return how a fused node differs from the nodes that it replaced; "" where it does not.

    Both are run on random values with the sizes of the arrays in `given`.  If `runs` is true, a run of the model
    computed these arrays, and both are compared on them, too.  Without `extent.repeats` the first values that do not
    hide errors are the last.  Raises VerificationError with the reason if nothing could be compared.
    """
    try:
        sessions = _open_both(unfused, optimized, part, given)
    except OnnxruntimeFailure as error:
        return f"onnxruntime refuses its body: {first_line(error)}"
    reason = "each output was NaN, infinite, empty or masked on all values"
    compared = False
    for what, feeds in draws(unfused, part, given, runs=runs):
        if compared and not extent.allows(DRAWN, OF_PARTS):
            break
        try:
            expected = run(sessions.replaced, sessions.feeds(feeds))
        except OnnxruntimeFailure as error:
            reason = f"the nodes that it replaced do not run ({first_line(error)})"
            continue
        try:
            actual = run(sessions.fused, sessions.feeds(feeds))
        except OnnxruntimeFailure as error:
            return f"its body does not run on {what}: {first_line(error)}"
        exact = run(sessions.exact, arrays_to_float32(feeds)) if sessions.exact else {}
        for name in part.outputs:
            old, new = expected[name], actual.get(name)
            assert isinstance(old, np.ndarray)
            if not isinstance(new, np.ndarray) or (old.dtype, old.shape) != (new.dtype, new.shape):
                found = type_and_shape(new) if isinstance(new, np.ndarray) else "missing"
                wanted = type_and_shape(old)
                return f"on {what} its output '{name}' is {found}; the nodes that it replaced give {wanted}"
            true = exact.get(name)
            compared |= _says_something(old)
            old = with_numbers_for_nan(old, new) if numbers_for_nan else old
            check = _Check(sessions, feeds, name, old, new, true if isinstance(true, np.ndarray) else None)
            # In float16, the result of a fully masked row depends on whether scores near -65504 are rounded to -65504.
            # onnxruntime does not round them if it removes the pair of Casts between two operators.
            is_determined = what != LEAVE_NOTHING or sessions.half != "float16"
            if fault := check.fault() if is_determined else check.misplaced():
                return f"on {what} {fault}{_rounding_sentence(optimized, part)}"
        if compared and not extent.repeats:
            break
    if not compared:
        raise VerificationError(reason)
    return ""


def _given(unfused: UnfusedGraph, part: Part, values: Mapping[str, Array]) -> Feeds:
    """Return the values of all inputs of a fused node and of the nodes that it replaced.

    Raises VerificationError if a value is unknown.
    """
    given: Feeds = {}
    for name in dict.fromkeys((*part.operands, *part.leaves)):
        if name in unfused.constants:
            given[name] = unfused.constant(name)
        elif name in values:
            given[name] = values[name]
        elif name not in unfused.types:
            raise VerificationError(f"no tensor of the original has the value of its operand '{name}'")
        else:
            raise VerificationError(f"the value of '{name}' in a run is not a tensor")
    return given


@dataclass(frozen=True)
class _Sessions:
    """Sessions of the fused node and of the replaced nodes; `exact` evaluates the replaced nodes in float32."""

    replaced: Session
    fused: Session
    exact: Session | None
    half: str  # the half precision by which errors are judged, "" for none
    in_float32: bool  # whether both models are in float32, because the CPU provider cannot run them in bfloat16
    model: onnx.ModelProto  # a model of the replaced nodes
    rounded: Mapping[str, int]  # the half-precision tensors that `model` computes, and their dtypes
    folder: Path | None

    def feeds(self, feeds: Feeds) -> Feeds:
        return arrays_to_float32(feeds) if self.in_float32 else feeds

    @cached_property
    def in_float64(self) -> Session | None:
        """A session of the replaced nodes in float64; None for half precision, or if a float64 kernel is missing."""
        if self.half:
            return None
        try:
            return _open(model_to_float64(self.model), self.folder)
        except OnnxruntimeFailure:
            return None

    @cached_property
    def rounding(self) -> Session | None:
        """A session that runs half-precision nodes in float32 and rounds each result; None for other precisions."""
        return _open(model_that_rounds(self.model, self.rounded), self.folder) if self.rounded else None


def _open_both(unfused: UnfusedGraph, optimized: onnx.ModelProto, part: Part, given: Mapping[str, Array]) -> _Sessions:
    """Open the replaced nodes and the fused node as models that read the same inputs.

    Raises VerificationError if onnxruntime does not open the replaced nodes, for example because two have the same
    name, and OnnxruntimeFailure if it opens these but not the fused node.
    """
    folder = unfused.graph.folder
    inputs = [  # some operators require that the shapes of weights are known, as MatMulNBits does for its bias
        input_of(name, value, has_shape=name in unfused.constants)
        for name, value in given.items()
        if not _is_packed(value)
    ]
    replaced = unfused.model(part.replaced, inputs, part.outputs)
    fused = copy_without(optimized, "graph", "functions")
    fused.functions.extend(f for f in optimized.functions if f.domain == DOMAIN and f.name == part.fused.op_type)
    fused.graph.name = "part"
    fused.graph.node.extend(each for node in part.nodes for each in _movable(node, given))
    fused.graph.input.extend(i for i in inputs if i.name in part.operands)
    packed = (name for name, value in given.items() if name in part.operands and _is_packed(value))
    fused.graph.initializer.extend(unfused.initializer(name) for name in packed)
    fused.graph.output.extend(onnx.ValueInfoProto(name=name) for name in part.outputs)
    half = _half(unfused, part)
    try:
        old, new = _open_replaced(replaced, folder), _open(fused, folder)
    except (VerificationError, OnnxruntimeFailure):
        if half != "bfloat16":
            raise
        replaced, fused = model_to_float32(replaced), model_to_float32(fused)
        old, new = _open_replaced(replaced, folder), _open(fused, folder)
        return _Sessions(old, new, None, half, True, replaced, {}, folder)
    if not half:
        return _Sessions(old, new, None, half, False, replaced, {}, folder)
    exact = _open_replaced(model_to_float32(replaced), folder)
    computed = {o: unfused.types[o][0] for node in part.replaced for o in node.output if o in unfused.types}
    rounded = {name: dtype for name, dtype in computed.items() if dtype in HALF_PRECISION}
    return _Sessions(old, new, exact, half, False, replaced, rounded, folder)


def _movable(node: onnx.NodeProto, given: Mapping[str, Array]) -> list[onnx.NodeProto]:
    """Return a node or, for a Transpose of float8, which it lacks before opset 21, nodes that move float32."""
    value = given.get(node.input[0]) if node.op_type == "Transpose" else None
    if value is None or value.dtype.name not in LARGEST_FLOAT8:
        return [node]
    (source,), (result,), copy = node.input, node.output, onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[0], copy.output[0] = f"{result}/wide", f"{result}/moved"
    cast = onnx.helper.make_node
    return [
        cast("Cast", [source], copy.input, to=onnx.TensorProto.FLOAT),
        copy,
        cast("Cast", copy.output, [result], to=DTYPE_NUMBERS[value.dtype.name]),
    ]


def _is_packed(value: Array) -> bool:
    """Return whether onnxruntime takes no inputs of the dtype: of less than 8 bits, or rare floats of 8 bits."""
    name = value.dtype.name
    return name not in LARGEST_FLOAT8 and name.startswith(("int4", "uint4", "int2", "uint2", "float4", "float8"))


def _open(model: onnx.ModelProto, folder: Path | None) -> Session:
    return open_session(model, folder, optimize=False)


def _open_replaced(model: onnx.ModelProto, folder: Path | None) -> Session:
    try:
        return _open(model, folder)
    except OnnxruntimeFailure as error:
        raise VerificationError(f"onnxruntime cannot run it on the CPU ({first_line(error)})") from error


def _half(unfused: UnfusedGraph, part: Part) -> str:
    """Return the coarsest half precision in which a fused node and the nodes that it replaced compute.

    Returns "" if they compute in none, or only cast to one.
    """
    if not part.computes_in_half(unfused):
        return ""
    names = (*part.operands, *part.outputs, *(o for node in part.replaced for o in node.output))
    found = {HALF_PRECISION.get(unfused.types[name][0], "") for name in names if name in unfused.types}
    return "bfloat16" if "bfloat16" in found else "float16"


@dataclass(frozen=True)
class _Check:
    """The comparison of an output of a fused node with the output of the replaced nodes, for one set of operands."""

    sessions: _Sessions
    feeds: Feeds
    name: str
    old: Array
    new: Array
    exact: Array | None

    def fault(self) -> str:
        """Return how the output differs by more than rounding; "" where it does not."""
        dtype = self.old.dtype.name
        if dtype not in PART_TOLERANCES:
            wrong = int(unequal(self.old, self.new).sum())
            if not wrong or self._are_ties():
                return ""
            return f"its output '{self.name}' differs in {wrong} of {self.old.size} elements"
        if misplaced := self.misplaced():
            return misplaced
        old, new, true = _wide(self.old), _wide(self.new), self._in_float32()
        error, own = _error(new, true), _error(old, true)
        half = bool(self.sessions.half)
        if (error <= self._allowed(true)).all() or (half and error.max() <= own.max()):
            return ""
        true = self._in_float64(old)
        error, allowed = _error(new, true), self._allowed(true)
        noise = 0.0
        for noise in self._noise(old, true):
            if (error <= allowed + NOISE_FACTOR * noise).all():
                return ""
        at = np.unravel_index(np.argmax(error - allowed), error.shape)
        return (
            f"its output '{self.name}' is {new[at]:.7g} at {[int(i) for i in at]}; the nodes that it replaced give "
            f"{true[at]:.7g}, and {self.sessions.half or dtype} allows an error of "
            f"{allowed[at] + NOISE_FACTOR * noise:.1e}"
        )

    def _are_ties(self) -> bool:
        """Return whether integers differ only by 1, where a quantizer rounds a number nearly halfway between them."""
        model, half = self.sessions.model, self.sessions.half
        quantizer = source_quantizer(model, self.name)
        if quantizer is None:
            return False
        session = _open(extract(model, quantizer.inputs), self.sessions.folder)
        values = run(session, self.sessions.feeds(self.feeds))
        return math.isfinite(quantizer.share_moved(values, self.old, self.new, PART_TOLERANCES, half))

    def misplaced(self) -> str:
        """Describe NaN and infinities that only one of both outputs has, as far as rounding cannot explain them."""
        dtype = self.old.dtype.name
        if dtype not in PART_TOLERANCES:
            return ""
        old, new, true = _wide(self.old), _wide(self.new), self._in_float32()
        found = describe_misplaced(old, new, true, dtype)
        if found and self.sessions.half:  # in half precision, the order of a sum can decide whether it overflows
            for other in self._moved():
                new = np.where(np.isfinite(other) == np.isfinite(old), new, old)
            found = describe_misplaced(old, new, true, dtype)
        return f"its output '{self.name}' differs in {found}" if found else ""

    def _in_float32(self) -> Array:
        """Return the replaced nodes' output in float32.

        Where an element is not finite in float32, the result has the element of `self.old`.
        """
        old = _wide(self.old)
        return old if self.exact is None else np.where(np.isfinite(_wide(self.exact)), _wide(self.exact), old)

    def _allowed(self, true: Array) -> Array:
        """Return for each element how large an error rounding can explain."""
        dtype, half = self.old.dtype.name, self.sessions.half
        tolerance = max(PART_TOLERANCES[dtype], PART_TOLERANCES[half] if half else 0.0)
        result: Array = tolerance * (np.where(np.isfinite(true), np.abs(true), 0.0) + self._rms(true, dtype))
        return result

    def _in_float64(self, old: Array) -> Array:
        """Return the replaced nodes' output in float64; elements that are not finite in float64 come from `old`."""
        if self.sessions.in_float64 is None:
            return self._in_float32()
        try:
            exact = _wide(np.asarray(run(self.sessions.in_float64, arrays_to_float64(self.feeds))[self.name]))
        except OnnxruntimeFailure:  # an operator without a kernel for these values
            return old
        return np.where(np.isfinite(exact) & np.isfinite(old), exact, old)

    def _rms(self, true: Array, dtype: str) -> float:
        mask = min(MASK_MAGNITUDES.get(each, MASK_MAGNITUDE) for each in (dtype, self.sessions.half))
        kept = true[np.isfinite(true) & (np.abs(true) < mask)]
        return float(np.sqrt(np.mean(np.square(kept)))) if kept.size else 0.0

    def _noise(self, old: Array, true: Array) -> Iterator[float]:
        """Yield the largest error of the replaced nodes so far: first of the plain run, then after each further run.

        The further runs have operands that are perturbed by one unit in the last place.  In half precision, their
        changes are measured from the plain result, because its error is much larger than one rounding.  Before them
        comes a run that rounds the result of each node, because providers other than the CPU's round it.
        """
        start = old if self.sessions.half else true
        found = float(_error(old, start).max(initial=0.0))
        yield found
        if self.sessions.rounding:
            rounded = _wide(np.asarray(run(self.sessions.rounding, arrays_to_float32(self.feeds))[self.name]))
            found = max(found, float(_error(rounded, true).max(initial=0.0)))
            yield found
        for other in self._moved():
            found = max(found, float(_error(other, start).max(initial=0.0)))
            yield found

    def _moved(self) -> Iterator[Array]:
        """Yield the results of the replaced nodes for operands that are perturbed by one unit in the last place."""
        for draw in range(NOISE_DRAWS):
            moved = {name: move_by_one_ulp(name, value, draw) for name, value in self.feeds.items()}
            yield _wide(np.asarray(run(self.sessions.replaced, self.sessions.feeds(moved))[self.name]))


def _says_something(array: Array) -> bool:
    """Return whether any element is an ordinary number: not NaN, infinite, or a mask value such as -65504."""
    if array.dtype.name not in FLOAT_NAMES:
        return bool(array.size)
    with np.errstate(invalid="ignore"):
        return bool((np.abs(_wide(array)) < MASK_MAGNITUDES.get(array.dtype.name, MASK_MAGNITUDE)).any())


def _rounding_sentence(optimized: onnx.ModelProto, part: Part) -> str:
    """Return a sentence if only the fused node, or only the replaced nodes, cast to half precision; else ""."""
    replaced = _roundings(part.replaced)
    body = next((f for f in optimized.functions if f.domain == DOMAIN and f.name == part.fused.op_type), None)
    fused = _roundings(body.node) if body else set()
    names = [dtype_name(t) for t in sorted(replaced ^ fused)]
    if not names:
        return ""
    which = "the nodes that it replaced" if replaced - fused else "its body"
    return f"; only {which} round to {names[0]}" if replaced - fused else f"; only {which} rounds to {names[0]}"


def _roundings(nodes: Sequence[onnx.NodeProto]) -> set[int]:
    return {a.i for node in nodes for a in node.attribute if node.op_type == "Cast" and a.i in HALF_PRECISION}


def _error(value: Array, true: Array) -> Array:
    """Return each element's distance from its true value; 0 where either of the two is not finite."""
    result: Array = np.zeros(true.shape)
    where = np.isfinite(value) & np.isfinite(true)
    with np.errstate(over="ignore"):  # an error may overflow to infinity
        result[where] = np.abs(value[where] - true[where])
    return result


def _wide(array: Array) -> Array:
    return array.astype(np.float64)
