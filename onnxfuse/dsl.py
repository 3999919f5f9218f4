"""The pattern language: a fusion is one function; its signature is the fused operator, its body the subgraph replaced.

The function runs once, on terms.  Operators mean the mathematics (`a * b * c` is a product in any order and grouping,
`x / y` may be a Div or a product with the reciprocal, `x**2` may be a Mul), `op.Name(...)` means that ONNX operator in
whatever form its opset gives it.  The words below say the rest.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TypeAlias

from onnxfuse.errors import PatternError

Number: TypeAlias = int | float


@dataclass(frozen=True)
class Span:
    """A place in a pattern's source: 1-based line, 0-based columns."""

    file: str
    line: int
    column: int
    end_column: int

    def __str__(self) -> str:
        return f"{Path(self.file).parent.name}/{Path(self.file).name}:{self.line}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Term:
    """A value in a pattern.  Terms are compared by identity: one term used twice is one value used twice."""

    span: Span

    def __add__(self, other: Operand) -> Term:
        return Sum(terms=_flat(Sum, self, other), span=_here())

    def __radd__(self, other: Operand) -> Term:
        return Sum(terms=_flat(Sum, other, self), span=_here())

    def __mul__(self, other: Operand) -> Term:
        return Product(terms=_flat(Product, self, other), span=_here())

    def __rmul__(self, other: Operand) -> Term:
        return Product(terms=_flat(Product, other, self), span=_here())

    def __sub__(self, other: Operand) -> Term:
        return Apply(op="Sub", inputs=(self, _term(other)), span=_here())

    def __neg__(self) -> Term:
        return Apply(op="Neg", inputs=(self,), span=_here())

    def __truediv__(self, other: Operand) -> Term:
        span, divisor = _here(), _term(other)
        if isinstance(divisor, Constant):
            return Product(terms=(self, Constant(value=1 / divisor.value, span=span)), span=span)
        reciprocal = _reciprocal(divisor, span)
        options = (
            Apply(op="Div", inputs=(self, divisor), span=span),
            Product(terms=_flat(Product, self, reciprocal), span=span),
        )
        return Either(options=options, span=span)

    def __rtruediv__(self, other: Operand) -> Term:
        if other != 1:
            return Apply(op="Div", inputs=(_term(other), self), span=_here())
        return _reciprocal(self, _here())

    def __pow__(self, exponent: int) -> Term:
        span = _here()
        power = Apply(op="Pow", inputs=(self, Constant(value=exponent, span=span)), span=span)
        return Either(options=(power, Product(terms=(self,) * exponent, span=span)), span=span)


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture(Term):
    """A parameter of the fused operator."""

    kind: Literal["tensor", "weight", "scalar", "attribute"]
    name: str = ""
    dims: str | None = None
    optional: bool = False
    default: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Constant(Term):
    """A number that the model must hold as a constant of one element."""

    value: Number


@dataclass(frozen=True, eq=False, kw_only=True)
class Filled(Term):
    """A constant of the model whose elements all are one number."""

    value: Number
    dims: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Absent(Term):
    """No value: the place of an operator's optional input that is left out."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Apply(Term):
    """An operator; `Name` of the ONNX domain or `domain::Name`."""

    op: str
    inputs: tuple[Term, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sum(Term):
    """Values added, in any order and grouping."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(Term):
    """Values multiplied, in any order and grouping."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Either(Term):
    """Spellings of one value."""

    options: tuple[Term, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Choose(Term):
    """Variants of the fused operator: which one was found becomes the attribute `name` of the fused node."""

    name: str
    options: Mapping[str, Term]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rearrange(Term):
    """Axes split, merged, permuted and repeated, in einops' notation."""

    inner: Term
    pattern: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Scaled(Term):
    """A value times a scalar, wherever in the (bi)linear expression the factors stand."""

    inner: Term
    scale: Capture


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared(Term):
    """A value that may have readers outside; its nodes stay for them."""

    inner: Term


@dataclass(frozen=True, eq=False, kw_only=True)
class Precision(Term):
    """A value that the body computes in float32 (`like` None) or casts to `like`'s dtype; matching passes through."""

    inner: Term
    like: Term | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Given(Term):
    """A value under a condition on what was captured."""

    inner: Term
    guard: Guard


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored(Term):
    """A value that is matched as `inner`, and stored as `ort` in files for onnxruntime (`--fallback ort`)."""

    inner: Term
    ort: Term


@dataclass(frozen=True)
class Size:
    """A number computed from named dimensions, for use as an operator's attribute."""

    text: str
    compute: Callable[[Mapping[str, Any]], Any]

    def __floordiv__(self, other: int) -> Size:
        return Size(f"{self.text} // {other}", lambda dims: self.compute(dims) // other)

    def __mul__(self, other: int) -> Size:
        return Size(f"{self.text} * {other}", lambda dims: self.compute(dims) * other)


@dataclass(frozen=True)
class Guard:
    """A condition on what was captured; its sentence is the message when it does not hold."""

    sentence: str
    holds: Callable[..., bool]
    span: Span

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The dimensions, scalars, choices and operands that the condition asks for."""
        return tuple(inspect.signature(self.holds).parameters)


@dataclass(frozen=True, eq=False)
class Fusion:
    """A declared fusion: the fused operator's parameters, and the terms of its outputs."""

    name: str
    doc: str
    captures: tuple[Capture, ...]
    outputs: tuple[Term, ...]
    out: tuple[str, ...]
    guards: tuple[Guard, ...]
    casts: bool
    source: str
    span: Span
    example: Mapping[str, Any] = field(default_factory=dict)
    last: bool = False

    @property
    def operands(self) -> tuple[Capture, ...]:
        """The captures that are tensors: the fused node's inputs, in order."""
        return tuple(c for c in self.captures if c.kind in ("tensor", "weight"))


Operand: TypeAlias = Term | Number
_guards: list[list[Guard]] = []


# --- words for captures ------------------------------------------------------------------------------------------


def tensor(dims: str | None = None, *, optional: bool = False) -> Any:
    """An input of the fused operator.

    `dims` names its axes, for example "... d": a name stands for one size throughout the fusion, "..." for any
    leading axes (the same throughout), `name?` for that size, 1, or an axis that is not there, and a number for itself.
    """
    return Capture(kind="tensor", dims=dims, optional=optional, span=_here())


def weight(dims: str | None = None, *, optional: bool = False) -> Any:
    """An input of the fused operator that is a constant of the model."""
    return Capture(kind="weight", dims=dims, optional=optional, span=_here())


def scalar(*, default: Number | None = None, optional: bool = False) -> Any:
    """A number: a constant of one element, or an operator's attribute; becomes an attribute of the fused node."""
    return Capture(kind="scalar", default=default, optional=optional or default is not None, span=_here())


def attribute(*, default: Any = None) -> Any:
    """An operator's attribute of whatever value, handed through to the fused node."""
    return Capture(kind="attribute", default=default, optional=True, span=_here())


# --- words for values --------------------------------------------------------------------------------------------


class _Operators:
    """`op.Name(inputs …, attribute=…)` is the operator `Name` of a domain; an input None is left out."""

    def __init__(self, domain: str = "") -> None:
        self._prefix = f"{domain}::" if domain else ""

    def __getattr__(self, name: str) -> Callable[..., Term]:
        def apply(*inputs: Operand | None, **attributes: Any) -> Term:
            return Apply(
                op=self._prefix + name, inputs=tuple(map(_term, inputs)), attributes=attributes, span=_here()
            )

        return apply


op = _Operators()
contrib = _Operators("com.microsoft")


def either(*options: Term) -> Term:
    """Spellings of one value; the first that an opset can express is the one that is stored."""
    return Either(options=options, span=_here())


def choose(name: str, **options: Term) -> Term:
    """Variants of the fused operator, tried in order; the one found is recorded as attribute `name`."""
    return Choose(name=name, options=options, span=_here())


def rearrange(value: Term, pattern: str) -> Term:
    """`value` with its axes rearranged, as in einops: "b s (h d) -> b h s d"; a name new on the right repeats.

    Matches any chain of Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Expand that does the same.
    """
    return Rearrange(inner=value, pattern=pattern, span=_here())


def scaled(value: Term, scale: Term) -> Term:
    """`value * scale`, where factors may stand on either side of the MatMul and of rearrangements inside."""
    if not isinstance(scale, Capture) or scale.kind != "scalar":
        raise PatternError(f"{_here()}: scaled() needs a scalar parameter as its second argument")
    return Scaled(inner=value, scale=scale, span=_here())


def shared(value: Term) -> Term:
    """A value that others may read too; its nodes stay for them."""
    return Shared(inner=value, span=_here())


def wide(value: Term) -> Term:
    """`value` in float32, whatever its dtype is."""
    return Precision(inner=value, span=_here())


def narrow(value: Term, like: Term) -> Term:
    """`value` in the dtype of `like`."""
    return Precision(inner=value, like=like, span=_here())


def given(value: Term, sentence: str, holds: Callable[..., bool]) -> Term:
    """`value`, as a spelling or variant that counts only where `holds(...)` is true; see `require`."""
    span = _here()
    return Given(inner=value, guard=Guard(sentence, holds, span), span=span)


def stored(value: Term, *, ort: Term) -> Term:
    """`value`, written as `ort` (which may use com.microsoft operators) where the file is for onnxruntime only."""
    return Stored(inner=value, ort=ort, span=_here())


def filled(value: Number, dims: str) -> Any:
    """A constant with these dimensions (named as in `tensor`) whose elements all are `value`."""
    return Filled(value=value, dims=dims, span=_here())


def size(name: str) -> Any:
    """The size of a named dimension, for use in an operator's attribute: `starts=[size("d") // 2]`.

    As a whole attribute (`num_groups=size("groups")`) it names the dimension, if nothing else does.
    """
    return Size(name, lambda dims: dims[name])


def require(sentence: str, holds: Callable[..., bool]) -> None:
    """A condition of the whole fusion.

    `holds` names as parameters the dimensions, scalars, choices and operands that it looks at (an absent operand is
    None), or at dtype and rank of the first output, the dtypes of the operands by name, or the model's opset;
    `sentence` says what is required and may show them as {name}.
    """
    if not _guards:
        raise PatternError(f"{_here()}: require() stands outside a fusion's body")
    _guards[-1].append(Guard(sentence, holds, _here()))


def fusion(
    *,
    out: str | tuple[str, ...],
    casts: bool = False,
    last: bool = False,
    example: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Fusion]:
    """Declare a fusion.

    out     dimensions of the output or outputs; further outputs are interior values that others may read, or values
            beside the first, computed from one of its operands
    casts   Casts between floating dtypes inside are absorbed: the body says what is computed in float32
    last    tried on what the other fusions leave, because its nodes may be part of larger ones that end elsewhere
    example shapes of operands that neither `dims` nor a rearrange() tells, and values for attributes, for generated
            models: {"x": (2, 4, 6, 6), "w": (6, 4, 3, 3), "strides": [2, 1]}
    """

    def declare(function: Callable[..., Any]) -> Fusion:
        code = function.__code__
        span = Span(code.co_filename, code.co_firstlineno, 0, 0)
        captures = tuple(_named(name, p.default, span) for name, p in inspect.signature(function).parameters.items())
        _guards.append([])
        try:
            result = function(*captures)
        finally:
            guards = _guards.pop()
        outputs = result if isinstance(result, tuple) else (result,)
        names = out if isinstance(out, tuple) else (out,)
        if len(outputs) != len(names):
            raise PatternError(f"{span}: '{function.__name__}' returns {len(outputs)} values, out= names {len(names)}")
        return Fusion(
            function.__name__, inspect.getdoc(function) or "", captures, outputs, names, tuple(guards), casts,
            inspect.getsource(function), span, _known(example or {}, captures, span), last,
        )

    return declare


# --- reading terms -----------------------------------------------------------------------------------------------


def parts(term: Term) -> tuple[Term, ...]:
    """The terms that a term is directly made of."""
    match term:
        case Apply(inputs=inputs):
            return inputs
        case Sum(terms=terms) | Product(terms=terms):
            return terms
        case Either(options=options):
            return options
        case Choose(options=options):
            return tuple(options.values())
        case Scaled(inner=inner, scale=scale):
            return inner, scale
        case Rearrange(inner=inner) | Shared(inner=inner) | Precision(inner=inner) | Given(inner=inner):
            return (inner,)
        case Stored(inner=inner):
            return (inner,)
        case _:
            return ()


def walk(*roots: Term) -> Iterator[Term]:
    """Every term below the roots, each once, parents first."""
    seen: set[int] = set()
    work = list(reversed(roots))
    while work:
        term = work.pop()
        if id(term) not in seen:
            seen.add(id(term))
            yield term
            work.extend(reversed(parts(term)))


def core(term: Term) -> Term:
    """The term without the words that matching passes through."""
    while isinstance(term, Shared | Precision | Given | Stored):
        term = term.inner
    return term


# --- making terms ------------------------------------------------------------------------------------------------


def _term(value: Operand | None) -> Term:
    if isinstance(value, Term):
        return value
    if isinstance(value, int | float):
        return Constant(value=value, span=_here())
    if value is None:
        return Absent(span=_here())
    raise PatternError(f"{_here()}: a pattern is made of terms and numbers, not {type(value).__name__}")


def _flat(kind: type[Sum] | type[Product], *values: Operand) -> tuple[Term, ...]:
    terms: list[Term] = []
    for value in values:
        terms.extend(value.terms if isinstance(value, kind) else (_term(value),))
    return tuple(terms)


def _reciprocal(value: Term, span: Span) -> Term:
    one = Constant(value=1, span=span)
    options = (Apply(op="Reciprocal", inputs=(value,), span=span), Apply(op="Div", inputs=(one, value), span=span))
    return Either(options=options, span=span)


def _named(name: str, capture: Any, span: Span) -> Capture:
    if not isinstance(capture, Capture):
        raise PatternError(f"{span}: parameter '{name}' needs a default: tensor(), weight(), scalar() or attribute()")
    return replace(capture, name=name)


def _known(example: Mapping[str, Any], captures: tuple[Capture, ...], span: Span) -> Mapping[str, Any]:
    unknown = sorted(example.keys() - {c.name for c in captures})
    if unknown:
        raise PatternError(f"{span}: example= names '{unknown[0]}', which is no parameter")
    return example


def _here() -> Span:
    """The source place of the pattern's expression that is being evaluated."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return _position(frame.f_code, frame.f_lasti)


def _position(code: CodeType, instruction: int) -> Span:
    for i, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if i == instruction // 2:
            one_line = line == end_line and column is not None and end_column is not None
            return Span(code.co_filename, line or 0, column or 0, (end_column or 0) if one_line else -1)
    return Span(code.co_filename, code.co_firstlineno, 0, -1)
