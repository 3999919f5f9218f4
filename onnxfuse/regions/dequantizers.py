"""Compute each DequantizeLinear in the regions that read its result: they then read integers, which are fewer bytes."""

from __future__ import annotations

from collections import defaultdict

from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer, tensor_before
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.cluster import Clusters
from onnxfuse.regions.normal_form import normal_form


def dequantize_at_readers(clusters: Clusters) -> None:
    """Move each DequantizeLinear to the level of the operators that read it, before any cluster is made.

    Only nodes of one level can form a region (see order.py).  If its readers have several levels, each further level
    gets a copy of the DequantizeLinear; the original stays at its level if an operator there, or one that cannot be in
    a region, reads it.  Casts of its result move with it.
    """
    graph, level, forms = clusters.graph, clusters.level, clusters.forms
    for node in reversed(list(graph.nodes)):  # Casts are moved before what they read
        op = op_of(node)  # first, because most nodes are neither
        if node not in forms or (op != "DequantizeLinear" and op != "Cast") or not _dequantizes(node):
            continue
        (result,), readers = node.outputs, defaultdict[int, list[Node]](list)
        for reader in consumers(result):
            readers[level[reader] if reader in forms else level[node]].append(reader)
        later = sorted(readers.keys() - {level[node]})
        if later and level[node] not in readers and not graph.is_kept(result):
            level[node] = later.pop(0)
        for each in later:
            copy = _copy(clusters, node, result, readers[each])
            level[copy] = each
    if clusters.copies:
        graph.sort()


def _dequantizes(node: Node) -> bool:
    """Return whether a node is a DequantizeLinear of a tensor that is computed, or a Cast of its result."""
    if op_of(node) == "Cast":
        source = producer(tensor_before(node.inputs[0], {"Cast"}))
        return source is not None and _dequantizes(source)
    return op_of(node) == "DequantizeLinear" and not is_constant(node.inputs[0])


def _copy(clusters: Clusters, node: Node, result: Tensor, readers: list[Node]) -> Node:
    """Return a copy of a node whose result `readers` now read in place of the original's `result`."""
    graph, shapes = clusters.graph, clusters.shapes
    copied = graph.variable(result.name)
    shapes.record(copied, shapes.shape(result), shapes.dtype(result))
    copy = graph.add_node(node.op, node.inputs, [copied], node.attrs, name=node_label(node))
    for reader in readers:
        reader.inputs = [copied if tensor is result else tensor for tensor in reader.inputs]
    for each in (copy, *readers):
        found = normal_form(shapes, each)
        assert not isinstance(found, str), found
        clusters.forms[each] = found
    clusters.copies.append(copy)
    return copy
