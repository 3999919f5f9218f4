"""The grammar of patterns: terms, which represent values, and the protocols by which they are matched and written.

A term defines its parts, the operators that can compute it, how it is matched and how it is written as nodes.  Matching
and writing use the protocols `Matching` and `Writing`, so this package does not depend on graphs.  The terms of
Python's operators, of ONNX operators and of rearrange() are in this file; the other words of the pattern language are
in words.py.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.algebra.operators import COMMUTATIVE, VIEWS
from onnxfuse.algebra.sizes import Dim
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.spans import Span, here
from onnxfuse.errors import PatternError

Number: TypeAlias = int | float
Operand: TypeAlias = "Term | Number"
PlainValue: TypeAlias = int | float | str | list[int] | list[float] | list[str]
AttributeValue: TypeAlias = "Term | Dim | Number | str | Sequence[Number | Dim] | None"
OperatorSet: TypeAlias = Literal["onnx", "ort", "standard"]  # the operators allowed in a body; see words.stored
Literals: TypeAlias = float | NDArray[Any]  # one number, or an array; it takes the dtype of the other operand

# Operators that most models have, or that differ between spellings.  Their absence does not show that nothing matches.
COMMON_OPS = VIEWS | {"Add", "Mul", "Sub", "Div", "Neg", "Cast", "Pow", "Sqrt", "Slice", "Where"}


@dataclass(frozen=True)
class Value:
    """A value in a function body: its name and its TensorProto.DataType."""

    name: str
    dtype: int


# --- protocols of matching and writing -----------------------------------------------------------------------------


class MatchState(Protocol):
    """The state of a match: the values captured so far."""

    @property
    def choices(self) -> Mapping[str, str]:
        """The labels of the options that matched so far, by the names of the choices: see words.choose."""
        ...

    def with_choice(self, name: str, label: str) -> Self:
        """Return the state with one more choice made."""
        ...

    def keep_nodes_since(self, before: Self) -> Self:
        """Return this state with a note: the nodes matched since the state `before` must stay in the graph."""
        ...


TensorT = TypeVar("TensorT", contravariant=True)
StateT = TypeVar("StateT", bound=MatchState)


class Matching(Protocol[TensorT, StateT]):
    """The methods of the matcher that terms call while they are matched."""

    def match(self, term: Term, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a tensor against a term; yield the state after each possible way to match."""
        ...

    def match_option(self, term: Term, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match an option that `fitting` returned, as `match` does."""
        ...

    def fitting(self, term: Alternatives, tensor: TensorT) -> Sequence[int]:
        """Return the indices of the options that can end with the operator that computes the tensor."""
        ...

    def holds(self, guard: Guard, state: StateT, term: Term | None = None) -> bool:
        """Return whether a condition holds in the state; if not, record why `term`, if given, does not match."""
        ...

    def match_absent(self, term: Absent, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match an input that is left out."""
        ...

    def match_capture(self, term: Capture, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a parameter of the fused operator."""
        ...

    def match_constant(self, term: Constant, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a number that the pattern states."""
        ...

    def match_operator(self, term: Apply, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match an operator with its inputs and attributes."""
        ...

    def match_output(self, operator: Term, index: int, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match the output `index` of an operator."""
        ...

    def match_associative(self, term: Sum | Product, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a sum or product in any order and grouping."""
        ...

    def match_rearrange(self, term: Rearrange, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match the inner term with its axes rearranged.

        If the inner term is a PackedSlice, a slice of it matches, too; attributes of the fused node describe the slice.
        """
        ...

    def match_scaled(self, term: Term, inner: Term, scale: Capture, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match `inner` times a scalar; the model can apply factors of the scalar anywhere in the expression."""
        ...

    def match_full(self, term: Term, value: Number, dims: str, tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a constant of these dimensions whose elements are all `value`."""
        ...

    def match_causal(
        self, term: Term, dims: str, score: Capture | None, tensor: TensorT, state: StateT
    ) -> Iterator[StateT]:
        """Match a causal mask of the dimensions `dims`: a boolean mask or, with `score`, an additive one."""
        ...

    def is_zero(self, tensor: TensorT) -> bool:
        """Return whether a tensor is a constant of zeros."""
        ...

    def is_widened(self, term: Term, tensor: TensorT, state: StateT) -> bool:
        """Return whether a tensor is the result of a Cast to float32; if so, record why the term does not match it."""
        ...


class Writing(Protocol):
    """The methods of a function body that terms call while they are written into it.

    A body is written for one variant of the fused operator: its dtypes, and the label of each choice.
    """

    @property
    def opset(self) -> int:
        """The ONNX opset of the body."""
        ...

    @property
    def operators(self) -> OperatorSet:
        """The set of operators that are allowed in the body."""
        ...

    def refuse(self, term: Term) -> None:
        """Record that a term is preferred, but cannot be written."""
        ...

    def value(self, term: Term) -> Value:
        """Return the value of a term; the first call for a term adds its nodes."""
        ...

    def can_write(self, term: Term) -> bool:
        """Return whether the opset has the operators of a term and the operands that it needs are present."""
        ...

    def has(self, capture: Capture) -> bool:
        """Return whether an operand is present, or a scalar has a value."""
        ...

    def label(self, choice: str) -> str:
        """Return the label of a choice in this variant."""
        ...

    def holds(self, guard: Guard) -> bool:
        """Return whether a condition is true of the values, sizes and choices of the match that is written."""
        ...

    def select(self, term: Alternatives, options: Sequence[Term]) -> Term:
        """Return the option to write among those that can be written."""
        ...

    def cast(self, value: Value, dtype: int) -> Value:
        """Return the value in another floating dtype; a value that is not of a floating dtype stays as it is."""
        ...

    def constant(self, value: Literals, dtype: int) -> Value:
        """Return the value of a new Constant node."""
        ...

    def scalar(self, name: str) -> float:
        """Return the number of the scalar with this name."""
        ...

    def full(self, value: Number, dims: str) -> NDArray[Any]:
        """Return an array of these dimensions whose elements are all `value`."""
        ...

    def operand(self, name: str) -> Value:
        """Return the value of the operand with this name."""
        ...

    def write_operator(self, term: Apply) -> Value:
        """Add the node of an operator, and return its value."""
        ...

    def write_output(self, operator: Term, index: int, count: int) -> Value:
        """Return the output `index` of the `count` outputs of an operator."""
        ...

    def write_associative(self, op: str, terms: Sequence[Term]) -> Value:
        """Return the terms combined by `op`, from the left."""
        ...

    def write_rearrange(self, term: Rearrange) -> Value:
        """Return the inner term's value, or a slice of this value, with its axes rearranged.

        Raises PatternError if no views compute the result.
        """
        ...

    def write_scaled(self, inner: Term, scale: str) -> Value:
        """Return `inner` times the scalar with the name `scale`."""
        ...

    def can_write_operator(self, term: Apply) -> bool:
        """Return whether the opset has the operator, and its inputs and attributes can be written."""
        ...

    def can_write_rearrange(self, term: Rearrange) -> bool:
        """Return whether the shapes of the views can be written."""
        ...


# --- terms -------------------------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """One way to compute a term: one of `ops` reads all of `parts`, directly or through the operators `between`."""

    ops: frozenset[str]
    parts: tuple[tuple[tuple[Ending, ...], slice], ...] = ()  # by part: its endings, its possible input positions
    between: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, kw_only=True)
class Term:
    """A value in a pattern.  Terms are compared by identity: one term used twice is one value used twice."""

    span: Span
    is_leaf: ClassVar[bool] = False  # whether the term matches the tensor itself, not the tensor before Casts

    # --- how it is read, matched and written ---------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Term, ...]:
        """The terms that this one consists of."""
        return ()

    @property
    def own_ops(self) -> frozenset[str]:
        """The operators that the term itself stands for, without its parts."""
        return frozenset()

    @property
    def own_nodes(self) -> int:
        """The estimated number of nodes that the term itself stands for, without its parts."""
        return 0

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        """The operators that can compute the term; None if any tensor can be the term, as for an operand."""
        return None if self.is_leaf else union([part.root_ops for part in self.parts])

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        """The ways to compute the term; None if `root_ops` is None."""
        return None if self.root_ops is None else (Ending(self.root_ops),)

    @functools.cached_property
    def needed_ops(self) -> frozenset[frozenset[str]]:
        """Sets of operators outside COMMON_OPS; each spelling of the term contains an operator of every set."""
        return frozenset().union(*(part.needed_ops for part in self.parts))

    @property
    def unwrapped(self) -> Term:
        """The term without the wrappers around it."""
        return self

    @property
    def is_optional(self) -> bool:
        """Whether the fusion also matches without the value."""
        return False

    @property
    def dim_specs(self) -> tuple[str, ...]:
        """The texts that name dimensions in this term itself, not in its parts."""
        return ()

    @property
    def attribute_captures(self) -> tuple[Capture, ...]:
        """The parameters of the fused operator that are attributes of this operator."""
        return ()

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions under which this term matches."""
        return ()

    def count_nodes(self, choices: Mapping[str, str], seen: set[int]) -> int:
        """Return about how many nodes the term matches, without the nodes of terms in `seen`.

        Of several spellings, the longest counts; of several variants, the one in `choices`, or else the longest.
        """
        if id(self) in seen:
            return 0
        seen.add(id(self))
        return self._count_nodes(choices, seen)

    @functools.cached_property
    def unshared_count(self) -> int:
        """The number of nodes of the longest form of the term; a part counts again for each place where it occurs."""
        return self.own_nodes + sum(part.unshared_count for part in self.parts)

    def _count_nodes(self, choices: Mapping[str, str], seen: set[int]) -> int:
        return self.own_nodes + sum(part.count_nodes(choices, seen) for part in self.parts)

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match a tensor against this term; yield the state after each possible way to match."""
        raise NotImplementedError(type(self).__name__)

    def can_write(self, body: Writing) -> bool:
        """Return whether the opset and the operands of a function body suffice to write the term as nodes."""
        return all(map(body.can_write, self.parts))

    def write(self, body: Writing) -> Value:
        """Add the term's nodes to the body, and return its value."""
        raise NotImplementedError(type(self).__name__)

    def number(self, body: Writing) -> Literals | None:
        """Return the number or array that the term is in this body; None if nodes compute it."""
        return None

    # --- arithmetic ----------------------------------------------------------------------------------------------

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
            inverse = Constant(value=1 / divisor.value, divisor=divisor.value, span=span)
            return Product(terms=_flat(Product, self, inverse), span=span)
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


def walk(*roots: Term) -> Iterator[Term]:
    """Yield the roots and every term below them, each once, parents first."""
    seen: set[int] = set()
    work = list(reversed(roots))
    while work:
        term = work.pop()
        if id(term) not in seen:
            seen.add(id(term))
            yield term
            work.extend(reversed(term.parts))


def union(sets: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the union of the sets; None if one of them is None."""
    known = [ops for ops in sets if ops is not None]
    return frozenset().union(*known) if len(known) == len(sets) else None


def _computed(parts: Sequence[Term], in_order: bool = False) -> tuple[tuple[tuple[Ending, ...], slice], ...]:
    """Return (endings, slice of inputs) for each part that every match has and that an operator computes.

    The endings are the ways to compute the part, and the slice selects the inputs that can be the part.  With
    `in_order`, part i is input i of the operator or a later one, because attributes of the term can be inputs in the
    model, before this part.  Otherwise, a part can be any input.
    """
    return tuple(
        (part.endings, slice(index if in_order else 0, None))
        for index, part in enumerate(parts)
        if part.endings is not None and not part.is_optional
    )


def smallest(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the set with the fewest operators."""
    return min(sets, key=lambda ops: (len(ops), sorted(ops)))


@dataclass(frozen=True, eq=False, kw_only=True)
class Wrapper(Term):
    """A term for the same value as `inner`, with an additional instruction for matching or for writing."""

    inner: Term

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.inner,)

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        return self.inner.root_ops

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        return self.inner.endings

    @functools.cached_property
    def unwrapped(self) -> Term:
        return self.inner.unwrapped

    @property
    def is_optional(self) -> bool:
        return self.inner.is_optional

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match(self.inner, tensor, state)

    def write(self, body: Writing) -> Value:
        """Write the innermost wrapped term: this wrapper, and wrappers inside it, add nothing to the ONNX function."""
        return body.value(self.unwrapped)

    def number(self, body: Writing) -> Literals | None:
        return self.inner.number(body)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSlice(Wrapper):
    """The operand of a Rearrange: a value, or a slice of the value's last axis."""

    name: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Rearrange(Term):
    """Axes split, merged, permuted and repeated, in einops' notation."""

    inner: Term
    pattern: str

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.inner,)

    @property
    def slice_name(self) -> str | None:
        """The prefix of the attributes that describe a slice; None if the whole inner term is rearranged."""
        return self.inner.name if isinstance(self.inner, PackedSlice) else None

    @property
    def own_ops(self) -> frozenset[str]:
        return VIEWS

    @property
    def own_nodes(self) -> int:
        return 2

    @functools.cached_property
    def changes_rank(self) -> bool:
        """Whether the pattern's sides certainly have different numbers of axes, so that a view computes the term."""
        left, right = (re.sub(r"\(.*?\)", "group", side).split() for side in self.pattern.split("->"))
        more, fewer = (left, right) if len(left) > len(right) else (right, left)
        return len(more) - more.count("...") > len(fewer) and "..." not in fewer

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        return union([self.inner.root_ops, VIEWS])

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        inner = self.inner.endings
        if inner is None:
            return None
        viewed = Ending(VIEWS, ((inner, slice(1)),), VIEWS)
        return (viewed,) if self.changes_rank else (*inner, viewed)

    @property
    def dim_specs(self) -> tuple[str, ...]:
        return (self.pattern,)

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_rearrange(self, tensor, state)

    def can_write(self, body: Writing) -> bool:
        return body.can_write(self.inner) and body.can_write_rearrange(self)

    def write(self, body: Writing) -> Value:
        return body.write_rearrange(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Alternatives(Term):
    """One of several terms; if it has a `name`, the fused node's attribute of that name says which one matched."""

    options: tuple[Term, ...]
    name: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.options

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        each = [option.endings for option in self.options]
        return None if None in each else tuple(itertools.chain(*filter(None, each)))

    @functools.cached_property
    def needed_ops(self) -> frozenset[frozenset[str]]:
        each = [option.needed_ops for option in self.options]
        one_of_each = [frozenset().union(*map(smallest, each))] if all(each) else []
        return frozenset.intersection(*each).union(one_of_each)

    def _count_nodes(self, choices: Mapping[str, str], seen: set[int]) -> int:
        if self.name is not None and self.name in choices:
            return self.labelled(choices[self.name]).count_nodes(choices, seen)
        return max(self.options, key=lambda option: option.unshared_count).count_nodes(choices, seen)

    @functools.cached_property
    def unshared_count(self) -> int:
        return max(option.unshared_count for option in self.options)

    def labelled(self, label: str) -> Term:
        """Return the option with this label."""
        return self.options[self.labels.index(label)]


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture(Term):
    """A parameter of the fused operator.  A scalar or attribute that is absent has the value `if_absent`."""

    kind: Literal["tensor", "weight", "scalar", "attribute"]
    name: str = ""
    dims: str | None = None
    optional: bool = False
    if_absent: PlainValue | None = None
    is_leaf: ClassVar[bool] = True

    @property
    def is_operand(self) -> bool:
        """Whether the parameter is an input of the fused node; the others are attributes."""
        return self.kind in ("tensor", "weight")

    @property
    def is_optional(self) -> bool:
        return self.optional

    @property
    def dim_specs(self) -> tuple[str, ...]:
        return (self.dims,) if self.dims else ()

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_capture(self, tensor, state)

    def can_write(self, body: Writing) -> bool:
        return body.has(self)

    def write(self, body: Writing) -> Value:
        return body.operand(self.name)

    def number(self, body: Writing) -> Literals | None:
        return body.scalar(self.name) if self.kind == "scalar" else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Constant(Term):
    """A number that the model must hold as a constant of one element.

    If a pattern divides by a number, its reciprocal, `value`, is matched as a factor; `divisor` is written in a Div.
    """

    value: Number
    divisor: Number | None = None
    is_leaf: ClassVar[bool] = True

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_constant(self, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.constant(self.value, TensorProto.FLOAT)

    def number(self, body: Writing) -> Literals | None:
        return self.value


@dataclass(frozen=True, eq=False, kw_only=True)
class Absent(Term):
    """An operator's optional input that is left out."""

    is_leaf: ClassVar[bool] = True

    @property
    def is_optional(self) -> bool:
        return True

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_absent(self, tensor, state)

    def can_write(self, body: Writing) -> bool:
        return False

    def write(self, body: Writing) -> Value:
        raise PatternError(f"{self.span}: None is not a value; only an operator's optional input can be None")


def sizes_in(value: object) -> Iterator[Dim]:
    """Yield the sizes in an attribute's value that depend on named dimensions."""
    if isinstance(value, Dim):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sizes_in(item)


@dataclass(frozen=True, eq=False, kw_only=True)
class Apply(Term):
    """An operator with its inputs and attributes; `op` is `Name` in the ONNX domain, else `domain::Name`."""

    op: str
    inputs: tuple[Term, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.inputs

    @property
    def own_ops(self) -> frozenset[str]:
        return frozenset([self.op])

    @property
    def own_nodes(self) -> int:
        return 1

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        return frozenset(["Slice", "Split"]) if self.op == "Slice" else self.own_ops

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        return (Ending(self.root_ops or self.own_ops, _computed(self.parts, self.op not in COMMUTATIVE)),)

    @functools.cached_property
    def needed_ops(self) -> frozenset[frozenset[str]]:
        own = () if self.op in COMMON_OPS else (self.own_ops,)
        return frozenset(own).union(*(part.needed_ops for part in self.parts))

    @property
    def dim_specs(self) -> tuple[str, ...]:
        return tuple(str(found) for value in self.attributes.values() for found in sizes_in(value))

    @property
    def attribute_captures(self) -> tuple[Capture, ...]:
        return tuple(value for value in self.attributes.values() if isinstance(value, Capture))

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_operator(self, tensor, state)

    def can_write(self, body: Writing) -> bool:
        return body.can_write_operator(self)

    def write(self, body: Writing) -> Value:
        return body.write_operator(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Associative(Term):
    """Values that one operator combines, in any order and grouping."""

    terms: tuple[Term, ...]

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.terms

    @property
    def own_nodes(self) -> int:
        return len(self.terms) - 1

    @property
    def has_number(self) -> bool:
        """Whether one of the values is a number: then a Sub may compute a sum with it, or a Div a product with it."""
        return any(isinstance(t, Constant) or (isinstance(t, Capture) and t.kind == "scalar") for t in self.terms)

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        return self.own_ops

    @functools.cached_property
    def endings(self) -> tuple[Ending, ...] | None:
        return (Ending(self.own_ops, _computed(self.parts), self.own_ops),)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sum(_Associative):
    """Values added, in any order and grouping."""

    @property
    def own_ops(self) -> frozenset[str]:
        return frozenset(["Add", "Sub"] if self.has_number else ["Add"])

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_associative(self, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.write_associative("Add", self.terms)


@dataclass(frozen=True, eq=False, kw_only=True)
class Product(_Associative):
    """Values multiplied, in any order and grouping."""

    @property
    def own_ops(self) -> frozenset[str]:
        return frozenset(["Mul", "Div"] if self.has_number else ["Mul"])

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_associative(self, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.write_associative("Mul", self.terms)


@dataclass(frozen=True, eq=False, kw_only=True)
class Either(Alternatives):
    """Several spellings of one value."""

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        for index in m.fitting(self, tensor):
            yield from m.match_option(self.options[index], tensor, state)

    def can_write(self, body: Writing) -> bool:
        return any(map(body.can_write, self.options))

    def write(self, body: Writing) -> Value:
        options = [option for option in self.options if body.can_write(option)]
        if not options:
            raise PatternError(f"{self.span}: no spelling can be written in opset {body.opset}")
        return body.value(body.select(self, options))


# --- making terms ------------------------------------------------------------------------------------------------


def as_term(value: Operand | None) -> Term:
    """Return the term of a value in a pattern: a number is a Constant, None is Absent."""
    if isinstance(value, Term):
        return value
    if isinstance(value, int | float):
        return Constant(value=value, span=here())
    if value is None:
        return Absent(span=here())
    raise PatternError(f"{here()}: a pattern is made of terms and numbers, not {type(value).__name__}")


def _flat(kind: type[_Associative], *values: Operand) -> tuple[Term, ...]:
    terms: list[Term] = []
    for value in values:
        terms.extend(value.terms if isinstance(value, kind) else (as_term(value),))
    return tuple(terms)


def _reciprocal(value: Term, span: Span) -> Term:
    one = Constant(value=1, span=span)
    options = (Apply(op="Reciprocal", inputs=(value,), span=span), Apply(op="Div", inputs=(one, value), span=span))
    return Either(options=options, span=span)
