"""Join elementwise operators with the fused node whose result they read: its kernel then has them as epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import onnx
from onnx import helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, is_constant, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.region_operators import ELEMENTWISE, PRODUCTS, VIEWS
from onnxfuse.regions.cluster import MAX_OPERANDS, MAX_OUTPUTS, Cluster
from onnxfuse.regions.formation import Formed, Merging, is_worth_it
from onnxfuse.regions.steps import Step
from onnxfuse.regions.write import body, order_by_reading, program
from onnxfuse.rewrite.replace import Fused, LocalFunctions

VIEWED: Final = "views"  # of the declaration's `epilogue`


@dataclass(frozen=True)
class Join:
    """What joins the fused node that gives `result`: a cluster, or a part of one whose other nodes stay apart."""

    result: Tensor
    cluster: Cluster
    apart: Cluster | None = None


def find_join(formed: Formed, cluster: Cluster, joining: Mapping[str, bool | str]) -> Join | None:
    """Return how a cluster can join a fused node; None if it cannot.

    `joining` are the fusions that elementwise operators join, with their declaration's `epilogue`.  Of the nodes of the
    cluster, those that depend on the node's result must be elementwise, and their outputs have its shape.  What they
    read besides is computed with them, where nothing else reads it and it is elementwise or, with "views", a view.
    The result may be an output of the graph.  Others may read it beside a single operator, which would stay apart.
    """
    merging = formed.merging
    if merging is None or cluster.is_free:
        return None
    graph, shapes = merging.graph, merging.clusters.shapes
    found = [
        tensor
        for tensor in cluster.operands.values()
        if (maker := producer(tensor)) is not None
        and maker.domain == DOMAIN
        and joining.get(str(maker.attrs["fusion"]), False) in (True, VIEWED, maker.attrs.get("layout"))
        and "program" not in maker.attrs
        and dtype_name(shapes.dtype(tensor)) in PRODUCTS
        and tensor is maker.outputs[0]
        and (not _is_read_outside(tensor, cluster) or not is_worth_it(cluster))
        and shapes.shape(tensor) is not None
        and _is_behind_nothing(tensor, cluster, merging.level)
    ]
    found.sort(key=lambda tensor: graph.position[tensor.inputs[0]], reverse=True)
    with_views = (joining[str(tensor.inputs[0].attrs["fusion"])] == VIEWED for tensor in found)
    joins = (_join(formed, merging, cluster, *each) for each in zip(found, with_views, strict=True))
    return next((join for join in joins if join is not None), None)


def _is_read_outside(result: Tensor, cluster: Cluster) -> bool:
    return any(node not in cluster.nodes for node in consumers(result))


def _is_behind_nothing(result: Tensor, cluster: Cluster, level: Mapping[Node, int]) -> bool:
    """Return whether what a cluster reads besides the first result of a node depends on none of the node's results.

    Where that is the only result, it does not, if nothing but the cluster reads it.  Else, what the cluster reads must
    be of a lower level: then neither this join nor others can close a cycle.
    """
    (maker,) = result.inputs
    if len(maker.outputs) == 1 and not _is_read_outside(result, cluster):
        return True
    makers = (producer(tensor) for tensor in cluster.operands.values() if tensor is not result)
    return all(each is None or level[each] < level[maker] for each in makers)


def _join(formed: Formed, merging: Merging, cluster: Cluster, result: Tensor, with_views: bool) -> Join | None:
    """Return the part of a cluster that can join the node of a result; None if there is none, or it does not pay."""
    graph, shapes, forms = merging.graph, merging.clusters.shapes, formed.forms
    part, made = set[Node](), {result.name}
    for node in cluster.nodes:
        if any(tensor.name in made for tensor in node.inputs):
            if not all(step.op in ("Constant", *ELEMENTWISE) for step in forms[node]):
                return None
            part.add(node)
            made |= {tensor.name for tensor in node.outputs}
    outputs = [t for node in part for t in node.outputs if graph.is_kept(t) or not part.issuperset(consumers(t))]
    if any(shapes.shape(output) != shapes.shape(result) for output in outputs):
        return None
    for node in reversed(cluster.nodes):
        readers = {reader for tensor in node.outputs for reader in consumers(tensor)}
        is_kept = any(graph.is_kept(tensor) for tensor in node.outputs)
        is_elementwise = all(step.op in ("Constant", *ELEMENTWISE) for step in forms[node])
        is_view = with_views and all(map(_is_read_in_place, forms[node]))
        if readers <= part and not is_kept and (is_elementwise or is_view):
            part.add(node)
    left = [node for node in cluster.nodes if node not in part]
    if not left:
        return Join(result, cluster)
    between = [t for node in left for t in node.outputs if any(reader in part for reader in consumers(t))]
    if merging.clusters.bytes_of(between) >= merging.clusters.bytes_of([result]):
        return None
    inside = merging.clusters.part([node for node in cluster.nodes if node in part])
    others = merging.clusters.part(left)
    if len(inside.operands) > MAX_OPERANDS or len(others.outputs) > MAX_OUTPUTS:
        return None
    order_by_reading(inside, forms)
    return Join(result, inside, others)


def _is_read_in_place(step: Step) -> bool:
    """Return whether an epilogue reads through a step: neighbours stay such."""
    if step.op == "Transpose":
        perm: list[int] = step.attributes["perm"]  # type: ignore[assignment]
        return perm[-1] == len(perm) - 1
    return step.op in ("Constant", *VIEWS)


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
    kept = {result.name: result} if graph.is_kept(result) or _is_read_outside(result, cluster) else {}
    joined = replace(cluster, operands={result.name: result, **others}, outputs={**cluster.outputs, **kept})
    inputs, outputs = [*maker.inputs, *others.values()], [*joined.outputs.values(), *maker.outputs[1:]]
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
    outputs = [*(names[name] for name in behind.output), *product.output[1:]]
    opsets = {each.domain: each for each in (*behind.opset_import, *product.opset_import)}
    return helper.make_function(
        DOMAIN, fusion, inputs, outputs, nodes, list(opsets.values()), sorted(attributes),
        doc_string=f"{product.doc_string}\n\nElementwise operators follow.",
    )  # fmt: skip
