"""Move operators that compute a large tensor to the regions that read the tensor, if that saves bytes.

Regions grow in execution order, so the Sub of `x - mean(x)` is in the region of the mean.  If a region with other rows
reads the difference, it is written to memory and read again.  With the Sub in the reading region, x is read instead.
If several regions read the tensor, each gets a copy of the operators.

A cluster is a group of nodes that will become one region.  Clusters of one level (see `order.py`) exchange nodes.  To
readers of later levels, operators move only with a copy of the Split or Slice that they follow, because operators that
read the result of a product would join the product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Final

from onnxfuse.algebra.operators import FREE
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.regions.cluster import LAUNCH_BYTES, Cluster, Clusters
from onnxfuse.regions.pointwise import POINTWISE

MAX_MOVED: Final = 8  # maximum number of operators moved to the readers of a tensor
MAX_READERS: Final = 4  # maximum number of regions that receive the moved operators
MIN_SAVED: Final = 1 / 16  # minimum saving, as a share of the regions' cost without launches


@dataclass(frozen=True)
class Border:
    """A tensor between the cluster that computes it and the clusters that read it, `later` if of another level."""

    tensor: Tensor
    own: Cluster
    readers: Sequence[Cluster]
    later: bool


@dataclass(frozen=True)
class Move:
    """A planned move of operators to a tensor's readers.

    The move replaces the cluster that computes the tensor by `left`, which lacks the moved operators, and the clusters
    that read the tensor by `readers`, which compute it themselves.
    """

    nodes: Sequence[Node]  # in execution order
    staying: Set[Node]  # those of `nodes` that `left` computes as well, because it needs them for other results
    left: Cluster
    readers: Sequence[Cluster]


def settle_borders(clusters: Clusters) -> None:
    """Move operators from clusters that compute a large tensor to the clusters that read it, if that saves bytes.

    The nodes that stay can be too few for a region; `clusters.reasons` then says why.  Tensors are visited from last to
    first, because moving a producer can remove other readers of an earlier tensor.
    """
    for node in reversed(list(clusters.graph.nodes)):
        for tensor in node.outputs if node in clusters.of else ():
            border = _border(clusters, tensor)
            move = _best_move(clusters, border) if border is not None else None
            if border is not None and move is not None:
                _apply(clusters, border, move)
                why = f"'{node_label(node)}' is computed where its result is read, because that moves fewer bytes"
                clusters.reasons.update((node_label(each), why) for each in move.left.nodes)


def _border(clusters: Clusters, tensor: Tensor) -> Border | None:
    """Return a Border for a tensor that an elementwise operator computes; None if the operator cannot be moved.

    All readers of the tensor must be in clusters that are not too large for a region: larger ones gain nothing, and for
    a Sum or Concat of 10,000 operands, each of its operands would be tried.
    """
    maker, of, level = tensor.inputs[0], clusters.of, clusters.level
    own = of[maker]
    if maker.op not in POINTWISE or tensor.name not in own.outputs or clusters.graph.is_kept(tensor):
        return None
    readers = dict[Cluster, None]()
    for node in tensor.outputs:
        reader = of.get(node)
        if reader is None or len(readers) > MAX_READERS or reader.is_too_large:
            return None
        if reader is not own:
            readers[reader] = None
    later = any(level[node] != level[maker] for node in tensor.outputs)
    return Border(tensor, own, list(readers), later) if 1 <= len(readers) <= MAX_READERS else None


def _best_move(clusters: Clusters, border: Border) -> Move | None:
    """Return the move of operators to a tensor's readers that saves most bytes; None if no move saves enough."""
    ends = [each for each in _ends(clusters, border) if not border.later or any(map(_is_slicing, each))]
    found = ((_saved(clusters, border, nodes), nodes) for nodes in ends)
    saved, nodes = max(found, key=lambda each: each[0], default=(0, []))
    if saved <= 0:
        return None
    staying = _staying(clusters, border, nodes)
    left = [node for node in border.own.nodes if node in staying or node not in nodes]
    outputs = {name: tensor for name, tensor in border.own.outputs.items() if tensor is not border.tensor}
    read = {tensor.name: tensor for tensor in _read(clusters, nodes) if producer(tensor) in left}
    made = {tensor.name for node in left for tensor in node.outputs}
    given = {name: tensor for name, tensor in {**outputs, **read}.items() if name in made}
    own = clusters.part(left, given.values())
    position = clusters.graph.position.__getitem__
    readers = [
        clusters.part(sorted((*nodes, *each.nodes), key=position), each.outputs.values()) for each in border.readers
    ]
    cost = partial(_cost, clusters, border)
    before = sum(map(cost, (border.own, *border.readers)))
    after = sum(map(cost, (own, *readers) if left else readers))
    least = MIN_SAVED * (before - LAUNCH_BYTES * (1 + len(readers)))
    return Move(nodes, staying, own, readers) if before - after >= least else None


def _ends(clusters: Clusters, border: Border) -> Iterator[list[Node]]:
    """Yield growing groups of operators that compute a border's tensor; the first group is the tensor's producer.

    Each further group adds one operator: among those that compute a tensor which the group reads, and that can move,
    the one with the largest result.
    """
    found = [border.tensor.inputs[0]]
    while len(found) <= MAX_MOVED:
        yield found
        read = [
            t for t in _read(clusters, found) if (maker := producer(t)) is not None and _moves(clusters, border, maker)
        ]
        if not read:
            return
        maker = max(read, key=clusters.bytes).inputs[0]
        found = sorted((*found, maker), key=clusters.graph.position.__getitem__)


def _moves(clusters: Clusters, border: Border, node: Node) -> bool:
    """Return whether a node can go to another cluster: it is in `border.own`, and is elementwise or a view (FREE)."""
    is_free = op_of(node) in FREE or (border.later and _is_slicing(node))
    return clusters.of.get(node) is border.own and (node.op in POINTWISE or is_free)


def _is_slicing(node: Node) -> bool:
    return op_of(node) in ("Split", "Slice")


def _read(clusters: Clusters, nodes: Sequence[Node]) -> list[Tensor]:
    """Return the tensors that these nodes read and do not compute themselves."""
    read = {name for node in nodes for step in clusters.forms[node] for name in step.inputs}
    read -= {tensor.name for node in nodes for tensor in node.outputs}
    return list({t.name: t for node in nodes for t in node.inputs if t.name in read}.values())


def _saved(clusters: Clusters, border: Border, nodes: Sequence[Node]) -> int:
    """Return how many bytes less are moved if these operators go to a tensor's readers; negative for more bytes."""
    staying = _staying(clusters, border, nodes)
    inside = [node for node in border.own.nodes if node in staying or node not in nodes]
    read, made = {t.name for node in inside for t in node.inputs}, {t.name for node in inside for t in node.outputs}
    saved = (1 + len(border.readers)) * clusters.bytes(border.tensor)
    for tensor in _read(clusters, nodes):
        readers = sum(tensor.name not in each.operands for each in border.readers)
        if tensor.name in made:
            readers += tensor.name not in border.own.outputs
        elif tensor.name not in read:
            readers -= 1
        if readers:
            saved -= readers * (_bytes_read(clusters, tensor, nodes, ()) if border.later else clusters.bytes(tensor))
    return saved


def _cost(clusters: Clusters, border: Border, cluster: Cluster) -> float:
    """Return the cost of a cluster, which reads only parts of what it slices if operators move to a later level."""
    if not border.later:
        return cluster.cost
    operands = cluster.operands.values()
    left_out = sum(clusters.bytes(t) - _bytes_read(clusters, t, cluster.nodes, cluster.outputs) for t in operands)
    return cluster.cost - left_out


def _bytes_read(clusters: Clusters, tensor: Tensor, nodes: Sequence[Node], outputs: Collection[str]) -> int:
    """Return how many bytes of a tensor nodes read: of a Split or Slice, those of results that they read or give."""
    within, parts = {t.name for node in nodes for t in node.inputs}.union(outputs), 0
    for node in (each for each in nodes if any(t is tensor for t in each.inputs)):
        if not _is_slicing(node):
            return clusters.bytes(tensor)
        parts += sum(clusters.bytes(t) for t in node.outputs if t.name in within)
    return min(parts, clusters.bytes(tensor))


def _staying(clusters: Clusters, border: Border, nodes: Sequence[Node]) -> set[Node]:
    """Return those of `nodes` that must stay in their cluster, so that the readers get copies of them.

    A node must stay if its result must keep its name, or if a node that stays or is not in `nodes` reads the result.
    Nodes that read the border's tensor count only if they are in the cluster that computes it.
    """
    going, staying = set(nodes), set[Node]()
    for node in reversed(nodes):
        for tensor in node.outputs:
            if tensor is border.tensor:
                readers = [each for each in tensor.outputs if clusters.of[each] is border.own]
            else:
                readers = tensor.outputs
            if clusters.graph.is_kept(tensor) or any(each not in going or each in staying for each in readers):
                staying.add(node)
    return staying


def _apply(clusters: Clusters, border: Border, move: Move) -> None:
    """Move operators to readers: the first reader gets them (copies of those that also stay), others get copies."""
    # The first reader comes last, because the operators that move to it then read its copies.  The other readers must
    # copy these operators before, while they still have their original inputs.
    for i, reader in reversed(list(enumerate(move.readers))):
        copied = [node for node in move.nodes if i or node in move.staying]
        copies = _copies(clusters, reader, copied) if copied else []
        level = max(clusters.level[node] for node in border.readers[i].nodes)
        moved = [] if i else [node for node in move.nodes if node not in move.staying]
        clusters.level.update(dict.fromkeys((*copies, *moved), level))
    left = clusters.part(move.left.nodes)  # can have fewer outputs than `move.left`: copies read other copies
    for before, after in zip((border.own, *border.readers), (left, *move.readers), strict=True):
        after.place = before.place
        clusters.split(after)


def _copies(clusters: Clusters, reader: Cluster, nodes: Sequence[Node]) -> list[Node]:
    """Replace nodes of a cluster by copies, and return the copies; other clusters keep reading the original nodes."""
    graph, shapes, forms = clusters.graph, clusters.shapes, clusters.forms
    made, renamed = dict[Node, Node](), dict[str, Tensor]()
    for node in nodes:
        outputs = [graph.variable(tensor.name) for tensor in node.outputs]
        for copy, tensor in zip(outputs, node.outputs, strict=True):
            shapes.record(copy, shapes.shape(tensor), shapes.dtype(tensor))
            renamed[tensor.name] = copy
        copied = graph.add_node(
            node.op, node.inputs, outputs, node.attrs, name=node_label(node), domain=node.domain or ""
        )
        graph.position[copied], forms[copied] = graph.position[node], forms[node]
        clusters.copies.append(copied)
        made[node] = copied
    reader.nodes = [made.get(node, node) for node in reader.nodes]
    names = {name: tensor.name for name, tensor in renamed.items()}
    copies = set(made.values())
    for node in reader.nodes:
        if node in copies or any(tensor.name in renamed for tensor in node.inputs):
            for i, tensor in enumerate(node.inputs):
                node.inputs[i] = renamed.get(tensor.name, tensor)
            forms[node] = tuple(step.renamed(names) for step in forms[node])
    return list(made.values())
