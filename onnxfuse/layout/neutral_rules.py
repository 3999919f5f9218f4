"""Rules for operators that work in either layout, once their axes and constants are permuted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from onnxfuse.algebra.operators import BROADCASTING, REDUCTIONS, UNARY
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, input_index, int_attribute
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of
from onnxfuse.layout.axes import last_axis, to_first, to_last
from onnxfuse.layout.conversion import NOT_AN_IMAGE, Conversion, Kind, Model, Rule, same_operator, stored
from onnxfuse.layout.vectors import in_order
from onnxfuse.layout.writer import Writer, image_rank


def integers(model: Model, node: Node, name: str) -> list[int] | None:
    """Return a parameter (an attribute or a constant input) that is a list of integers; None if there is none."""
    found = attribute_or_input(model.graph, node, name)
    if not isinstance(found, list) or not all(isinstance(number, int) for number in found):
        return None
    return [int(number) for number in found]


def moved(
    model: Model, node: Node, axis: int | None = None, why_not: Callable[[Model, Node], str] = lambda model, node: ""
) -> Conversion | str:
    """Return the conversion of an operator that reads one image.

    `axis` is the default of the operator's attribute `axis`, which is permuted; None if the operator has no such
    attribute.  `why_not` returns the reason why the operator depends on the layout, or "".
    """
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    if reason := why_not(model, node):
        return reason
    attributes = None if axis is None else {"axis": last_axis(int_attribute(node, "axis", axis), rank)}
    return same_operator(node, attributes=attributes, computes=(0,) if op_of(node) in UNARY else None)


def second_is_read(model: Model, node: Node) -> str:
    """Return why the node stays channels-first if its second output is read; else "".

    A MaxPool's indices depend on the layout, because they count channels-first elements.
    """
    is_read = any(tensor.name and (tensor.outputs or model.graph.is_kept(tensor)) for tensor in node.outputs[1:])
    return "its second output is read" if is_read else ""


def has_several_scales(model: Model, node: Node) -> str:
    """Return why a node with several quantization scales stays channels-first; else "".

    The scales could belong to channels.
    """
    of_one = (is_constant(tensor) and math.prod(tensor.shape) == 1 for tensor in node.inputs[1:] if tensor.name)
    return "" if all(of_one) else "it has more than one scale"


def dynamic_quantizer(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a DynamicQuantizeLinear: it has one scale and zero point for the whole image."""
    return same_operator(node, computes=(0,)) if image_rank(model.shapes, node.inputs[0]) else NOT_AN_IMAGE


def flattens(model: Model, node: Node) -> str:
    """Return why a Softmax that flattens axes (before opset 13) stays channels-first; else ""."""
    return "it flattens the axes after its own in this opset" if model.graph.opset < 13 else ""


def changes_axes(model: Model, node: Node) -> str:
    """Return why a Gather that changes the rank stays channels-first; else "".

    A list of indices keeps the rank, as in a shuffle of channels.
    """
    is_list = model.shapes.rank(node.inputs[1]) == 1
    return "" if is_list else "its indices are not a list, so that its result has other axes"


def broadcasting(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of an operator that broadcasts.

    Computed operands must be images of one rank, or have one element.  Constants must not have more axes than the
    images.
    """
    rank = image_rank(model.shapes, node.outputs[0])
    if not rank or not any(image_rank(model.shapes, tensor) == rank for tensor in node.inputs):
        return NOT_AN_IMAGE
    reads = []
    for i, tensor in enumerate(node.inputs):
        if is_constant(tensor):
            if len(tensor.shape) > rank:
                return f"its constant '{tensor.name}' has more than {rank} axes"
        elif image_rank(model.shapes, tensor) == rank:
            reads.append(i)
        elif tensor.name and not _is_scalar(model.shapes, tensor, rank):
            return f"its operand '{tensor.name}' has not {rank} axes"
    return same_operator(node, tuple(reads), broadcasts=True)


def _is_scalar(shapes: ShapeInfo, tensor: Tensor, rank: int) -> bool:
    shape = shapes.shape(tensor)
    return shape is not None and len(shape) < rank and all(size == 1 for size in shape)


def concat(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Concat: it joins along the permuted axis."""
    axis, rank = int_attribute(node, "axis"), image_rank(model.shapes, node.outputs[0])
    images = [i for i, tensor in enumerate(node.inputs) if image_rank(model.shapes, tensor) == rank]
    if axis is None or not rank or not images:
        return NOT_AN_IMAGE
    if not all(i in images or is_constant(tensor) for i, tensor in enumerate(node.inputs)):
        return f"an operand is not a tensor of {rank} axes"
    constants = {
        i: stored(f"{t.name}/nhwc", np.ascontiguousarray(constant_value(model.graph, t).transpose(to_last(rank))))
        for i, t in enumerate(node.inputs)
        if is_constant(t)
    }
    return same_operator(node, tuple(images), attributes={"axis": last_axis(axis, rank)}, operands=constants)


def slice_(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Slice: only its axes change; starts, ends and steps keep their order."""
    if not image_rank(model.shapes, node.inputs[0]):
        return NOT_AN_IMAGE
    axes = integers(model, node, "axes")
    if axes is None and attribute_or_input(model.graph, node, "axes") is None:
        starts = integers(model, node, "starts")
        axes = None if starts is None else list(range(len(starts)))
    if axes is None:
        return "its axes are not constant"
    return _with_axes(model, node, axes)


def reduction(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a reduction.

    Without keepdims, the remaining axes must have the same order in both layouts.
    """
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    axes = integers(model, node, "axes")
    if not axes:
        return "its axes are not constant"
    if int_attribute(node, "keepdims", 1):
        return _with_axes(model, node, axes)
    reduced = {axis % rank for axis in axes}
    if [axis for axis in to_last(rank) if axis not in reduced] != sorted(set(range(rank)) - reduced):
        return "the axes that it keeps have another order channels-last"
    return _with_axes(model, node, axes, computes=())


def _with_axes(model: Model, node: Node, axes: Sequence[int], computes: tuple[int, ...] | None = None) -> Conversion:
    new = [last_axis(axis, image_rank(model.shapes, node.inputs[0])) for axis in axes]
    index = input_index(op_of(node), "axes", model.graph.opset)
    if index is None:
        return same_operator(node, attributes={"axes": new}, computes=computes)
    axes_operand = stored(f"{node.outputs[0].name}/axes", np.array(new, np.int64))  # a Slice can lack the axes input
    return same_operator(node, operands={index: axes_operand}, computes=computes)


def pad(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Pad: pads are permuted, first those before each axis, then those after each axis.

    Pads of some axes are extended to all axes: onnxruntime 1.31.1 ignores `axes` when it moves a Transpose past a Pad.
    """
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    axes_index, index = (input_index("Pad", name, model.graph.opset) for name in ("axes", "pads"))
    has_axes = axes_index is not None and axes_index < len(node.inputs) and bool(node.inputs[axes_index].name)
    axes = integers(model, node, "axes") if has_axes else list(range(rank))
    if axes is None:
        return "its axes are not constant"
    count, places = len(axes), {axis % rank: i for i, axis in enumerate(axes)}
    before = [places.get(axis) for axis in to_last(rank)]  # for each channels-last axis: the index of its pad in `pads`
    order = [*before, *(None if place is None else place + count for place in before)]
    pads = integers(model, node, "pads")
    if pads is not None and len(pads) != 2 * count:
        return "it has not two pads for each of its axes"
    if index is None:
        known = [0 if place is None or pads is None else pads[place] for place in order]
        return same_operator(node, attributes={"pads": known})

    def write(writer: Writer) -> None:
        inputs = [*node.inputs[:axes_index]]
        inputs[0] = writer.image(inputs[0])
        inputs[index] = in_order(writer, inputs[index], order)
        writer.rewrite(node, inputs, [writer.computed(node.outputs[0])])

    return Conversion(node, Kind.NEUTRAL, (0,), (0,), write)


def reshape(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Reshape that joins or splits spatial axes only, and keeps batch and channels."""
    x, y, target = node.inputs[0], node.outputs[0], node.inputs[-1]
    before, after = model.shapes.shape(x), model.shapes.shape(y)
    if not image_rank(model.shapes, x) or not image_rank(model.shapes, y) or before is None or after is None:
        return NOT_AN_IMAGE
    channels = after[1]
    if before[:2] != after[:2] or not isinstance(channels, int) or int_attribute(node, "allowzero", 0):
        return "it does not keep both its images and its channels"

    def new_target(writer: Writer) -> Tensor:
        # A 0 in the target copies the image's size at the same index.  In channels-last order, the indices of spatial
        # axes are lower by 1 in both the image and the target, so that a 0 still copies the right size.  For channels
        # it would not, so their number is written.
        value = writer.shapes.exact_value(target)
        known = {} if value is not None and value[1] == channels else {1: channels}
        return in_order(writer, target, to_last(len(after)), known)

    return same_operator(node, operands={1: new_target})


def shape_of(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Shape: the shape of the channels-last image, permuted to channels-first order.

    Nodes that take constant indices of the shape take the permuted indices instead.
    """
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    places = np.array(to_first(rank))[int_attribute(node, "start", 0) : int_attribute(node, "end", rank)]

    def write(writer: Writer) -> None:
        source, output = node.inputs[0], node.outputs[0]
        if not writer.is_computed_last(source):
            return
        shapes, image = writer.shapes, writer.image(source)
        whole = writer.graph.variable(f"{output.name}/nhwc")
        shapes.record(whole, (rank,), shapes.dtype(output))
        shapes.record_value(whole, np.array(shapes.shape(image), object))
        for reader in consumers(output):
            if (taken := _places_taken(model, reader, len(places))) is not None:
                _take(writer, whole, places[taken], reader.outputs[0])
                reader.inputs.clear()
                reader.outputs.clear()
        _take(writer, whole, places, output)
        writer.rewrite(node, [image], [whole], {"start": None, "end": None})

    return Conversion(node, Kind.NEUTRAL, (), (), write, reads_either=(0,))


def _places_taken(model: Model, node: Node, count: int) -> Array | None:
    """Return the indices that a Gather or Slice takes from `count` elements; None if they are not constant."""
    if op_of(node) == "Gather" and is_constant(indices := node.inputs[1]):
        return constant_value(model.graph, indices)
    if op_of(node) != "Slice" or attribute_or_input(model.graph, node, "steps") is not None:
        return None
    starts, ends = (integers(model, node, name) for name in ("starts", "ends"))
    return np.arange(count)[starts[0] : ends[0]] if starts and ends else None


def _take(writer: Writer, source: Tensor, places: Array, output: Tensor) -> None:
    stored = writer.graph.constant(f"{output.name}/order", np.array(places, np.int64))
    writer.graph.add_node("Gather", [source, stored], [output], {"axis": 0})


NEUTRAL_RULES: Final[dict[str, Rule]] = {
    # Inputs of UNARY operators after the first are scalars, which have no layout.
    **dict.fromkeys(UNARY, partial(moved, why_not=second_is_read)),
    **dict.fromkeys(BROADCASTING, broadcasting),
    **dict.fromkeys(REDUCTIONS, reduction),
    "Concat": concat,
    "DequantizeLinear": partial(moved, why_not=has_several_scales),
    "DynamicQuantizeLinear": dynamic_quantizer,
    "Gather": partial(moved, axis=0, why_not=changes_axes),
    "LogSoftmax": partial(moved, axis=-1, why_not=flattens),
    "Pad": pad,
    "QuantizeLinear": partial(moved, why_not=has_several_scales),
    "Reshape": reshape,
    "Shape": shape_of,
    "Slice": slice_,
    "Softmax": partial(moved, axis=-1, why_not=flattens),
    "Split": partial(moved, axis=0),
}
