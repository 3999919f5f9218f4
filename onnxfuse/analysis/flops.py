"""Count the floating-point operations of products, convolutions, attentions and recurrences: 2 for a multiply-add.

Operations on quantized numbers count as the same operations on floats.  All other operators count as 0, because the
bytes that they move decide how long they take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable, apply_rule, has_input, input_shape, operands_of, required
from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.attention import by_heads
from onnxfuse.ir.attributes import int_attribute, str_attribute
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.node import Node, op_of

RULES = RuleTable[Callable[[ShapeInfo, Node], Size]]()
PAST_KEY = 6  # input of MultiHeadAttention


def model_flops(model: onnx.ModelProto, folder: Path | None) -> int | None:
    """Return the floating-point operations of one run of a model's main graph, fused nodes included.

    None if a shape that the count needs is unknown or dynamic.  `folder` holds the model's external data.
    """
    shapes = read_and_infer(inline_functions(model, fused=True).model, folder)
    counts = [count_flops(shapes, node) for node in shapes.graph.nodes]
    known = [each for each in counts if isinstance(each, int)]
    return sum(known) if len(known) == len(counts) else None


def count_flops(shapes: ShapeInfo, node: Node) -> Size | None:
    """Return the floating-point operations of one run of a node of ONNX or onnxruntime; None if a shape is unknown.

    The count is a polynomial over the dynamic dims.  A call of a function counts as 0.
    """
    rule = RULES.get(op_of(node))
    return apply_rule(rule, shapes, node) if rule else 0


def _output_elements(shapes: ShapeInfo, node: Node) -> Size:
    return _elements(required(shapes.shape(node.outputs[0])))


def _elements(shape: Sequence[Size]) -> Size:
    return math.prod(shape)


@RULES.rule(
    "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm", "com.microsoft::FusedMatMul", "com.microsoft::FusedGemm",
    "com.microsoft::QGemm", "com.microsoft::DynamicQuantizeMatMul", "com.microsoft::MatMulIntegerToFloat",
    "com.microsoft::GemmFastGelu",
)  # fmt: skip
def _product(shapes: ShapeInfo, node: Node) -> Size:
    a = input_shape(shapes, node, operands_of(node)[0])
    inner = -1 if not int_attribute(node, "transA", 0) else 0 if int_attribute(node, "transBatchA", 0) else -2
    return 2 * _output_elements(shapes, node) * a[inner]


@RULES.rule("com.microsoft::MatMulNBits", "com.microsoft::MatMulBnb4")
def _product_with_packed_weight(shapes: ShapeInfo, node: Node) -> Size:
    return 2 * _output_elements(shapes, node) * required(int_attribute(node, "K", 0) or None)


@RULES.rule("Einsum")
def _einsum(shapes: ShapeInfo, node: Node) -> Size:
    """Return the count for an Einsum of two operands: a multiply-add for each combination of its letters' indices."""
    letters = required(str_attribute(node, "equation")).replace(" ", "").partition("->")[0].split(",")
    if len(letters) != 2 or "." in "".join(letters):
        raise CannotInfer
    shown = [zip(letters[i], input_shape(shapes, node, i), strict=True) for i in (0, 1)]
    sizes = dict(itertools.chain(*shown))
    return 2 * _elements(tuple(sizes.values()))


@RULES.rule(
    "Conv", "ConvInteger", "QLinearConv", "com.microsoft::FusedConv", "com.microsoft::NhwcConv",
    "com.microsoft::NhwcFusedConv",
)  # fmt: skip
def _convolution(shapes: ShapeInfo, node: Node) -> Size:
    weight = input_shape(shapes, node, operands_of(node)[1])
    return 2 * _output_elements(shapes, node) * _elements(weight[1:])


@RULES.rule("ConvTranspose")
def _transposed_convolution(shapes: ShapeInfo, node: Node) -> Size:
    return 2 * _elements(input_shape(shapes, node)) * _elements(input_shape(shapes, node, 1)[1:])


@RULES.rule("Attention")
def _attention(shapes: ShapeInfo, node: Node) -> Size:
    """Return the count for both products, of all queries with all keys: masks leave out none."""
    batch, heads, queries, size = by_heads(shapes, node, 0, "q_num_heads")
    key, value = by_heads(shapes, node, 1, "kv_num_heads"), by_heads(shapes, node, 2, "kv_num_heads")
    keys = key[2] + (input_shape(shapes, node, 4)[2] if has_input(node, 4) else 0)
    return 2 * batch * heads * queries * keys * (size + value[3])


@RULES.rule("com.microsoft::MultiHeadAttention")
def _multi_head_attention(shapes: ShapeInfo, node: Node) -> Size:
    query, key = input_shape(shapes, node, 0, 3), input_shape(shapes, node, 1, 3, 4)
    keys = key[-2] + (input_shape(shapes, node, PAST_KEY, 4)[2] if has_input(node, PAST_KEY) else 0)
    return 2 * query[0] * query[1] * keys * (query[2] + required(shapes.shape(node.outputs[0]))[2])


@RULES.rule("LinearAttention", "com.microsoft::LinearAttention")
def _linear_attention(shapes: ShapeInfo, node: Node) -> Size:
    """Return the count for three products of each token with the state: retrieval, update and result."""
    return 3 * 2 * input_shape(shapes, node, 1, 3)[1] * _elements(required(shapes.shape(node.outputs[1])))


@RULES.rule("com.microsoft::GatedDeltaNet")
def _gated_delta_net(shapes: ShapeInfo, node: Node) -> Size:
    """Return the count that linear attention has."""
    *tokens, _, _ = required(shapes.shape(node.outputs[0]))
    return 3 * 2 * _elements(tokens) * _elements(input_shape(shapes, node, 6, 4)[1:])


@RULES.rule("GRU", "LSTM", "RNN")
def _recurrence(shapes: ShapeInfo, node: Node) -> Size:
    """Return the count for the products of each step, with the weights of the input and of the state."""
    steps, batch, _ = input_shape(shapes, node, 0, 3)
    return 2 * steps * batch * (_elements(input_shape(shapes, node, 1)) + _elements(input_shape(shapes, node, 2)))
