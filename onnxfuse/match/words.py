"""What terms and tensors are called, and how large patterns are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.dims import Size as DimSize
from onnxfuse.dsl import Apply, Choose, Either, Product, Rearrange, Scaled, Sum, Term, parts
from onnxfuse.graph import Tensor, is_constant, op_of, producer

VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity"}


def root_ops(term: Term) -> set[str]:
    """The operators that can compute a term."""
    match term:
        case Apply(op=op):
            return {op}
        case Product():
            return {"Mul", "Div"}
        case Sum():
            return {"Add", "Sub"}
        case Rearrange(inner=inner):
            return VIEWS | root_ops(inner)
        case Scaled(inner=inner):
            return {"Mul", "Div"} | root_ops(inner)
        case _:
            return set().union(*map(root_ops, parts(term)))


def count(term: Term, choices: Mapping[str, str], seen: set[int] | None = None) -> int:
    """About how many nodes a term stands for: of its longest spelling, and of the chosen variant or the longest."""
    seen = set() if seen is None else seen
    if id(term) in seen:
        return 0
    seen.add(id(term))
    match term:
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
    known = (
        f"{token}={dims[token.rstrip('?')]}" if token.rstrip("?") in dims and token != "..." else token
        for token in spec.split()
    )
    return ", ".join(known)


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
