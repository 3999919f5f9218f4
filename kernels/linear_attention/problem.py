"""A node linear_attention or gated_delta_net as its kernels see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.tensors import (
    ABSENT,
    STORAGE,
    Defines,
    operand_pointer,
    operand_spec,
    required_spec,
    shaped_pointer,
)
from onnxfuse.runtime.plan import FusedNode, Pointer, Struct, TensorSpec, Value
from onnxfuse.runtime.symint import expect_equal

DECAYED: Final = ("gated", "gated_delta")
CORRECTED: Final = ("delta", "gated_delta")
GATED_DELTA_NET: Final = "gated_delta_net"
OPERANDS: Final = ("query", "key", "value", "decay", "beta")


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of a node, and its operands."""

    batch: int
    length: int
    q_heads: int
    k_heads: int
    state_heads: int
    size: int  # rows of a state
    value_size: int  # columns of a state
    dtype: str
    gate_dtype: str  # of decays and rates
    state_dtype: str
    by_column: bool  # whether states are stored as (value_size, size)
    leading: tuple[int, ...]  # the axes of tokens: (batch, length), or (length,) of one sequence
    decay: int  # 0: no decay, 1: one for each head, 2: one for each row of the state
    beta: int  # 0: no delta rule, 1: a rate for each head, 2: one for all heads
    scale: float
    aligned: bool
    node: FusedNode

    @property
    def heads(self) -> int:
        """The heads of results."""
        return max(self.q_heads, self.state_heads)

    @property
    def y(self) -> TensorSpec:
        """The results, (batch, length, heads * value_size), or with heads as an axis of their own."""
        by_head = self.by_column or self.node.integer("results_by_head", 0)
        row = (self.heads, self.value_size) if by_head else (self.heads * self.value_size,)
        return TensorSpec((*self.leading, *row), self.dtype, self.aligned)

    @property
    def has_present(self) -> bool:
        """Whether the states after the last token are an output."""
        return len(self.node.output_dtypes) > 1

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the node."""
        return (self.y, self.present) if self.has_present else (self.y,)

    @property
    def present(self) -> TensorSpec:
        """The states after the last token."""
        matrix = (self.value_size, self.size) if self.by_column else (self.size, self.value_size)
        return TensorSpec((self.batch, self.state_heads, *matrix), self.state_dtype, self.aligned)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The addresses of the operands, in the order in which the kernels' structs have them."""
        return tuple(operand_pointer(self.node, name) for name in OPERANDS)

    @property
    def states(self) -> Struct:
        """The past state, the present one, and the results, as linear_attention_sequence.cu has them."""
        present = Pointer("output", 1) if self.has_present else ABSENT
        return Struct((operand_pointer(self.node, "past_state"), present, Pointer("output", 0)))

    @property
    def defines(self) -> Defines:
        """The macros that all kernels have."""
        return {
            "T": STORAGE[self.dtype], "GATE_T": STORAGE[self.gate_dtype], "SIZE": self.size,
            "VALUE_SIZE": self.value_size,
            "STATE_HEADS": self.state_heads, "Q_HEADS": self.q_heads, "K_HEADS": self.k_heads, "HEADS": self.heads,
            "DECAY": self.decay, "BETA": self.beta, "STATE_T": STORAGE[self.state_dtype],
            "STATES_BY_COLUMN": int(self.by_column),
            "PAST": int("past_state" in self.node.operands), "PRESENT": int(self.has_present),
        }  # fmt: skip


def unsupported(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs the node; None if one does."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True)) | {"the output": node.output_dtypes[0]}
    dtypes |= dict(zip(("present_state",), node.output_dtypes[1:], strict=False))
    state = dtypes.get("past_state", dtypes.get("present_state"))
    gate = dtypes.get("decay", dtypes.get("beta"))
    for name, dtype in dtypes.items():
        required = state if name.endswith("_state") else dtypes["query"]
        if node.fusion == GATED_DELTA_NET and name in ("decay", "beta") and gate == "float32":
            required = gate
        if dtype not in STORAGE or dtype != required:
            return f"{node.fusion}: {name} is {dtype}; required one dtype of {', '.join(STORAGE)}"
    sizes = "heads size kv_heads value_size" if node.fusion == GATED_DELTA_NET else "width key_width value_width"
    for name in sizes.split():
        if name not in node.attributes:
            return f"{node.fusion}: the {name} is dynamic; required a number"
    if node.fusion == GATED_DELTA_NET:
        ranks = node.attributes.get("output_ranks")
        is_one = node.attributes.get("batch") == 1
        return None if ranks == [4, 4] or is_one else f"{node.fusion}: several sequences have no axis of their own"
    q_heads, state_heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    size, rest = divmod(node.integer("width"), q_heads)
    value_rest = node.integer("value_width") % state_heads
    k_heads, key_rest = divmod(node.integer("key_width"), max(size, 1))
    if rest or value_rest or key_rest or not k_heads or state_heads % k_heads:
        return (
            f"{node.fusion}: rows of {node.integer('width')}, {node.integer('key_width')} and "
            f"{node.integer('value_width')} elements are not whole heads, {q_heads} of queries and {state_heads} of "
            "values"
        )
    return None


def heads_of(node: FusedNode) -> tuple[int, int, int, int, int]:
    """Return the heads of queries, of keys and of states, and the rows and columns of a state."""
    if node.fusion == GATED_DELTA_NET:
        q_heads, state_heads, size, value_size = map(node.integer, ("heads", "kv_heads", "size", "value_size"))
        return q_heads, q_heads, state_heads, size, value_size
    q_heads, state_heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    size = node.integer("width") // q_heads
    return q_heads, node.integer("key_width") // size, state_heads, size, node.integer("value_width") // state_heads


def _require_rows(
    node: FusedNode, inputs: Sequence[TensorSpec], name: str, leading: tuple[int, ...], width: int
) -> None:
    """Raise ValueError unless an operand has the axes `leading` and then `width` elements, with or without heads."""
    shape = required_spec(node, inputs, name).shape
    found = (*shape[: len(leading)], math.prod(shape[len(leading) :]))
    equal = [expect_equal(size, other) for size, other in zip(found, (*leading, width), strict=True)]
    if not all(equal):
        raise ValueError(f"{node.label}: {name} has shape {[*shape]}; required {[*leading, width]}")


def _per_token(node: FusedNode, inputs: Sequence[TensorSpec], name: str, attribute: str) -> int:
    """Return how many decays or rates a token has; a gated_delta_net has no attribute that says it."""
    if node.fusion != GATED_DELTA_NET:
        return node.integer(attribute)
    leading = len(required_spec(node, inputs, "query").shape) - 2
    return math.prod(required_spec(node, inputs, name).shape[leading:])


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> LinearAttention:
    """Return the sizes and operands.  Raises ValueError if the shapes do not fit."""
    by_column = node.fusion == GATED_DELTA_NET
    query = required_spec(node, inputs, "query")
    q_heads, k_heads, state_heads, size, value_size = heads_of(node)
    leading = query.shape[:-2] if by_column else query.shape[:2]
    past = operand_spec(node, inputs, "past_state")
    batch, length = leading if len(leading) == 2 else (1, *leading)
    widths = {"query": q_heads * size, "key": k_heads * size, "value": state_heads * value_size}
    rule, decay, beta = node.text("update_rule", "gated_delta"), 0, 0
    if rule in DECAYED:
        decay = 1 if _per_token(node, inputs, "decay", "decays") == state_heads else 2
        widths["decay"] = state_heads * (size if decay == 2 else 1)
    if rule in CORRECTED:
        beta = 1 if _per_token(node, inputs, "beta", "rates") == state_heads else 2
        widths["beta"] = state_heads if beta == 1 else 1
    for name, width in widths.items():
        _require_rows(node, inputs, name, leading, width)
    matrix = (value_size, size) if by_column else (size, value_size)
    shaped_pointer(node, inputs, "past_state", (batch, state_heads, *matrix))
    gate = operand_spec(node, inputs, "decay" if decay else "beta") if decay or beta else None
    return LinearAttention(
        batch, length, q_heads, k_heads, state_heads, size, value_size, query.dtype, (gate or query).dtype,
        past.dtype if past else (*node.output_dtypes, "float32")[1], by_column, leading, decay, beta,
        node.number("scale", 0.0) or 1 / math.sqrt(size), all(spec.aligned for spec in inputs), node,
    )  # fmt: skip
