"""The words of the pattern language: functions that patterns use in addition to Python's operators.

A word is one function.  A word with a new meaning also has a class of terms next to it, which says how the word is
matched and written (see terms.py).  A word that is listed in `__all__` is exported by onnxfuse and onnxfuse.dsl.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Protocol

import onnx.defs
from onnx import TensorProto

from onnxfuse.algebra.sizes import Dim, symbol
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.spans import here
from onnxfuse.dsl.terms import (
    Alternatives,
    Apply,
    AttributeValue,
    Capture,
    Either,
    Literals,
    Matching,
    Number,
    Operand,
    OperatorSet,
    PackedSlice,
    PlainValue,
    Rearrange,
    StateT,
    TensorT,
    Term,
    Value,
    Wrapper,
    Writing,
    as_term,
    union,
)
from onnxfuse.errors import PatternError

__all__ = [
    "Term",
    "attribute",
    "cast_like",
    "causal",
    "choose",
    "contrib",
    "either",
    "float32",
    "full",
    "op",
    "or_zeros",
    "packed_slice",
    "rearrange",
    "results",
    "scalar",
    "scaled",
    "shared",
    "size",
    "stored",
    "tensor",
    "unrounded",
    "weight",
    "when",
]

# --- parameters of the fused operator ----------------------------------------------------------------------------


def tensor(dims: str | None = None, *, optional: bool = False) -> Capture:
    """Declare an input of the fused operator.

    `dims` names its axes, for example "... d": a name stands for one size throughout the fusion, "..." for any leading
    axes (the same throughout), and a number for an axis of that size.  A "?" after a name (`name?`) means that the axis
    has the named size or size 1, or is missing; `1?` means that it has size 1 or is missing.  `name??` also matches an
    axis of any symbolic size that broadcasts to an axis over which a product of the fusion sums: the model then runs
    only if the symbolic size equals the named size or 1.  Without `dims`, a rearrange() of the tensor names the
    axes.  Raises PatternError if `dims` has anything else.
    """
    _check_dims(dims)
    return Capture(kind="tensor", dims=dims, optional=optional, span=here())


def weight(dims: str | None = None, *, optional: bool = False) -> Capture:
    """Declare an input of the fused operator that must be a constant of the model; `dims` is as in `tensor`."""
    _check_dims(dims)
    return Capture(kind="weight", dims=dims, optional=optional, span=here())


def _check_dims(dims: str | None) -> None:
    for axis in (dims or "").split():
        name = axis.removesuffix("?").removesuffix("?")
        if not (axis in ("...", "1?") or axis.isdecimal() or name.isidentifier()):
            raise PatternError(
                f"{here()}: \"{dims}\" has '{axis}'; required names of axes, numbers or '...'. Leave the text out "
                "where a rearrange() of the tensor tells its axes"
            )


def scalar(*, if_absent: Number | None = None, optional: bool = False) -> Capture:
    """Declare a number, which becomes an attribute of the fused node.

    In the model it is a constant of one element, or an operator's attribute.  A model without this number matches only
    with `optional=True`, where the fused node has no such attribute, or with `if_absent=1e-5`, where the attribute is
    1e-5.  Choose `if_absent` so that the spellings without a number compute the same as the others with `if_absent`.
    """
    return Capture(kind="scalar", if_absent=if_absent, optional=optional or if_absent is not None, span=here())


def attribute(*, if_absent: PlainValue | None = None) -> Capture:
    """Declare an operator's attribute of any value, which becomes an attribute of the fused node.

    If the operator lacks the attribute, the fused node has the value `if_absent`, or no such attribute if that is None.
    """
    return Capture(kind="attribute", if_absent=if_absent, optional=True, span=here())


# --- operators ---------------------------------------------------------------------------------------------------


class _Operator(Protocol):
    """The type of `op.Name`: a function from inputs and attributes to the term of that operator."""

    def __call__(self, *inputs: Operand | None, **attributes: AttributeValue) -> Apply: ...


class _Operators:
    """The operators of a domain: `op.Name(inputs …, attribute=…)` is a term of `Name`; inputs of None are left out."""

    def __init__(self, domain: str = "") -> None:
        self._prefix = f"{domain}::" if domain else ""

    def __getattr__(self, name: str) -> _Operator:
        def apply(*inputs: Operand | None, **attributes: AttributeValue) -> Apply:
            if not self._prefix:
                _check_operator(name)
            return Apply(op=self._prefix + name, inputs=tuple(map(as_term, inputs)), attributes=attributes, span=here())

        return apply


def _check_operator(name: str) -> None:
    """Raise PatternError, with the nearest name, unless an opset of the ONNX domain has this operator."""
    if not onnx.defs.has(name):
        near = get_close_matches(name, {s.name for s in onnx.defs.get_all_schemas() if not s.domain}, 1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise PatternError(f"{here()}: ONNX has no operator '{name}'{hint}")


op = _Operators()
contrib = _Operators("com.microsoft")


@dataclass(frozen=True, eq=False, kw_only=True)
class Output(Term):
    """The output `index` of the `count` outputs of an operator or of the one that `choose` found."""

    inner: Term
    index: int
    count: int

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.inner,)

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_output(self.inner, self.index, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.write_output(self.inner, self.index, self.count)


def results(node: Term, count: int) -> tuple[Output, ...]:
    """Return the `count` outputs of one operator, or of the operator that `choose` finds.

    Use the outputs in one of two ways: return all of them, in order, as the outputs of a fusion, or use them inside the
    `ort` or `standard` term of stored().
    """
    choices = node.options if isinstance(node, Choose) else (node,)
    if not all(isinstance(choice, Apply) for choice in choices):
        raise PatternError(f"{here()}: results() needs an operator, or a choice of operators, as its first argument")
    return tuple(Output(inner=node, index=index, count=count, span=here()) for index in range(count))


def size(name: str) -> Dim:
    """Return the size of a named dimension, for use in an operator's attribute: `starts=[size("d") // 2]`.

    If the size is a whole attribute (`num_groups=size("groups")`), and nothing else in the match determines the size,
    the value of the model's attribute determines it.
    """
    return symbol(name)


# --- spellings and variants --------------------------------------------------------------------------------------


def either(*options: Term) -> Term:
    """Return a value with several spellings; the fused node's function has the first one that the opset can express."""
    return Either(options=options, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Choose(Alternatives):
    """Variants of the fused operator; the label of the one that matches becomes the fused node's attribute `name`."""

    name: str

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        """Match the variants in order; they exclude each other, so none is tried after the first that matches."""
        known = state.choices.get(self.name)
        for index in m.fitting(self, tensor):
            if known is not None and known != self.labels[index]:
                continue
            fits = False
            chosen = state if known else state.with_choice(self.name, self.labels[index])
            for after in m.match_option(self.options[index], tensor, chosen):
                fits = True
                yield after
            if fits:
                return

    def can_write(self, body: Writing) -> bool:
        return body.can_write(self.labelled(body.label(self.name)))

    def write(self, body: Writing) -> Value:
        return body.value(self.labelled(body.label(self.name)))


def choose(name: str, **options: Term) -> Term:
    """Return a value that differs between variants of the fused operator; the options are tried in order.

    The label of the option that matches becomes the attribute `name` of the fused node.
    """
    return Choose(name=name, options=tuple(options.values()), labels=tuple(options), span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class When(Wrapper):
    """A value under a condition on captured values."""

    guard: Guard

    @property
    def guards(self) -> tuple[Guard, ...]:
        return (self.guard,)

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        if self.guard.is_known_first and not m.holds(self.guard, state):
            return
        for after in m.match(self.inner, tensor, state):
            if m.holds(self.guard, after, self):
                yield after

    def can_write(self, body: Writing) -> bool:
        return body.holds(self.guard) and body.can_write(self.inner)


def when(value: Term, sentence: str, holds: Callable[..., bool]) -> Term:
    """Return `value` as a spelling or variant that matches only if `holds(...)` is true; see `require`."""
    span = here()
    return When(inner=value, guard=Guard(sentence, holds, span), span=span)


# --- axes and factors --------------------------------------------------------------------------------------------


def rearrange(value: Term, pattern: str) -> Term:
    """Return `value` with its axes rearranged, as in einops: "b s (h d) -> b h s d"; a name only on the right repeats.

    Matches any chain of Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Expand that does the same.
    """
    return Rearrange(inner=value, pattern=pattern, span=here())


def packed_slice(value: Term, name: str) -> Term:
    """Return, inside rearrange(), `value` or a slice of it that Slices, Splits or Gathers take from its last axis.

    If the last axis is "(a b)", a slice consists of `a` runs of `b` elements, with equal gaps or none between the runs.
    Attributes of the fused node describe the place of a slice: `<name>_offset` is the number of elements on the axis
    before the first run.  If there are gaps, `<name>_pitch` is the distance in elements between the starts of two runs,
    and `<name>_blocks` is the number of blocks of `<name>_pitch` elements on the axis.
    """
    return PackedSlice(inner=value, name=name, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Scaled(Term):
    """A value times a scalar; the model can apply factors of the scalar anywhere in the (bi)linear expression."""

    inner: Term
    scale: Capture

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.inner, self.scale

    @functools.cached_property
    def root_ops(self) -> frozenset[str] | None:
        return union([self.inner.root_ops, frozenset(["Mul", "Div"])])

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_scaled(self, self.inner, self.scale, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.write_scaled(self.inner, self.scale.name)


def scaled(value: Term, scale: Term) -> Term:
    """Return `value * scale`; the model can apply factors of `scale` before or after a MatMul and rearrangements."""
    if not isinstance(scale, Capture) or scale.kind != "scalar":
        raise PatternError(f"{here()}: scaled() needs a scalar parameter as its second argument")
    return Scaled(inner=value, scale=scale, span=here())


# --- constants ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Full(Term):
    """A constant of the model whose elements are all the same number."""

    value: Number
    dims: str
    is_leaf: ClassVar[bool] = True

    @property
    def dim_specs(self) -> tuple[str, ...]:
        return (self.dims,)

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_full(self, self.value, self.dims, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.constant(body.full(self.value, self.dims), TensorProto.FLOAT)

    def number(self, body: Writing) -> Literals | None:
        return body.full(self.value, self.dims)


def full(value: Number, dims: str) -> Term:
    """Return a constant with these dimensions (named as in `tensor`) whose elements are all `value`."""
    return Full(value=value, dims=dims, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Causal(Term):
    """Any tensor with the contents of `inner`: true (or 0) up to a diagonal, false (or `score`) above it."""

    inner: Term
    dims: str
    score: Capture | None
    is_leaf: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self.inner,)

    @functools.cached_property
    def needed_ops(self) -> frozenset[frozenset[str]]:
        return frozenset()

    def _count_nodes(self, choices: object, seen: object) -> int:
        return 0

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return m.match_causal(self, self.dims, self.score, tensor, state)

    def write(self, body: Writing) -> Value:
        return body.value(self.inner)


def causal(written: Term, dims: str, score: Term | None = None) -> Term:
    """Return a causal mask with `dims` "queries keys": true up to the diagonal that ends at the last query and key.

    Of q queries and k keys, query i sees the keys up to i + k - q.  With a scalar parameter `score`, the tensor is 0
    where a key is seen, and `score` elsewhere.  Matches any tensor with these contents, however it is computed; the
    body (the ONNX function of the fused operator) computes it as `written`.
    """
    if score is not None and not isinstance(score, Capture):
        raise PatternError(f"{here()}: causal() needs a scalar parameter as its third argument")
    return Causal(inner=written, dims=dims, score=score, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Computed(Term):
    """A number that is computed from scalars of the match; only on the right side of a rewrite rule."""

    compute: Callable[..., float]

    def number(self, body: Writing) -> Literals:
        return self.compute(**{name: body.scalar(name) for name in inspect.signature(self.compute).parameters})

    def write(self, body: Writing) -> Value:
        return body.constant(self.number(body), TensorProto.FLOAT)


def computed(compute: Callable[..., float]) -> Term:
    """Return, on the right side of a rewrite rule, a number computed from the scalars that `compute` names.

    The result is used like a number: as an operand, `x * computed(lambda scale: 1 / scale)`, or as an attribute.
    """
    return Computed(compute=compute, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class OrZeros(Wrapper):
    """An optional operand, or zeros of the dtype of `like`."""

    operand: Capture
    like: Term
    zeros: str  # the dimensions of the zeros

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        return iter((state,)) if m.is_zero(tensor) else m.match(self.inner, tensor, state)

    def can_write(self, body: Writing) -> bool:
        return True

    def write(self, body: Writing) -> Value:
        if body.has(self.operand):
            return body.value(self.operand)
        return body.constant(body.full(0, self.zeros), body.value(self.like).dtype)


def or_zeros(operand: Term, like: Term, dims: str | None = None) -> Term:
    """Return an optional operand that also matches zeros: the fused node then lacks it, as if the model did.

    The body then has zeros of the dtype of `like` and of the dimensions `dims`, by default those of the operand.  The
    operator that reads the operand must treat an omitted operand as 0.
    """
    if not isinstance(operand, Capture) or not operand.optional:
        raise PatternError(f"{here()}: or_zeros() needs an optional parameter as its first argument")
    zeros = operand.dims or "" if dims is None else dims
    return OrZeros(inner=operand, operand=operand, like=like, zeros=zeros, span=here())


# --- remarks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared(Wrapper):
    """A value that nodes outside the fusion are allowed to read; the nodes that compute it stay in the graph."""

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        for after in m.match(self.inner, tensor, state):
            yield after.keep_nodes_since(state)


def shared(value: Term) -> Term:
    """Return a value that nodes outside the fusion may read too; the nodes that compute it stay in the graph."""
    return Shared(inner=value, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Known(Wrapper):
    """An operand that matches only if the graph computes it as `inner`; the nodes that do so stay in the graph."""

    operand: Capture

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.inner, self.operand

    @property
    def unwrapped(self) -> Term:
        return self

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        for after in m.match(self.inner, tensor, state):
            yield from m.match(self.operand, tensor, after.keep_nodes_since(state))

    def can_write(self, body: Writing) -> bool:
        return body.can_write(self.operand) or body.can_write(self.inner)

    def write(self, body: Writing) -> Value:
        return body.value(self.operand if body.has(self.operand) else self.inner)


def known(operand: Term, value: Term) -> Term:
    """Return a rule's operand that matches only if the graph computes it as `value`; these nodes stay in the graph."""
    if not isinstance(operand, Capture):
        raise PatternError(f"{here()}: known() needs a parameter as its first argument")
    return Known(inner=value, operand=operand, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Unrounded(Wrapper):
    """A value that matches only if no Cast to float32 computes it; models may round such a Cast's input on purpose."""

    def match(self, m: Matching[TensorT, StateT], tensor: TensorT, state: StateT) -> Iterator[StateT]:
        if not m.is_widened(self, tensor, state):
            yield from m.match(self.inner, tensor, state)


def unrounded(value: Term) -> Term:
    """Return a value that no Cast to float32 computes, because models may have rounded the Cast's input on purpose."""
    return Unrounded(inner=value, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Precision(Wrapper):
    """A value that the body computes in float32 (`like` None) or casts to `like`'s dtype; matching ignores dtypes."""

    like: Term | None = None

    def write(self, body: Writing) -> Value:
        value = body.value(self.inner)
        return body.cast(value, TensorProto.FLOAT if self.like is None else body.value(self.like).dtype)


def float32(value: Term) -> Term:
    """Return `value` in float32, whatever its dtype is."""
    return Precision(inner=value, span=here())


def cast_like(value: Term, like: Term) -> Term:
    """Return `value` in the dtype of `like`."""
    return Precision(inner=value, like=like, span=here())


@dataclass(frozen=True, eq=False, kw_only=True)
class Stored(Wrapper):
    """A value that matches as `inner`; a body for an operator set in `others` has that term instead, if possible."""

    others: Mapping[OperatorSet, Term]

    def can_write(self, body: Writing) -> bool:
        other = self.others.get(body.operators)
        return (other is not None and body.can_write(other)) or body.can_write(self.inner)

    def write(self, body: Writing) -> Value:
        other = self.others.get(body.operators)
        if other is not None and body.can_write(other):
            return body.value(other)
        if other is not None:
            body.refuse(other)
        return body.value(self.inner)


def stored(value: Term, *, ort: Term | None = None, standard: Term | None = None, every: Term | None = None) -> Term:
    """Return `value`; functions written for some targets compute an equal term in its place, if they can.

    `ort` is for onnxruntime only (`--fallback ort`) and may use com.microsoft operators; `standard` is for
    `--emit standard` and has ONNX's own operator in place of the several operators of `value`.  `every` is for every
    target, where bodies need a spelling that need not match, such as one that reads dynamic sizes from a shape.
    """
    others: dict[OperatorSet, Term | None] = {"onnx": every, "ort": ort or every, "standard": standard or every}
    return Stored(inner=value, others={name: term for name, term in others.items() if term is not None}, span=here())
