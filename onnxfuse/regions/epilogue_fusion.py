"""Fuse elementwise operators into the fused node whose result they read, as the epilogue of its kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import onnx

from onnxfuse.algebra.operators import EXTREMES
from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.match import Match
from onnxfuse.region_operators import ELEMENTWISE, PRODUCTS, VIEWS
from onnxfuse.regions.cluster import MAX_OPERANDS, MAX_OUTPUTS, Cluster, Clusters
from onnxfuse.regions.joining import Joining
from onnxfuse.regions.rows import DYNAMIC
from onnxfuse.regions.steps import Step
from onnxfuse.regions.write import body, measured_besides, order_by_reading, program
from onnxfuse.rewrite.chain_bodies import chained
from onnxfuse.rewrite.replace import (
    FunctionCall,
    Fused,
    LocalFunctions,
    attributes_of,
    labels,
    own_attributes,
    put_call,
)


@dataclass(frozen=True)
class Join:
    """A plan to replace a cluster, or a part of it, and the fused node that computes `result` by one fused node.

    If only a part of the cluster joins the fused node, `apart` holds the rest of the cluster.
    """

    result: Tensor
    cluster: Cluster
    apart: Cluster | None = None
    match: Match | None = None  # the match that computes `result`, if it is not a fused node yet


def find_epilogue_fusion(
    clusters: Clusters, cluster: Cluster, joining: Joining, taken: Collection[str] = frozenset()
) -> Join | None:
    """Return how a cluster can join a fused node; None if it cannot.

    `joining` says which fused nodes operators can join, and `taken` has the names of results that other clusters join.
    The operators that depend on the fused node's result must be elementwise or only regroup axes, and their outputs
    must have the rows of this result (see `_has_rows_of`).  The operators that compute other operands of these join as
    well, if they are elementwise or views and nothing else reads them.

    If the fused node's result is also read elsewhere, or is a graph output, the new node has it as an output, too.

    Operators up to an ArgMax or ArgMin of the rows can join as well, if nothing else reads the values before it.
    """
    if cluster.is_free:
        return None
    graph, shapes = clusters.graph, clusters.shapes
    found = list[tuple[Node, Tensor, Match | None]]()
    for tensor in cluster.operands.values():
        maker = producer(tensor)
        may_join = (
            maker is not None
            and tensor is maker.outputs[0]
            and tensor.name not in taken
            and "program" not in maker.attrs
            and dtype_name(shapes.dtype(tensor)) in PRODUCTS
            and shapes.shape(tensor) is not None
            and _closes_no_cycle(clusters, maker, cluster)
        )
        if maker is None or not may_join:
            continue
        if maker.domain == DOMAIN:
            if joining.takes_epilogue(maker):
                found.append((maker, tensor, None))
        elif match := joining.match_at(tensor):
            found.append((maker, tensor, match))
    found.sort(key=lambda one: graph.position[one[0]], reverse=True)
    results = {tensor.name for _, tensor, _ in found}
    for maker, tensor, match in found:
        if joining.takes_selection(maker, match) and (join := _join_selection(clusters, cluster, tensor, results)):
            return replace(join, match=match)
    for join_part in _join, _join_up_to_quantizers, _join_before_others:
        for _, tensor, match in found:
            join = join_part(clusters, cluster, tensor, results, joining)
            if join is not None:
                return replace(join, match=match)
    return None


def _closes_no_cycle(clusters: Clusters, maker: Node, cluster: Cluster) -> bool:
    """Return whether a cluster can join `maker`, the node whose result it reads, without closing a cycle.

    No cycle is possible if `maker` has one result, and only the cluster reads it.  Otherwise, the producers of all
    other operands of the cluster must have a lower level (a number that never decreases from a producer to a consumer)
    than `maker`.  Then no combination of joins closes a cycle.
    """
    result = maker.outputs[0]
    if len(maker.outputs) == 1 and all(node in cluster.nodes for node in result.outputs):
        return True
    read = (*cluster.operands.values(), *measured_besides(cluster, clusters.forms).values())
    makers = (producer(tensor) for tensor in read if tensor is not result)
    return all(each is None or clusters.level[each] < clusters.level[maker] for each in makers)


def _join(
    clusters: Clusters, cluster: Cluster, result: Tensor, results: Collection[str], joining: Joining
) -> Join | None:
    """Return how a part of a cluster can join the node that computes `result`.

    Returns None if no part can join, or if the joining part would read as many bytes as `result` has, or more, from the
    rest of the cluster.  `results` has the names of all results of nodes that the cluster could join.  A
    DequantizeLinear that only norms read does not join: in a region with a norm, it reads integers, which are fewer
    bytes.
    """
    part = _readers(cluster, result)
    if not all(_keeps_order(step) for node in part for step in clusters.forms[node]):
        return None
    part -= {node for node in part if producer(node.inputs[0]) in part and _is_read_by_norms(clusters, node, joining)}
    if not _gives_rows_of(clusters, part, result):
        return None
    join = _join_part(clusters, cluster, result, part, results)
    between = _between(join)
    return None if between and clusters.bytes_of(between) >= clusters.bytes_of([result]) else join


def _join_selection(clusters: Clusters, cluster: Cluster, result: Tensor, results: Collection[str]) -> Join | None:
    """Return how the operators of a cluster up to an ArgMax or ArgMin of rows can join the node that computes `result`.

    Nothing else reads `result` and the values in between, so that the node stores the indices alone.
    """
    readers = _readers(cluster, result)
    for node in (node for node in cluster.nodes if node in readers and _selects_of_rows(clusters, node, result)):
        part = {node}
        for each in reversed(cluster.nodes):
            if each in readers and any(reader in part for tensor in each.outputs for reader in consumers(tensor)):
                part.add(each)
        before = part - {node}
        inner = [result, *(tensor for each in before for tensor in each.outputs)]
        is_alone = not any(clusters.graph.is_kept(t) or not part.issuperset(consumers(t)) for t in inner)
        if is_alone and all(_keeps_order(step) for each in before for step in clusters.forms[each]):
            return _join_part(clusters, cluster, result, part, results)
    return None


def _selects_of_rows(clusters: Clusters, node: Node, result: Tensor) -> bool:
    """Return whether a node is an ArgMax or ArgMin over the last axis of an operand that has the rows of `result`."""
    if op_of(node) not in EXTREMES:
        return False
    shape, rows = (clusters.shapes.shape(tensor) or () for tensor in (node.inputs[0], result))
    is_last = clusters.forms[node][-1].attributes["axis"] == len(shape) - 1
    return is_last and _has_rows_of(shape, rows) and shape[-1:] == rows[-1:]


def _is_read_by_norms(clusters: Clusters, node: Node, joining: Joining) -> bool:
    """Return whether a node is a DequantizeLinear, and all readers of its result are norms that can be in regions."""
    if op_of(node) != "DequantizeLinear" or clusters.graph.is_kept(node.outputs[0]):
        return False
    return all(map(joining.is_norm, consumers(node.outputs[0])))


def _join_up_to_quantizers(
    clusters: Clusters, cluster: Cluster, result: Tensor, results: Collection[str], joining: Joining
) -> Join | None:
    """Return how the operators of a cluster up to its QuantizeLinears can join the node that computes `result`.

    The rest of the cluster then reads integers, which are fewer bytes.  No operator of the rest computes an operand of
    the operators that join.
    """
    staying = set[Node]()
    while consumers(result) and (part := _up_to_quantizers(clusters, cluster, result, staying)) >= {*consumers(result)}:
        join = _join_part(clusters, cluster, result, part, results) if _gives_rows_of(clusters, part, result) else None
        if not (between := _between(join)):
            return join
        staying |= {node for tensor in between for node in _readers(cluster, tensor)}
    return None


def _between(join: Join | None) -> list[Tensor]:
    """Return the operands of the operators that join which the rest of the cluster computes."""
    if join is None or join.apart is None:
        return []
    return [tensor for name, tensor in join.apart.outputs.items() if name in join.cluster.operands]


def _join_before_others(
    clusters: Clusters, cluster: Cluster, result: Tensor, results: Collection[str], joining: Joining
) -> Join | None:
    """Return how the operators of a cluster before others that cannot join can join the node that computes `result`.

    The others are DynamicQuantizeLinears, and operators that move elements, such as a Concat, if they read fewer bytes
    than `result` has.  A DynamicQuantizeLinear reads its operand twice: for the scale, and to quantize it.  So its
    region would compute the operators before it twice.  No operator of the rest computes an operand of the operators
    that join: that would be a cycle, because the rest reads their results.
    """
    readers, staying = _readers(cluster, result), set[Node]()
    while part := _before_others(clusters, cluster, result, readers, staying):
        join = _join_part(clusters, cluster, result, part, results) if _gives_rows_of(clusters, part, result) else None
        if not (between := _between(join)):
            return join
        staying |= {node for tensor in between for node in _readers(cluster, tensor)}
    return None


def _before_others(
    clusters: Clusters, cluster: Cluster, result: Tensor, readers: set[Node], staying: Collection[Node]
) -> set[Node]:
    """Return the nodes of `readers`, but not of `staying`, that keep the order of elements up to such others."""
    in_order, part = set[Node](), set[Node]()
    for node in (node for node in cluster.nodes if node in readers and node not in staying):
        keeps_order = op_of(node) != DYNAMIC and all(map(_keeps_order, clusters.forms[node]))
        if keeps_order and readers.intersection(map(producer, node.inputs)) <= in_order:
            in_order.add(node)
    for node in (node for node in reversed(cluster.nodes) if node in in_order):
        is_narrow = clusters.bytes_of(node.outputs) < clusters.bytes_of([result])
        read_by = {*chain.from_iterable(map(consumers, node.outputs))}
        ends = {each for each in read_by if op_of(each) == DYNAMIC or (is_narrow and each in readers - in_order)}
        if ends or not part.isdisjoint(read_by):
            part.add(node)
    return part


def _up_to_quantizers(clusters: Clusters, cluster: Cluster, result: Tensor, staying: Collection[Node]) -> set[Node]:
    """Return the nodes of a cluster, without those in `staying`, that can join up to the cluster's QuantizeLinears.

    The returned nodes depend on `result` and keep the order of its elements.  All other nodes read only results of
    QuantizeLinears from them.
    """
    found, readers = set[Node](), _readers(cluster, result)
    for node in (node for node in cluster.nodes if node in readers):
        keeps_order = node not in staying and all(map(_keeps_order, clusters.forms[node]))
        if keeps_order and readers.intersection(map(producer, node.inputs)) <= found:
            found.add(node)
    for node in [node for node in reversed(cluster.nodes) if node in found]:
        is_read = any(clusters.graph.is_kept(t) or not found.issuperset(consumers(t)) for t in node.outputs)
        if is_read and op_of(node) != "QuantizeLinear":
            found.discard(node)
    return found


def _readers(cluster: Cluster, result: Tensor) -> set[Node]:
    """Return the nodes of a cluster that depend on a tensor."""
    found, made = set[Node](), {result.name}
    for node in cluster.nodes:
        if any(tensor.name in made for tensor in node.inputs):
            found.add(node)
            made |= {tensor.name for tensor in node.outputs}
    return found


def _join_part(
    clusters: Clusters, cluster: Cluster, result: Tensor, part: set[Node], results: Collection[str]
) -> Join | None:
    """Return how the operators `part`, and those that compute their other operands, can join the producer of `result`.

    A QuantizeLinear or a Cast to fewer bytes that reads another result in `results` does not join: it can join the
    producer of that result, which then writes fewer bytes.
    """
    graph, forms = clusters.graph, clusters.forms
    for node in reversed(cluster.nodes):
        readers = {reader for tensor in node.outputs for reader in consumers(tensor)}
        is_kept = any(graph.is_kept(tensor) for tensor in node.outputs)
        is_apart = op_of(node) in ("QuantizeLinear", "Cast") and node.inputs[0].name in results
        is_apart = is_apart and clusters.bytes_of(node.outputs) < clusters.bytes_of(node.inputs[:1])
        if readers <= part and not is_kept and not is_apart and all(map(_is_read_in_place, forms[node])):
            part.add(node)
    left = [node for node in cluster.nodes if node not in part]
    if not left:
        return Join(result, cluster)
    inside = clusters.part([node for node in cluster.nodes if node in part])
    others = clusters.part(left)
    if len(inside.operands) > MAX_OPERANDS or len(others.outputs) > MAX_OUTPUTS:
        return None
    order_by_reading(inside, forms)
    return Join(result, inside, others)


def _gives_rows_of(clusters: Clusters, part: set[Node], result: Tensor) -> bool:
    """Return whether all outputs of a part of a cluster have the rows of `result`, as `_has_rows_of` says."""
    graph, shape = clusters.graph, clusters.shapes.shape
    outputs = [t for node in part for t in node.outputs if graph.is_kept(t) or not part.issuperset(consumers(t))]
    return all(_has_rows_of(shape(output), shape(result)) for output in outputs)


def _keeps_order(step: Step) -> bool:
    """Return whether the elements of a step's result have the same order as those of its operand."""
    return step.op in ("Constant", "Reshape", "Unsqueeze", "Squeeze", *ELEMENTWISE)


def _has_rows_of(shape: Shape | None, result: Shape | None) -> bool:
    """Return whether a tensor of `shape` has the rows of a tensor of shape `result`, in the same order.

    A row has the elements of the last axis of `result`; in `shape`, the row is spread over one or more trailing axes.
    """
    if not shape or not result:
        return shape == result
    ends = accumulate(reversed(shape), lambda below, size: below * size)
    return product(shape) == product(result) and result[-1] in ends


def _is_read_in_place(step: Step) -> bool:
    """Return whether an epilogue can run a step: an elementwise operator, or a view that keeps the last axis intact."""
    return step.op in ("Constant", *VIEWS, *ELEMENTWISE) and step.keeps_last_axis


def write_epilogue_fusion(
    clusters: Clusters,
    join: Join,
    functions: LocalFunctions,
    bodies: Mapping[str, onnx.FunctionProto],
    records: Mapping[str, Fused],
) -> Fused:
    """Replace a fused node, and the cluster that becomes its epilogue, by one node; return the record of this node.

    `bodies` maps names to the functions that fused nodes call, and `records` maps names of fused nodes to their
    records.  The caller must sort the graph afterwards.
    """
    graph, shapes, cluster, result = clusters.graph, clusters.shapes, join.cluster, join.result
    (maker,) = result.inputs
    record = records[maker.name]
    others = {**cluster.operands, **measured_besides(cluster, clusters.forms)}
    others.pop(result.name)
    is_read_elsewhere = any(node not in cluster.nodes for node in result.outputs)
    kept = {result.name: result} if is_read_elsewhere or graph.is_kept(result) else {}
    joined = replace(cluster, operands={result.name: result, **others}, outputs={**cluster.outputs, **kept})
    inputs, outputs = [*maker.inputs, *others.values()], [*joined.outputs.values(), *maker.outputs[1:]]
    own = {**own_attributes(maker), "program": program(shapes, joined, clusters.forms)}
    operands = [str(maker.attrs["operands"]), *(f"x{i + 1}" for i in range(len(others)))]
    attributes = attributes_of(shapes, record.fusion, operands, outputs, own)
    before = bodies[maker.op]
    both = chained(before, body(graph, joined, clusters.forms, []), "x0")
    both.name, both.doc_string = record.fusion, f"{before.doc_string}\n\nElementwise operators follow."
    both.attribute[:] = sorted(attributes)
    joining = tuple(label for node in cluster.nodes for label in labels(node, records))
    call = FunctionCall(functions.add(both), record.node, inputs, outputs, attributes)
    put_call(shapes, (maker, *cluster.nodes), call)
    return replace(record, replaces=(*record.replaces, *joining), output=outputs[0].name, joined=joining)
