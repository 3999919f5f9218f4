"""Put the nodes of a model in execution order, at any depth, as onnxruntime does when it loads one."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence

import onnx

from onnxfuse.ir.protos import defined_names, graphs, subgraphs


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads: its inputs, and those that its subgraphs capture."""
    yield from filter(None, node.input)
    for inner in subgraphs(node):
        yield from outer_reads(inner)


def outer_reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the tensors that a subgraph reads and does not define itself.

    A name that the subgraph defines is its own, even if the graph around it has a tensor of this name.
    """
    own = defined_names(graph)
    for node in graph.node:
        yield from (name for name in reads(node) if name not in own)
    yield from (o.name for o in graph.output if o.name not in own)


def execution_order(needs: Sequence[Collection[str]], writes: Sequence[Collection[str]]) -> list[int]:
    """Return the indices of nodes so that each comes after those whose tensors it reads (Kahn's algorithm).

    `needs` and `writes` are the names that each node reads and writes.  The order stays close to the present one.  The
    nodes of a cycle, and those after it, are left out.
    """
    producer_of = {name: i for i, names in enumerate(writes) for name in names if name}
    missing, users = [], [list[int]() for _ in needs]  # by node: how many producers must come first; who reads it
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
    """Return whether no node reads an output of its own or of a later node."""
    later = {name for names in writes for name in names if name}
    for needed, written in zip(needs, writes, strict=True):
        if not later.isdisjoint(needed):
            return False
        later.difference_update(written)
    return True


def in_execution_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model itself if its nodes are in execution order, else a copy whose nodes are, where no cycle is."""
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
    """Return the execution order of the nodes; None if they are in it, or if there is none."""
    needs, writes = [set(reads(n)) for n in part.node], [n.output for n in part.node]
    if is_in_order(needs, writes):
        return None
    order = execution_order(needs, writes)
    return order if len(order) == len(needs) else None
