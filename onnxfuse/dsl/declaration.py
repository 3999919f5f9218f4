"""The declaration of a fusion: one function, whose signature is the fused operator and whose body is the subgraph.

A rewrite rule is declared in the same words, as pairs of a left side to match and a right side to write in its place.

The function runs once, on terms (symbolic values).  Python operators stand for the mathematics: `a * b * c` is a
product in any order and grouping, `x / y` may be a Div or a product with the reciprocal, and `x**2` may be a Mul.
`op.Name(...)` stands for the ONNX operator `Name`, in the form that it has in the model's opset.  The other words are
in words.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.spans import Span, here
from onnxfuse.dsl.terms import Capture, Number, Term, as_term, walk
from onnxfuse.dsl.words import Output
from onnxfuse.errors import PatternError

__all__ = ["Fusion", "fusion", "require"]

Body: TypeAlias = Callable[..., Term | tuple[Term, ...]]
Rules: TypeAlias = Iterator[tuple[Term, Term]]  # pairs: a left side to match, and a right side that replaces it
ExampleValue: TypeAlias = Sequence[int] | Number | str

_guards: list[list[Guard]] = []  # for each fusion function that is running: its conditions so far


@dataclass(frozen=True, eq=False)
class Fusion:
    """A declared fusion: the fused operator's parameters, and the terms of its outputs; see `fusion`."""

    name: str
    doc: str
    captures: tuple[Capture, ...]
    outputs: tuple[Term, ...]
    out: tuple[str, ...]
    guards: tuple[Guard, ...]
    casts: bool
    function: Callable[..., object]  # the decorated function
    span: Span
    example: Mapping[str, ExampleValue] = field(default_factory=dict)
    last: bool = False
    channels_last: tuple[str, ...] = ()
    epilogue: bool | Literal["nhwc"] = False
    prologue: bool = False
    selection: bool = False

    def __repr__(self) -> str:  # terms share subterms, so the default repr would grow exponentially
        return f"Fusion({self.name})"

    @property
    def step(self) -> str:
        """The fusion's name in reports of errors that were raised while matching it or writing its body."""
        return f"fusion {self.name}"

    @property
    def source(self) -> str:
        """The Python source of the declaration."""
        return inspect.getsource(self.function)

    @property
    def operands(self) -> tuple[Capture, ...]:
        """The captures that are tensors: the fused node's inputs, in order."""
        return tuple(capture for capture in self.captures if capture.is_operand)


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A rewrite rule: `left` is matched like a fusion, and each match is replaced by `right`."""

    left: Fusion
    right: Term
    of_scores: bool = False


def require(sentence: str, holds: Callable[..., bool]) -> None:
    """Add a condition of the whole fusion, or of all pairs of a rewrite rule.

    The parameters of `holds` name the facts that it needs: dimensions, scalars, choices and operands of the fusion (an
    absent operand is None), `dtype` and `rank` of the first output, `dtypes` of the operands by name, or the model's
    `opset`.  `sentence` states the requirement, and may show these facts as {name}.

    A parameter may also be one of the functions in guards.RELATIONS, such as is_multiple(a, b), which returns whether
    operand a is operand b times a constant.

    The parameter `joined` is true if elementwise operators that follow, or a norm that comes first, will join the fused
    node (see `epilogue` and `prologue` in `fusion`).  A fusion whose condition names `joined` is first tried with
    False.  It is tried once more, with True, on nodes that operators or a norm could join.
    """
    if not _guards:
        raise PatternError(f"{here()}: require() stands outside a fusion's body")
    _guards[-1].append(Guard(sentence, holds, here()))


def fusion(
    *,
    out: str | tuple[str, ...],
    casts: bool = False,
    last: bool = False,
    channels_last: Sequence[str] = (),
    epilogue: bool | Literal["nhwc"] = False,
    prologue: bool = False,
    selection: bool = False,
    example: Mapping[str, ExampleValue] | None = None,
) -> Callable[[Body], Fusion]:
    """Declare a fusion.

    out     dimensions of the output or outputs; further outputs are interior values that other nodes may read, or
            values that share an operand with the first output
    casts   absorb Casts between floating dtypes inside the match: the body states which values are computed in float32
    last    try the fusion only on nodes that other fusions leave, because they may be part of a larger match
    channels_last  the operands of shape (n, channels, spatial axes ...) that become channels-last, together with the
            output, where the layout stage makes a part of the graph channels-last.  The other operands keep their
            layout, and the fused node gets the attribute layout="nhwc".  Without this argument, the fusion keeps its
            layout, and a channels-last part of the graph ends at it
    epilogue  whether elementwise operators that read the first output may join the fused node, with `--epilogues`.  The
            node lists these operators in the attribute `program`.  After its own operands, the node reads the other
            operands of these operators, or the tensors that these operands are views of.  It computes the operators'
            results in place of its first output.  "nhwc": operators join only channels-last nodes
    prologue  whether an RMSNorm that computes the first operand, `x`, may join the fused node, with `--epilogues`, if
            nothing else reads its result, and unless `x` has many rows.  The node's attribute `prologue` then names the
            norm, and the node reads the norm's operands in place of `x` (see kernels/prologue_node.py)
    selection  whether the operators that join with `epilogue` may end in an ArgMax or ArgMin over the last axis, if
            nothing else reads the values before it; its result is then the node's only output
    example  shapes of operands that neither `dims` nor a rearrange() gives, or names of their axes, and values for
            attributes, for generated models: {"x": (2, 4, 6, 6), "w": (6, 4, 3, 3), "scales": "n blocks",
            "strides": [2, 1]}

    Raises PatternError where the declaration is wrong.
    """

    def declare(function: Body) -> Fusion:
        span = _span_of(function)
        captures = _captures_of(function, span)
        with _collected_guards() as guards:
            result = function(*captures)
        outputs = result if isinstance(result, tuple) else (result,)
        names = out if isinstance(out, tuple) else (out,)
        _check_outputs(outputs, names, f"{span}: '{function.__name__}'")
        return Fusion(
            function.__name__, inspect.getdoc(function) or "", captures, outputs, names, tuple(guards), casts,
            function, span, _checked_example(example or {}, captures, span), last,
            _checked_images(channels_last, captures, len(outputs), span), epilogue, prologue, selection,
        )  # fmt: skip

    return declare


def rewrite(
    *, out: str = "...", of_scores: bool = False, example: Mapping[str, ExampleValue] | None = None
) -> Callable[[Callable[..., Rules]], tuple[Rewrite, ...]]:
    """Declare rewrite rules by a generator of pairs: a left side to match, and a right side that replaces it.

    Both sides must compute the same wherever the left side matches and its conditions hold.  Rules match as fusions do:
    no value between the operands and the result may have other readers, unless it is `shared`.  The right side may use
    `computed` numbers.  A condition of one pair is a `when` on its left side.

    out      dimensions of the result, as in `fusion`
    of_scores  the rule holds for finite scores only, and applies where the result can become part of an attention
    example  shapes of operands, for generated models, as in `fusion`

    Raises PatternError where the declaration is wrong.
    """

    def declare(function: Callable[..., Rules]) -> tuple[Rewrite, ...]:
        span = _span_of(function)
        captures = _captures_of(function, span)
        with _collected_guards() as guards:
            pairs = [(left, as_term(right)) for left, right in function(*captures)]
        shapes = _checked_example(example or {}, captures, span)
        doc = inspect.getdoc(function) or ""
        return tuple(
            Rewrite(
                Fusion(
                    function.__name__, doc, _captures_in(left, captures), (left,), (out,), tuple(guards), False,
                    function, span, shapes,
                ),
                right,
                of_scores,
            )
            for left, right in pairs
        )  # fmt: skip

    return declare


@contextmanager
def _collected_guards() -> Iterator[list[Guard]]:
    """Collect the guards that calls of `require` declare within the context."""
    _guards.append([])
    try:
        yield _guards[-1]
    finally:
        _guards.pop()


def _check_outputs(outputs: Sequence[Term], names: Sequence[str], where: str) -> None:
    """Raise PatternError if outputs do not fit their names, or if only some of them are made by `results`."""
    if len(outputs) != len(names):
        raise PatternError(f"{where} returns {len(outputs)} values, out= names {len(names)}")
    results = [(each.index, each.count) for each in outputs if isinstance(each, Output)]
    is_within = any(isinstance(term, Output) for term in walk(*outputs))
    if is_within and results != [(i, len(outputs)) for i in range(len(outputs))]:
        raise PatternError(f"{where} has results() outside another value of stored(); they may also be all outputs, "
                           "in order")  # fmt: skip


def _captures_in(left: Term, captures: Sequence[Capture]) -> tuple[Capture, ...]:
    """Return the parameters that occur in the left side of a rule, as operands or as attributes."""
    terms = list(walk(left))
    present = {id(term) for term in terms} | {id(each) for term in terms for each in term.attribute_captures}
    return tuple(capture for capture in captures if id(capture) in present)


def _span_of(function: Callable[..., object]) -> Span:
    code = function.__code__
    return Span(code)


def _captures_of(function: Callable[..., object], span: Span) -> tuple[Capture, ...]:
    return tuple(_named(name, p.default, span) for name, p in inspect.signature(function).parameters.items())


def _named(name: str, capture: object, span: Span) -> Capture:
    if not isinstance(capture, Capture):
        raise PatternError(f"{span}: parameter '{name}' needs a default: tensor(), weight(), scalar() or attribute()")
    return replace(capture, name=name)


def _checked_example(
    example: Mapping[str, ExampleValue], captures: tuple[Capture, ...], span: Span
) -> Mapping[str, ExampleValue]:
    unknown = sorted(example.keys() - {c.name for c in captures})
    if unknown:
        raise PatternError(f"{span}: example= names '{unknown[0]}', which is not a parameter")
    return example


def _checked_images(names: Sequence[str], captures: tuple[Capture, ...], outputs: int, span: Span) -> tuple[str, ...]:
    """Return the names in `channels_last`.  Raises PatternError unless all are tensors and there is one output."""
    tensors = {capture.name for capture in captures if capture.kind == "tensor"}
    for name in names:
        if name not in tensors:
            raise PatternError(f"{span}: channels_last= names '{name}', which no parameter declares with tensor()")
    if names and outputs > 1:
        raise PatternError(f"{span}: channels_last= is for fusions of one output; this one has {outputs}")
    return tuple(names)
