"""Insert nodes that were written from terms into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx.numpy_helper import to_array

from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.graphsurgeon import new_variable
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant


def insert_nodes(
    shapes: ShapeInfo,
    protos: Sequence[onnx.NodeProto],
    operands: Mapping[str, Tensor],
    outputs: Sequence[tuple[str, Tensor]],
    label: str,
) -> list[Node]:
    """Append nodes that compute tensors whose producers were removed; return them with their types inferred.

    protos    nodes that a BodyBuilder wrote; their Constants become initializers
    operands  the tensors that the nodes read, by the names of the values in `protos`
    outputs   pairs of the name of a value and the tensor that it becomes; a value that is an operand, or becomes a
              second tensor, gets an Identity
    label     the prefix of new names; a value that is computed from constants alone is instead named after the first
              of its constants
    """
    graph, tensors = shapes.graph, dict(operands)
    computed = {name for proto in protos for name in proto.output}
    ends: dict[str, Tensor] = {}
    copies: list[tuple[str, Tensor]] = []
    for name, tensor in outputs:
        if name in computed and name not in ends:
            ends[name] = tensor
        else:
            copies.append((name, tensor))
    made = []
    # For each value that is computed from constants alone: the beginning of its name in the graph.
    stems = {name: tensor.name for name, tensor in operands.items() if is_constant(tensor)}
    for proto in protos:
        if proto.op_type == "Constant":
            tensors[proto.output[0]] = graph.constant(f"{label}/constant", to_array(proto.attribute[0].t))
            stems[proto.output[0]] = label
        else:
            of_constants = bool(proto.input) and all(name in stems for name in proto.input if name)
            stem = stems.get(proto.input[0], label) if of_constants else label
            made.append(_append(graph, proto, label, stem, tensors, ends))
            stems |= dict.fromkeys(proto.output, stem) if of_constants else {}
    for name, tensor in copies:
        made.append(graph.add_node("Identity", [tensors[name]], [tensor], name=graph.unique_name(f"{label}/Identity")))
    for node in made:
        infer_node(shapes, node)
    return made


def _append(
    graph: Graph, proto: onnx.NodeProto, label: str, stem: str, tensors: dict[str, Tensor], ends: Mapping[str, Tensor]
) -> Node:
    """Append a node with a name that begins with `label`, and outputs whose names begin with `stem`."""
    for name in proto.output:
        tensors[name] = ends[name] if name in ends else graph.variable(f"{stem}/{proto.op_type}_output")
    inputs = [tensors[name] if name else new_variable("") for name in proto.input]
    attributes = {each.name: _attribute(each) for each in proto.attribute}
    name = graph.unique_name(f"{label}/{proto.op_type}")
    outputs = [tensors[each] for each in proto.output]
    return graph.add_node(proto.op_type, inputs, outputs, attributes, name=name, domain=proto.domain)


def _attribute(attribute: onnx.AttributeProto) -> AttributeValue:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return list(value) if not isinstance(value, int | float | str) else value
