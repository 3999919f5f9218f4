"""Compute QuantizeLinears of constants ahead of time, and DequantizeLinears of biases and of some weights.

Weights of convolutions are dequantized only where nothing but weights is quantized: a model with quantized activations
runs in integers, and onnxruntime finds its integer operators by the DequantizeLinears of the weights.  Weights that
such a model quantizes when it runs, as models for TensorRT do, are stored as integers.  Weights of norms and of
ConvTransposes are always dequantized, because these do not run in integers.  Biases are dequantized too, because
onnxruntime quantizes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

import numpy as np

from onnxfuse.algebra.operators import CONVOLUTIONS, LIMITS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_default, int_attribute
from onnxfuse.ir.dtypes import LARGEST_FLOAT8, Array, dtype_name
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.graphsurgeon import make_constant
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.ir.quantizers import QUANTIZERS
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.region_operators import SIXTEEN_BITS

IN_INTEGERS: Final = ("DynamicQuantize", "QLinear", "ConvInteger", "MatMulInteger", "com.microsoft::")
INTEGERS: Final = ("int8", "uint8", "int16", "uint16", "int32")
QUANTIZED: Final = ("int8", "uint8", *LARGEST_FLOAT8)
FLOATS: Final = ("float32", "float16")
FIRST_WITH_FLOAT_BIASES: Final = 11  # the first opset with Round, which onnxruntime uses to quantize biases
MAX_INT8: Final = 127
SAME_SCALE: Final = 1e-6  # the largest relative difference of two scales that count as equal
FIRST_WITH_PRECISION: Final = 23  # the opset in which QuantizeLinear has an attribute `precision`
NORMS: Final = frozenset(f"{kind}Normalization" for kind in ("Batch", "Group", "Instance", "Layer", "RMS"))
OF_FLOATS: Final = NORMS | CONVOLUTIONS - {"Conv"}  # operators that onnxruntime never runs in integers
# Operators through which quantized weights can pass on their way to a Conv.
VIEWS: Final = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast"})


@graph_pass()
def fold_quantized_weights(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Replace QuantizeLinears of constants, and DequantizeLinears of biases and of some weights, by initializers.

    A weight is dequantized only if nothing but norms or convolutions reads it.
    """
    found = [node for node in graph.nodes if op_of(node) in QUANTIZERS]
    folded = [each for node in filter(_is_of_constants, found) for each in _folded(graph, node, _quantized)]
    found = [node for node in found if node.outputs]
    in_integers = any(op_of(node).startswith(IN_INTEGERS) for node in graph.nodes) or _has_fused_quantizers(graph)
    readers = OF_FLOATS if in_integers or not all(map(_is_of_constants, found)) else OF_FLOATS | CONVOLUTIONS
    for node in filter(_is_of_constants, found):
        (result,) = node.outputs
        are_floats = _are_weights(graph, result, readers) and not _would_be_quantized(graph, node)
        if are_floats or _are_beside_sixteen_bits(graph, shapes, result) or _is_bias(graph, node):
            folded += _folded(graph, node, _dequantized)
    return folded


def _folded(graph: Graph, node: Node, compute: Callable[[Graph, Node], Array | None]) -> list[Folded]:
    """Convert a node's result into an initializer if `compute` returns its value.

    Returns the change in a list; the list is empty if `compute` returns None or the tensor must keep its name.
    """
    (tensor,), value = node.outputs, compute(graph, node)
    if value is None or graph.is_kept(tensor):
        return []
    change = Folded("constant", node_label(node), tensor.name)
    make_constant(tensor, value)
    return [change]


def _has_fused_quantizers(graph: Graph) -> bool:
    """Return whether fused nodes contain quantizers; only a model that was optimized before has fused nodes."""
    return any(node.op_type.endswith("QuantizeLinear") for body in graph.functions for node in body.node)


def _is_of_constants(node: Node) -> bool:
    """Return whether the node reads constants only."""
    return is_constant(node.inputs[0]) and all(is_constant(each) or not each.name for each in node.inputs[1:])


def _is_bias(graph: Graph, node: Node) -> bool:
    """Return whether a node dequantizes a bias whose scale is the product of the scales of both operands.

    onnxruntime quantizes such a bias again without loss.  It would round a bias with another scale, and it fails in
    opsets before FIRST_WITH_FLOAT_BIASES.
    """
    (bias,), scale = node.outputs, _constant(graph, node, 1)
    if not is_constant(node.inputs[0]) or node.inputs[0].dtype != np.int32 or scale is None or graph.is_kept(bias):
        return False
    readers = consumers(bias) if graph.opset >= FIRST_WITH_FLOAT_BIASES else []
    return bool(readers) and all(_has_scale(graph, reader, bias, scale) for reader in readers)


def _has_scale(graph: Graph, reader: Node, bias: Tensor, scale: Array) -> bool:
    """Return whether a product or convolution adds the bias, and the scales of its operands multiply to `scale`."""
    if op_of(reader) not in (*CONVOLUTIONS, "Gemm") or not reader.inputs[2:] or reader.inputs[2] is not bias:
        return False
    makers = [producer(tensor) for tensor in reader.inputs[:2]]
    scales = [_constant(graph, each, 1) for each in makers if each is not None and op_of(each) == "DequantizeLinear"]
    known = [each for each in scales if each is not None and each.size in (1, scale.size)]
    factors = [each.astype(np.float64).ravel() for each in known]
    return (
        len(factors) == 2
        and bool((scale != 0).all())
        and np.allclose(factors[0] * factors[1], scale.ravel(), SAME_SCALE, 0)
    )


def _are_weights(graph: Graph, tensor: Tensor, readers: Set[str]) -> bool:
    """Return whether only the operators `readers` read the tensor, as weights, directly or through views."""
    if graph.is_kept(tensor) or not tensor.outputs:
        return False
    for node in tensor.outputs:
        if op_of(node) in VIEWS and node.inputs[0] is tensor:
            if not _are_weights(graph, node.outputs[0], readers):
                return False
        elif op_of(node) not in readers or node.inputs[0] is tensor:
            return False
    return True


def _would_be_quantized(graph: Graph, node: Node) -> bool:
    """Return whether onnxruntime's optimizations would quantize the result of `node` again, with other numbers.

    They quantize float weights of convolutions between quantizers to int8, with one scale for which the largest is 127.
    """
    values, scale, zero = (_constant(graph, node, index) for index in range(3))
    is_same = scale is not None and scale.size == 1 and (zero is None or not zero.any())
    if is_same and values is not None and values.dtype == np.int8 and np.abs(values.astype(np.int64)).max() == MAX_INT8:
        return False
    for reader in consumers(node.outputs[0]):
        maker, after = producer(reader.inputs[0]), graph.sole_consumer(reader.outputs[0])
        while after is not None and op_of(after) in LIMITS:
            after = graph.sole_consumer(after.outputs[0])
        found = [op_of(each) for each in (maker, after) if each is not None]
        if op_of(reader) in CONVOLUTIONS and found == ["DequantizeLinear", "QuantizeLinear"]:
            return True
    return False


def _are_beside_sixteen_bits(graph: Graph, shapes: ShapeInfo, weights: Tensor) -> bool:
    """Return whether MatMuls alone read the weights, beside integers of 16 bits.

    These multiply floats, also in onnxruntime, whose optimizations would quantize weights of a Conv or a Gemm again.
    """
    readers = consumers(weights)
    makers = [producer(each.inputs[0]) for each in readers if op_of(each) == "MatMul" and each.inputs[1] is weights]
    found = [each for each in makers if each is not None and op_of(each) == "DequantizeLinear"]
    wide = all(dtype_name(shapes.dtype(each.inputs[0])) in SIXTEEN_BITS for each in found)
    return bool(found) and len(found) == len(readers) and wide and not graph.is_kept(weights)


def _dequantized(graph: Graph, node: Node) -> Array | None:
    """Return onnxruntime's result for a DequantizeLinear of constants with a dtype of INTEGERS.

    Returns None for other nodes, and if the scale is given per block.
    """
    values = _constant(graph, node, 0)
    if op_of(node) != "DequantizeLinear" or values is None or values.dtype.name not in INTEGERS:
        return None
    if not _is_plain(graph, node):
        return None
    scale, zero = _scale_and_zero(graph, node, values)
    if scale is None:
        return None
    wide = (values.astype(np.int64) - zero).astype(np.float32)
    return (wide * scale.astype(np.float32)).astype(scale.dtype)


def _quantized(graph: Graph, node: Node) -> Array | None:
    """Return onnxruntime's result for a QuantizeLinear of constants to 8 bits; None for other nodes.

    The 8 bits are an integer, or a float8 number, for which numbers beyond its range become its limits.
    From opset 23 on, QuantizeLinear has an attribute for the precision, and the quotient of float16 numbers is rounded
    to float16.
    """
    if op_of(node) != "QuantizeLinear":
        return None
    values, zero_point = _constant(graph, node, 0), _constant(graph, node, 2)
    dtype = np.dtype(np.uint8) if zero_point is None else zero_point.dtype
    if values is None or values.dtype.name not in FLOATS or dtype.name not in QUANTIZED:
        return None
    scale, zero = _scale_and_zero(graph, node, values)
    if scale is None or scale.dtype != values.dtype or not np.isfinite(values).all() or not _is_plain(graph, node):
        return None
    if graph.opset < FIRST_WITH_PRECISION:
        values, scale = values.astype(np.float32), scale.astype(np.float32)
    with np.errstate(over="ignore"):
        quotient = values / scale
    if largest := LARGEST_FLOAT8.get(dtype.name):
        saturated: Array = np.clip(quotient.astype(np.float32), -largest, largest).astype(dtype)
        return saturated
    limits = np.iinfo(dtype)
    rounded: Array = np.clip(np.rint(quotient.astype(np.float64)) + zero, limits.min, limits.max).astype(dtype)
    return rounded


def _is_plain(graph: Graph, node: Node) -> bool:
    """Return whether all attributes except the axis have their default values."""
    others = ((name, value) for name, value in node.attrs.items() if name != "axis")
    return all(value == attribute_default(op_of(node), name, graph.opset) for name, value in others)


def _constant(graph: Graph, node: Node, index: int) -> Array | None:
    """Return the value of an input; None if it is left out or computed."""
    found = node.inputs[index] if index < len(node.inputs) else None
    return constant_value(graph, found) if is_constant(found) else None


def _scale_and_zero(graph: Graph, node: Node, values: Array) -> tuple[Array | None, Array]:
    """Return the scale and the zero point, shaped to broadcast.

    The scale is None if it is computed or given per block, if it is 0 or not finite, or if it does not fit the axis.
    """
    scale, zero = _constant(graph, node, 1), _constant(graph, node, 2)
    offset: Array = np.zeros((), np.int64) if zero is None else zero.astype(np.int64)
    if scale is None or scale.dtype.name not in FLOATS or int_attribute(node, "block_size", 0):
        return None, offset
    axis, shape = int_attribute(node, "axis", 1), [1] * values.ndim
    if scale.size > 1:
        if scale.ndim != 1 or not -values.ndim <= axis < values.ndim or values.shape[axis] != scale.size:
            return None, offset
        shape[axis] = -1
    if not (np.isfinite(scale) & (scale != 0)).all() or offset.size not in (1, scale.size):
        return None, offset
    return scale.reshape(shape), offset.reshape(shape)
