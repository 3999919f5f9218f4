"""The results of matching: the State during matching, and the Match or the nearest Miss at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.spans import Span
from onnxfuse.ir.node import AttributeValue, Node, Tensor

Dims: TypeAlias = Mapping[str, Any]  # the Size of each name, and the tuple of Sizes that "..." stands for
CapturedValue: TypeAlias = "AttributeValue | Tensor | None"


class State(NamedTuple):
    """The captures so far.  A State is immutable, so that backtracking can continue from it."""

    terms: Mapping[int, Tensor] = MappingProxyType({})  # the tensor of each matched term, by the term's id
    values: Mapping[str, CapturedValue] = MappingProxyType({})
    operands: Mapping[str, Tensor] = MappingProxyType({})
    dims: Dims = MappingProxyType({})
    choices: Mapping[str, str] = MappingProxyType({})
    nodes: Mapping[int, Node] = MappingProxyType({})  # nodes that will be replaced, by their ids
    kept: Mapping[int, Node] = MappingProxyType({})  # nodes that are only looked through, and stay for other readers
    factor: float | None = None  # the product of the scalars met so far, while inside scaled()

    def with_nodes(self, nodes: Sequence[Node], *, keep: bool = False) -> State:
        """Return the state with more nodes that will be replaced or, with `keep`, that are only looked through."""
        if not nodes:
            return self
        new = {id(n): n for n in nodes}
        terms, values, operands, dims, choices, old, kept, factor = self
        if keep:
            return State(terms, values, operands, dims, choices, old, {**kept, **new}, factor)
        return State(terms, values, operands, dims, choices, {**old, **new}, kept, factor)

    def keep_nodes_since(self, before: State) -> State:
        """Return a state in which the nodes matched since the state `before` stay in the graph."""
        new = [node for key, node in self.nodes.items() if key not in before.nodes]
        return self._replace(nodes=before.nodes).with_nodes(new, keep=True)

    def with_term(self, term: int, tensor: Tensor) -> State:
        """Return the state with a tensor bound to a term, which is given by its id."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State({**terms, term: tensor}, values, operands, dims, choices, nodes, kept, factor)

    def with_operand(self, name: str, tensor: Tensor, dims: Dims) -> State:
        """Return the state with an operand, and with `dims` as its dimensions."""
        terms, values, operands, _, choices, nodes, kept, factor = self
        return State(terms, values, {**operands, name: tensor}, dims, choices, nodes, kept, factor)

    def with_choice(self, name: str, label: str) -> State:
        """Return the state in which the choice `name` has this label."""
        terms, values, operands, dims, choices, nodes, kept, factor = self
        return State(terms, values, operands, dims, {**choices, name: label}, nodes, kept, factor)


@dataclass(frozen=True)
class Match:
    """A subgraph that the fusion can replace."""

    fusion: Fusion
    outputs: tuple[Tensor, ...]
    operands: Mapping[str, Tensor]
    values: Mapping[str, CapturedValue]
    dims: Dims
    choices: Mapping[str, str]
    nodes: tuple[Node, ...]
    has_side_outputs: bool = False  # whether an output is a side output: see side_outputs.py


class Miss(NamedTuple):  # most attempts give a Miss; a NamedTuple takes a quarter of the time of a frozen dataclass
    """Why a fusion does not apply at a tensor; `matched` is the number of the pattern's nodes that matched."""

    fusion: Fusion
    node: str
    matched: int
    size: Callable[[], int]
    sentence: Callable[[], str]
    span: Span
    around: tuple[str, ...] = ()  # names of the nodes that matched
    hint: str = ""  # a change that the user can make
    complete: bool = False  # all nodes matched, but replacing them was refused

    @property
    def of(self) -> int:
        """The estimated number of nodes in the pattern's nearest variant; `matched` of them were found in the graph."""
        return max(self.size(), self.matched)

    @property
    def reason(self) -> str:
        """The sentence that names the subject, the requirement and the finding."""
        return self.sentence()
