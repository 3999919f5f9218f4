"""Describe how onnxruntime's CUDA provider runs the quantized operators of a model, and attention with a cache.

The descriptions also say whether onnxfuse fuses quantizers with the operators before and after them into one kernel, or
computes a product or convolution of the quantized integers.  Those of onnxruntime follow the sources of version 1.30
(contrib_ops/cuda/quantization and contrib_ops/cuda/bert).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import onnx
from onnx import TensorProto

from onnxfuse.analysis.rules import has_input
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.inspection.placement import Placement, Scope
from onnxfuse.ir.attributes import flag_attribute, int_attribute, str_attribute
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, consumers, is_constant, op_of, producer
from onnxfuse.ir.validate import size_of
from onnxfuse.regions.normal_form import normal_form
from onnxfuse.spell_out.quantized import OF_INTEGERS
from onnxfuse.spell_out.quantized import RULES as QUANTIZED_RULES
from onnxfuse.spell_out.spell_out import CONTRIB

Description: TypeAlias = tuple[str, str]  # the operator with its variant, and how it runs

ON_THE_CPU: Final = "on the CPU, for want of a CUDA kernel"
JOINED: Final = "joined with its MatMul to a MatMulNBits by onnxruntime's optimizations"
WHOLE: Final = "dequantizes the whole weight in every run"
ALONE: Final = "a launch of its own, because no float operator is joined with it on CUDA"
FUSED: Final = "; onnxfuse fuses it with the elementwise operators and norms beside it"
MULTIPLIED: Final = "; onnxfuse multiplies its integers"
MULTIPLIED_FLOAT8: Final = "; onnxfuse multiplies its float8 numbers"
AS_FLOATS: Final = "; onnxfuse writes it as a MatMul of floats between quantizers, which it fuses with their neighbours"
PRODUCTS: Final = ("MatMul", "Gemm")
FLOAT8_MOVES_SINCE: Final = 21  # the first opset whose Transpose takes float8, as channels-last convolutions need
OF_REGIONS: Final = QUANTIZED_RULES.keys() - set(OF_INTEGERS)
OTHER_BITS: Final = (TensorProto.INT16, TensorProto.UINT16, TensorProto.INT4, TensorProto.UINT4)


@dataclass(frozen=True)
class Quantized:
    """Quantized nodes with the same description `what`: their number, their constants' bytes, and how they run."""

    what: str
    nodes: int
    bytes: int
    how: str


def quantized(model: onnx.ModelProto, scopes: Sequence[Scope], placed: Placement) -> Iterator[Quantized]:
    """Yield the quantized operators, and GroupQueryAttention, in execution order.

    Raises ModelError for an attribute of a wrong type, which ONNX's checker does not find in operators of onnxruntime.
    """
    found: dict[Description, list[Node]] = defaultdict(list)
    for node, shapes in ((node, each.shapes) for each in scopes for node in each.shapes.graph.nodes):
        describe = DESCRIPTIONS.get(_name(node))
        if describe is not None and node.inputs and node.outputs:
            try:
                what, how = describe(shapes, node)
            except TypeError as error:
                raise ModelError(str(error)) from error
            how = ON_THE_CPU if node in placed.without_kernel else how
            found[what, f"{how}{_taken(shapes, node)}"].append(node)
    sizes = {tensor.name: size_of(tensor) for tensor in model.graph.initializer}
    for (what, how), nodes in found.items():
        weights = {tensor.name for node in nodes for tensor in node.inputs if tensor.name in sizes}
        yield Quantized(what, len(nodes), sum(sizes[name] for name in weights), how)


def _name(node: Node) -> str:
    """Return a node's operator without the domain com.microsoft, which also contains copies of ONNX's operators."""
    return op_of(node).removeprefix(CONTRIB)


def _taken(shapes: ShapeInfo, node: Node) -> str:
    """Return a phrase on how onnxfuse fuses a node, or operators that it replaces the node by; "" if it does not."""
    if _is_multiplied(shapes, node):
        return MULTIPLIED_FLOAT8 if _is_float8(shapes, node) else MULTIPLIED
    if op_of(node) == "QLinearMatMul":
        return AS_FLOATS
    if op_of(node) in OF_REGIONS:
        tensors = (tensor for tensor in (*node.inputs, *node.outputs) if tensor.name)
        return "" if any(shapes.dtype(tensor) in OTHER_BITS for tensor in tensors) else FUSED
    return FUSED if isinstance(normal_form(shapes, node), tuple) else ""


def _mat_mul_n_bits(_: ShapeInfo, node: Node) -> Description:
    how = "reads packed weights for up to 16 rows; for more, dequantizes the whole weight in every run and multiplies"
    return f"MatMulNBits, {int_attribute(node, 'bits', 4)} bits, {_blocks(node, 3)}", how


def _dequantize_linear(shapes: ShapeInfo, node: Node) -> Description:
    dtype = dtype_name(shapes.dtype(node.inputs[0]))
    if not is_constant(node.inputs[0]):
        return f"DequantizeLinear of {dtype} values", ALONE
    if not int_attribute(node, "block_size", 0):
        return f"DequantizeLinear of {dtype} weights", WHOLE
    what = f"DequantizeLinear of {dtype} weights, {_blocks(node, 2)}"
    if "int" in dtype and [op_of(reader) for reader in consumers(node.outputs[0])] == ["MatMul"]:
        return what, JOINED
    return what, WHOLE


def _is_multiplied(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether onnxfuse computes a node on 8 bits: a product, or a DequantizeLinear only for such products."""
    if op_of(node) in ("MatMulInteger", "ConvInteger"):
        return is_constant(node.inputs[1]) and [op_of(reader) for reader in consumers(node.outputs[0])] == ["Cast"]
    if op_of(node) in OF_INTEGERS:
        return is_constant(node.inputs[3]) or shapes.rank(node.inputs[0]) == shapes.rank(node.inputs[3]) in (3, 4)
    if _name(node) != "DequantizeLinear" or not is_constant(node.inputs[0]) or int_attribute(node, "block_size", 0):
        return False
    is_float8 = _is_float8(shapes, node)
    products = PRODUCTS if is_float8 and shapes.graph.opset < FLOAT8_MOVES_SINCE else (*PRODUCTS, "Conv")
    readers = consumers(node.outputs[0])
    if [op_of(reader) for reader in readers] == ["Transpose"]:
        readers = consumers(readers[0].outputs[0])
    makers = [producer(reader.inputs[0]) for reader in readers if op_of(reader) in products]
    found = [maker for maker in makers if maker is not None and _name(maker) == "DequantizeLinear"]
    are_alike = all(_is_float8(shapes, maker) == is_float8 for maker in found)
    return bool(found) and len(found) == len(readers) and are_alike


def _is_float8(shapes: ShapeInfo, dequantizer: Node) -> bool:
    return shapes.dtype(dequantizer.inputs[0]) == TensorProto.FLOAT8E4M3FN


def _gather_block_quantized(_: ShapeInfo, node: Node) -> Description:
    bits = int_attribute(node, "bits", 4)
    return f"GatherBlockQuantized, {bits} bits, {_blocks(node, 3)}", "dequantizes the rows that it gathers"


def _blocks(node: Node, zero_points: int) -> str:
    size = int_attribute(node, "block_size", 128)
    return f"blocks of {size}{', zero points' if has_input(node, zero_points) else ''}"


def _group_query_attention(shapes: ShapeInfo, node: Node) -> Description:
    heads, kv_heads = int_attribute(node, "num_heads", 0), int_attribute(node, "kv_num_heads", 0)
    facts = [f"{heads} heads on {kv_heads}"]
    if has_input(node, 3):
        kind = str_attribute(node, "k_quant_type", "NONE")
        scales = {"PER_TENSOR": ", one scale for all", "PER_CHANNEL": ", a scale for each channel"}.get(kind, "")
        facts.append(f"a cache of {dtype_name(shapes.dtype(node.inputs[3]))}{scales}")
    if flag_attribute(node, "do_rotary", False):
        facts.append("rotation inside")
    window = int_attribute(node, "local_window_size", -1)
    if window > 0:
        facts.append(f"a window of {window}")
    how = "writes new keys into the cache where past and present are one buffer, else copies the cache in every run"
    return f"GroupQueryAttention, {', '.join(facts)}", how


def _alone(shapes: ShapeInfo, node: Node) -> Description:
    return _name(node), ALONE


DESCRIPTIONS: Final[Mapping[str, Callable[[ShapeInfo, Node], Description]]] = {
    **dict.fromkeys(("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"), _alone),
    **{op.removeprefix(CONTRIB): _alone for op in QUANTIZED_RULES},
    "MatMulNBits": _mat_mul_n_bits,
    "DequantizeLinear": _dequantize_linear,
    "GatherBlockQuantized": _gather_block_quantized,
    "GroupQueryAttention": _group_query_attention,
}
