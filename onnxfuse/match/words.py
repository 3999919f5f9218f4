"""What terms and tensors are called, and how large patterns are."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.language.terms import (
    Absent,
    Apply,
    Capture,
    Causal,
    Choose,
    Constant,
    Either,
    Filled,
    Product,
    Rearrange,
    Scaled,
    Sum,
    Term,
    parts,
)
from onnxfuse.model.graph import Tensor, is_constant, op_of, producer
from onnxfuse.shapes.dims import Size as DimSize

VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity"}


def root_ops(term: Term) -> frozenset[str] | None:
    """The operators that can compute a term; None where any can, or none, as for an operand."""
    match term:
        case Capture() | Constant() | Filled() | Absent() | Causal():
            return None
        case Apply(op="Slice"):
            return frozenset(["Slice", "Split"])
        case Apply(op=op):
            return frozenset([op])
        case Product():
            return frozenset(["Mul", "Div"])
        case Sum():
            return frozenset(["Add", "Sub"])
        case Rearrange(inner=inner):
            inside = root_ops(inner)
            return None if inside is None else inside | VIEWS
        case Scaled(inner=inner):
            inside = root_ops(inner)
            return None if inside is None else inside | {"Mul", "Div"}
    each = [root_ops(part) for part in parts(term)]
    return None if None in each else frozenset().union(*(ops for ops in each if ops is not None))


# Found in most models, or what a spelling goes wrong in: no reason not to look.
COMMON = {"Add", "Mul", "Sub", "Div", "Neg", "Cast", "Pow", "Sqrt", "Slice", "Where"} | VIEWS


@functools.cache
def needed_ops(term: Term) -> frozenset[str]:
    """Operators of which a term contains at least one, however it is spelled; empty where nothing can be said."""
    match term:
        case Causal():
            return frozenset()
        case Apply(op=op):
            return _rarest([*map(needed_ops, parts(term)), frozenset([op])])
        case Either() | Choose():
            each = [needed_ops(part) for part in parts(term)]
            return frozenset().union(*each) if all(each) else frozenset()
        case Sum() | Product():
            own = frozenset(["Mul", "Div"] if isinstance(term, Product) else ["Add", "Sub"])
            return _rarest([*map(needed_ops, parts(term)), own])
        case _:
            return _rarest([needed_ops(part) for part in parts(term)])


def _rarest(sets: Sequence[frozenset[str]]) -> frozenset[str]:
    return min(filter(None, sets), key=lambda ops: (len(ops & COMMON), len(ops)), default=frozenset())


def count(term: Term, choices: Mapping[str, str], seen: set[int] | None = None) -> int:
    """About how many nodes a term stands for: of its longest spelling, and of the chosen variant or the longest."""
    seen = set() if seen is None else seen
    if id(term) in seen:
        return 0
    seen.add(id(term))
    match term:
        case Causal():
            return 0
        case Choose(name=name, options=options) if name in choices:
            return count(options[choices[name]], choices, seen)
        case Either() | Choose():
            return max(count(option, choices, set(seen)) for option in parts(term))
        case Sum(terms=terms) | Product(terms=terms):
            own = len(terms) - 1
        case Rearrange():
            own = 2
        case Apply():
            own = 1
        case _:
            own = 0
    return own + sum(count(part, choices, seen) for part in parts(term))


def origin(tensor: Tensor) -> str:
    """What computes a tensor, in words."""
    node = producer(tensor)
    if node is None:
        return "a constant" if is_constant(tensor) else "a graph input"
    return f"the output of {op_of(node)} '{node.name}'" if node.name else f"the output of {op_of(node)}"


def node_name(tensor: Tensor) -> str:
    """The name of the node that computes a tensor; the tensor's own where it has none."""
    node = producer(tensor)
    return str((node.name if node is not None else "") or tensor.name)


def shape_text(shape: Sequence[DimSize] | None) -> str:
    """A shape for a message."""
    return "unknown rank" if shape is None else ", ".join(map(str, shape))


def spec_text(spec: str, dims: Mapping[str, Any]) -> str:
    """Named dimensions for a message, with the sizes that are bound."""
    return ", ".join(_token_text(token, dims) for token in spec.split())


def _token_text(token: str, dims: Mapping[str, Any]) -> str:
    if token == "..." and token in dims:
        return ", ".join(map(str, dims[token]))
    size = dims.get(token.rstrip("?"))
    return token if size is None else f"{token}={size}"


def number_text(value: Any) -> str:
    """A scalar or attribute for a message."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
