"""Merge nodes with the same operator, attributes and inputs; also merge equal constant tables."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np

from onnxfuse.algebra.operators import RANDOM
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.graphsurgeon import disconnect
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.region_operators import ELEMENTWISE

MAX_COMPARED_BYTES = 4096  # constants up to this size are compared by value, larger ones by identity
MAX_TABLE_SIZE = 2**20  # maximum elements of a table that is compared by value: 8192 rows of 128


@graph_pass()
def eliminate_common_subexpressions(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge equal nodes and equal constant tables of a sorted graph; return how many nodes and tables were removed."""
    first: dict[Hashable, Node] = {}  # coarse key -> its first node; exact keys are costly, and few nodes need them
    exact: dict[Hashable, Node] = {}  # exact key -> its first node, only for nodes that share a coarse key
    has_exact: set[Node] = set()
    constant_keys: dict[int, Hashable] = {}
    merged: dict[int, Tensor] = {}  # id of a tensor -> the tensor that its consumers, which follow, read in its place
    count, removed = _merge_tables(graph), list[Node]()
    for node in list(graph.nodes):
        for i, tensor in enumerate(node.inputs):
            if id(tensor) in merged:
                node.inputs[i] = _latest(merged, tensor)
        coarse_key = node.op, tuple(id(t) if t.inputs or not is_constant(t) else None for t in node.inputs)
        similar = first.setdefault(coarse_key, node)
        if similar is node:
            continue
        if similar not in has_exact:
            has_exact.add(similar)
            exact.setdefault(_key(graph, similar, constant_keys), similar)
        key = _key(graph, node, constant_keys)
        equal = exact.setdefault(key, node)
        if key is not None and equal is not node and _merge(graph, equal, node, merged):
            removed.append(node)
    disconnect(removed)
    return count + len(removed)


def _merge_tables(graph: Graph) -> int:
    """Merge equal constants of two or more axes that elementwise operators read; return how many were removed.

    JAX writes the table of a rotary embedding once for each Mul that reads it.  Patterns of rotary embeddings require
    that the Muls of both halves of the heads read the same table.  TorchScript writes the first state of an RWKV once
    for each operator of the first step that reads it, but the operators of later steps read one tensor.  Strings stay,
    because the bytes of an array of them are addresses.
    """
    by_type: dict[Hashable, dict[int, Constant]] = {}
    for node in graph.nodes:
        if op_of(node) not in ELEMENTWISE:
            continue
        for tensor in node.inputs:
            if tensor.inputs or not is_constant(tensor) or len(tensor.shape) < 2 or tensor.dtype == object:
                continue
            if math.prod(tensor.shape) <= MAX_TABLE_SIZE:
                by_type.setdefault((tensor.dtype, *tensor.shape), {})[id(tensor)] = tensor
    count = 0
    for same_type in by_type.values():
        first: dict[bytes, Constant] = {}
        for table in same_type.values() if len(same_type) > 1 else ():
            kept = first.setdefault(constant_value(graph, table).tobytes(), table)
            count += kept is not table and graph.replace(table, kept)
    return count


def _latest(merged: Mapping[int, Tensor], tensor: Tensor) -> Tensor:
    while id(tensor) in merged:
        tensor = merged[id(tensor)]
    return tensor


def _merge(graph: Graph, kept: Node, node: Node, merged: dict[int, Tensor]) -> bool:
    """Replace the outputs of `node` by those of `kept`; return whether that was possible.

    If an output and its replacement must both keep their names, nothing changes.  Otherwise, `merged` maps the tensor
    that goes to the one that stays.  Each consumer looks its inputs up there once, when its turn comes: to search its
    inputs after each merge would take quadratic time for a Sum of 10,000 equal operators.
    """
    pairs = list(zip(list(node.outputs), list(kept.outputs), strict=True))
    if any(graph.is_kept(old) and graph.is_kept(new) for old, new in pairs):
        return False
    for old, new in pairs:
        if old.name and graph.is_kept(old):
            graph.replace(old, new)
            merged[id(new)] = old
        elif old.name:
            merged[id(old)] = new
    return True


def _key(graph: Graph, node: Node, constant_keys: dict[int, Hashable]) -> Hashable:
    """Return a key that nodes share if and only if they compute the same; None for a node that is not comparable."""
    op = op_of(node)
    if op in RANDOM | {"Dropout"} or schema(op, graph.opset) is None or not node.inputs:
        return None
    if id(node) in graph.protos and not _has_plain_attributes(graph, node):
        return None
    attributes = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
    present_outputs = tuple(bool(t.name) for t in node.outputs)
    return op, attributes, present_outputs, tuple(_input_key(graph, tensor, constant_keys) for tensor in node.inputs)


def _has_plain_attributes(graph: Graph, node: Node) -> bool:
    """Return whether all attributes are numbers, strings, or lists, and graphsurgeon has read all of them."""
    plain = (int, float, str, bytes, list)
    stored = graph.protos[id(node)][1].attribute
    return len(stored) == len(node.attrs) and all(isinstance(value, plain) for value in node.attrs.values())


def _input_key(graph: Graph, tensor: Tensor, constant_keys: dict[int, Hashable]) -> Hashable:
    if not tensor.name:
        return None
    if not is_constant(tensor):
        return id(tensor)
    if id(tensor) not in constant_keys:
        constant_keys[id(tensor)] = _constant_key(graph, tensor)
    return constant_keys[id(tensor)]


def _constant_key(graph: Graph, tensor: Constant) -> Hashable:
    if math.prod(tensor.shape) > MAX_COMPARED_BYTES or np.dtype(object) == tensor.dtype:
        return id(tensor)
    value = constant_value(graph, tensor)
    return (str(value.dtype), value.shape, value.tobytes()) if value.nbytes <= MAX_COMPARED_BYTES else id(tensor)
