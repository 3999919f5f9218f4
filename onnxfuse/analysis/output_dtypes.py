"""The dtypes of a node's outputs, determined by its attributes or by the type constraints of the operator's schema."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo, constant_dtype
from onnxfuse.analysis.shape_rules import SHAPE_RULES
from onnxfuse.ir.attributes import schema, tensor_attribute
from onnxfuse.ir.node import Node, is_constant, op_of

_DTYPES = {f"tensor({name.lower()})": int(value) for name, value in TensorProto.DataType.items()}
_CONSTANT_DTYPES = {
    "value_float": TensorProto.FLOAT, "value_int": TensorProto.INT64, "value_string": TensorProto.STRING,
}  # fmt: skip

_ONNXRUNTIME_SOURCES = {  # operator -> inputs; the first that is present gives output 0 its dtype (default: input 0)
    "com.microsoft::QuantizeLinear": (2,), "com.microsoft::DequantizeLinear": (1,),
    "com.microsoft::MatMulIntegerToFloat": (2,), "com.microsoft::EmbedLayerNormalization": (2,),
    "com.microsoft::GatherBlockQuantized": (2,), "com.microsoft::QGemm": (8, 1),
    "com.microsoft::QLinearConcat": (1,), "com.microsoft::QLinearWhere": (1,),
}  # fmt: skip

# Operator -> inputs that give outputs their dtype, if no input is present that has the same type parameter.
_SOURCES = {"DequantizeLinear": (1,), "LinearAttention": (0,)}

_CACHES: dict[int, tuple[int, ...]] = {1: (0,), 2: (0,)}  # outputs 1 and 2 are keys and values; input 0 gives the dtype
_FURTHER_OUTPUTS: dict[str, dict[int, tuple[int, ...]]] = {  # operator -> output -> inputs that give it its dtype
    "com.microsoft::SkipLayerNormalization": {3: (0,)}, "com.microsoft::SkipSimplifiedLayerNormalization": {3: (0,)},
    "com.microsoft::EmbedLayerNormalization": {2: (2,)}, "com.microsoft::SkipGroupNorm": {1: (0,)},
    "com.microsoft::Attention": {1: (0,)}, "com.microsoft::MultiHeadAttention": _CACHES,
    "com.microsoft::DecoderMaskedMultiHeadAttention": _CACHES, "com.microsoft::SparseAttention": _CACHES,
    "com.microsoft::GroupQueryAttention": {1: (3, 0), 2: (4, 0)},  # the past, which can be quantized, or query
    "com.microsoft::LinearAttention": {1: (3, 0)}, "com.microsoft::GatedDeltaNet": {1: (6,)},
    "com.microsoft::CausalConvWithState": {1: (0,)},
}  # fmt: skip


def output_dtype(shapes: ShapeInfo, node: Node, index: int) -> int:
    """Return the onnx.TensorProto.DataType of an output; 0 where neither an attribute nor the schema determines it."""
    op = op_of(node)
    if op == "Constant":
        return _constant_node_dtype(node)
    if op == "ConstantOfShape":
        value = tensor_attribute(node, "value")
        return int(TensorProto.FLOAT) if value is None else constant_dtype(value)
    for name in ("to", "dtype", "output_dtype"):
        stated = node.attrs.get(name)
        if index == 0 and isinstance(stated, int) and stated:
            return stated
    source = _dtype_source(op, shapes.graph.opset, index)
    found = (shapes.dtype(node.inputs[i]) for i in source.inputs if i < len(node.inputs) and node.inputs[i].name)
    return source.fixed or next((dtype for dtype in found if dtype), 0)


def _constant_node_dtype(node: Node) -> int:
    if len(node.attrs) != 1:  # the node is invalid, or has a sparse value, which graphsurgeon leaves out
        return 0
    ((name, value),) = node.attrs.items()
    return constant_dtype(value) if is_constant(value) else int(_CONSTANT_DTYPES[name.removesuffix("s")])


@dataclass(frozen=True)
class _Source:
    """The source of an output's dtype: the first of `inputs` that is present, or a fixed dtype."""

    inputs: tuple[int, ...] = ()
    fixed: int = 0


@functools.cache
def _dtype_source(op: str, opset: int, index: int) -> _Source:
    found = schema(op, opset)
    if found is None:  # an operator of onnxruntime only, even if in the ONNX domain
        inputs = _FURTHER_OUTPUTS.get(op, {}).get(index, ()) if index else _ONNXRUNTIME_SOURCES.get(op, (0,))
        return _Source(inputs) if op in SHAPE_RULES else _Source()
    if not found.outputs:
        return _Source()
    formal_output = found.outputs[min(index, len(found.outputs) - 1)]
    if not formal_output.is_homogeneous:  # a Loop's outputs can have different dtypes
        return _Source()
    kind = formal_output.type_str
    allowed = next((c.allowed_type_strs for c in found.type_constraints if c.type_param_str == kind), [kind])
    if len(allowed) == 1:
        return _Source(fixed=_DTYPES.get(next(iter(allowed)), 0))
    alike = tuple(i for i, formal in enumerate(found.inputs) if formal.type_str == kind)
    return _Source(alike + _SOURCES.get(op, ()))
