"""Rewrite rotary embeddings so that Slices take the elements of each pair, which the patterns of fusions require.

Some models reshape heads to (..., pairs, 2), or to (..., 2, pairs), and then take one of the two, as torch's `unbind`
does.  A Slice that takes every other element of a head, or half of it, replaces the Reshape and the operator after it.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import SLICING
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import integers, sliced, write
from onnxfuse.passes.fold_shapes import MAX_INT64, reshape_target
from onnxfuse.passes.graph_pass import graph_pass

RANK: Final = 5  # minimum rank of heads reshaped to pairs: batch, heads, rows, pairs and 2


@graph_pass(opset=13)  # from this opset on, the axes of Unsqueeze are an input
def canonicalize_rotary_pairs(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace operators that take one element of each pair by Slices; return the number of changes.

    The operators read tensors of shape (..., pairs, 2) or (..., 2, pairs).
    """
    parts = [(node, made) for node in graph.nodes if op_of(node) in SLICING for made in node.outputs]
    return sum(_slice_instead(graph, shapes, node, made) for node, made in parts)


def _slice_instead(graph: Graph, shapes: ShapeInfo, node: Node, made: Tensor) -> bool:
    """Replace `made`, if it has one element of each pair, by a Slice of the tensor before the Reshape to pairs.

    Returns whether `made` was replaced.
    """
    reshape = producer(node.inputs[0])
    if reshape is None or op_of(reshape) != "Reshape" or shapes.dtype(made) not in FUSIBLE_FLOATS:
        return False
    pairs, shape = shapes.shape(node.inputs[0]), shapes.shape(made)
    if pairs is None or shape is None or len(pairs) < RANK or graph.is_kept(made):
        return False
    whole = (*pairs[:-2], pairs[-2] * pairs[-1])
    target = reshape_target(shapes.shape(reshape.inputs[0]), whole)
    if target is None or 0 in whole:
        return False
    try:
        ranges = slice_ranges(shapes, node, made)
    except CannotInfer:
        return False
    axis, (first, taken) = next(iter(ranges.items()), (0, (0, 0)))
    columns = pairs[-1]
    if len(ranges) != 1 or axis < len(pairs) - 2 or pairs[axis] != 2 or taken != 1 or not isinstance(columns, int):
        return False
    source, stem, at = reshape.inputs[0], made.name, axis - len(pairs)
    if shapes.shape(source) != whole:
        source = write(shapes, "Reshape", [source, integers(graph, f"{stem}_shape", target)], f"{stem}_heads")
    start, end, step = (first, MAX_INT64, 2) if at == -1 else (first * columns, (first + 1) * columns, 1)
    if at == -1 and pairs[-2] == 1:  # one pair: as a Slice without steps, it can be rewritten again (Flux)
        end, step = first + 1, 1
    part = sliced(shapes, source, -1, start, end, step, f"{stem}_of_pairs")
    if len(shape) == len(pairs):
        part = write(shapes, "Unsqueeze", [part, integers(graph, f"{stem}_axis", [at])], f"{stem}_part")
    return graph.replace(made, part)
