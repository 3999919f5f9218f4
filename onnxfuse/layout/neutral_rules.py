"""Operators that compute the same in either layout, with their axes and constants permuted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, input_index, int_attribute
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of
from onnxfuse.layout.axes import last_axis, permuted, to_first, to_last
from onnxfuse.layout.conversion import Conversion, Kind, Model, Rule, same_operator
from onnxfuse.layout.writer import Writer, image_rank

# Operators of one tensor, element by element.
UNARY: Final = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
})  # fmt: skip
# Operators that broadcast their tensors, element by element.
BROADCASTING: Final = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min",
    "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
REDUCTIONS: Final = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
NOT_AN_IMAGE: Final = "it reads no computed tensor of three to five axes"


def integers(model: Model, node: Node, name: str) -> list[int] | None:
    """Return a parameter that is a list of integers, be it an attribute or a constant input; None where it is not."""
    found = attribute_or_input(model.graph, node, name)
    if not isinstance(found, list) or not all(isinstance(number, int) for number in found):
        return None
    return [int(number) for number in found]


def unary(model: Model, node: Node) -> Conversion | str:
    """Further inputs are scalars.  Of a Dropout nobody may read the mask, which is all true."""
    if not image_rank(model.shapes, node.inputs[0]):
        return NOT_AN_IMAGE
    if any(tensor.outputs or model.graph.is_kept(tensor) for tensor in node.outputs[1:] if tensor.name):
        return "its second output is read"
    return same_operator(node, (0,), computes=(0,))


def broadcasting(model: Model, node: Node) -> Conversion | str:
    """Computed operands are images of one rank, or have one element; constants have no more axes than images."""
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


def quantized(model: Model, node: Node) -> Conversion | str:
    """Only with one scale for the whole tensor."""
    if not image_rank(model.shapes, node.inputs[0]):
        return NOT_AN_IMAGE
    if any(not (is_constant(tensor) and math.prod(tensor.shape) == 1) for tensor in node.inputs[1:] if tensor.name):
        return "it has more than one scale"
    return same_operator(node, (0,))


def concat(model: Model, node: Node) -> Conversion | str:
    """Join along the permuted axis."""
    axis, rank = int_attribute(node, "axis"), image_rank(model.shapes, node.outputs[0])
    images = [i for i, tensor in enumerate(node.inputs) if image_rank(model.shapes, tensor) == rank]
    if axis is None or not rank or not images:
        return NOT_AN_IMAGE
    if not all(i in images or is_constant(tensor) for i, tensor in enumerate(node.inputs)):
        return f"an operand is no tensor of {rank} axes"
    constants = {
        i: np.ascontiguousarray(constant_value(model.graph, tensor).transpose(to_last(rank)))
        for i, tensor in enumerate(node.inputs)
        if is_constant(tensor)
    }
    return same_operator(node, tuple(images), attributes={"axis": last_axis(axis, rank)}, constants=constants)


def split(model: Model, node: Node) -> Conversion | str:
    """Split the permuted axis."""
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    return same_operator(node, (0,), attributes={"axis": last_axis(int_attribute(node, "axis", 0), rank)})


def softmax(model: Model, node: Node) -> Conversion | str:
    """Before opset 13 the operator flattened the axes behind its own."""
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    if model.graph.opset < 13:
        return "it flattens the axes behind its own in this opset"
    return same_operator(node, (0,), attributes={"axis": last_axis(int_attribute(node, "axis", -1), rank)})


def slice_(model: Model, node: Node) -> Conversion | str:
    """Only the axes change: starts, ends and steps keep their order."""
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
    """Without keepdims, the axes that stay must be in the same order in both layouts."""
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
        return same_operator(node, (0,), attributes={"axes": new}, computes=computes)
    if index < len(node.inputs) and node.inputs[index].name:
        return same_operator(node, (0,), constants={index: np.array(new, np.int64)}, computes=computes)
    return _with_new_input(node, index, np.array(new, np.int64))


def _with_new_input(node: Node, index: int, axes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Conversion:
    """Give a Slice without axes those of its starts."""

    def write(writer: Writer) -> None:
        inputs = [*node.inputs[:index], writer.graph.constant(f"{node.outputs[0].name}/axes", axes)]
        inputs[0] = writer.image(inputs[0])
        writer.rewrite(node, [*inputs, *node.inputs[index + 1 :]], [writer.computed(node.outputs[0])])

    return Conversion(node, Kind.NEUTRAL, (0,), (0,), write)


def pad(model: Model, node: Node) -> Conversion | str:
    """Permute the pads, which are those before each axis and then those behind each.

    Pads of some axes become those of all, because onnxruntime 1.31.1 moves a Transpose past a Pad as if it had no axes.
    """
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    axes_index, index = (input_index("Pad", name, model.graph.opset) for name in ("axes", "pads"))
    has_axes = axes_index is not None and axes_index < len(node.inputs) and bool(node.inputs[axes_index].name)
    axes = integers(model, node, "axes") if has_axes else list(range(rank))
    pads = integers(model, node, "pads")
    if pads is None or axes is None or len(pads) != 2 * len(axes):
        return "its pads are not constant"
    of_axis = {axis % rank: (pads[i], pads[len(axes) + i]) for i, axis in enumerate(axes)}
    both = permuted([of_axis.get(axis, (0, 0)) for axis in range(rank)], to_last(rank))
    new = [before for before, _ in both] + [behind for _, behind in both]
    if index is None:
        return same_operator(node, (0,), attributes={"pads": new})

    def write(writer: Writer) -> None:
        inputs = [*node.inputs[:axes_index]]
        inputs[0] = writer.image(inputs[0])
        inputs[index] = writer.graph.constant(f"{inputs[index].name}/nhwc", np.array(new, np.int64))
        writer.rewrite(node, inputs, [writer.computed(node.outputs[0])])

    return Conversion(node, Kind.NEUTRAL, (0,), (0,), write)


def gather(model: Model, node: Node) -> Conversion | str:
    """Gather along the permuted axis, as a shuffle of channels does; with a list of indices, which keeps the axes."""
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    if model.shapes.rank(node.inputs[1]) != 1:
        return "its indices are no list, so that its result has other axes"
    return same_operator(node, (0,), attributes={"axis": last_axis(int_attribute(node, "axis", 0), rank)})


def shape_of(model: Model, node: Node) -> Conversion | str:
    """The shape of a channels-last image is put into the order of a channels-first one."""
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    axes = list(range(rank))[int_attribute(node, "start", 0) : int_attribute(node, "end", rank)]

    def write(writer: Writer) -> None:
        source, output = node.inputs[0], node.outputs[0]
        if not writer.is_computed_last(source):
            return
        attributes: dict[str, AttributeValue | None] = {"start": None, "end": None}
        whole = writer.graph.variable(f"{output.name}/nhwc")
        shapes = writer.shapes
        shapes.record(whole, (rank,), shapes.dtype(output))
        order = writer.graph.constant(f"{output.name}/order", np.array([to_first(rank)[a] for a in axes], np.int64))
        writer.rewrite(node, [writer.image(source)], [whole], attributes)
        writer.graph.add_node("Gather", [whole, order], [output], {"axis": 0})

    return Conversion(node, Kind.NEUTRAL, (), (), write, reads_either=(0,))


NEUTRAL_RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BROADCASTING, broadcasting),
    **dict.fromkeys(REDUCTIONS, reduction),
    "QuantizeLinear": quantized,
    "DequantizeLinear": quantized,
    "Concat": concat,
    "Split": split,
    "Softmax": softmax,
    "LogSoftmax": softmax,
    "Slice": slice_,
    "Gather": gather,
    "Pad": pad,
    "Shape": shape_of,
}
