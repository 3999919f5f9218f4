"""Remove nodes that compute one of their inputs, and write equivalent operators in one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from onnx import TensorProto, helper

from onnxfuse.analysis.rules import RuleTable, has_input
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.attributes import attribute_or_input, int_attribute, number_parameter
from onnxfuse.ir.dtypes import LARGEST_FLOAT8, Array, dtype_name, is_exact_cast
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.graph_pass import graph_pass

RewriteRule: TypeAlias = Callable[[Graph, ShapeInfo, Node], bool]  # a rule returns whether it changed the graph

RULES = RuleTable[RewriteRule]()
NEUTRAL_SCALARS = {"Mul": 1, "Div": 1, "Add": 0, "Sub": 0}
# A bias of a product of dequantized integers counts as a multiple of the product's scale if each quotient bias / scale
# differs from an integer by at most SUM_ROUNDING * (1 + the largest quotient).
SUM_ROUNDING = 1e-6
MAX_WEIGHT_RANK = 3  # the highest rank of a tensor that a weight scales or shifts: batch, sequence, features


@graph_pass()
def remove_no_ops(graph: Graph, shapes: ShapeInfo) -> int:
    """Apply the rule of each node's operator; return the number of changes."""
    return sum(RULES[op](graph, shapes, node) for node in list(graph.nodes) if (op := op_of(node)) in RULES)


def _remove(graph: Graph, shapes: ShapeInfo, node: Node, source: Tensor) -> bool:
    """Replace the node's output by `source`; return False, and change nothing, if both must keep their names.

    The node also stays if its output is a graph output that declares more dims than are known of `source`, and other
    nodes read `source`, too.  These would then read the declared dims, which can be wrong, and onnxruntime refuses
    nodes whose inputs have wrong dims.
    """
    output = node.outputs[0]
    if graph.is_kept(output) and len(source.outputs) > 1 and _says_more(shapes, output, source):
        return False
    if not graph.replace(output, source):
        return False
    node.inputs.clear()
    return True


def _says_more(shapes: ShapeInfo, output: Tensor, source: Tensor) -> bool:
    """Return whether an output is declared with a rank or constant dims that are not known of `source`."""
    declared, known = output.shape, shapes.shape(source)
    if declared is None or known is None or len(declared) != len(known):
        return declared is not None
    return any(isinstance(dim, int) and dim != found for dim, found in zip(declared, known, strict=True))


@RULES.rule("Identity")
def _remove_identity(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove an Identity, unless it copies a Transpose's result to a graph output, and a Gemm reads this result.

    onnxruntime 1.31 merges a Transpose before a Gemm into the Gemm, and loses a graph output that this Transpose
    computes.
    """
    source = node.inputs[0]
    transpose = producer(source)
    merged = (
        transpose is not None and op_of(transpose) == "Transpose" and any(op_of(r) == "Gemm" for r in source.outputs)
    )
    return not (merged and graph.is_kept(node.outputs[0])) and _remove(graph, shapes, node, source)


@RULES.rule("Max", "Mean", "Min", "Sum")
def _remove_of_one_input(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Concat, Max, Min, Mean or Sum of one tensor."""
    return len(node.inputs) == 1 and len(node.outputs) == 1 and _remove(graph, shapes, node, node.inputs[0])


@RULES.rule("Concat")
def _remove_empty_inputs(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove empty inputs of a Concat, such as the unrotated part of heads where a rotary embedding rotates all."""
    axis = int_attribute(node, "axis", 1)
    found = [shapes.shape(t) for t in node.inputs]
    if any(shape is not None and not -len(shape) <= axis < len(shape) for shape in found):
        return False  # the model is invalid, which the runtime reports
    filled = [t for t, shape in zip(node.inputs, found, strict=True) if shape is None or shape[axis] != 0]
    if not filled or len(filled) == len(node.inputs):
        return _remove_of_one_input(graph, shapes, node)
    node.inputs = filled
    _remove_of_one_input(graph, shapes, node)
    return True


@RULES.rule("Split")
def _remove_split(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Split into one part."""
    return len(node.outputs) == 1 and _remove(graph, shapes, node, node.inputs[0])


@RULES.rule("Dropout")
def _remove_dropout(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Dropout if nothing reads its mask, and its training flag is absent or false."""
    if any(t.outputs or graph.is_kept(t) for t in node.outputs[1:]):
        return False
    if graph.opset < 7:
        return bool(int_attribute(node, "is_test")) and _remove(graph, shapes, node, node.inputs[0])
    flag = attribute_or_input(graph, node, "training_mode")
    return (flag is None or isinstance(flag, int)) and not flag and _remove(graph, shapes, node, node.inputs[0])


@RULES.rule("Cast")
def _simplify_cast(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Cast to the dtype of its input; make a Cast that reads a lossless Cast read that Cast's input."""
    source, wanted = node.inputs[0], shapes.dtype(node.outputs[0])
    if wanted and shapes.dtype(source) == wanted:
        return _remove(graph, shapes, node, source)
    first_cast = producer(source)
    if first_cast is None or op_of(first_cast) != "Cast":
        return False
    origin = first_cast.inputs[0]
    if not is_exact_cast(shapes.dtype(origin), shapes.dtype(source)) or wanted == TensorProto.STRING:
        return False
    if shapes.dtype(origin) == wanted:
        return _remove(graph, shapes, node, origin)
    node.inputs[0] = origin
    return True


@RULES.rule("CastLike")
def _replace_cast_like(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Replace a CastLike by a Cast if the dtype that it casts to is known."""
    wanted = shapes.dtype(node.inputs[1])
    if not wanted:
        return False
    if shapes.dtype(node.inputs[0]) == wanted:
        return _remove(graph, shapes, node, node.inputs[0])
    graph.rewrite(node, "Cast", node.inputs[:1], {**node.attrs, "to": wanted})
    return True


@RULES.rule("Expand")
def _remove_if_same_shape(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove an Expand, a Tile or a forward Slice to the shape of its input."""
    shape = shapes.shape(node.inputs[0])
    is_same = shape is not None and shape == shapes.shape(node.outputs[0])
    return is_same and _remove(graph, shapes, node, node.inputs[0])


@RULES.rule("Tile")
def _simplify_tile(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Tile to the shape of its input; write a Tile that repeats only axes of size 1 as an Expand."""
    if _remove_if_same_shape(graph, shapes, node):
        return True
    shape, repeats = shapes.shape(node.inputs[0]), shapes.value(node.inputs[1]) if graph.opset >= 8 else None
    if not shape or repeats is None or len(shape) != repeats.size:
        return False
    if any(size != 1 != count for size, count in zip(shape, repeats.tolist(), strict=True)):
        return False
    graph.rewrite(node, "Expand", node.inputs)
    return True


@RULES.rule("Slice")
def _remove_slice(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Slice with positive steps that takes all elements, or exactly one input of a Concat."""
    steps = attribute_or_input(graph, node, "steps")
    forward = steps is None or (isinstance(steps, list) and all(isinstance(step, int) and step > 0 for step in steps))
    if forward and _remove_if_same_shape(graph, shapes, node):
        return True
    part = _sliced_part(shapes, node)
    return part is not None and _remove(graph, shapes, node, part)


def _sliced_part(shapes: ShapeInfo, node: Node) -> Tensor | None:
    """Return the input of a Concat that a Slice of the Concat extracts; None if it extracts other elements."""
    concat, whole = producer(node.inputs[0]), shapes.shape(node.inputs[0])
    if concat is None or op_of(concat) != "Concat" or whole is None:
        return None
    try:
        ((axis, taken),) = slice_ranges(shapes, node, node.outputs[0]).items()
    except (CannotInfer, ValueError):  # the Slice's ranges are unknown, or it cuts several axes or none
        return None
    sizes = [None if shape is None else shape[axis] for shape in map(shapes.shape, concat.inputs)]
    if axis != int_attribute(concat, "axis", 0) % len(whole):
        return None
    start = 0
    for part, size in zip(concat.inputs, sizes, strict=True):
        if not isinstance(size, int):
            return None
        if taken == (start, size):
            return part
        start += size
    return None


@RULES.rule("Pad")
def _remove_pad(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove a Pad that adds nothing."""
    pads = attribute_or_input(graph, node, "pads")
    return isinstance(pads, list) and not any(pads) and _remove(graph, shapes, node, node.inputs[0])


@RULES.rule("ReduceL2", "ReduceMean")
def _name_last_axis(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write the last axis of a reduction as -1, so that two equal reductions of one tensor are merged."""
    rank = shapes.rank(node.inputs[0])
    if not rank or attribute_or_input(graph, node, "axes") != [rank - 1]:
        return False
    if "axes" in node.attrs:
        graph.set_attribute(node, "axes", [-1])
    else:
        node.inputs[1] = graph.constant(f"{node.outputs[0].name}_axes", np.array([-1], np.int64))
    return True


@RULES.rule(*NEUTRAL_SCALARS)
def _simplify_arithmetic(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    changes = _remove_neutral, _flatten_weight, _flatten_scale
    return any(change(graph, shapes, node) for change in changes)


def _remove_neutral(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove `x * 1`, `x / 1`, `x + 0` and `x - 0` where the scalar does not change the shape.

    Only scalars count: a vector of ones is the weight of a norm.  `x + 0` is removed although it turns -0 into +0,
    because no runtime promises to do so.
    """
    op = op_of(node)
    if graph.opset < 7:
        return False
    for index in (1, 0) if op in ("Mul", "Add") else (1,):
        constant, source = node.inputs[index], node.inputs[1 - index]
        if is_constant(constant) and math.prod(constant.shape) == 1 and not is_constant(source):
            rank = shapes.rank(source)
            keeps_shape = not constant.shape or (rank is not None and len(constant.shape) <= rank)
            is_neutral = keeps_shape and bool(constant_value(graph, constant) == NEUTRAL_SCALARS[op])
            return is_neutral and _remove(graph, shapes, node, source)
    return False


def _flatten_weight(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Reshape a weight of shape (1, d) or (1, 1, d) to (d) if that broadcasts with the other input in the same way.

    A constant of four axes is unchanged: it can be a row of a rotary embedding's table, or a mask.
    """
    for index, weight in enumerate(node.inputs if graph.opset >= 7 else ()):
        rank = shapes.rank(node.inputs[1 - index]) or 0
        if not is_constant(weight) or not 1 < len(weight.shape) <= rank <= MAX_WEIGHT_RANK:
            continue
        if math.prod(weight.shape) == weight.shape[-1] > 1:
            node.inputs[index] = graph.constant(f"{weight.name}_row", constant_value(graph, weight).reshape(-1))
            return True
    return False


def _flatten_scale(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Drop leading axes of size 1 of a constant that a Mul multiplies by a scalar, if only Muls read the product.

    The tensors that these Muls scale must have at least as many axes as the constant.  Quantizers write such a product
    of two scales, and multiply sums of integers by it.
    """
    (product,) = node.outputs
    is_scale = op_of(node) == "Mul" and all(op_of(reader) == "Mul" for reader in product.outputs)
    scaled = [t for reader in product.outputs for t in reader.inputs if t is not product] if is_scale else []
    if not scaled or graph.opset < 7 or graph.is_kept(product):
        return False
    for index, scale in enumerate(node.inputs):
        if not is_constant(scale) or not scale.shape or scale.shape[0] != 1 or shapes.rank(node.inputs[1 - index]) != 0:
            continue
        if all((shapes.rank(tensor) or 0) >= len(scale.shape) for tensor in scaled):
            value = constant_value(graph, scale)
            first = next((i for i, size in enumerate(value.shape) if size != 1), value.ndim)
            node.inputs[index] = graph.constant(f"{scale.name}_scale", value.reshape(value.shape[first:]))
            shapes.record(product, value.shape[first:], shapes.dtype(product))
            return True
    return False


@RULES.rule("QuantizeLinear")
def _secure_quantizer(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write a quantizer in a form that onnxruntime's optimizations do not change."""
    return _write_zero_point(graph, shapes, node) or _write_max(graph, shapes, node)


def _write_max(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Write a Relu as the maximum of x and 0 if a QuantizeLinear to float8 alone reads its result.

    onnxruntime's optimizations remove such a Relu, as if 0 were the lowest float8 number.
    """
    given, (result,) = node.inputs[0], node.outputs
    relu = producer(given) if dtype_name(shapes.dtype(result)) in LARGEST_FLOAT8 else None
    if relu is None or op_of(relu) != "Relu" or not graph.sole_consumer(given) or not shapes.dtype(given):
        return False
    dtype = helper.tensor_dtype_to_np_dtype(shapes.dtype(given))
    zero = graph.constant(f"{given.name}_least", np.zeros((), dtype))
    graph.rewrite(relu, "Max", [relu.inputs[0], zero])
    return True


def _write_zero_point(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Give a QuantizeLinear to int8 a zero point of int8 in place of the attribute `output_dtype`.

    onnxruntime's optimizations replace a QuantizeLinear, with the operator and the DequantizeLinears before it, by a
    QLinear operator, whose result is uint8 if the zero point is left out.  Other optimizations turn quantizers to int8
    into quantizers to uint8, but leave `output_dtype` unchanged.  onnxruntime then refuses the model.
    """
    shape = shapes.shape(node.inputs[1])
    sizes = [size for size in shape or () if isinstance(size, int)]
    if int_attribute(node, "output_dtype", 0) != TensorProto.INT8 or shape is None or len(sizes) < len(shape):
        return False
    if not has_input(node, 2):
        zeros = graph.constant(f"{node.outputs[0].name}_zero", np.zeros(sizes, np.int8))
        node.inputs = [*node.inputs[:2], zeros]
    graph.set_attribute(node, "output_dtype", 0)
    return True


@RULES.rule("DequantizeLinear")
def _remove_zero_points(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Remove the zero points of float8 numbers, which are all 0."""
    if dtype_name(shapes.dtype(node.inputs[0])) not in LARGEST_FLOAT8 or not has_input(node, 2):
        return False
    zero_points = node.inputs[2]
    if not is_constant(zero_points) or constant_value(graph, zero_points).any():
        return False
    node.inputs = node.inputs[:2]
    return True


@RULES.rule("Gemm")
def _simplify_gemm(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Reshape the bias of a Gemm to one axis, and fold the factor `alpha` into the scale of its weight.

    If a Gemm multiplies dequantized integers, its bias must be a multiple of the scale of the product: onnxruntime's
    optimizations would round any other bias when they make a QGemm of the product.
    """
    return _adds_sums(graph, shapes, node) and (_flatten_bias(graph, node) or _fold_factor(graph, node))


def _adds_sums(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a Gemm adds its bias without rounding it, even after onnxruntime's optimizations.

    This is so if the bias is a multiple of the scale of the product, or if no dequantized integers are multiplied.
    """
    step: Array = np.full((), number_parameter(graph, node, "alpha"))
    for tensor in node.inputs[:2]:
        maker = producer(tensor)
        if maker is None or op_of(maker) != "DequantizeLinear" or not is_constant(scale := maker.inputs[1]):
            return True
        if dtype_name(shapes.dtype(maker.inputs[0])) in LARGEST_FLOAT8:
            return True
        factor = constant_value(graph, scale)
        if max(step.ndim, factor.ndim) > 1 or not _fit(step.shape, factor.shape):
            return True  # onnxruntime does not make a QGemm if scales are per block or per row
        step = step * factor
    if not has_input(node, 2):
        return True
    bias, maker = node.inputs[2], producer(node.inputs[2])
    if maker is not None and op_of(maker) == "DequantizeLinear" and is_constant(scale := maker.inputs[1]):
        factor = constant_value(graph, scale)
        return not _fit(step.shape, factor.shape) or np.allclose(factor, step, SUM_ROUNDING, 0)
    if is_constant(bias) and not _fit(step.shape, bias.shape):
        return True
    with np.errstate(all="ignore"):
        sums = constant_value(graph, bias) / step if is_constant(bias) else np.full((), np.nan)
    return bool(np.abs(sums - np.rint(sums)).max(initial=0.0) <= SUM_ROUNDING * (1 + np.abs(sums).max(initial=0.0)))


def _fit(step: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether a scale fits a tensor: the scale has one number, or the last axis has size 1 or the scale's size.

    step   the shape of the scale: one number, or one per column
    other  the shape of the tensor
    """
    return 1 in (math.prod(step), *other[-1:]) or not other or tuple(step) == tuple(other[-1:])


def _fold_factor(graph: Graph, node: Node) -> bool:
    """Multiply the scale of a dequantized weight by the factor `alpha` of its Gemm, and set `alpha` to 1."""
    weight, factor = node.inputs[1], number_parameter(graph, node, "alpha")
    maker = producer(weight) if graph.sole_consumer(weight) else None
    if maker is None or op_of(maker) != "DequantizeLinear" or not 0 < factor < math.inf or factor == 1:
        return False
    scale = maker.inputs[1]
    if not is_constant(scale):
        return False
    value = constant_value(graph, scale)
    maker.inputs[1] = graph.constant(f"{scale.name}_factor", (value * factor).astype(value.dtype))
    graph.set_attribute(node, "alpha", 1.0)
    return True


def _flatten_bias(graph: Graph, node: Node) -> bool:
    """Reshape a bias of shape (1, n) of a Gemm to (n)."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if graph.opset < 7 or not is_constant(bias) or len(bias.shape) != 2 or bias.shape[0] != 1:
        return False
    node.inputs[2] = graph.constant(f"{bias.name}_row", constant_value(graph, bias).reshape(-1))
    return True


@RULES.rule("Shape")
def _read_shape_of_indices(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Make a Shape of a Gather's result read the indices, if its consumers take only sizes of the indices' axes.

    Then an embedding can be fused even though sizes of its result are used.
    """
    gather, sizes = producer(node.inputs[0]), node.outputs[0]
    if gather is None or op_of(gather) != "Gather" or int_attribute(gather, "axis", 0):
        return False
    if node.attrs or graph.is_kept(sizes):
        return False
    rank = shapes.rank(indices := gather.inputs[1])
    if not rank or not all(0 <= axis < rank for consumer in sizes.outputs for axis in _axes_read(graph, consumer)):
        return False
    node.inputs = [indices]
    return True


def _axes_read(graph: Graph, node: Node) -> Iterable[int]:
    """Return the indices of the sizes that a consumer of a Shape takes; [-1] if it could take any size."""
    if op_of(node) != "Gather" or not is_constant(indices := node.inputs[1]):
        return [-1]
    axes: list[int] = constant_value(graph, indices).reshape(-1).tolist()
    return axes
