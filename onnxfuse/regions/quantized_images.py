"""Fuse the quantizers around a pool or a Resize into its node, whose kernel then reads and writes integers.

Otherwise each element is written and read as a float of four bytes, and the QuantizeLinear is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.ir.serde import node_proto
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.joining import Joining
from onnxfuse.rewrite.chain_bodies import chained, function_of
from onnxfuse.rewrite.replace import FunctionCall, Fused, attributes_of, own_attributes, put_call

FUSIONS: Final = ("average_pool", "global_average_pool", "resize")
INTEGERS: Final = (TensorProto.INT8, TensorProto.UINT8)
OPERANDS: Final = ("scale", "zero_point")  # of x and of y


def fuse_quantizers(joining: Joining, records: Mapping[str, Fused]) -> list[Fused]:
    """Fuse a DequantizeLinear and a QuantizeLinear into each node between them; return the new records.

    `records` holds the records of all fused nodes, by the node's name.  The graph is sorted before and after.
    """
    graph = joining.graph
    found = [node for node in graph.nodes if node.name in records and _is_between_quantizers(joining, node)]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    joining.drop_functions(found)
    made = [_fuse(joining, records[node.name], bodies[node.op], node) for node in found]
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _is_between_quantizers(joining: Joining, node: Node) -> bool:
    """Return whether a node of FUSIONS reads dequantized integers, and its result is only quantized to that dtype."""
    if node.domain != DOMAIN or str(node.attrs["fusion"]) not in FUSIONS:
        return False
    (y,), before = node.outputs, producer(node.inputs[0])
    after = joining.graph.sole_consumer(y)
    if before is None or after is None:
        return False
    if op_of(before) != "DequantizeLinear" or op_of(after) != "QuantizeLinear" or after.inputs[0] is not y:
        return False
    dtypes = {joining.shapes.dtype(each) for each in (before.inputs[0], after.outputs[0])}
    is_plain = all(_is_plain(joining, each) for each in (before, after))
    is_excluded = (str(node.attrs["fusion"]), after.outputs[0].name) in joining.exclude
    return is_plain and not is_excluded and len(dtypes) == 1 and dtypes <= {*INTEGERS}


def _is_plain(joining: Joining, node: Node) -> bool:
    """Return whether a quantizer has one constant scale of float32, a constant zero point, and no other settings."""
    constants = node.inputs[1:]
    is_of_floats = len(constants) == len(OPERANDS) and joining.shapes.dtype(constants[0]) == TensorProto.FLOAT
    are_numbers = all(is_constant(each) and [*each.shape] in ([], [1]) for each in constants)
    return is_of_floats and are_numbers and node.attrs.keys() <= {"axis"}


def _fuse(joining: Joining, record: Fused, body: onnx.FunctionProto, node: Node) -> Fused:
    """Replace a node and the quantizers around it by one node, whose body has all three."""
    before = producer(node.inputs[0])
    (after,) = consumers(node.outputs[0])
    assert before is not None
    numbers, integers = _function(joining, before, "x"), _function(joining, after, "y")
    both = chained(chained(numbers, body, "x"), integers, "y")
    both.name, both.doc_string = record.fusion, f"Between quantizers.\n\n{body.doc_string}"
    inputs = [*before.inputs, *node.inputs[1:], *after.inputs[1:]]
    operands = (*numbers.input, *str(node.attrs["operands"]).split()[1:], *integers.input[1:])
    attributes = attributes_of(joining.shapes, record.fusion, operands, after.outputs, own_attributes(node))
    both.attribute[:] = sorted(attributes)
    outputs, joined = list[Tensor](after.outputs), (node_label(before), node_label(after))
    replaced = [node, after, *([before] if joining.graph.sole_consumer(before.outputs[0]) else [])]
    call = FunctionCall(joining.functions.add(both), node.name, inputs, outputs, attributes)
    put_call(joining.shapes, replaced, call)
    replaces = (*record.replaces, *joined)
    return replace(record, replaces=replaces, output=outputs[0].name, joined=(*record.joined, *joined))


def _function(joining: Joining, node: Node, of: str) -> onnx.FunctionProto:
    """Return a function that consists of a quantizer, whose operands are named after `of`, which is x or y."""
    operands = [of, *(f"{of}_{each}" for each in OPERANDS)]
    inner = node_proto(joining.graph, node)
    inner.name, inner.input[:], inner.output[:] = "", operands, [f"{of}_quantized"]
    inner.ClearField("metadata_props")
    return function_of(operands, [inner], joining.graph.opset)
