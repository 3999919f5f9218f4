"""Texts of misses (failed matches): of all failed attempts, a miss reports the one in which most nodes matched.

Functions at the end describe tensors and shapes for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from onnxfuse.algebra.sizes import Size
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.spans import Span
from onnxfuse.dsl.terms import Term
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, is_constant, is_outer, op_of, producer
from onnxfuse.match.named_dims import axes_of, size_of
from onnxfuse.match.state import Dims, Miss, State

# How much of the pattern matched at a failure, in ascending order.  "nothing": not even the number of axes.  "a part":
# a part of a term.  "the term": all of a term, but a condition failed.  "the pattern": all of the pattern, but the
# matched nodes must not be replaced.
Agreed: TypeAlias = Literal["nothing", "a part", "the term", "the pattern"]
MAX_VALUE_CHARACTERS = 60  # maximum characters of a value in a message


class NearestMiss:
    """Of all failed attempts to match one fusion at one tensor, the attempt in which most nodes matched."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._refused = False  # whether an attempt matched the whole pattern, but the match must not be replaced
        self._best: tuple[tuple[int, int, bool], Callable[[], str], Span, State, str] | None = None
        self._sizes: dict[tuple[tuple[str, str], ...], int] = {}

    def forget(self) -> None:
        """Drop the recorded failures, before matching at another tensor."""
        self._best, self._refused = None, False

    def fail(
        self,
        term: Term,
        state: State,
        sentence: Callable[[], str],
        span: Span | None = None,
        hint: str = "",
        agreed: Agreed = "a part",
    ) -> None:
        """Record why `term` does not match, if more of the pattern matched than at any failure before."""
        self._refused = self._refused or agreed == "the pattern"
        count = len(state.nodes) + len(state.kept) + (agreed in ("the term", "the pattern"))
        reached = count, len(state.operands), agreed != "nothing"
        if self._best is None or reached > self._best[0]:
            self._best = (reached, sentence, span or term.span, state, hint)

    def miss(self, tensor: Tensor) -> Miss:
        """Return the nearest failure at this tensor."""
        if self._best is None:
            return self.miss_at_once(f"no reading of '{tensor.name}' fits", tensor)
        _, sentence, span, state, hint = self._best
        names = tuple(str(n.name) for n in (*state.nodes.values(), *state.kept.values()))
        size = self._size(state.choices)
        return Miss(self.fusion, node_name(tensor), len(names), size, sentence, span, names, hint, self._refused)

    def miss_at_once(self, sentence: str, tensor: Tensor, hint: str = "") -> Miss:
        """Return a miss for a tensor at which matching is not even tried."""
        size = self._size({})
        return Miss(self.fusion, node_name(tensor), 0, size, lambda: sentence, self.fusion.span, (), hint)

    def _size(self, choices: Mapping[str, str]) -> Callable[[], int]:
        def size() -> int:
            key = tuple(sorted(choices.items()))
            if key not in self._sizes:
                self._sizes[key] = self.fusion.outputs[0].count_nodes(choices, set())
            return self._sizes[key]

        return size


def origin(graph: Graph, tensor: Tensor) -> str:
    """Describe the node that computes a tensor, or that computed it before nodes were fused."""
    node = producer(tensor)
    now = ("", "") if node is None else (op_of(node), node.name)
    op, name = graph.origins.get(tensor.name, now)
    if not op:
        outer = "a tensor of the graph around" if is_outer(tensor) else "a graph input"
        return "a constant" if is_constant(tensor) else outer
    return f"the output of {op} '{name}'" if name else f"the output of {op}"


def node_name(tensor: Tensor) -> str:
    """Return the name of the node that computes a tensor, or the tensor's name if the node has none."""
    node = producer(tensor)
    return str((node.name if node is not None else "") or tensor.name)


def shape_text(shape: Sequence[Size] | None) -> str:
    """Return a shape as text for a message."""
    return "unknown rank" if shape is None else ", ".join(map(str, shape))


def spec_text(spec: str, dims: Dims) -> str:
    """Return named dimensions as text for a message, with the sizes that are known."""
    return ", ".join(_token_text(token, dims) for token in spec.split())


def _token_text(token: str, dims: Dims) -> str:
    if token == "..." and token in dims:
        return ", ".join(map(str, dims[token]))
    size = dims.get(token.rstrip("?"))
    return token if size is None else f"{token}={size}"


def arranged_axes_text(side: str, dims: Dims) -> str:
    """Return the axes of one side of an arrangement, such as "n (h w) c", for a message, with the known sizes."""
    return ", ".join(_axis_text(names, dims) for names in axes_of(side))


def _axis_text(names: Sequence[str], dims: Dims) -> str:
    if names == ["..."] and "..." in dims:
        return ", ".join(map(str, dims["..."]))
    size, text = size_of(names, dims), "*".join(names)
    return text if size is None or text.isdecimal() else f"{text}={size}"


def number_text(value: object) -> str:
    """Return a scalar or attribute as text for a message."""
    if value is None:
        return "absent"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def value_text(value: object) -> str:
    """Return a value as text for a message, shortened to MAX_VALUE_CHARACTERS."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."
