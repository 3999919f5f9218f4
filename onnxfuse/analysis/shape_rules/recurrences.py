"""Shape rules of linear attention, of the causal convolutions before it, and of quantized LSTMs."""

from __future__ import annotations

from typing import Final

from onnxfuse.analysis.rules import RuleTable, ShapeRule, input_shape, required
from onnxfuse.analysis.shape_info import CannotInfer, PartialShape, ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.node import Node

# Attributes of com.microsoft's CausalConvWithState, with their values where it computes what ONNX's operator does.
AS_IN_ONNX: Final = {
    "ndim": 1, "dilation": 1, "channels_last": 0, "state_window": 0, "state_length": 0, "state_channels_last": -1,
    "input_channel_offset": 0, "input_channels": 0, "state_update_capacity": 0,
}  # fmt: skip

RULES = RuleTable[ShapeRule]()


@RULES.rule("LinearAttention", "com.microsoft::LinearAttention")
def _linear_attention(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    query, value = input_shape(shapes, node, 0, 3), input_shape(shapes, node, 2, 3)
    heads, kv_heads = (required(int_attribute(node, name)) for name in ("q_num_heads", "kv_num_heads"))
    if min(heads, kv_heads) <= 0 or int_attribute(node, "state_window", 0):
        raise CannotInfer
    size = value[2] // kv_heads
    return [(*query[:2], max(heads, kv_heads) * size), (query[0], kv_heads, query[2] // heads, size)]


@RULES.rule("com.microsoft::GatedDeltaNet")
def _gated_delta_net(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    """Return the shapes of the results and of the states, which are those of the states before."""
    state = input_shape(shapes, node, 6, 4)
    rows = required(shapes.shape(node.inputs[0]))
    leading = rows[:-2] if node.inputs[1].name else rows[:-1]
    return [(*leading, *state[1:3]), state]


@RULES.rule("CausalConvWithState", "com.microsoft::CausalConvWithState")
def _causal_conv_with_state(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    if any(int_attribute(node, name, usual) != usual for name, usual in AS_IN_ONNX.items()):
        raise CannotInfer
    x, weight = input_shape(shapes, node, 0, 3), input_shape(shapes, node, 1, 3)
    return [x, (*x[:2], weight[2] - 1)]


@RULES.rule("com.microsoft::DynamicQuantizeLSTM")
def _quantized_lstm(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    """Return the shapes of an LSTM's results; onnx infers those of ONNX's own recurrent layers."""
    steps, batch, _ = input_shape(shapes, node, 0, 3)
    state = (input_shape(shapes, node, 1, 3)[0], batch, required(int_attribute(node, "hidden_size")))
    return [(steps, *state), state, state]
