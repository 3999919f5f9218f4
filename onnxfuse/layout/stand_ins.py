"""Offer channels-last Concats, Splits and gates to regions, which take them if that is cheaper.

Layouts are assigned before regions are formed, and turn these operators into fused nodes, whose kernels a region cannot
include.  For example, a gate after a Split would need its own launch.  So the plain operators replace these fused nodes
while regions are formed.  Operators that no region takes become fused nodes again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx
import onnx.numpy_helper

from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor
from onnxfuse.layout.channel_rules import CHANNEL_FUSIONS
from onnxfuse.layout.fusions import GATE
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

FUSIONS: Final = frozenset({*CHANNEL_FUSIONS, GATE})


@dataclass(frozen=True)
class StandIn:
    """A plain operator, the fused node that it temporarily replaces, and the fused node's record."""

    node: Node
    record: Fused
    body: onnx.FunctionProto
    inputs: tuple[Tensor, ...]
    attributes: Mapping[str, AttributeValue]


def stand_in(graph: Graph, fused: Collection[Fused]) -> list[StandIn]:
    """Replace each fused node of FUSIONS whose function has one operator by that operator; return the replacements.

    `fused` holds the records of the fused nodes.
    """
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    records = {one.node: one for one in fused if one.fusion in FUSIONS}
    made: list[StandIn] = []
    for node in list(graph.nodes):
        record = records.get(node.name) if node.domain == DOMAIN else None
        if record is None or str_attribute(node, "layout", "") != "nhwc":
            continue
        inner = [each for each in bodies[node.op].node if each.op_type not in ("Transpose", "Constant")]
        if len(inner) == 1:
            made.append(_stand_in(graph, node, record, bodies[node.op], inner[0]))
    if made:
        graph.sort()
    return made


def _stand_in(graph: Graph, node: Node, record: Fused, body: onnx.FunctionProto, inner: onnx.NodeProto) -> StandIn:
    """Replace a fused node by its operator on channels-last tensors; its function may have it between Transposes."""
    inputs, outputs = tuple(node.inputs), list(node.outputs)
    known = dict(zip(body.input, inputs, strict=True))
    for each in body.node:
        if each.op_type == "Constant":
            value = onnx.numpy_helper.to_array(each.attribute[0].t)
            known[each.output[0]] = graph.constant(f"{record.output}/{each.output[0]}", value)
        elif each.op_type == "Transpose" and each.input[0] in known:
            known[each.output[0]] = known[each.input[0]]
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in inner.attribute}
    own = dict(node.attrs)
    node.inputs.clear()
    node.outputs.clear()
    graph.linked.nodes.remove(node)
    new = graph.add_node(
        inner.op_type, [known[name] for name in inner.input], outputs, attributes, name=record.replaces[0]
    )
    return StandIn(new, record, body, inputs, own)


def put_back(graph: Graph, stand_ins: Sequence[StandIn]) -> list[Fused]:
    """Replace the operators that are still present by their fused nodes, and return the records of these nodes."""
    functions, present, left = LocalFunctions(graph), set(graph.nodes), list[Fused]()
    for one in stand_ins:
        if one.node in present:
            outputs = list(one.node.outputs)
            one.node.inputs.clear()
            one.node.outputs.clear()
            graph.linked.nodes.remove(one.node)
            body = onnx.FunctionProto()
            body.CopyFrom(one.body)
            body.name = one.record.fusion
            op = functions.add(body)
            graph.add_node(op, one.inputs, outputs, one.attributes, name=one.record.node, domain=DOMAIN)
            left.append(one.record)
    if stand_ins:
        graph.sort()
        drop_functions(graph, ())
    return left
