"""Write regions into a model: a node with a program for generated kernels, and a function with the original nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of
from onnxfuse.ir.serde import node_proto
from onnxfuse.match.diagnostics import node_name
from onnxfuse.regions.cluster import Cluster, Clusters
from onnxfuse.regions.computed import nodes_of
from onnxfuse.regions.steps import Step
from onnxfuse.rewrite.chain_bodies import renamed
from onnxfuse.rewrite.replace import REGION, FunctionCall, Fused, LocalFunctions, attributes_of, labels, put_call

DOC: Final = "Elementwise operators, index maps and reductions that one kernel runs."


def program(shapes: ShapeInfo, region: Cluster, forms: Mapping[Node, tuple[Step, ...]]) -> str:
    """Return the program of a region as compact JSON; x0, x1, ... are its operands in their order."""
    names = {name: f"x{i}" for i, name in enumerate(region.operands)}
    dtypes = {names[name]: dtype_name(shapes.dtype(tensor)) for name, tensor in region.operands.items()}
    constants: dict[tuple[object, ...], str] = {}
    ops: list[list[object]] = []
    count = 0
    for node in region.nodes:
        inner: dict[str, str] = {}
        for step in forms[node]:
            key = step.dtype, json.dumps(step.attributes)
            if step.op == "Constant" and key in constants:
                inner[step.outputs[0]] = constants[key]
                continue
            read = [inner.get(name) or names[name] for name in step.inputs]
            made = [f"v{count + i}" for i in range(len(step.outputs))]
            count += len(made)
            for name, value in zip(step.outputs, made, strict=True):
                (inner if name.startswith("#") else names)[name] = value
                dtypes[value] = dtype_name(step.dtype)
            if step.op == "Constant":
                constants[key] = made[0]
            ops.append([step.op, read, made, dict(step.attributes)])
    outputs = [names[name] for name in region.outputs]
    return json.dumps({"ops": ops, "outputs": outputs, "dtypes": dtypes}, separators=(",", ":"))


def body(
    graph: Graph,
    region: Cluster,
    forms: Mapping[Node, tuple[Step, ...]],
    attributes: list[str],
    bodies: Mapping[str, onnx.FunctionProto] | None = None,
) -> onnx.FunctionProto:
    """Return the body of a region: a function of its original nodes, which runs where no kernel is available.

    The function also has the constants that are not operands, and nodes that compute sizes from dims.  Fused nodes in
    the region are replaced by the nodes of their functions, which are in `bodies`.
    """
    names = {name: f"x{i}" for i, name in enumerate(region.operands)}
    nodes: list[onnx.NodeProto] = []
    count, units = 0, _units(graph, region, forms)
    for node in region.nodes:
        if node in units:
            axis, parts = units[node]
            for i, tensor in enumerate(parts):
                names[tensor.name], index = f"t{count}", f"c{count}"
                value = onnx.numpy_helper.from_array(np.array(i, np.int64))
                nodes.append(helper.make_node("Constant", [], [index], value=value))
                source = names[node.inputs[0].name]
                nodes.append(helper.make_node("Gather", [source, index], [names[tensor.name]], axis=axis))
                count += 1
        if any(tensor.name in names for tensor in node.outputs) or node in units:
            continue
        for tensor in node.inputs:
            if is_constant(tensor) and tensor.name not in names:
                names[tensor.name] = f"c{count}"
                value = onnx.numpy_helper.from_array(constant_value(graph, tensor))
                nodes.append(helper.make_node("Constant", [], [names[tensor.name]], value=value))
                count += 1
        for computed in (each for step in forms[node] for each in step.computed):
            names[computed.name] = f"c{count}"
            nodes += nodes_of(computed, names, names[computed.name], graph.opset)
            count += 1
        for output in node.outputs:
            names[output.name] = f"t{count}"
            count += 1
        if node.domain == DOMAIN and bodies:
            given = [names[t.name] for t in node.inputs], [names[t.name] for t in node.outputs]
            nodes += _nodes_of(bodies[node.op], *given, f"t{count}_")
            continue
        proto = node_proto(graph, node)
        nodes.append(helper.make_node(proto.op_type, [names[n] if n else "" for n in proto.input],
                                      [names[n] for n in proto.output]))  # fmt: skip
        nodes[-1].attribute.extend(proto.attribute)
    outputs = [names[name] for name in region.outputs]
    opsets = [helper.make_opsetid("", graph.opset)]
    operands = [names[name] for name in region.operands]
    return helper.make_function(DOMAIN, REGION, operands, outputs, nodes, opsets, sorted(attributes), doc_string=DOC)


def _units(
    graph: Graph, region: Cluster, forms: Mapping[Node, tuple[Step, ...]]
) -> dict[Node, tuple[int, list[Tensor]]]:
    """Return the Splits into parts of size 1 whose axis Squeezes remove: the axis, and what the Squeezes compute.

    The body has a Gather for each part instead.  onnxruntime moves a Transpose after these, but not after a Squeeze,
    and is eight times slower where a Transpose moves that axis too: in an XCiT, that took 15 % of the time on a CPU.
    """
    found = {}
    for node in region.nodes:
        attributes = {
            name: value for step in forms[node] if step.op == "Split" for name, value in step.attributes.items()
        }
        axis, sizes = attributes.get("axis"), attributes.get("sizes")
        readers = [consumers(each) for each in node.outputs]
        ends = [each[0] for each in readers if len(each) == 1 and op_of(each[0]) == "Squeeze"]
        are_alike = all(each in region.nodes and attribute_or_input(graph, each, "axes") == [axis] for each in ends)
        is_inside = len(ends) == len(readers) and not region.outputs.keys() & {each.name for each in node.outputs}
        if (
            isinstance(axis, int)
            and isinstance(sizes, list)
            and all(size == 1 for size in sizes)
            and is_inside
            and are_alike
        ):
            found[node] = axis, [each.outputs[0] for each in ends]
    return found


def _nodes_of(body: onnx.FunctionProto, inputs: list[str], outputs: list[str], stem: str) -> list[onnx.NodeProto]:
    """Return the nodes of a function, inlined for a call; the names of inner values begin with `stem`."""
    names = {name: stem + name for node in body.node for name in node.output}
    given = dict(zip((*body.input, *body.output), (*inputs, *outputs), strict=True))
    return renamed(body.node, {**names, **given, "": ""})


def write_region(
    clusters: Clusters,
    region: Cluster,
    functions: LocalFunctions,
    bodies: Mapping[str, onnx.FunctionProto],
    records: Mapping[str, Fused],
) -> Fused:
    """Replace the nodes of a region by one node that calls its function, and return the node's record.

    The caller must sort the graph afterwards.  `bodies` holds the functions of fused nodes in the region, and `records`
    maps names of fused nodes to their records, as in `labels`.
    """
    graph, shapes, forms = clusters.graph, clusters.shapes, clusters.forms
    region = replace(region, operands=region.operands | measured_besides(region, forms))
    outputs: list[Tensor] = list(region.outputs.values())
    operands = [f"x{i}" for i in range(len(region.operands))]
    attributes = attributes_of(shapes, REGION, operands, outputs, {"program": program(shapes, region, forms)})
    function = functions.add(body(graph, region, forms, list(attributes), bodies))
    replaced = tuple(label for node in region.nodes for label in labels(node, records))
    name = graph.unique_name(f"{node_name(outputs[0])}/{REGION}")
    put_call(shapes, region.nodes, FunctionCall(function, name, list(region.operands.values()), outputs, attributes))
    return Fused(REGION, name, replaced, {}, outputs[0].name)


def measured_besides(region: Cluster, forms: Mapping[Node, tuple[Step, ...]]) -> dict[str, Tensor]:
    """Return, by name, the tensors from which a region reads dims, but no elements."""
    made = {t.name for node in region.nodes for t in node.outputs}
    found = (tensor for node in region.nodes for step in forms[node] for tensor in step.measured)
    return {tensor.name: tensor for tensor in found if tensor.name not in made and tensor.name not in region.operands}


def order_by_reading(region: Cluster, forms: Mapping[Node, tuple[Step, ...]]) -> None:
    """Sort a region's operands in the order in which its steps first read them, and its outputs in execution order."""
    read = dict.fromkeys(name for node in region.nodes for step in forms[node] for name in step.inputs)
    made = dict.fromkeys(t.name for node in region.nodes for t in node.outputs)
    region.operands = {name: region.operands[name] for name in read if name in region.operands}
    region.outputs = {name: region.outputs[name] for name in made if name in region.outputs}
