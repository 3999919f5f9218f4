"""Judge an optimized model: it must compute what the original computes in onnxruntime without optimizations.

A float may differ by rounding.  How much rounding does to a model is measured on the original: by how far its outputs
move when its float32 inputs move by an ulp, and, if it computes in half precision, by how far they are from the same
model in float32.  Where a model only rounds to half precision and back, few values may differ: each rounding must stay.
Where a value overflows in float32 alone, what the original computes in float64 is right as well (overflow.py).

Judge inside `own_process`: onnxruntime crashes on some of the originals, such as InstanceNormalization of no elements,
which then do not count.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from drafts import FLOATS, WORD, inferred, shape_at, types, types_in
from onnx import TensorProto, helper, numpy_helper
from overflow import allow_exact, without_overflow
from undetermined import (
    expands_to_several_axes,
    joins_unequal_sizes,
    normalizes_nothing,
    relies_on_empty_slices,
    without_false_shapes,
)

from onnxfuse import OnnxfuseError, optimize
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, model_to_float32

SECONDS = 20.0  # of this process in one call of optimize(), or of one run of a model in its own process
OF_ONE_NODE = ("inference of ", "spelling ")  # steps whose errors leave out one node, which may be invalid
DRAWS = 3
SHAKES = 4
ULP = 2.0**-23
NO_RANDOM_NUMBERS = 22  # the opset from which on onnxruntime 1.32 has no kernel for RandomUniformLike
ULPS = {TensorProto.FLOAT: ULP, TensorProto.FLOAT16: 2.0**-10}  # onnxruntime multiplies no bfloat16
RELATIVE = {"float64": 1e-5, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest value
MAX_ROUNDED_OTHERWISE = 0.02  # of an output's values, where a model rounds on purpose: their float32 value was a tie
VIEWS = {"Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Split", "Gather",
         "Concat", "Identity", "Tile", "Pad", "Shape", "Size", "Constant"}  # fmt: skip
LOST_VALUE = "OrtValue::Get()"  # what onnxruntime says where a node reads a value that nothing has made
Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What became of a model: "same", "idle" (onnxruntime does not run it), "refused", or a failure."""

    kind: str
    sentence: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in ("crash", "hang", "wrong")

    @property
    def key(self) -> str:
        """What verdicts of the same cause have in common: the kind, and the sentence without names and numbers."""
        words = [word for word in self.sentence.split() if word.isalpha()]
        return f"{self.kind} {' '.join(words[:12])}"


class Hang(BaseException):
    """A call took too long.  It is no Exception, as verification goes on with other inputs after any of those."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hang in this thread, the main one, once this process has computed for so long.

    Processor time counts, as a busy machine leaves a process waiting, and so does verification while the original runs
    in another process, which has a time limit of its own.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(
    model: onnx.ModelProto | bytes, sizes: Mapping[str, int], seed: int, *, verify: bool = False, fallback: Any = "onnx"
) -> Verdict:
    """Optimize a model and compare what both compute on inputs that `seed` and the first sizes of symbols determine."""
    try:
        with limited(SECONDS):
            optimized, report = optimize(model, verify=verify, fallback=fallback)
    except OnnxfuseError as error:
        return _of_refused(model, sizes, seed, error)
    except Hang as error:
        return Verdict("hang", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]} in {last.name}"
        return Verdict("crash", f"{type(error).__name__} {where}: {' '.join(str(error).split())[:200]}")
    if raised := [one for one in report.left_out if not one.step.startswith(OF_ONE_NODE)]:
        return Verdict("crash", str(raised[0]))
    if isinstance(model, bytes):
        return Verdict("idle", "damaged bytes")
    verdict = compare(model, optimized, sizes, seed, fallback == "ort")
    if report.left_out and verdict.kind == "same":  # rules may raise at nodes that do not run
        return Verdict("crash", str(report.left_out[0]))
    return verdict


def _of_refused(model: onnx.ModelProto | bytes, sizes: Mapping[str, int], seed: int, error: OnnxfuseError) -> Verdict:
    """Return "refused" for a model that onnxruntime runs, and "idle" for one that it does not run."""
    said = " ".join(str(error).split())[:250]
    if isinstance(model, bytes):
        return Verdict("idle", said)
    ran = any(outputs_of(Session(model), feeds) is not None for feeds in draws(model, sizes, seed))
    return Verdict("refused" if ran else "idle", said)


def compare(
    model: onnx.ModelProto, optimized: onnx.ModelProto, sizes: Mapping[str, int], seed: int, ort: bool = False
) -> Verdict:
    """Return "same", "idle" or "wrong".

    These differences do not count: with the bodies of `--fallback ort`, NaN in rows of attention whose scores are NaN
    or infinite (docs/fusions.md); elements that onnxruntime leaves unwritten; that it crashes on an
    InstanceNormalization of no elements; what it accepts because it infers no rows for a Slice that has some, nothing
    of what is expanded, or nothing of an output that is declared falsely (undetermined.py); and that without its
    optimizations 1.31 loses what a branch reads behind two Casts of an initializer.
    """
    original, other, half = Session(model), Session(optimized), half_precision_of(model)
    on_purpose = bool(half) and rounds_on_purpose(model)
    infinite = any(not np.isfinite(numpy_helper.to_array(t).astype(np.float64)).all() for t in model.graph.initializer
                   if t.data_type in FLOATS and len(t.dims))  # fmt: skip
    ran = False
    for feeds in draws(model, sizes, seed):
        expected = outputs_of(original, feeds)
        if expected is None:
            continue
        ran = True
        found = outputs_of(other, feeds)
        if found is None and LOST_VALUE in other.error:
            found = outputs_of(Session(optimized, optimize=True), feeds)
        if found is None and (declared := without_false_shapes(optimized, expected)):
            found = outputs_of(Session(declared), feeds)
        at = f"at {', '.join(f'{name} {value.dtype}{list(value.shape)}' for name, value in feeds.items())}"
        if found is None and "SIGSEGV" in other.error and normalizes_nothing(optimized, feeds):
            continue
        if found is None:
            if joins_unequal_sizes(model, list(expected), feeds) or relies_on_empty_slices(model, feeds):
                continue
            if expands_to_several_axes(model, other.error):
                continue
            return Verdict("wrong", f"the optimized model does not run: {other.error} ({at})")
        for name, value in expected.items():
            if ort and _is_nan_anywhere(found[name]):
                continue
            if difference(value, found[name], [], None if on_purpose else value, half, on_purpose, infinite) is None:
                continue
            reason = _beyond_rounding(model, original, feeds, seed, name, value, found[name], on_purpose, infinite)
            if reason and not joins_unequal_sizes(model, [name], feeds):
                return Verdict("wrong", f"output {name} {reason} ({at})")
    return Verdict("same" if ran else "idle", "" if ran else f"onnxruntime does not run it: {original.error}")


def _beyond_rounding(
    model: onnx.ModelProto, original: Session, feeds: Arrays, seed: int, name: str, want: Any, got: Any,
    on_purpose: bool, infinite: bool,
) -> str | None:  # fmt: skip
    """Return in what an output differs; None if by no more than it moves where the original rounds otherwise.

    That is measured only where something differs, which is rare.
    """
    half, moved = half_precision_of(model), [TensorProto.FLOAT] if on_purpose else list(ULPS)
    near = [each[name] for way in (ULP, -ULP) if (each := outputs_of(original, _nudged(feeds, way)))]
    near += [
        each[name] for other_way in rounded_otherwise(model, seed, moved) if (each := outputs_of(other_way, feeds))
    ]
    wide = None
    if half and not on_purpose:
        wide = outputs_of(Session(model_to_float32(model)), arrays_to_float32(feeds))
    exact = wide[name] if wide else None
    reason = difference(want, got, near, exact, half, on_purpose, infinite)
    if reason and not half and (unbounded := without_overflow(model, feeds)):
        exact_values, largest = unbounded
        want, near = allow_exact(want, got, near, exact_values[name], largest)
        reason = difference(want, got, near, exact, half, on_purpose, infinite)
    return reason


class Session:
    """A model in onnxruntime, by default without optimizations; `error` is what it said last."""

    def __init__(self, model: onnx.ModelProto, optimize: bool = False) -> None:
        self.error = ""
        self.session: Any = None
        try:
            self.session = open_session(model, None, optimize=optimize)
        except Exception as error:  # onnxruntime has no public base class of its errors
            self.error = " ".join(str(error).split())[:300]


def rounded_otherwise(model: onnx.ModelProto, seed: int, dtypes: Sequence[int]) -> Iterator[Session]:
    """Yield the model with each element of results of these dtypes moved by up to an ulp at random, in bodies too.

    Each element moves by itself: among scores that are offset by 10000, that is what changes their softmax.
    """
    typed, opset = inferred(model) or model, next((each.version for each in model.opset_import if not each.domain), 0)
    for shake in range(SHAKES):
        shaken = onnx.ModelProto()
        shaken.CopyFrom(typed)
        _shake(shaken.graph, {}, Random(seed + shake), dtypes, opset)
        yield Session(shaken)


def _shake(
    graph: onnx.GraphProto, outside: Mapping[str, onnx.TypeProto], random: Random, dtypes: Sequence[int], opset: int
) -> None:
    known = {**outside, **types_in(graph)}
    nodes = list(graph.node)
    del graph.node[:]
    del graph.value_info[:]
    for node in nodes:
        moves = []
        for index, name in enumerate(node.output):
            dtype = known[name].tensor_type.elem_type if name in known else TensorProto.UNDEFINED
            if name and dtype in dtypes:
                own = f"{name}::{random.getrandbits(64)}"  # a body may have a value of the same name
                node.output[index] = f"{own}::exact"
                moves += _move(node.output[index], own, dtype, random, opset)
                moves[-1].output[0] = name
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _shake(attribute.g, known, random, dtypes, opset)
        graph.node.extend([node, *moves])


def _move(source: str, target: str, dtype: int, random: Random, opset: int) -> list[onnx.NodeProto]:
    """Return nodes that move a tensor by up to an ulp, element by element."""
    constants = {"factor": np.float32(ULPS[dtype]), "zero": np.float32(0), "one": np.float32(1),
                 "apart": np.float32(random.uniform(9, 99))}  # fmt: skip
    drawn = [
        _node("RandomUniformLike", target, "shaped", source, dtype=TensorProto.FLOAT, low=-1.0, high=1.0,
              seed=random.uniform(0, 2**16))
    ]  # fmt: skip
    sines = [  # of numbers far apart, as onnxruntime draws none from opset 22 on
        _node("Size", target, "size", source), _node("Cast", target, "count", "::size", to=TensorProto.FLOAT),
        _node("Range", target, "numbers", "::zero", "::count", "::one"),
        _node("Mul", target, "angles", "::numbers", "::apart"), _node("Sin", target, "drawn", "::angles"),
        _node("Shape", target, "shape", source),
        _node("Reshape", target, "shaped", "::drawn", "::shape", allowzero=1),
    ]  # fmt: skip
    made = [_node("Constant", target, name, value=numpy_helper.from_array(np.asarray(each)))
            for name, each in constants.items()]  # fmt: skip
    moved = [_node("Mul", target, "small", "::shaped", "::factor"), _node("Add", target, "wide", "::small", "::one"),
             _node("Cast", target, "moving", "::wide", to=dtype)]  # fmt: skip
    nodes = sines if opset >= NO_RANDOM_NUMBERS else drawn
    return [*made, *nodes, *moved, helper.make_node("Mul", [source, f"{target}::moving"], [target])]


def _node(op: str, target: str, output: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    """Return a node beside a tensor; names that begin with "::" are its own."""
    named = [f"{target}{name}" if name.startswith("::") else name for name in inputs]
    return helper.make_node(op, named, [f"{target}::{output}"], **attributes)


def outputs_of(session: Session, feeds: Arrays) -> dict[str, Any] | None:
    """Return what a session computes; None if it does not run, which its `error` then explains."""
    if session.session is None:
        return None
    try:
        return run(session.session, feeds)
    except Exception as error:  # as above
        session.error = " ".join(str(error).split())[:300]
        return None


# --- inputs ----------------------------------------------------------------------------------------------------------


def draws(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> Iterator[dict[str, Any]]:
    """Yield inputs: at the first sizes of the symbols, at others, and with sizes of zero and one; with other values."""
    kept = {tensor.name: tensor for tensor in model.graph.initializer}
    for draw in range(DRAWS):
        random, numbers = Random(seed * DRAWS + draw), np.random.default_rng(seed * DRAWS + draw)
        words = {word for i in model.graph.input for d in i.type.tensor_type.shape.dim for word in
                 WORD.findall(d.dim_param)}  # fmt: skip
        pool = ((), (1, 2, 3, 5), (0, 1, 1, 4))[draw]
        now = dict(sizes) if draw == 0 else {word: random.choice(pool) for word in sorted(words)}
        feeds = {}
        for each in model.graph.input:
            kind = each.type.tensor_type
            dims = [d.dim_param or d.dim_value if d.WhichOneof("value") else None for d in kind.shape.dim]
            shape = tuple(kept[each.name].dims) if each.name in kept else shape_at(dims, now)
            feeds[each.name] = drawn(numbers, shape, kind.elem_type, (1.0, 4.0, 1.0)[draw], whole=draw == 2)
        yield feeds


def drawn(numbers: np.random.Generator, shape: Sequence[int], dtype: int, scale: float, whole: bool = False) -> Any:
    """Return random values of a dtype: floats around zero, or whole ones with many ties, and small indices."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype == TensorProto.BOOL:
        return np.asarray(numbers.random(shape) < 0.6)
    if dtype in (*(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16), TensorProto.DOUBLE):
        values = numbers.standard_normal(shape) * scale
        return np.asarray(np.round(values) if whole else values).astype(kind)
    return np.asarray(numbers.integers(0, 2, shape)).astype(kind)


def _nudged(feeds: Arrays, by: float) -> dict[str, Any]:
    """Return the inputs with each float32 moved by an ulp, up or down at random."""
    numbers = np.random.default_rng(1)
    return {
        name: value * (1 + np.float32(2 * by) * numbers.choice([-1, 1], value.shape).astype(np.float32))
        if value.dtype == np.float32
        else value
        for name, value in feeds.items()
    }


# --- differences -----------------------------------------------------------------------------------------------------


def rounds_on_purpose(model: onnx.ModelProto) -> bool:
    """Whether half precision is only passed through: inputs and weights have others, and no operator computes in it."""
    halves = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    if any(i.type.tensor_type.elem_type in halves for i in model.graph.input):
        return False
    known = types(model)
    for node in model.graph.node:
        names = [name for name in (*node.input, *node.output) if name]
        if any(name not in known for name in names) or any(a.HasField("g") for a in node.attribute):
            return False
        reads_half = any(known[name].tensor_type.elem_type in halves for name in names)
        if reads_half and node.op_type not in VIEWS:
            return False
    return True


def difference(
    expected: Any, found: Any, near: Sequence[Any], exact: Any, half: str, on_purpose: bool, infinite: bool = False
) -> str | None:
    """Return in what two values of an output differ; None if by no more than rounding explains.

    With `infinite` weights NaN and infinite values count as the same.
    """
    if type(expected) is not type(found):
        return f"is a {type(found).__name__}, not a {type(expected).__name__}"
    if not isinstance(expected, np.ndarray):
        return None if isinstance(expected, list) and len(expected) == len(found) else "is another sequence"
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    near = [each for each in near if each.shape == expected.shape]
    if expected.dtype.kind not in "fV" and expected.dtype != ml_dtypes.bfloat16:
        steady = np.ones(expected.shape, bool)
        for each in (*near, *([exact] if exact is not None and exact.shape == expected.shape else [])):
            steady &= each == expected
        if half and exact is None and not on_purpose:
            return None  # what a float16 decides cannot be told apart from rounding
        wrong = (expected != found) & steady
        return f"is {_first(found, wrong)}, not {_first(expected, wrong)}" if wrong.any() else None
    return _float_difference(expected, found, near, exact, half, on_purpose, infinite)


def _float_difference(
    expected: Any, found: Any, near: Sequence[Any], exact: Any, half: str, on_purpose: bool, infinite: bool
) -> str | None:
    with np.errstate(all="ignore"):
        want, got = expected.astype(np.float64), found.astype(np.float64)
        others = [each.astype(np.float64) for each in near]
        if exact is not None and exact.shape == expected.shape:
            others.append(exact.astype(np.float64))
        finite = np.isfinite(want)
        steady = np.ones(want.shape, bool)  # the same kind of number wherever the original rounds otherwise
        for each in others:
            steady &= (np.isfinite(each) == finite) & (finite | (np.isnan(each) == np.isnan(want)))
        odd = steady & (np.isfinite(got) != finite)
        if not infinite:  # inf - inf is NaN in one order of a sum and inf in another
            odd |= steady & ~finite & (np.isnan(got) != np.isnan(want))
            odd |= steady & np.isinf(want) & np.isinf(got) & (want != got)
        if half and not on_purpose and exact is None:
            odd[:] = False
        if odd.any():
            return f"is {_first(found, odd)}, not {_first(expected, odd)}"
        both = finite & np.isfinite(got) & steady
        largest = np.abs(want[both]).max(initial=0.0)
        noise = max([np.abs(each - want)[both].max(initial=0.0) for each in others], default=0.0)
        coarse = RELATIVE[half] if half else RELATIVE["float32"]
        error = np.where(both, np.abs(got - want), 0.0)
        if half and not on_purpose and exact is not None and exact.shape == expected.shape:
            error = np.minimum(error, np.where(both, np.abs(got - others[-1]), 0.0))
        allowed = coarse * largest + 6 * noise + 1e-30
        wrong = error > allowed
        if on_purpose and not wrong.any():
            tight = RELATIVE["float32"] * largest + 6 * noise + 1e-30
            many = (error > tight).sum()
            wrong = error > tight if many > 1 + MAX_ROUNDED_OTHERWISE * error.size else wrong
        if wrong.any():
            worst = np.where(wrong, error, 0.0).max()
            values = f"is {_first(found, wrong)}, not {_first(expected, wrong)}"
            return f"{values}: off by {worst:.3g}, allowed {allowed:.3g}, {int(wrong.sum())} of {wrong.size} values"
    return None


def _is_nan_anywhere(value: Any) -> bool:
    return isinstance(value, np.ndarray) and bool(value.dtype.kind in "fV" and np.isnan(value.astype(np.float32)).any())


def _first(array: Any, where: Any) -> Any:
    return array[where].reshape(-1)[0]
