"""The pattern language: a fusion is one function; its signature is the fused operator, its body the subgraph replaced.

The function runs once, on terms.  Operators mean the mathematics (`a * b * c` is a product in any order and grouping,
`x / y` may be a Div or a product with the reciprocal, `x**2` may be a Mul), `op.Name(...)` means that ONNX operator in
whatever form its opset gives it.  The words below say the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import onnx.defs

from onnxfuse.errors import PatternError
from onnxfuse.language.spans import Span, here
from onnxfuse.language.terms import (
    Apply,
    Capture,
    Causal,
    Choose,
    Either,
    Filled,
    Fusion,
    Given,
    Guard,
    Number,
    Operand,
    Output,
    Part,
    Precision,
    Rearrange,
    Scaled,
    Shared,
    Size,
    Stored,
    Term,
    as_term,
    walk,
)

__all__ = [
    "Fusion",
    "Term",
    "attribute",
    "causal",
    "choose",
    "contrib",
    "either",
    "filled",
    "fusion",
    "given",
    "narrow",
    "op",
    "part",
    "rearrange",
    "require",
    "results",
    "scalar",
    "scaled",
    "shared",
    "size",
    "stored",
    "tensor",
    "weight",
    "wide",
]

_guards: list[list[Guard]] = []


# --- words for captures ------------------------------------------------------------------------------------------


def tensor(dims: str | None = None, *, optional: bool = False) -> Any:
    """An input of the fused operator.

    `dims` names its axes, for example "... d": a name stands for one size throughout the fusion, "..." for any
    leading axes (the same throughout), `name?` for that size, 1, or an axis that is not there, and a number for itself.
    """
    return Capture(kind="tensor", dims=dims, optional=optional, span=here())


def weight(dims: str | None = None, *, optional: bool = False) -> Any:
    """An input of the fused operator that is a constant of the model."""
    return Capture(kind="weight", dims=dims, optional=optional, span=here())


def scalar(*, default: Number | None = None, optional: bool = False) -> Any:
    """A number: a constant of one element, or an operator's attribute; becomes an attribute of the fused node."""
    return Capture(kind="scalar", default=default, optional=optional or default is not None, span=here())


def attribute(*, default: Any = None) -> Any:
    """An operator's attribute of whatever value, handed through to the fused node."""
    return Capture(kind="attribute", default=default, optional=True, span=here())


# --- words for values --------------------------------------------------------------------------------------------


class _Operators:
    """`op.Name(inputs …, attribute=…)` is the operator `Name` of a domain; an input None is left out."""

    def __init__(self, domain: str = "") -> None:
        self._prefix = f"{domain}::" if domain else ""

    def __getattr__(self, name: str) -> Callable[..., Term]:
        def apply(*inputs: Operand | None, **attributes: Any) -> Term:
            if not self._prefix:
                _check_operator(name)
            return Apply(
                op=self._prefix + name, inputs=tuple(map(as_term, inputs)), attributes=attributes, span=here()
            )

        return apply


def _check_operator(name: str) -> None:
    """Raise PatternError, with the nearest name, unless an opset of the ONNX domain has this operator."""
    if not onnx.defs.has(name):
        near = get_close_matches(name, {s.name for s in onnx.defs.get_all_schemas() if not s.domain}, 1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise PatternError(f"{here()}: ONNX has no operator '{name}'{hint}")


op = _Operators()
contrib = _Operators("com.microsoft")


def either(*options: Term) -> Term:
    """Spellings of one value; the first that an opset can express is the one that is stored."""
    return Either(options=options, span=here())


def choose(name: str, **options: Term) -> Term:
    """Variants of the fused operator, tried in order; the one found is recorded as attribute `name`."""
    return Choose(name=name, options=options, span=here())


def rearrange(value: Term, pattern: str) -> Term:
    """`value` with its axes rearranged, as in einops: "b s (h d) -> b h s d"; a name new on the right repeats.

    Matches any chain of Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Expand that does the same.
    """
    return Rearrange(inner=value, pattern=pattern, span=here())


def part(value: Term, name: str) -> Term:
    """Inside rearrange(): `value`, or a part of it that Slices, Splits or Gathers take from its last axis.

    Of a last axis "(a b)" each of the `a` runs of `b` elements may be one of several that lie there side by side.
    Where something is left out, the attribute `<name>_offset` says how many elements of the axis come before the first
    one, and `<name>_pitch` how many lie from the beginning of one run to that of the next, where it is not `b`; the
    axis has `<name>_blocks` blocks of so many elements.
    """
    return Part(inner=value, name=name, span=here())


def scaled(value: Term, scale: Term) -> Term:
    """`value * scale`, where factors may stand on either side of the MatMul and of rearrangements inside."""
    if not isinstance(scale, Capture) or scale.kind != "scalar":
        raise PatternError(f"{here()}: scaled() needs a scalar parameter as its second argument")
    return Scaled(inner=value, scale=scale, span=here())


def shared(value: Term) -> Term:
    """A value that others may read too; its nodes stay for them."""
    return Shared(inner=value, span=here())


def causal(written: Term, dims: str, score: Any = None) -> Term:
    """A tensor of the dimensions `dims`, "queries keys", that is true up to the diagonal at which both end.

    Query i of q sees the keys up to i + k - q of k.  With a scalar parameter `score` the tensor is 0 where a key is
    seen, and `score` elsewhere.  Matches any tensor that holds this, however it is computed; `written` is how it is
    stored.
    """
    return Causal(inner=written, dims=dims, score=score, span=here())


def wide(value: Term) -> Term:
    """`value` in float32, whatever its dtype is."""
    return Precision(inner=value, span=here())


def narrow(value: Term, like: Term) -> Term:
    """`value` in the dtype of `like`."""
    return Precision(inner=value, like=like, span=here())


def given(value: Term, sentence: str, holds: Callable[..., bool]) -> Term:
    """`value`, as a spelling or variant that counts only where `holds(...)` is true; see `require`."""
    span = here()
    return Given(inner=value, guard=Guard(sentence, holds, span), span=span)


def stored(value: Term, *, ort: Term) -> Term:
    """`value`, written as `ort` (which may use com.microsoft operators) where the file is for onnxruntime only."""
    return Stored(inner=value, ort=ort, span=here())


def results(node: Term, count: int) -> tuple[Term, ...]:
    """The outputs of an operator that has several, all of one dtype; only in what is stored(ort=...)."""
    if not isinstance(node, Apply):
        raise PatternError(f"{here()}: results() needs an operator as its first argument")
    return tuple(Output(inner=node, place=place, count=count, span=here()) for place in range(count))


def filled(value: Number, dims: str) -> Any:
    """A constant with these dimensions (named as in `tensor`) whose elements all are `value`."""
    return Filled(value=value, dims=dims, span=here())


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
        raise PatternError(f"{here()}: require() stands outside a fusion's body")
    _guards[-1].append(Guard(sentence, holds, here()))


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
        if any(isinstance(term, Output) for term in walk(*outputs)):
            raise PatternError(f"{span}: '{function.__name__}' has results() outside stored(ort=...)")
        return Fusion(
            function.__name__, inspect.getdoc(function) or "", captures, outputs, names, tuple(guards), casts,
            inspect.getsource(function), span, _known(example or {}, captures, span), last,
        )

    return declare


def _named(name: str, capture: Any, span: Span) -> Capture:
    if not isinstance(capture, Capture):
        raise PatternError(f"{span}: parameter '{name}' needs a default: tensor(), weight(), scalar() or attribute()")
    return replace(capture, name=name)


def _known(example: Mapping[str, Any], captures: tuple[Capture, ...], span: Span) -> Mapping[str, Any]:
    unknown = sorted(example.keys() - {c.name for c in captures})
    if unknown:
        raise PatternError(f"{span}: example= names '{unknown[0]}', which is no parameter")
    return example
