"""What a match is: the State on the way, the Match at the end, or the Miss that came nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.spans import Span
from onnxfuse.ir.node import AttributeValue, Node, Tensor

Dims: TypeAlias = Mapping[str, Any]  # a Size by each name, and under "..." the tuple of those that it stands for
CapturedValue: TypeAlias = "AttributeValue | Tensor | None"


class State(NamedTuple):
    """What is captured so far.  It is never changed, so that every way of matching can go on from it."""

    terms: Mapping[int, Tensor] = MappingProxyType({})  # by the term's id
    values: Mapping[str, CapturedValue] = MappingProxyType({})
    operands: Mapping[str, Tensor] = MappingProxyType({})
    dims: Dims = MappingProxyType({})
    choices: Mapping[str, str] = MappingProxyType({})
    nodes: Mapping[int, Node] = MappingProxyType({})  # by the node's id: they will be replaced
    kept: Mapping[int, Node] = MappingProxyType({})  # they are only seen through, and stay for what else reads them
    factor: float | None = None  # the product of the scalars met so far, while inside scaled()

    def with_nodes(self, nodes: Sequence[Node], *, keep: bool = False) -> State:
        """Return the state with more nodes: to be replaced, or (`keep`) only seen through."""
        if not nodes:
            return self
        new = {id(n): n for n in nodes}
        terms, values, operands, dims, choices, old, kept, factor = self
        if keep:
            return State(terms, values, operands, dims, choices, old, {**kept, **new}, factor)
        return State(terms, values, operands, dims, choices, {**old, **new}, kept, factor)

    def keep_nodes_since(self, before: State) -> State:
        """Return the state in which the nodes that were matched since `before` are only seen through."""
        new = [node for key, node in self.nodes.items() if key not in before.nodes]
        return self._replace(nodes=before.nodes).with_nodes(new, keep=True)

    def with_term(self, term: int, tensor: Tensor) -> State:
        """Return the state with the tensor that a term, given by its id, stands for."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State({**terms, term: tensor}, values, operands, dims, choices, nodes, kept, factor)

    def with_operand(self, name: str, tensor: Tensor, dims: Dims) -> State:
        """Return the state with an operand, and with the dimensions that are known then."""
        terms, values, operands, _, choices, nodes, kept, factor = self
        return State(terms, values, {**operands, name: tensor}, dims, choices, nodes, kept, factor)

    def with_choice(self, name: str, label: str) -> State:
        """Return the state with the label of a choice."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State(terms, values, operands, dims, {**choices, name: label}, nodes, kept, factor)


@dataclass(frozen=True)
class Match:
    """A subgraph that the fusion may replace."""

    fusion: Fusion
    outputs: tuple[Tensor, ...]
    operands: Mapping[str, Tensor]
    values: Mapping[str, CapturedValue]
    dims: Dims
    choices: Mapping[str, str]
    nodes: tuple[Node, ...]
    has_side_outputs: bool = False  # whether an output is computed beside the first one: see side_outputs.py


class Miss(NamedTuple):  # most attempts end in one: a NamedTuple is made in a quarter of a frozen dataclass's time
    """Why a fusion does not apply at a tensor: `matched` of about `of` nodes agreed."""

    fusion: Fusion
    node: str
    matched: int
    size: Callable[[], int]
    sentence: Callable[[], str]
    span: Span
    around: tuple[str, ...] = ()  # names of the nodes that agreed
    hint: str = ""  # what the user can change
    complete: bool = False  # all nodes agreed, but replacing them was refused

    @property
    def of(self) -> int:
        """About how many nodes the pattern has, in the variant that came nearest."""
        return max(self.size(), self.matched)

    @property
    def reason(self) -> str:
        """The sentence: subject, what is required, what was found."""
        return self.sentence()
