"""A linear_attention node as its kernels see it."""

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
    state_dtype: str
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
        by_head = self.node.integer("results_by_head", 0)
        row = (self.heads, self.value_size) if by_head else (self.heads * self.value_size,)
        return TensorSpec((self.batch, self.length, *row), self.dtype, self.aligned)

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
        shape = (self.batch, self.state_heads, self.size, self.value_size)
        return TensorSpec(shape, self.state_dtype, self.aligned)

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
            "T": STORAGE[self.dtype], "SIZE": self.size, "VALUE_SIZE": self.value_size,
            "STATE_HEADS": self.state_heads, "Q_HEADS": self.q_heads, "K_HEADS": self.k_heads, "HEADS": self.heads,
            "DECAY": self.decay, "BETA": self.beta, "STATE_T": STORAGE[self.state_dtype],
            "PAST": int("past_state" in self.node.operands), "PRESENT": int(self.has_present),
        }  # fmt: skip


def unsupported(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs the node; None if one does."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True)) | {"the output": node.output_dtypes[0]}
    dtypes |= dict(zip(("present_state",), node.output_dtypes[1:], strict=False))
    state = dtypes.get("past_state", dtypes.get("present_state"))
    for name, dtype in dtypes.items():
        required = state if name.endswith("_state") else dtypes["query"]
        if dtype not in STORAGE or dtype != required:
            return f"{node.fusion}: {name} is {dtype}; required one dtype of {', '.join(STORAGE)}"
    for name in "width", "key_width", "value_width":
        if name not in node.attributes:
            return f"{node.fusion}: the {name} is dynamic; required a number"
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


def _require_rows(node: FusedNode, inputs: Sequence[TensorSpec], name: str, rows: tuple[int, int, int]) -> None:
    """Raise ValueError unless an operand has the shape `rows`, or has its heads as an axis of their own."""
    batch, length, *row = required_spec(node, inputs, name).shape
    equal = [expect_equal(size, other) for size, other in zip((batch, length, math.prod(row)), rows, strict=True)]
    if not all(equal):
        raise ValueError(f"{node.label}: {name} has shape {[batch, length, *row]}; required {list(rows)}")


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> LinearAttention:
    """Return the sizes and operands.  Raises ValueError if the shapes do not fit."""
    query = required_spec(node, inputs, "query")
    batch, length = query.shape[:2]
    q_heads, state_heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    size, value_width = node.integer("width") // q_heads, node.integer("value_width")
    value_size, rule = value_width // state_heads, node.text("update_rule", "gated_delta")
    _require_rows(node, inputs, "query", (batch, length, node.integer("width")))
    _require_rows(node, inputs, "key", (batch, length, node.integer("key_width")))
    _require_rows(node, inputs, "value", (batch, length, value_width))
    state = (batch, state_heads, size, value_size)
    shaped_pointer(node, inputs, "past_state", state)
    past = operand_spec(node, inputs, "past_state")
    state_dtype = past.dtype if past else (*node.output_dtypes, "float32")[1]
    decay = beta = 0
    if rule in DECAYED:
        decay = 1 if node.integer("decays") == state_heads else 2
        _require_rows(node, inputs, "decay", (batch, length, state_heads * (size if decay == 2 else 1)))
    if rule in CORRECTED:
        beta = 1 if node.integer("rates") == state_heads else 2
        _require_rows(node, inputs, "beta", (batch, length, state_heads if beta == 1 else 1))
    return LinearAttention(
        batch, length, q_heads, node.integer("key_width") // size, state_heads, size, value_size, query.dtype,
        state_dtype, decay, beta, node.number("scale", 0.0) or 1 / math.sqrt(size),
        all(spec.aligned for spec in inputs), node,
    )  # fmt: skip
