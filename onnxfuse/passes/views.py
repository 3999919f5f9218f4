"""Chains of Reshape, Transpose, Squeeze, Unsqueeze and Flatten become the shortest chain that moves the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.model.graph import Graph, Node, Tensor, op_of, producer
from onnxfuse.passes.fold import only_reader, reshape_target
from onnxfuse.shapes.dims import Size, product
from onnxfuse.shapes.inference import Shapes
from onnxfuse.shapes.layout import Atom, Layout, identity, merged, reshape, transpose

MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})


@dataclass(frozen=True)
class Move:
    """A Transpose by `perm`, or a Reshape where that is None, to a shape."""

    perm: tuple[int, ...] | None
    shape: tuple[Size, ...]


def compose_views(graph: Graph, shapes: Shapes) -> int:
    """Replace chains of moves by chains of fewer nodes: none, or the needed ones of Reshape > Transpose > Reshape.

    Sizes may be symbolic; a chain stays where its new Reshapes would need a computed target.  Returns the number of
    chains that were replaced.
    """
    if graph.opset < 5:  # Reshape had its target as an attribute
        return 0
    moves = [node for node in graph.nodes if op_of(node) in MOVES]
    count = sum(_shorten(graph, shapes, node) for node in reversed(moves))  # from the ends: the longest chains first
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _shorten(graph: Graph, shapes: Shapes, last: Node) -> bool:
    """Shorten the longest chain that ends in the node."""
    chain = _chain_to(last)
    result = shapes.shape(last.outputs[0])
    steps = [_step(shapes, node) for node in chain]
    for start in range(len(chain)):
        nodes = chain[start:]
        source, removed = nodes[0].inputs[0], _removed(graph, nodes)
        shape = shapes.shape(source)
        if shape is None or result is None or any(size == 0 for size in (*shape, *result)):
            continue
        if removed == 1 and shape != result:  # one node can only give way to none
            continue
        known = [step for step in steps[start:] if step is not None]
        if len(known) < len(nodes):
            continue
        limit = max((len(step.perm) for step in known if step.perm is not None), default=0)
        for moves in _spellings(shape, tuple(known)):
            # a Transpose over more axes than before may be slower
            fits = len(moves) < removed and all(len(move.perm or ()) <= limit for move in moves)
            if fits and _build(graph, shapes, last, source, moves):
                _drop_unread(graph, nodes)
                return True
    return False


def _step(shapes: Shapes, node: Node) -> Move | None:
    """What a node of a chain does; None where the shape of its result is not known."""
    shape = shapes.shape(node.outputs[0])
    if shape is None:
        return None
    perm = node.attrs.get("perm") or range(len(shape))[::-1]
    return Move(tuple(perm) if op_of(node) == "Transpose" else None, shape)


def _chain_to(last: Node) -> list[Node]:
    chain: list[Node] = []
    node: Node | None = last
    while node is not None and op_of(node) in MOVES and node.inputs and len(chain) < 16:
        chain.insert(0, node)
        node = producer(node.inputs[0])
    return chain


def _drop_unread(graph: Graph, chain: list[Node]) -> None:
    """Take the chain's nodes apart that nobody reads now, so that they are not shortened in turn."""
    for node in reversed(chain):
        if any(t.outputs or graph.is_kept(t) for t in node.outputs):
            break
        node.inputs.clear()


def _removed(graph: Graph, chain: list[Node]) -> int:
    """How many nodes nobody needs any more without the chain's last one."""
    count = 1
    for node in reversed(chain[:-1]):
        if only_reader(graph, node.outputs[0]) is None:
            break
        count += 1
    return count


def _layout(source: Sequence[Size], chain: Sequence[Move]) -> Layout | None:
    """Where the elements of the chain's result lie in its source; None where the sizes do not tell."""
    layout: Layout | None = identity(source)
    for move in chain:
        if layout is None:
            return None
        layout = reshape(layout, move.shape) if move.perm is None else transpose(layout, move.perm)
    return None if layout is None else merged(layout)


@functools.lru_cache(maxsize=4096)  # the blocks of a model repeat their chains
def _spellings(source: tuple[Size, ...], chain: tuple[Move, ...]) -> tuple[tuple[Move, ...], ...]:
    """Chains of moves that do what the chain does, shortest first."""
    layout, result = _layout(source, chain), chain[-1].shape
    if layout is None:
        return ()
    straight = reshape(identity(source), result)
    if straight is not None and merged(straight) == layout:
        return ((),) if source == result else ((Move(None, result),),)
    runs = merged((tuple(atom for axis in layout for atom in axis),))[0]
    spellings: list[tuple[Move, ...]] = []
    if (perm := _whole_axes(source, layout)) is not None:
        spellings.append((Move(perm, result),))
    ordered = _in_source_order(source, layout)
    if ordered is not None:
        before = tuple(product(a.size for a in layout[i]) for i in ordered)
        spellings.append((Move(None, before), Move(_inverse(ordered), result)))
    flat = tuple((run,) for run in runs)
    moved = _whole_axes(source, flat + tuple(() for size in source if size == 1))
    if moved is not None:
        spellings.append((Move(moved, tuple(source[i] for i in moved)), Move(None, result)))
    ordered = _in_source_order(source, flat)
    if ordered is not None:
        before, after = tuple(runs[i].size for i in ordered), tuple(run.size for run in runs)
        spellings.append((Move(None, before), Move(_inverse(ordered), after), Move(None, result)))
    return tuple(spellings)


def _whole_axes(source: Sequence[Size], layout: Layout) -> tuple[int, ...] | None:
    """The perm that makes the layout of the source's own axes; None where it needs other axes."""
    ones = [i for i, size in enumerate(source) if size == 1]
    perm = []
    for axis in layout:
        if not axis and ones:
            perm.append(ones.pop(0))
        elif len(axis) == 1 and axis[0].axis is not None and axis[0] == Atom(axis[0].axis, 1, source[axis[0].axis]):
            perm.append(axis[0].axis)
        else:
            return None
    return tuple(perm) if sorted(perm) == list(range(len(source))) else None


def _in_source_order(source: Sequence[Size], layout: Layout) -> list[int] | None:
    """The layout's axes, each of one run or none, in the order of the source; None where an axis has several runs."""
    if any(len(axis) > 1 or any(atom.axis is None for atom in axis) for axis in layout):
        return None
    order: list[int] = [i for i, axis in enumerate(layout) if not axis]
    for place in reversed(range(len(source))):
        stride: Size = 1
        waiting = {i: axis[0] for i, axis in enumerate(layout) if axis and axis[0].axis == place}
        while waiting:
            found = next((i for i, atom in waiting.items() if atom.stride == stride), None)
            if found is None:
                return None
            stride = stride * waiting.pop(found).size
            order.insert(0, found)
    return order


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(list(order).index(i) for i in range(len(order)))


def _build(graph: Graph, shapes: Shapes, last: Node, source: Tensor, moves: Sequence[Move]) -> bool:
    """Let the moves compute what the node computes; False, and nothing changed, where a target is not constant."""
    end = last.outputs[0]
    if not moves:
        done = graph.replace(end, source)
        if done:
            last.inputs.clear()
        return done
    shape = shapes.shape(source)
    targets = []
    for move in moves:
        target = [] if move.perm else reshape_target(shape, move.shape)
        if target is None:
            return False
        targets.append(target)
        shape = move.shape
    tensor = source
    for move, target in zip(moves, targets, strict=True):
        made = graph.variable(f"{end.name}_moved")
        shapes.put(made, move.shape, shapes.dtype(source))
        if move.perm:
            graph.add("Transpose", [tensor], [made], perm=list(move.perm))
        else:
            graph.add("Reshape", [tensor, _target(graph, shapes, end, target)], [made])
        tensor = made
    last.inputs.clear()
    return graph.replace(end, tensor)


def _target(graph: Graph, shapes: Shapes, end: Tensor, target: list[int]) -> Tensor:
    return graph.constant(f"{end.name}_shape", np.array(target, np.int64))
