"""What a match is: the State on the way, the Match at the end, or the Miss that came nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnx import TensorProto

from onnxfuse.dsl import Fusion, Span
from onnxfuse.graph import Node, Tensor

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
}


@dataclass(frozen=True)
class State:
    """What is captured so far."""

    terms: Mapping[int, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    operands: Mapping[str, Tensor] = field(default_factory=dict)
    dims: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[int, Node] = field(default_factory=dict)
    kept: Mapping[int, Node] = field(default_factory=dict)
    factor: float | None = None  # the scalars met so far, while inside scaled()

    def with_nodes(self, nodes: Sequence[Node], *, keep: bool = False) -> State:
        if not nodes:
            return self
        new = {id(n): n for n in nodes}
        return replace(self, kept={**self.kept, **new}) if keep else replace(self, nodes={**self.nodes, **new})


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


@dataclass(frozen=True)
class Miss:
    """Why a fusion does not apply at a tensor: `matched` of about `of` nodes agreed."""

    fusion: Fusion
    node: str
    matched: int
    size: Callable[[], int]
    sentence: Callable[[], str]
    span: Span
    around: tuple[str, ...] = ()  # names of the nodes that agreed
    hint: str = ""  # what the user can change

    @property
    def of(self) -> int:
        """About how many nodes the pattern has, in the variant that came nearest."""
        return max(self.size(), self.matched)

    @property
    def reason(self) -> str:
        """The sentence: subject, required, found."""
        return self.sentence()
