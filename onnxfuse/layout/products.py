"""Store weights of integer products and convolutions in the layouts that kernels read; also store their sums."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import onnx

from onnxfuse.algebra.filter_edges import MAX_ROWS, Beyond, most_taps_beyond, row_count, sums_inside
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.ir.graph import constant_value, take_name
from onnxfuse.ir.node import Constant, Node, Tensor, consumers, is_constant
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.bodies import channels_last_function
from onnxfuse.layout.fusions import QUANTIZED_CONVOLUTION, QUANTIZED_PRODUCT
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, drop_functions, put_call

TURNED: Final[Perm] = (1, 0)
SUMS: Final = "w_sums"  # name of the operand that holds the sums of weights


def store_rows(shapes: ShapeInfo, recorded: Collection[Fused]) -> dict[str, tuple[str, Perm]]:
    """Store the weights of products of integers as (n, k), so that the integers over which a kernel sums are adjacent.

    Nodes with records in `recorded` change, unless something else reads their weight.  The result maps the name of each
    new weight to the weight that it is a Transpose of, and to the perm.  The body (the ONNX function that the node
    calls) transposes the weight back; onnxruntime computes this Transpose when it loads the model.
    """
    graph, names = shapes.graph, {one.node for one in recorded}
    found = [node for node in graph.nodes if node.name in names and _has_columns(node)]
    weights = {weight.name: weight for node in found if is_constant(weight := _weight(node))}
    weights = {name: weight for name, weight in weights.items() if set(consumers(weight)) <= {*found}}
    found = [node for node in found if _weight(node).name in weights]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if found and not graph.is_subgraph:
        drop_functions(graph, found)
    functions, originals = LocalFunctions(graph), dict[str, tuple[str, Perm]]()
    for name, weight in weights.items():
        stored = graph.constant(f"{name}/nk", np.ascontiguousarray(constant_value(graph, weight).T))
        originals[stored.name] = name, TURNED
        for node in consumers(weight):
            inputs, body = list(node.inputs), bodies[node.op]
            index = next(i for i, tensor in enumerate(inputs) if tensor is weight)
            inputs[index] = stored
            turned = channels_last_function(body, {body.input[index]: TURNED}, {})
            turned.name = QUANTIZED_PRODUCT
            if constant_value(graph, stored).dtype.name == FLOAT8:
                _dequantize_first(turned, body.input[index])
            attributes = {**node.attrs, "weight_layout": "nk"}
            call = FunctionCall(functions.add(turned), node.name, inputs, list(node.outputs), attributes)
            put_call(shapes, [node], call)
    if found:
        graph.remove_dead()
        graph.sort()
    return originals


def _dequantize_first(body: onnx.FunctionProto, weight: str) -> None:
    """Exchange a body's Transpose of a weight and the DequantizeLinear of its result: float8 needs opset 21 to move.

    A Gemm reads the dequantized weight with transB, without the Transpose.
    """
    nodes = list(body.node)
    before = next(i for i, node in enumerate(nodes) if node.op_type == "Transpose" and node.input[0] == weight)
    transpose = nodes.pop(before)
    at = next(i for i, node in enumerate(nodes) if node.input and node.input[0] == transpose.output[0])
    dequantize = nodes[at]
    dequantize.input[0], transpose.input[0] = weight, transpose.output[0]
    dequantize.output[0], transpose.output[0] = transpose.output[0], dequantize.output[0]
    for attribute in dequantize.attribute:
        if attribute.name == "axis":
            attribute.i = 0
    (reader,) = (node for node in nodes if transpose.output[0] in node.input)
    if reader.op_type == "Gemm":
        reader.input[1] = transpose.input[0]
        others = [each for each in reader.attribute if each.name != "transB"]
        del reader.attribute[:]
        reader.attribute.extend([*others, onnx.helper.make_attribute("transB", 1)])
    else:
        nodes.insert(at + 1, transpose)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del body.node[:]
    body.node.extend(copies)


def store_sums(shapes: ShapeInfo) -> None:
    """Store the sums of weights that kernels multiply by the zero point of x, as an operand that no body reads.

    The sums are not stored if the weights are not constant, or if a convolution has auto_pad: kernels then compute the
    sums in each run.  Sums are not needed where kernels dequantize the operands instead of multiplying integers: for
    uint8 weights, weights with zero points, convolutions with groups, and those with more than MAX_ROWS rows of sums.
    """
    graph = shapes.graph
    found = {node: summed for node in graph.nodes if (summed := _summed(node)) is not None}
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if found and not graph.is_subgraph:
        drop_functions(graph, found)
    functions, stored = LocalFunctions(graph), dict[tuple[str, Beyond], Constant]()
    for node, (weight, beyond) in found.items():
        operands, body = _operands(node), onnx.FunctionProto()
        if (weight.name, beyond) not in stored:
            sums = sums_inside(constant_value(graph, weight), beyond)
            stored[weight.name, beyond] = graph.constant(f"{weight.name}/sums", sums)
        body.CopyFrom(bodies[node.op])
        at = operands.index("w_scale") + 1
        body.name = str_attribute(node, "fusion", "")
        body.input.insert(at, take_name({*body.input, *(name for one in body.node for name in one.output)}, SUMS))
        attributes = {**node.attrs, "operands": " ".join((*operands[:at], SUMS, *operands[at:]))}
        inputs = (*node.inputs[:at], stored[weight.name, beyond], *node.inputs[at:])
        put_call(shapes, [node], FunctionCall(functions.add(body), node.name, inputs, list(node.outputs), attributes))
    if found:
        graph.remove_dead()
        graph.sort()


def _summed(node: Node) -> tuple[Constant, Beyond] | None:
    """Return a node's weights and the taps that can lie outside x; None if the sums of weights cannot be stored."""
    fusion = str_attribute(node, "fusion", "") if node.domain == DOMAIN else ""
    if fusion not in (QUANTIZED_PRODUCT, QUANTIZED_CONVOLUTION):
        return None
    operands, weight = _operands(node), _weight(node)
    if "x_zero_point" not in operands or not {"w_zero_point", SUMS}.isdisjoint(operands):
        return None
    if not is_constant(weight) or weight.dtype != np.int8:
        return None
    if fusion == QUANTIZED_PRODUCT:
        return (weight, ()) if str_attribute(node, "weight_layout", "") == "nk" else None
    _, *kernel, _ = weight.shape
    required = (("layout", "", "nhwc"), ("w_layout", "ohwi", "ohwi"), ("auto_pad", "NOTSET", "NOTSET"))
    is_plain = all(str_attribute(node, name, default) == value for name, default, value in required)
    if not is_plain or int_attribute(node, "group", 1) != 1:
        return None
    axes = len(kernel)
    pads = ints_attribute(node, "pads", [0] * 2 * axes)
    dilations = ints_attribute(node, "dilations", [1] * axes)
    beyond = most_taps_beyond(kernel, dilations, pads[:axes], pads[axes:])
    return (weight, beyond) if row_count(beyond) <= MAX_ROWS else None


def _has_columns(node: Node) -> bool:
    is_product = node.domain == DOMAIN and str_attribute(node, "fusion", "") == QUANTIZED_PRODUCT
    return is_product and str_attribute(node, "weight_layout", "") == "kn"


def _operands(node: Node) -> list[str]:
    return str_attribute(node, "operands", "").split()


def _weight(node: Node) -> Tensor:
    return node.inputs[_operands(node).index("w")]
