"""Write activations that exporters spell in several operators as the one operator that patterns know.

These are hard sigmoids, `clip(a x + b, 0, 1)` and `relu6(x + 3) / 6`, also as the gate of a hard swish with the factor
anywhere in the product, and `relu(x) - slope * relu(-x)`, a PRelu.  A PRelu of one slope becomes a LeakyRelu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, schema
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_number, constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit

# What schemas call the dtypes that the rules are for, and the distance from 1 to the next number.
ONNX_NAMES: Final[Mapping[int, str]] = {
    TensorProto.FLOAT: "float", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip
UNIT_ROUNDING: Final[Mapping[int, float]] = {
    TensorProto.FLOAT: 2.0**-23,
    TensorProto.FLOAT16: 2.0**-10,
    TensorProto.BFLOAT16: 2.0**-7,
}
# What may compute the argument of a hard sigmoid, which is then fused with it: not every CUDA provider has it alone.
FUSED_PRODUCERS: Final = frozenset({"Conv", "Gemm", "MatMul", "BatchNormalization", "Add", "Sub", "Mul"})


def recognize_activations(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace what is written in several operators; return the number of activations that were replaced."""
    if graph.opset < 7:  # broadcasting had other rules, and PRelu other slopes
        return 0
    count = 0
    for node in list(graph.nodes):
        written, rule = RULES.get(op_of(node), ("", None))
        if rule and node.outputs and _exists(written, shapes.dtype(node.outputs[0]), graph.opset):
            count += rule(graph, shapes, node)
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _exists(op: str, dtype: int, opset: int) -> bool:
    """Return whether an opset has an operator for a dtype; bfloat16 came last."""
    found = schema(op, opset)
    return found is not None and f"tensor({ONNX_NAMES.get(dtype)})" in found.inputs[0].types


# --- constants beside an operator ----------------------------------------------------------------------------------


def _factor(graph: Graph, node: Node | None) -> tuple[Tensor, float] | None:
    """Return a tensor and the number that the node multiplies it by, or divides it by; None for another node."""
    if node is None or op_of(node) not in ("Mul", "Div"):
        return None
    for index in (1, 0) if op_of(node) == "Mul" else (1,):
        number = constant_number(graph, node.inputs[index])
        if number and math.isfinite(number):
            return node.inputs[1 - index], number if op_of(node) == "Mul" else 1 / number
    return None


def _added(graph: Graph, node: Node | None) -> tuple[Tensor, float] | None:
    """Return a tensor and the number that the node adds to it; None for another node."""
    if node is None or op_of(node) != "Add":
        return None
    for index in (1, 0):
        number = constant_number(graph, node.inputs[index])
        if number is not None and math.isfinite(number):
            return node.inputs[1 - index], number
    return None


def _only_for(graph: Graph, tensor: Tensor, reader: Node) -> Node | None:
    """Return the node that computes the tensor if `reader` is all that reads it."""
    return producer(tensor) if graph.sole_consumer(tensor) is reader else None


# --- hard sigmoid --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ramp:
    """`clip(slope * x + offset, 0, top)`."""

    x: Tensor
    slope: float
    offset: float
    top: float


def _ramp(graph: Graph, clip: Node) -> Ramp | None:
    """Return what a Clip from 0 on computes of the tensor in front of a sum and a factor."""
    source, reader, high = _clipped(graph, clip)
    node = _only_for(graph, source, reader)
    if high is None or not 0 < high < math.inf or node is None:
        return None
    if added := _added(graph, node):
        inner, offset = added
        x, slope = _factor(graph, _only_for(graph, inner, node)) or (inner, 1.0)
        return Ramp(x, slope, offset, high)
    if factor := _factor(graph, node):
        inner, slope = factor
        if added := _added(graph, _only_for(graph, inner, node)):
            return Ramp(added[0], slope, slope * added[1], high)
    return None


def _clipped(graph: Graph, clip: Node) -> tuple[Tensor, Node, float | None]:
    """Return what a Clip from 0 on reads, or the Relu in front of a Min, which node reads it, and the upper bound."""
    source = clip.inputs[0]
    if op_of(clip) == "Clip":
        return source, clip, _bound(graph, clip, "max") if _bound(graph, clip, "min") == 0 else None
    for index in (0, 1) if len(clip.inputs) == 2 else ():
        relu = _only_for(graph, clip.inputs[index], clip)
        if relu is not None and op_of(relu) == "Relu":
            return relu.inputs[0], relu, constant_number(graph, clip.inputs[1 - index])
    return source, clip, None


def _bound(graph: Graph, clip: Node, name: str) -> float | None:
    """Return a bound of a Clip; None if it is computed, or absent."""
    found = attribute_or_input(graph, clip, name)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    return float(found) if isinstance(found, int | float) else None


def _recognize_hard_sigmoid(graph: Graph, shapes: ShapeInfo, clip: Node) -> bool:
    """Replace a ramp from 0 to 1, or one that is divided by its top, also in a product with another tensor."""
    ramp = _ramp(graph, clip)
    if ramp is None or not _is_fused(ramp.x) or not shapes.shape(ramp.x) == shapes.shape(clip.outputs[0]) is not None:
        return False
    if ramp.top == 1:  # with one reader, the sum and the factor are folded into the operator in front
        return len(ramp.x.outputs) > 1 and _write_hard_sigmoid(graph, shapes, ramp, clip.outputs[0])
    reader = graph.sole_consumer(clip.outputs[0])
    if reader is None:
        return False
    tolerance = UNIT_ROUNDING[shapes.dtype(clip.outputs[0])]
    if _is_inverse(_factor(graph, reader), ramp.top, tolerance):
        return _write_hard_sigmoid(graph, shapes, ramp, reader.outputs[0])
    if op_of(reader) != "Mul" or (op_of(clip) == "Clip" and _is_standard(ramp, reader)):
        return False
    other = reader.inputs[0] if reader.inputs[1] is clip.outputs[0] else reader.inputs[1]
    behind, in_front = graph.sole_consumer(reader.outputs[0]), _only_for(graph, other, reader)
    if behind is not None and _is_inverse(_factor(graph, behind), ramp.top, tolerance):
        end = behind.outputs[0]
    elif in_front is not None and _is_inverse(factor := _factor(graph, in_front), ramp.top, tolerance):
        assert factor is not None
        other, end = factor[0], reader.outputs[0]
    else:
        return False
    gate = _hard_sigmoid(graph, shapes, ramp)
    end.inputs.clear()
    graph.add_node("Mul", [other, gate], [end])
    return True


def _is_fused(x: Tensor) -> bool:
    node = producer(x)
    return node is not None and op_of(node) in FUSED_PRODUCERS


def _is_standard(ramp: Ramp, product: Node) -> bool:
    """Return whether it is the gate of ONNX's HardSwish, which patterns know in this form."""
    return (ramp.slope, ramp.offset, ramp.top) == (1, 3, 6) and any(t is ramp.x for t in product.inputs)


def _is_inverse(factor: tuple[Tensor, float] | None, top: float, tolerance: float) -> bool:
    return factor is not None and abs(factor[1] * top - 1) <= tolerance


def _write_hard_sigmoid(graph: Graph, shapes: ShapeInfo, ramp: Ramp, end: Tensor) -> bool:
    return graph.replace(end, _hard_sigmoid(graph, shapes, ramp))


def _hard_sigmoid(graph: Graph, shapes: ShapeInfo, ramp: Ramp) -> Tensor:
    attributes: dict[str, AttributeValue] = {"alpha": ramp.slope / ramp.top, "beta": ramp.offset / ramp.top}
    x = ramp.x
    return emit(
        graph, shapes, "HardSigmoid", [x], f"{x.name}_hard_sigmoid", shapes.shape(x), shapes.dtype(x), attributes
    )


# --- PRelu ---------------------------------------------------------------------------------------------------------


def _recognize_leaky_relu(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Replace a PRelu of one slope by a LeakyRelu, and drop axes of size 1 in front of the channels of the slopes."""
    x, slopes = node.inputs
    rank = shapes.rank(x)
    if not is_constant(slopes) or rank is None:
        return False
    slope = constant_number(graph, slopes)
    if slope is not None and math.isfinite(slope) and len(slopes.shape) <= rank:
        end = node.outputs[0]
        node.inputs.clear()
        node.outputs.clear()
        graph.add_node("LeakyRelu", [x], [end], {"alpha": slope}, name=node.name)
        return True
    if len(slopes.shape) == rank > 1 and slopes.shape[0] == 1:
        node.inputs[1] = graph.constant(f"{slopes.name}_of_channels", constant_value(graph, slopes)[0])
        return True
    return False


def _recognize_prelu(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    """Replace `relu(x) - slope * relu(-x)`, and `relu(x) + slope * (x - |x|) / 2`, by a PRelu."""
    for part, other in (node.inputs, node.inputs[::-1])[: 2 if op_of(node) == "Add" else 1]:
        relu = _only_for(graph, part, node)
        if relu is None or op_of(relu) != "Relu":
            continue
        x = relu.inputs[0]
        slopes = _slopes(graph, x, other, node)
        if slopes is None or not _broadcasts_into(slopes, shapes, x):
            continue
        slopes = (slopes if op_of(node) == "Add" else -slopes).astype(tensor_dtype_to_np_dtype(shapes.dtype(x)))
        if not np.isfinite(slopes).all():
            return False
        end = node.outputs[0]
        node.inputs.clear()
        node.outputs.clear()
        graph.add_node("PRelu", [x, graph.constant(f"{x.name}_slopes", slopes)], [end], name=node.name)
        return True
    return False


def _slopes(graph: Graph, x: Tensor, product: Tensor, reader: Node) -> Array | None:
    """Return in float64 by what a product of constants and `relu(-x)`, or `x - |x|`, multiplies a negative x."""
    slopes = np.ones(())
    while node := _only_for(graph, product, reader):
        reader = node
        factors = list(_constant_factors(graph, node))
        if not factors:
            break
        product, factor = factors[0]
        slopes = slopes * factor
    else:
        return None
    core = [producer(each) for each in node.inputs if graph.sole_consumer(each) is node]
    if op_of(node) == "Relu" and len(core) == 1 and core[0] is not None and op_of(core[0]) == "Neg":
        return -slopes if core[0].inputs[0] is x else None
    if op_of(node) == "Sub" and node.inputs[0] is x and len(core) == 1 and core[0] is not None:
        return 2 * slopes if op_of(core[0]) == "Abs" and core[0].inputs[0] is x else None
    return None


def _constant_factors(graph: Graph, node: Node) -> Iterator[tuple[Tensor, Array]]:
    """Yield the computed tensor of a Mul by a constant, or of a Div by a number, and the constant in float64."""
    if op_of(node) == "Div" and (found := _factor(graph, node)):
        yield found[0], np.array(found[1])
    for index in (0, 1) if op_of(node) == "Mul" else ():
        constant, other = node.inputs[index], node.inputs[1 - index]
        if is_constant(constant) and not is_constant(other):
            yield other, constant_value(graph, constant).astype(np.float64)


def _broadcasts_into(slopes: Array, shapes: ShapeInfo, x: Tensor) -> bool:
    """Return whether slopes broadcast to the shape of x, as PRelu asks for, and leave it as it is."""
    shape = shapes.shape(x)
    if shape is None or slopes.ndim > len(shape):
        return False
    sizes = zip(slopes.shape, shape[len(shape) - slopes.ndim :], strict=True)
    return all(size in (1, other) for size, other in sizes)


# By the operator that a spelling ends with: the one that is written, and the rule.
RULES: Final = {
    "Clip": ("HardSigmoid", _recognize_hard_sigmoid),
    "Min": ("HardSigmoid", _recognize_hard_sigmoid),
    "PRelu": ("LeakyRelu", _recognize_leaky_relu),
    "Add": ("PRelu", _recognize_prelu),
    "Sub": ("PRelu", _recognize_prelu),
}
