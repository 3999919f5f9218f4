"""Puts the nodes of a model and its subgraphs in execution order, as onnxruntime does when it loads a model."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence

import onnx

from onnxfuse.ir.protos import defined_names, graphs, subgraphs


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of tensors that a node reads: its inputs, and the tensors that its subgraphs capture."""
    yield from filter(None, node.input)
    for inner in subgraphs(node):
        yield from outer_reads(inner)


def outer_reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of tensors that a subgraph captures: it reads them, and does not define them.

    A name that the subgraph defines means the subgraph's own tensor, even if the outer graph has a tensor of that name.
    """
    own = defined_names(graph)
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
    yield from (o.name for o in graph.output if o.name not in own)


def execution_order(needs: Sequence[Collection[str]], writes: Sequence[Collection[str]]) -> list[int]:
    """Return the indices of nodes, ordered so that each node follows the producers of its inputs (Kahn's algorithm).

    `needs` and `writes` hold the names that each node reads and writes.  The order stays close to the present one.  The
    nodes of a cycle, and the nodes after it, are omitted.
    """
    producer_of = {name: i for i, names in enumerate(writes) for name in names if name}
    # Per node: the number of its producers that are not in the order yet, and the nodes that read its outputs.
    missing, users = [], [list[int]() for _ in needs]
    for i, names in enumerate(needs):
        producers = {producer_of[name] for name in names if name in producer_of}
        missing.append(len(producers))
        for j in producers:
            users[j].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in users[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    return order


def is_in_order(needs: Sequence[Collection[str]], writes: Sequence[Collection[str]]) -> bool:
    """Return whether the order is valid: no node reads an output of its own or of a later node."""
    later = {name for names in writes for name in names if name}
    for needed, written in zip(needs, writes, strict=True):
        if not later.isdisjoint(needed):
            return False
        later.difference_update(written)
    return True


def in_execution_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model if its nodes are in execution order, else a sorted copy; graphs with a cycle stay unsorted."""
    if all(_order(part) is None for part in graphs(model.graph, *model.functions)):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for part in graphs(result.graph, *result.functions):
        if order := _order(part):
            present = list(part.node)
            copies = [onnx.NodeProto.FromString(present[i].SerializeToString()) for i in order]
            del part.node[:]
            part.node.extend(copies)
    return result


def _order(part: onnx.GraphProto | onnx.FunctionProto) -> list[int] | None:
    """Return the execution order as indices of the nodes; None if they are already in order, or have a cycle."""
    needs, writes = [set(reads(n)) for n in part.node], [n.output for n in part.node]
    if is_in_order(needs, writes):
        return None
    order = execution_order(needs, writes)
    return order if len(order) == len(needs) else None
