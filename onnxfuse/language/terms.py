"""What patterns are made of: terms, which mean values, and the fusions that they declare."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from onnxfuse.errors import PatternError
from onnxfuse.language.spans import Span, here

Number: TypeAlias = int | float


@dataclass(frozen=True, eq=False, kw_only=True)
class Term:
    """A value in a pattern.  Terms are compared by identity: one term used twice is one value used twice."""

    span: Span

    def __add__(self, other: Operand) -> Term:
        return Sum(terms=_flat(Sum, self, other), span=here())

    def __radd__(self, other: Operand) -> Term:
        return Sum(terms=_flat(Sum, other, self), span=here())

    def __mul__(self, other: Operand) -> Term:
        return Product(terms=_flat(Product, self, other), span=here())

    def __rmul__(self, other: Operand) -> Term:
        return Product(terms=_flat(Product, other, self), span=here())

    def __sub__(self, other: Operand) -> Term:
        return Apply(op="Sub", inputs=(self, as_term(other)), span=here())

    def __neg__(self) -> Term:
        return Apply(op="Neg", inputs=(self,), span=here())

    def __truediv__(self, other: Operand) -> Term:
        span, divisor = here(), as_term(other)
        if isinstance(divisor, Constant):
            return Product(terms=_flat(Product, self, Constant(value=1 / divisor.value, span=span)), span=span)
        reciprocal = _reciprocal(divisor, span)
        options = (
            Apply(op="Div", inputs=(self, divisor), span=span),
            Product(terms=_flat(Product, self, reciprocal), span=span),
        )
        return Either(options=options, span=span)

    def __rtruediv__(self, other: Operand) -> Term:
        if other != 1:
            return Apply(op="Div", inputs=(as_term(other), self), span=here())
        return _reciprocal(self, here())

    def __pow__(self, exponent: int) -> Term:
        span = here()
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
class Output(Term):
    """One of the `count` outputs of an operator; all have the dtype of the first."""

    inner: Apply
    place: int
    count: int


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
class Part(Term):
    """Inside a Rearrange: its source, or a run of elements on the source's last axis."""

    inner: Term
    name: str


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
class Causal(Term):
    """Any tensor that holds what `inner` does: up to a diagonal true, or 0, and behind it false, or `score`."""

    inner: Term
    dims: str
    score: Capture | None


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

    def __repr__(self) -> str:  # of its terms, which share others, a repr would be without end
        return f"Fusion({self.name})"

    @property
    def operands(self) -> tuple[Capture, ...]:
        """The captures that are tensors: the fused node's inputs, in order."""
        return tuple(c for c in self.captures if c.kind in ("tensor", "weight"))


Operand: TypeAlias = Term | Number


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
        case Stored(inner=inner) | Part(inner=inner) | Causal(inner=inner) | Output(inner=inner):
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


def bare(term: Term) -> Term:
    """The term without the words that matching passes through."""
    while isinstance(term, Shared | Precision | Given | Stored | Part):
        term = term.inner
    return term


# --- making terms ------------------------------------------------------------------------------------------------


def as_term(value: Operand | None) -> Term:
    if isinstance(value, Term):
        return value
    if isinstance(value, int | float):
        return Constant(value=value, span=here())
    if value is None:
        return Absent(span=here())
    raise PatternError(f"{here()}: a pattern is made of terms and numbers, not {type(value).__name__}")


def _flat(kind: type[Sum] | type[Product], *values: Operand) -> tuple[Term, ...]:
    terms: list[Term] = []
    for value in values:
        terms.extend(value.terms if isinstance(value, kind) else (as_term(value),))
    return tuple(terms)


def _reciprocal(value: Term, span: Span) -> Term:
    one = Constant(value=1, span=span)
    options = (Apply(op="Reciprocal", inputs=(value,), span=span), Apply(op="Div", inputs=(one, value), span=span))
    return Either(options=options, span=span)
