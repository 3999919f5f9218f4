"""What a match is: the State on the way, the Match at the end, or the Miss that came nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from onnx import TensorProto

from onnxfuse.language.spans import Span
from onnxfuse.language.terms import Fusion
from onnxfuse.model.graph import Node, Tensor

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


class State(NamedTuple):
    """What is captured so far; never changed, so that every way of matching can go on from it."""

    terms: Mapping[int, Tensor] = MappingProxyType({})
    values: Mapping[str, Any] = MappingProxyType({})
    operands: Mapping[str, Tensor] = MappingProxyType({})
    dims: Mapping[str, Any] = MappingProxyType({})
    choices: Mapping[str, str] = MappingProxyType({})
    nodes: Mapping[int, Node] = MappingProxyType({})
    kept: Mapping[int, Node] = MappingProxyType({})
    factor: float | None = None  # the scalars met so far, while inside scaled()

    def with_nodes(self, nodes: Sequence[Node], *, keep: bool = False) -> State:
        """The state with more nodes: to be replaced, or (`keep`) only seen through."""
        if not nodes:
            return self
        new = {id(n): n for n in nodes}
        terms, values, operands, dims, choices, old, kept, factor = self
        if keep:
            return State(terms, values, operands, dims, choices, old, {**kept, **new}, factor)
        return State(terms, values, operands, dims, choices, {**old, **new}, kept, factor)

    def with_term(self, term: int, tensor: Tensor) -> State:
        """The state with what a term stands for."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State({**terms, term: tensor}, values, operands, dims, choices, nodes, kept, factor)

    def with_operand(self, name: str, tensor: Tensor, dims: Mapping[str, Any]) -> State:
        """The state with an operand, and what its dimensions are."""
        terms, values, operands, _, choices, nodes, kept, factor = self
        return State(terms, values, {**operands, name: tensor}, dims, choices, nodes, kept, factor)

    def with_choice(self, name: str, label: str) -> State:
        """The state with the variant that a choice is for."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State(terms, values, operands, dims, {**choices, name: label}, nodes, kept, factor)


@dataclass(frozen=True)
class Match:
    """A subgraph that the fusion may replace, if rewriting finds it legal."""

    fusion: Fusion
    outputs: tuple[Tensor, ...]
    operands: Mapping[str, Tensor]
    values: Mapping[str, Any]
    dims: Mapping[str, Any]
    choices: Mapping[str, str]
    nodes: tuple[Node, ...]
    siblings: bool = False  # whether outputs stand side by side: none is computed from what is inside the other


class Miss(NamedTuple):  # most readings end in one: made in a quarter of the time that a frozen dataclass takes
    """Why a fusion does not apply at a tensor: `matched` of about `of` nodes agreed."""

    fusion: Fusion
    node: str
    matched: int
    size: Callable[[], int]
    sentence: Callable[[], str]
    span: Span
    around: tuple[str, ...] = ()  # names of the nodes that agreed
    hint: str = ""  # what the user can change
    complete: bool = False  # all agreed, but replacing it was refused

    @property
    def of(self) -> int:
        """About how many nodes the pattern has, in the variant that came nearest."""
        return max(self.size(), self.matched)

    @property
    def reason(self) -> str:
        """The sentence: subject, required, found."""
        return self.sentence()
