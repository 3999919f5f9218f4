"""A linear_attention node as its kernels see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.tensors import STORAGE, Defines, operand_pointer, required_spec, shaped_pointer
from onnxfuse.runtime.plan import FusedNode, Pointer, Struct, TensorSpec, Value

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
        """The results."""
        return TensorSpec((self.batch, self.length, self.heads * self.value_size), self.dtype, self.aligned)

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
        return Struct((operand_pointer(self.node, "past_state"), Pointer("output", 1), Pointer("output", 0)))

    @property
    def defines(self) -> Defines:
        """The macros that all kernels have."""
        return {
            "T": STORAGE[self.dtype], "SIZE": self.size, "VALUE_SIZE": self.value_size,
            "STATE_HEADS": self.state_heads, "Q_HEADS": self.q_heads, "K_HEADS": self.k_heads, "HEADS": self.heads,
            "DECAY": self.decay, "BETA": self.beta, "STATE_T": STORAGE[self.state_dtype],
            "PAST": int("past_state" in self.node.operands),
        }  # fmt: skip


def unsupported(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs the node; None if one does."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True)) | {"the output": node.output_dtypes[0]}
    dtypes |= {"present_state": node.output_dtypes[1]}
    state = dtypes.get("past_state", dtypes["present_state"])
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


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> LinearAttention:
    """Return the sizes and operands.  Raises ValueError if the shapes do not fit."""
    query = required_spec(node, inputs, "query")
    batch, length, _ = query.shape
    q_heads, state_heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    size, value_width = node.integer("width") // q_heads, node.integer("value_width")
    value_size, rule = value_width // state_heads, node.text("update_rule", "gated_delta")
    shaped_pointer(node, inputs, "query", (batch, length, node.integer("width")))
    shaped_pointer(node, inputs, "key", (batch, length, node.integer("key_width")))
    shaped_pointer(node, inputs, "value", (batch, length, value_width))
    state = (batch, state_heads, size, value_size)
    shaped_pointer(node, inputs, "past_state", state)
    decay = beta = 0
    if rule in DECAYED:
        decay = 1 if node.integer("decays") == state_heads else 2
        shaped_pointer(node, inputs, "decay", (batch, length, state_heads * (size if decay == 2 else 1)))
    if rule in CORRECTED:
        beta = 1 if node.integer("rates") == state_heads else 2
        shaped_pointer(node, inputs, "beta", (batch, length, state_heads if beta == 1 else 1))
    return LinearAttention(
        batch, length, q_heads, node.integer("key_width") // size, state_heads, size, value_size, query.dtype,
        node.output_dtypes[1], decay, beta, node.number("scale", 0.0) or 1 / math.sqrt(size),
        all(spec.aligned for spec in inputs), node,
    )  # fmt: skip
