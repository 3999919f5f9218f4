"""Fold a Pad into the pads of the convolutions and pools that read it, and the Slice of a convolution into its pads.

A causal convolution of PyTorch pads both ends of a sequence, and a Slice removes the last columns.  TensorFlow's
converters write a Pad before strided convolutions, and other exporters before causal convolutions.  A Conv and an
AveragePool pad with zeros.  A MaxPool pads with -inf, so zeros fit only if no element of its image is negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeGuard

from onnxfuse.algebra.operators import NONNEGATIVE
from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.attributes import attribute_or_input, int_attribute, ints_attribute, perm_of, str_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.emit import write
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass

FIRST_WITH_INPUTS: Final = 11  # the first opset in which pads are an input
Sizes: TypeAlias = Sequence[tuple[int, int]]  # per axis: numbers of elements added at the beginning and at the end


@dataclass(frozen=True)
class Window:
    """A node that can pad its input itself, with its new attributes, and any Transpose between the Pad and the node."""

    node: Node
    transpose: Node | None
    attributes: dict[str, AttributeValue]


@graph_pass()
def fold_pads(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Fold each Pad whose consumers can all do the padding themselves, and Slices; return the nodes that vanished."""
    folds = {"Pad": _fold, "Slice": _fold_slice}
    return [
        one for node in list(graph.nodes) if op_of(node) in folds for one in folds[op_of(node)](graph, shapes, node)
    ]


def _fold_slice(graph: Graph, shapes: ShapeInfo, node: Node) -> Iterator[Folded]:
    """Fold a Slice that removes columns of a convolution's result into smaller pads of the convolution."""
    conv, shape = producer(node.inputs[0]), shapes.shape(node.inputs[0])
    if conv is None or op_of(conv) != "Conv" or shape is None or graph.sole_consumer(node.inputs[0]) is not node:
        return
    pads = _pads_after(shapes, conv, node, shape)
    if pads is None:
        return
    yield Folded("pad", node_label(node), node_label(conv))
    inputs, outputs = [*conv.inputs], [*node.outputs]
    for each in (conv, node):
        each.inputs.clear()
        each.outputs.clear()
    graph.add_node("Conv", inputs, outputs, {**conv.attrs, "pads": pads}, name=conv.name)


def _pads_after(shapes: ShapeInfo, conv: Node, cut: Node, shape: Shape) -> list[int] | None:
    """Return the pads with which a convolution computes what a Slice keeps of its result; None if none do so.

    Sizes must be known, because onnxruntime computes no convolution whose result has no columns.
    """
    count = len(shape) - 2
    pads, strides = ints_attribute(conv, "pads", [0] * 2 * count), ints_attribute(conv, "strides", [1] * count)
    is_padded = str_attribute(conv, "auto_pad", "NOTSET") == "NOTSET" and len(pads) == 2 * count
    try:
        ranges = slice_ranges(shapes, cut, cut.outputs[0])
    except CannotInfer:
        return None
    for axis, (start, left) in ranges.items():
        size = shape[axis]
        if not is_padded or axis < 2 or strides[axis - 2] != 1 or not isinstance(size, int):
            return None
        pads[axis - 2] -= start
        pads[count + axis - 2] -= size - left - start
    return pads if is_padded and min(pads) >= 0 else None


def _fold(graph: Graph, shapes: ShapeInfo, pad: Node) -> Iterator[Folded]:
    source, padded = pad.inputs[0], pad.outputs[0]
    sizes, value = _sizes(graph, shapes, pad), _value(graph, pad)
    if sizes is None or value is None or graph.is_kept(padded):
        return
    windows = [_window(graph, pad, node, transpose, sizes, value) for node, transpose in _readers(graph, padded)]
    found = [window for window in windows if window is not None]
    if not found or len(found) < len(windows):
        return
    folded = Folded("pad", node_label(pad), node_label(found[0].node))
    unpadded = {one.transpose: _transposed(shapes, one.transpose, source) for one in found if one.transpose is not None}
    for one in found:
        image = source if one.transpose is None else unpadded[one.transpose]
        own = {name: value for name, value in {**one.node.attrs, **one.attributes}.items() if name != "auto_pad"}
        graph.rewrite(one.node, one.node.op, [image, *one.node.inputs[1:]], own)
    yield folded


def _transposed(shapes: ShapeInfo, transpose: Node, source: Tensor) -> Tensor:
    """Return `source` after a Transpose with the perm of `transpose`."""
    perm = perm_of(transpose, shapes.rank(source) or 0)
    return write(shapes, "Transpose", [source], f"{source.name}_transposed", {"perm": perm})


# --- the Pad -------------------------------------------------------------------------------------------------------


def _sizes(graph: Graph, shapes: ShapeInfo, pad: Node) -> Sizes | None:
    """Return the elements that a Pad adds to each axis; None if the pads are computed or negative."""
    rank, pads = shapes.rank(pad.inputs[0]), attribute_or_input(graph, pad, "pads")
    axes = attribute_or_input(graph, pad, "axes")
    if rank is None or not _are_integers(pads) or not (axes is None or _are_integers(axes)):
        return None
    given = range(rank) if axes is None else [axis % rank for axis in axes]
    if len(pads) != 2 * len(given) or min(pads, default=0) < 0:
        return None
    of_axis = dict(zip(given, zip(pads, pads[len(given) :], strict=False), strict=True))
    return [of_axis.get(axis, (0, 0)) for axis in range(rank)]


def _are_integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def _value(graph: Graph, pad: Node) -> float | None:
    """Return the number with which a Pad fills; None where this number is computed, or the mode copies elements."""
    if str_attribute(pad, "mode", "constant") != "constant":
        return None
    found = attribute_or_input(graph, pad, "value" if graph.opset < FIRST_WITH_INPUTS else "constant_value")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    return 0.0 if found is None else float(found) if isinstance(found, int | float) else None


# --- the consumers of the Pad --------------------------------------------------------------------------------------


def _readers(graph: Graph, padded: Tensor) -> Iterator[tuple[Node, Node | None]]:
    """Yield each consumer of a tensor, or of a Transpose of it, with that Transpose or None."""
    for node in dict.fromkeys(consumers(padded)):
        if op_of(node) == "Transpose" and not graph.is_kept(node.outputs[0]):
            yield from ((reader, node) for reader in dict.fromkeys(consumers(node.outputs[0])))
        else:
            yield node, None


def _window(graph: Graph, pad: Node, node: Node, transpose: Node | None, sizes: Sizes, value: float) -> Window | None:
    """Return how a consumer of a padded tensor, or of its Transpose, can do the padding itself; None if it cannot."""
    if transpose is not None:
        sizes = [sizes[axis] for axis in perm_of(transpose, len(sizes))]
    read = pad.outputs[0] if transpose is None else transpose.outputs[0]
    if [i for i, tensor in enumerate(node.inputs) if tensor is read] != [0]:
        return None
    if len(sizes) < 3 or any(sum(both) for both in sizes[:2]):  # the batch axis or channels are padded
        return None
    is_padded = str_attribute(node, "auto_pad", "NOTSET") == "NOTSET"
    if not is_padded and str_attribute(node, "auto_pad") != "VALID":
        return None
    count = len(sizes) - 2
    old = ints_attribute(node, "pads", [0] * 2 * count) if is_padded else [0] * 2 * count
    if len(old) != 2 * count:
        return None
    added = [front for front, _ in sizes[2:]] + [behind for _, behind in sizes[2:]]
    new = [one + other for one, other in zip(old, added, strict=True)]
    own: dict[str, AttributeValue] = {"pads": new}
    if op_of(node) == "Conv" and value == 0:
        return Window(node, transpose, own)
    if op_of(node) not in ("AveragePool", "MaxPool") or not _pads_whole_windows(node, new):
        return None
    if op_of(node) == "AveragePool" and value == 0 and (int_attribute(node, "count_include_pad", 0) or not any(old)):
        return Window(node, transpose, {**own, "count_include_pad": 1})
    if op_of(node) == "MaxPool" and (value == -math.inf or (value == 0 and _is_nonnegative(graph, pad.inputs[0]))):
        return Window(node, transpose, own)
    return None


def _pads_whole_windows(pool: Node, pads: Sequence[int]) -> bool:
    """Return whether every window of a pool covers an element of its image, as runtimes require.

    With ceil_mode, a window can begin after the end of the image, so that the number of windows depends on the pads.
    """
    kernel = ints_attribute(pool, "kernel_shape", [])
    has_indices = any(tensor.name for tensor in pool.outputs[1:])
    if int_attribute(pool, "ceil_mode", 0) or has_indices or len(pads) != 2 * len(kernel):
        return False
    return all(size < window for size, window in zip(pads, [*kernel, *kernel], strict=True))


def _is_nonnegative(graph: Graph, tensor: Tensor) -> bool:
    node = producer(tensor)
    if node is None or op_of(node) not in (*NONNEGATIVE, "Clip"):
        return False
    least = attribute_or_input(graph, node, "min") if op_of(node) == "Clip" else 0.0
    return isinstance(least, int | float) and least >= 0
