"""Join elementwise operators with the product whose result they read: one node, whose kernel has them as epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx
from onnx import helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, is_constant, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.region_operators import ELEMENTWISE, PRODUCTS
from onnxfuse.regions.cluster import Cluster
from onnxfuse.regions.steps import Step
from onnxfuse.regions.write import body, program
from onnxfuse.rewrite.replace import Fused, LocalFunctions


def joined_result(
    graph: Graph,
    shapes: ShapeInfo,
    cluster: Cluster,
    forms: Mapping[Node, tuple[Step, ...]],
    joining: Mapping[str, bool | str],
) -> Tensor | None:
    """Return the result of a fused node that a cluster can join; None if there is none.

    `joining` are the fusions that elementwise operators join, with the layout that nodes must have, or True.  Nothing
    else may read the result, but it may be an output of the graph, and all outputs of the cluster have its shape.
    """
    steps = (step for node in cluster.nodes for step in forms[node])
    if cluster.is_free or not all(step.op == "Constant" or step.op in ELEMENTWISE for step in steps):
        return None
    found = [
        tensor
        for tensor in cluster.operands.values()
        if (maker := producer(tensor)) is not None
        and maker.domain == DOMAIN
        and joining.get(str(maker.attrs["fusion"]), False) in (True, maker.attrs.get("layout"))
        and "program" not in maker.attrs
        and dtype_name(shapes.dtype(tensor)) in PRODUCTS
        and len(maker.outputs) == 1
        and all(node in cluster.nodes for node in consumers(tensor))
        and shapes.shape(tensor) is not None
        and all(shapes.shape(output) == shapes.shape(tensor) for output in cluster.outputs.values())
    ]
    return max(found, key=lambda tensor: graph.position[tensor.inputs[0]], default=None)


def write_joined(
    graph: Graph,
    shapes: ShapeInfo,
    cluster: Cluster,
    forms: Mapping[Node, tuple[Step, ...]],
    result: Tensor,
    bodies: Mapping[str, onnx.FunctionProto],
    functions: LocalFunctions,
    product: Fused,
) -> Fused:
    """Replace the nodes of a cluster, and the fused node whose `result` they read, by one; `product` is its record.

    The graph must be sorted afterwards.
    """
    (maker,) = result.inputs
    others = {name: tensor for name, tensor in cluster.operands.items() if tensor is not result}
    kept = {result.name: result} if graph.is_kept(result) else {}
    joined = replace(cluster, operands={result.name: result, **others}, outputs={**cluster.outputs, **kept})
    inputs, outputs = [*maker.inputs, *others.values()], list(joined.outputs.values())
    own: dict[str, AttributeValue] = {
        **{name: maker.attrs[name] for name in str(maker.attrs["attributes"]).split()},
        "output_ranks": [-1 if (rank := shapes.rank(t)) is None else rank for t in outputs],
        "program": program(shapes, joined, forms),
    }
    attributes: dict[str, AttributeValue] = {
        "fusion": product.fusion,
        "operands": " ".join([str(maker.attrs["operands"]), *(f"x{i + 1}" for i in range(len(others)))]),
        "output_types": [shapes.dtype(t) for t in outputs],
        "attributes": " ".join(sorted(own)),
        **own,
    }
    function = functions.add(_body(product.fusion, bodies[maker.op], body(graph, joined, []), list(attributes)))
    joining = tuple(node_label(node) for node in cluster.nodes)
    for node in (maker, *cluster.nodes):
        node.inputs.clear()
        node.outputs.clear()
    graph.add_node(function, inputs, outputs, attributes, name=product.node, domain=DOMAIN)
    for tensor in (*outputs, *(tensor for tensor in inputs if not is_constant(tensor))):
        graph.record_type(tensor, shapes.dtype(tensor), shapes.shape(tensor))
    return replace(product, replaces=(*product.replaces, *joining), output=outputs[0].name, joined=joining)


def _body(
    fusion: str, product: onnx.FunctionProto, behind: onnx.FunctionProto, attributes: list[str]
) -> onnx.FunctionProto:
    """Return one function of two, of which the second reads the result of the first as its first input."""
    taken = {*product.input, *(name for node in product.node for name in node.output)}
    names = {behind.input[0]: product.output[0], "": ""}
    inner = (name for node in behind.node for name in node.output)
    for name in dict.fromkeys((*behind.input[1:], *inner)):
        names[name] = name
        while names[name] in taken:
            names[name] += "_"
    nodes = [*product.node]
    for node in behind.node:
        read, made = [names[name] for name in node.input], [names[name] for name in node.output]
        nodes.append(helper.make_node(node.op_type, read, made))
        nodes[-1].attribute.extend(node.attribute)
    inputs = [*product.input, *(names[name] for name in behind.input[1:])]
    outputs = [names[name] for name in behind.output]
    opsets = {each.domain: each for each in (*behind.opset_import, *product.opset_import)}
    return helper.make_function(
        DOMAIN, fusion, inputs, outputs, nodes, list(opsets.values()), sorted(attributes),
        doc_string=f"{product.doc_string}\n\nElementwise operators follow.",
    )  # fmt: skip
