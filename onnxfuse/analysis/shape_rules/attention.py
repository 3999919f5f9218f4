"""Shape rules of the attention operators of ONNX and onnxruntime."""

from __future__ import annotations

from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.rules import RuleTable, ShapeRule, has_input, input_shape, required
from onnxfuse.analysis.shape_info import CannotInfer, PartialShape, ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.node import Node, op_of

RULES = RuleTable[ShapeRule]()
PAST_KEY, PAST_VALUE = 3, 4  # inputs of GroupQueryAttention


@RULES.rule("Attention")
def _attention(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    batch, heads, queries, _ = by_heads(shapes, node, 0, "q_num_heads")
    key, value = by_heads(shapes, node, 1, "kv_num_heads"), by_heads(shapes, node, 2, "kv_num_heads")
    keys = key[2] + (input_shape(shapes, node, 4)[2] if has_input(node, 4) else 0)
    is_packed = len(input_shape(shapes, node)) == 3
    result = (batch, queries, heads * value[3]) if is_packed else (batch, heads, queries, value[3])
    return [result, (*key[:2], keys, key[3]), (*value[:2], keys, value[3]), (batch, heads, queries, keys)]


def by_heads(shapes: ShapeInfo, node: Node, index: int, heads_attribute: str) -> Shape:
    """Return an input's shape as (batch, heads, length, head size); a 3-D input is divided into heads."""
    shape = input_shape(shapes, node, index)
    if len(shape) == 4:
        return shape
    heads = _count(node, heads_attribute)
    return (shape[0], heads, shape[1], shape[2] // heads)


def _count(node: Node, name: str) -> int:
    """Return an attribute that counts heads.  Raises CannotInfer where it is absent or not positive."""
    heads = required(int_attribute(node, name))
    if heads <= 0:
        raise CannotInfer
    return heads


@RULES.rule(
    "com.microsoft::MultiHeadAttention", "com.microsoft::Attention", "com.microsoft::GroupQueryAttention",
    "com.microsoft::DecoderMaskedMultiHeadAttention", "com.microsoft::SparseAttention",
)  # fmt: skip
def _contrib_attention(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    query = input_shape(shapes, node, 0, 3)
    hidden: Size
    if op_of(node) == "com.microsoft::Attention":
        sizes = ints_attribute(node, "qkv_hidden_sizes")
        hidden = sizes[-1] if sizes else input_shape(shapes, node, 1, 2)[1] // 3
    elif op_of(node) in ("com.microsoft::GroupQueryAttention", "com.microsoft::SparseAttention"):
        heads, kv_heads = (_count(node, name) for name in ("num_heads", "kv_num_heads"))
        hidden = query[2] if has_input(node, 1) else query[2] // (heads + 2 * kv_heads) * heads
        if op_of(node) == "com.microsoft::GroupQueryAttention":
            _require_heads_of_cache(shapes, node, kv_heads, hidden // heads)
    else:
        value = input_shape(shapes, node, 2, 3, 4) if has_input(node, 2) else query
        hidden = value[2] if len(value) == 3 else value[1] * value[3]
    return [(*query[:2], hidden)]


def _require_heads_of_cache(shapes: ShapeInfo, node: Node, heads: int, size: Size) -> None:
    """Require that caches of a GroupQueryAttention have `heads` heads of `size` elements; skip caches of 4 bits."""
    for index in PAST_KEY, PAST_VALUE:
        past = shapes.shape(node.inputs[index]) if has_input(node, index) else None
        if past is not None and len(past) == 4 and int_attribute(node, "kv_cache_bit_width", 0) != 4:
            shapes.require(past[1], heads)
            shapes.require(past[3], size)
