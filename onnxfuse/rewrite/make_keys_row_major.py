"""Make the keys of an attention row-major where patterns do not match their layout in memory.

Scores are the product of queries and of keys as (batch, heads, size, keys).  Patterns look through the views before
these keys for a layout in which the elements of a key are adjacent, such as "batch keys (heads size)".  Sometimes there
is none: a convolution gives images, whose keys are columns already, and some models reshape keys to five axes.  Then
the keys get new views that pass through one of these layouts.  If a Reshape of the source gives such a layout, nothing
is copied.  Otherwise a Transpose copies the keys, unless they are a cache.

In this file, "rows" are keys in one of these layouts, and "columns" are keys as the scores read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final

from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.match import Match, Matcher
from onnxfuse.match.prefilter import may_occur
from onnxfuse.passes.compose_views import (
    View,
    can_write_views,
    layout_of,
    sources_of,
    write_scalings,
    write_views,
    written_from,
)
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.select import ends_of_attention, has_softmax, nodes_up_to_products

RANK: Final = 4


def make_keys_row_major(
    graph: Graph, shapes: ShapeInfo, fusions: Sequence[Fusion], keep: Set[str] = frozenset()
) -> int:
    """Rewrite the keys of every attention that matches a pattern only with rewritten keys.

    Returns the number of attentions whose keys were rewritten.

    `keep` holds the labels of nodes that are not fused.
    """
    ends = [node for node in ends_of_attention(graph) if node_label(node) not in keep]
    pairs = [(end, scores) for end in ends if (scores := _scores(end)) is not None]
    pairs = [(end, scores) for end, scores in pairs if not _reads_rows(shapes, scores.inputs[1])]
    present = {op_of(node) for node in graph.nodes} if pairs else set()
    chosen = [fusion for fusion in fusions if has_softmax(fusion) and may_occur(fusion, present)] if pairs else []
    matchers = [Matcher(graph, shapes, fusion) for fusion in chosen]
    count = sum(_settle(graph, shapes, matchers, *pair) for pair in pairs) if matchers else 0
    if matchers:  # remove the views that were written for attentions that still do not match
        graph.remove_dead()
        graph.sort()
    return count


def _settle(graph: Graph, shapes: ShapeInfo, matchers: Sequence[Matcher], end: Node, scores: Node) -> bool:
    """Rewrite the keys of the attention that ends in `end` if the attention matches only with rewritten keys.

    Returns whether the keys were rewritten.
    """
    columns, present = scores.inputs[1], len(graph.nodes)
    written = None if _matches(matchers, end) else _through_rows(graph, shapes, columns)
    if written is None:
        return False
    graph.position |= dict.fromkeys(graph.nodes[present:], graph.position[scores])
    scores.inputs[1] = written
    if _matches(matchers, end):
        return True
    scores.inputs[1] = columns
    return False


def _matches(matchers: Sequence[Matcher], end: Node) -> bool:
    return any(isinstance(matcher.at(end.outputs[0]), Match) for matcher in matchers)


def _scores(end: Node) -> Node | None:
    """Return the product that computes the scores: the nearest one before the first operand of `end`, if any."""
    return next((node for node in nodes_up_to_products(end.inputs[:1]) if op_of(node) == "MatMul"), None)


def _reads_rows(shapes: ShapeInfo, columns: Tensor) -> bool:
    """Return whether `columns`, the transposed keys, are views of keys in a layout that kernels read.

    Also returns True if `columns` do not have four axes.
    """
    shape = shapes.shape(columns)
    if shape is None or len(shape) != RANK:
        return True
    layouts = dict(_layouts(shape))
    return any(
        start in layouts and layout_of(start, views) == layout_of(start, layouts[start])
        for _, start, views, _ in sources_of(shapes, columns)
    )


def _through_rows(graph: Graph, shapes: ShapeInfo, columns: Tensor) -> Tensor | None:
    """Write the keys as rows, and return a tensor that is equal to `columns`, as a view of these rows.

    The views that write the rows are chosen so that they copy as few tensors as possible.

    Returns None if a shape is unknown, if the views cannot be written, or if a cache would be copied.
    """
    shape = shapes.shape(columns)
    if shape is None:
        return None
    for source, start, views, scalings in (*sources_of(shapes, columns), (columns, shape, (), [])):
        if options := list(_ways(start, views, shape)):
            before, after = min(options, key=lambda option: _copies_and_views(option[0]))
            if _copies_and_views(before)[0] and _is_cache(graph, source):
                return None
            rows = write_views(shapes, source, before, f"{columns.name}_rows")
            made = None if rows is None else write_views(shapes, rows, after, f"{columns.name}_columns")
            return None if made is None else write_scalings(shapes, made, scalings)
    return None


def _copies_and_views(views: Sequence[View]) -> tuple[int, int]:
    return sum(view.perm is not None for view in views), len(views)


def _is_cache(graph: Graph, keys: Tensor) -> bool:
    """Return whether keys are a cache, which is kept from step to step; a copy costs more than reading columns.

    A cache is a graph input or output, or a Concat with a graph input.
    """
    node = producer(keys)
    appended = node.inputs if node is not None and op_of(node) == "Concat" else [keys]
    return graph.is_kept(keys) or any(producer(each) is None and not is_constant(each) for each in appended)


def _ways(start: Shape, views: Sequence[View], columns: Shape) -> Iterator[tuple[tuple[View, ...], tuple[View, ...]]]:
    """Yield, for each layout of keys that kernels read, the views from a source to it, and from it to `columns`."""
    for rows, after in _layouts(columns):
        whole = (View(None, start), *views, *_inverse(rows, after, columns))
        before = written_from(start, whole)
        if before is not None and can_write_views(rows, after):
            yield before, after


def _layouts(columns: Shape) -> Iterator[tuple[Shape, tuple[View, ...]]]:
    """Yield, for each layout that kernels read, the shape of keys in it, and the views from it to the columns."""
    batch, heads, size, keys = columns
    width: Size = heads * size
    yield (batch, keys, width), (View(None, (batch, keys, heads, size)), View((0, 2, 3, 1), columns))
    yield (keys, batch, width), (View(None, (keys, batch, heads, size)), View((1, 2, 3, 0), columns))
    yield (batch, keys, heads, size), (View((0, 2, 3, 1), columns),)
    yield (batch, heads, keys, size), (View((0, 1, 3, 2), columns),)


def _inverse(rows: Shape, after: Sequence[View], columns: Shape) -> tuple[View, ...]:
    """Return the views from shape `columns` to shape `rows`, which undo `after`, the views from rows to columns."""
    perm = after[-1].perm
    assert perm is not None
    back = tuple(perm.index(i) for i in range(RANK))
    return View(back, tuple(columns[i] for i in back)), View(None, rows)
