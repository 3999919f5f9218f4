"""Replace chains of Reshape, Transpose, Squeeze, Unsqueeze and Flatten by the shortest chain of the same effect."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.algebra.index_maps import inverse, transposed
from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.algebra.view_layouts import SubAxis, ViewLayout, coalesce, identity, reshape
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import input_index, perm_of
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import write
from onnxfuse.passes.empty_views import gives_shape_if_empty
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass

MAX_CHAIN_NODES = 16


@dataclass(frozen=True)
class View:
    """A Transpose by `perm`, or a Reshape where `perm` is None; `shape` is the shape of the result."""

    perm: tuple[int, ...] | None
    shape: tuple[Size, ...]


@graph_pass(opset=5)  # before opset 5, the target of Reshape was an attribute
def compose_views(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace chains of views by shorter ones: no view, or as few as possible of Reshape > Transpose > Reshape.

    Sizes can be symbolic; a chain stays if a Reshape in its place would need a target that is computed at run time.  A
    chain that ends in the Reshape before the InstanceNormalization of a GroupNorm also stays.  The pattern of GroupNorm
    requires that this Reshape reads a tensor with the axes of the norm's final result, and a shorter chain could skip
    this tensor.  Returns the number of replaced chains.
    """
    views = [node for node in graph.nodes if op_of(node) in REARRANGING and not _makes_rows_of_groups(node)]
    return sum(_shorten(graph, shapes, node) for node in reversed(views))  # from the end: longest chains first


def _makes_rows_of_groups(node: Node) -> bool:
    readers = consumers(node.outputs[0])
    return bool(readers) and all(op_of(reader) == "InstanceNormalization" for reader in readers)


def _shorten(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Replace the longest possible chain of views that ends in `last` by a shorter one; return whether there is one."""
    chain = chain_to(last)
    result = shapes.shape(last.outputs[0])
    views = [view_of(shapes, node) for node in chain]
    for start in range(len(chain)):
        nodes = chain[start:]
        source, removed = nodes[0].inputs[0], _removable_count(graph, nodes)
        shape = shapes.shape(source)
        if shape is None or result is None or any(size == 0 for size in (*shape, *result)):
            continue
        if removed == 1 and shape != result:  # a chain of one node is replaced only if it changes nothing
            continue
        known = [view for view in views[start:] if view is not None]
        if len(known) < len(nodes) or not gives_shape_if_empty(shapes, nodes):
            continue
        for candidate in _shorter_chains(shape, tuple(known), removed):
            if _replace(graph, shapes, last, source, candidate):
                _disconnect_unread(graph, nodes)
                return True
    return False


def shorter_chain(source: tuple[Size, ...], chain: tuple[View, ...]) -> tuple[View, ...] | None:
    """Return a chain of fewer views with the same effect on a tensor of shape `source`; None if there is none."""
    if any(size == 0 for size in (*source, *chain[-1].shape)):
        return None
    for candidate in _shorter_chains(source, chain, len(chain)):
        if can_write_views(source, candidate):
            return candidate
    return None


def _shorter_chains(source: tuple[Size, ...], chain: tuple[View, ...], removed: int) -> list[tuple[View, ...]]:
    """Return chains that can replace `chain`, shortest first.

    They have fewer views than `removed`, the number of nodes that the replacement removes.
    """
    max_rank = max((len(view.perm) for view in chain if view.perm is not None), default=0)
    return [
        candidate
        for candidate in equivalent_chains(source, chain)
        # A Transpose of more axes than before can be slower.
        if len(candidate) < removed and all(len(view.perm or ()) <= max_rank for view in candidate)
    ]


def view_of(shapes: ShapeInfo, node: Node) -> View | None:
    """Return a node of a chain as a View; None if the shape of its result is not known."""
    shape = shapes.shape(node.outputs[0])
    if shape is None:
        return None
    return View(tuple(perm_of(node, len(shape))) if op_of(node) == "Transpose" else None, shape)


def chain_to(last: Node) -> list[Node]:
    """Return the chain of views that ends in the node `last`, in execution order."""
    chain: list[Node] = []
    node: Node | None = last
    while node is not None and op_of(node) in REARRANGING and node.inputs and len(chain) < MAX_CHAIN_NODES:
        chain.insert(0, node)
        node = producer(node.inputs[0])
    return chain


def _disconnect_unread(graph: Graph, chain: list[Node]) -> None:
    """Disconnect the chain's nodes that nothing reads any more, so that they are not shortened as well."""
    for node in reversed(chain):
        if any(t.outputs or graph.is_kept(t) for t in node.outputs):
            break
        node.inputs.clear()


def _removable_count(graph: Graph, chain: list[Node]) -> int:
    """Return how many nodes at the end of the chain vanish if the chain's result is replaced."""
    count = 1
    for node in reversed(chain[:-1]):
        if graph.sole_consumer(node.outputs[0]) is None:
            break
        count += 1
    return count


def layout_of(source: Sequence[Size], chain: Sequence[View]) -> ViewLayout | None:
    """Return which elements of the source make up the chain's result; None if the sizes do not determine them."""
    layout: ViewLayout | None = identity(source)
    for view in chain:
        if layout is None:
            return None
        layout = reshape(layout, view.shape) if view.perm is None else transposed(layout, view.perm)
    return None if layout is None else coalesce(layout)


@functools.lru_cache(maxsize=4096)  # the blocks of a model repeat their chains
def equivalent_chains(source: tuple[Size, ...], chain: tuple[View, ...]) -> tuple[tuple[View, ...], ...]:
    """Return chains with the same effect as `chain` on a tensor of shape `source`, shortest first."""
    layout, result = layout_of(source, chain), chain[-1].shape
    if layout is None:
        return ()
    reshaped = reshape(identity(source), result)
    if reshaped is not None and coalesce(reshaped) == layout:
        return ((),) if source == result else ((View(None, result),),)
    found: list[tuple[View, ...]] = []
    if (perm := _perm_of_source(source, layout)) is not None:
        found.append((View(perm, result),))
    # The source counts as one axis here, because a Reshape can merge and split axes of the source.
    length = (product(source),)
    flat = layout_of(length, (View(None, source), *chain))
    if flat is not None and (order := _order_in_source(length, flat)) is not None:
        before = transposed(result, order)
        found.append((View(None, before), View(inverse(order), result)))
    # Each axis of the result is split into contiguous parts of the source; a Reshape joins the parts at the end.
    runs = coalesce((tuple(sub_axis for axis in layout for sub_axis in axis),))[0]
    split = tuple((run,) for run in runs)
    whole = iter(split)
    at_ones = tuple(() if size == 1 else next(whole, ()) for size in source)  # axes of size 1 stay where they are
    if next(whole, None) is None and (perm := _perm_of_source(source, at_ones)) is not None:
        found.append((View(perm, transposed(source, perm)), View(None, result)))
    if (order := _order_in_source(source, split)) is not None:
        before, after = tuple(runs[i].size for i in order), tuple(run.size for run in runs)
        found.append((View(None, before), View(inverse(order), after), View(None, result)))
    return tuple(found)


def _perm_of_source(source: Sequence[Size], layout: ViewLayout) -> tuple[int, ...] | None:
    """Return the perm of a Transpose of the source that gives the layout; None if a Reshape is needed as well."""
    ones = [i for i, size in enumerate(source) if size == 1]
    perm = []
    for axis in layout:
        if not axis and ones:
            perm.append(ones.pop(0))
        elif len(axis) == 1 and axis[0].axis is not None and axis[0] == SubAxis(axis[0].axis, 1, source[axis[0].axis]):
            perm.append(axis[0].axis)
        else:
            return None
    return tuple(perm) if sorted(perm) == list(range(len(source))) else None


def _order_in_source(source: Sequence[Size], layout: ViewLayout) -> list[int] | None:
    """Return the layout's axes in the order in which they lie in the source; None if an axis has several sub-axes.

    Axes of size 1 keep their places, because onnxruntime's CPU provider takes three times as long for a Transpose that
    moves them, too.
    """
    if any(len(axis) > 1 or any(sub_axis.axis is None for sub_axis in axis) for axis in layout):
        return None
    order: list[int] = []
    for source_axis in reversed(range(len(source))):
        stride: Size = 1
        waiting = {i: axis[0] for i, axis in enumerate(layout) if axis and axis[0].axis == source_axis}
        while waiting:
            found = next((i for i, sub_axis in waiting.items() if sub_axis.stride == stride), None)
            if found is None:
                return None
            stride = stride * waiting.pop(found).size
            order.insert(0, found)
    for one in (i for i, axis in enumerate(layout) if not axis):
        order.insert(one, one)
    return order


def _replace(graph: Graph, shapes: ShapeInfo, last: Node, source: Tensor, views: Sequence[View]) -> bool:
    """Replace the node by the views; return False if a Reshape would need a computed target.

    In that case nothing changes.  The result keeps its name, because verification compares tensors of the same name.
    """
    end = last.outputs[0]
    if not views:
        done = graph.replace(end, source)
        if done:
            last.inputs.clear()
        return done
    tensor = write_views(shapes, source, views, f"{end.name}_moved")
    if tensor is None:
        return False
    last.inputs.clear()
    last.outputs.clear()
    tensor.inputs[0].outputs = [end]
    return True


def _scaled_chain_to(shapes: ShapeInfo, tensor: Tensor) -> list[Node]:
    """Return the chain of views and scalings by a number that computes a tensor, in execution order."""
    chain: list[Node] = []
    node = producer(tensor)
    while node is not None and len(chain) < MAX_CHAIN_NODES:
        if op_of(node) not in REARRANGING and not _is_scaling(shapes, node):
            break
        chain.insert(0, node)
        node = producer(node.inputs[0])
    return chain


def _is_scaling(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node multiplies or divides its first input by a number, and keeps the input's rank."""
    if op_of(node) not in ("Mul", "Div") or shapes.graph.number(node.inputs[1]) is None:
        return False
    return shapes.rank(node.outputs[0]) == shapes.rank(node.inputs[0])


def farthest_view(shapes: ShapeInfo, tensor: Tensor, last: View) -> tuple[Tensor, tuple[View, ...], list[Node]] | None:
    """Return the earliest tensor from which views with constant targets compute the view `last` of `tensor`.

    Also returns the fewest such views, and the nodes on the way that multiply or divide by a number.  The views do not
    contain these products, so the caller has to apply them to the result.
    """
    for source, shape, views, scalings in sources_of(shapes, tensor):
        written = written_from(shape, (*views, last))
        if written is not None:
            return source, written, scalings
    return None


def sources_of(shapes: ShapeInfo, tensor: Tensor) -> Iterator[tuple[Tensor, Shape, tuple[View, ...], list[Node]]]:
    """Yield each source from which only views and scalings by a number compute `tensor`, the earliest source first.

    A source is yielded with its shape, the views between it and `tensor`, and the nodes that multiply or divide by a
    number.  Sources of unknown shape are left out.
    """
    chain = _scaled_chain_to(shapes, tensor)
    for start, first in enumerate(chain):
        shape, nodes = shapes.shape(first.inputs[0]), [each for each in chain[start:] if op_of(each) in REARRANGING]
        views = tuple(view for each in nodes if (view := view_of(shapes, each)) is not None)
        if shape is not None and len(views) == len(nodes):
            yield first.inputs[0], shape, views, [each for each in chain[start:] if op_of(each) not in REARRANGING]


def write_scalings(shapes: ShapeInfo, tensor: Tensor, scalings: Sequence[Node]) -> Tensor:
    """Multiply or divide a tensor by the numbers of the nodes `scalings`; return the result."""
    for node in scalings:
        tensor = write(shapes, op_of(node), [tensor, node.inputs[1]], f"{node.outputs[0].name}_moved")
    return tensor


def written_from(source: tuple[Size, ...], views: tuple[View, ...]) -> tuple[View, ...] | None:
    """Return the fewest views with the effect of `views` and with constant targets; None if there are none."""
    if any(size == 0 for size in (*source, *views[-1].shape)):
        return None
    return next((each for each in equivalent_chains(source, views) if can_write_views(source, each)), None)


def can_write_views(source: Sequence[Size] | None, views: Sequence[View]) -> bool:
    """Return whether all Reshapes among the views have constant targets for a tensor of shape `source`."""
    return None not in _operators(source, views)


def write_views(shapes: ShapeInfo, source: Tensor, views: Sequence[View], stem: str) -> Tensor | None:
    """Apply the views to the source; return None, and write nothing, if a Reshape would need a computed target."""
    forms = _operators(shapes.shape(source), views)
    tensor = source
    if None in forms:
        return None
    for op, numbers in filter(None, forms):
        if op == "Transpose":
            tensor = write(shapes, op, [tensor], stem, {"perm": numbers})
        elif op != "Reshape" and input_index(op, "axes", shapes.graph.opset) is None:
            tensor = write(shapes, op, [tensor], stem, {"axes": numbers})
        else:
            stored = shapes.graph.constant(f"{stem}_shape", np.array(numbers, np.int64))
            tensor = write(shapes, op, [tensor, stored], stem)
    return tensor


def _operators(source: Sequence[Size] | None, views: Sequence[View]) -> list[tuple[str, list[int]] | None]:
    before = (source, *(view.shape for view in views))
    return [_operator(shape, view) for shape, view in zip(before, views, strict=False)]


def _operator(shape: Sequence[Size] | None, view: View) -> tuple[str, list[int]] | None:
    """Return the operator that computes a view of a tensor of `shape`, and the operator's perm, target or axes.

    Returns None if a Reshape would need a computed target, and the shapes differ in more than axes of size 1.
    """
    if view.perm:
        return "Transpose", list(view.perm)
    if (target := reshape_target(shape, view.shape)) is not None:
        return "Reshape", target
    if shape is None or len(shape) == len(view.shape):
        return None
    longer, shorter = (view.shape, shape) if len(view.shape) > len(shape) else (shape, view.shape)
    axes = added_ones(shorter, longer)
    if axes is None:
        return None
    return ("Unsqueeze" if longer is view.shape else "Squeeze"), axes


def added_ones(shorter: Sequence[Size], longer: Sequence[Size]) -> list[int] | None:
    """Return the axes of size 1 by which the longer shape differs from the shorter; None if other axes differ."""
    rest, axes = list(shorter), list[int]()
    for axis, size in enumerate(longer):
        if rest and size == rest[0]:
            rest.pop(0)
        elif size == 1:
            axes.append(axis)
        else:
            return None
    return None if rest else axes
