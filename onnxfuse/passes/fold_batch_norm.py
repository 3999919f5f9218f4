"""Fold BatchNormalization, and constant scales and biases per channel, into the weights of an adjacent linear node.

Conv, ConvTranspose, Gemm and MatMul are linear.  So a step `y = x * scale + shift` per channel after such a node can be
folded into the node's weights.  A step before the node can be folded, too, unless the node pads its input.  The
arithmetic is done in float64 and rounded once.  Nothing is folded if the rounded weights would overflow or vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, ints_attribute, number_parameter
from onnxfuse.ir.dtypes import Array, is_exact_cast
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.linear_weights import (
    Channels,
    RescaledWeights,
    input_channels,
    is_linear,
    output_channels,
    read_per_channel,
    scale_inputs,
    scale_outputs,
    set_weights,
)

FOLDED_KINDS = {  # operator -> the kind of folding, as reports name it
    "BatchNormalization": "batch_norm", "Mul": "scale", "Div": "scale", "Add": "bias", "Sub": "bias", "Cast": "cast",
}  # fmt: skip


@dataclass(frozen=True)
class AffineStep:
    """A node that computes `source * scale + shift`; scale and shift are one float64 each, or one per channel."""

    node: Node
    source: Tensor
    scale: Array
    shift: Array


@graph_pass(opset=7)  # before opset 7, BatchNormalization had other attributes, and broadcasting other rules
def fold_batch_norm(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Fold affine steps per channel into constant weights; return the nodes that vanished."""
    folded: list[Folded] = []
    with np.errstate(all="ignore"):
        for node in list(graph.nodes):
            if is_linear(node):
                folded += _fold_before(graph, shapes, node)
                folded += _fold_after(graph, shapes, node)
    return folded


def _fold_after(graph: Graph, shapes: ShapeInfo, node: Node) -> list[Folded]:
    """Fold the chain of affine steps that reads the node's output, or a Transpose of it."""
    channels = output_channels(graph, shapes, node)
    steps = _steps_after(graph, shapes, node, node.outputs[0], channels)
    if not _is_worth_folding(node, steps):
        return _fold_behind_transpose(graph, shapes, node, channels)
    end = steps[-1].node.outputs[0]
    new = scale_outputs(graph, node, channels, *_compose(steps))
    if new is None:
        return []
    kept_add = None
    if op_of(node) == "MatMul" and new.bias is not None:
        kept_add = next((step.node for step in reversed(steps) if op_of(step.node) == "Add"), None)
    folded = _disconnect([step for step in steps if step.node is not kept_add], node)
    if op_of(node) != "MatMul" or new.bias is None:
        set_weights(graph, node, new)
        graph.replace(end, node.outputs[0])
    elif kept_add:
        _change_bias(graph, node, kept_add, new)
        if kept_add.outputs[0] is not end:
            graph.replace(end, kept_add.outputs[0])
    else:
        end.inputs.clear()
        _add_bias(graph, shapes, node, end, new)
    return folded


def _fold_behind_transpose(graph: Graph, shapes: ShapeInfo, node: Node, channels: Channels) -> list[Folded]:
    """Fold the affine steps after a Transpose that is a convolution's only consumer, as in channels-last models."""
    view = graph.sole_consumer(node.outputs[0])
    perm = ints_attribute(view, "perm") if view is not None and op_of(view) == "Transpose" else None
    if view is None or perm is None or not op_of(node).startswith("Conv") or channels.rank != len(perm):
        return []
    axis = perm.index(channels.rank - channels.axis_from_end)
    moved = Channels(channels.rank, channels.rank - axis, channels.count)
    steps = _steps_after(graph, shapes, node, view.outputs[0], moved)
    new = scale_outputs(graph, node, channels, *_compose(steps)) if _is_worth_folding(node, steps) else None
    if new is None:
        return []
    end = steps[-1].node.outputs[0]
    folded = _disconnect(steps, node)
    set_weights(graph, node, new)
    graph.replace(end, view.outputs[0])
    return folded


def _steps_after(graph: Graph, shapes: ShapeInfo, node: Node, start: Tensor, channels: Channels) -> list[AffineStep]:
    """Return the affine steps after `start`, up to the last result that has the same dtype as `start`.

    `start` is the output of the linear node, or a Transpose of this output.
    """
    steps: list[AffineStep] = []
    end = start
    dtype = shapes.dtype(end)
    while consumer := graph.sole_consumer(end):
        cast_dtype = shapes.dtype(consumer.outputs[0])
        is_exact = cast_dtype == dtype or is_exact_cast(dtype, cast_dtype)
        if op_of(consumer) == "Cast" and is_exact and op_of(node) != "MatMul":
            step: AffineStep | None = AffineStep(consumer, end, np.ones(1), np.zeros(1))
        else:
            step = _read_step(graph, consumer, end, channels)
        if step is None:
            break
        steps.append(step)
        end = consumer.outputs[0]
    while steps and shapes.dtype(end) != dtype:
        end = steps.pop().source
    return steps


def _disconnect(steps: Sequence[AffineStep], into: Node) -> list[Folded]:
    """Disconnect the folded steps from their inputs; return a record of each for reports."""
    folded = [Folded(FOLDED_KINDS[step.node.op], node_label(step.node), node_label(into)) for step in steps]
    for step in steps:
        step.node.inputs.clear()
    return folded


def _is_worth_folding(node: Node, steps: list[AffineStep]) -> bool:
    """Return whether folding removes nodes.  A MatMul has no bias input, so a shift after it stays as an Add."""
    if all(op_of(step.node) == "Cast" for step in steps):
        return False
    if op_of(node) != "MatMul" or any(map(_is_batch_norm, steps)):
        return True
    return len(steps) > int(_compose(steps)[1].any())


def _fold_before(graph: Graph, shapes: ShapeInfo, node: Node) -> list[Folded]:
    """Fold the affine steps that compute the node's input: as many of the last ones as can be folded exactly.

    Only BatchNormalization and steps that start at a graph input are folded: other scales before a node are the affine
    part of a norm or the 0.5 of a GELU, which belong to the operators before them.
    """
    channels = input_channels(graph, shapes, node)
    if channels is None:
        return []
    steps: list[AffineStep] = []
    start = node.inputs[0]
    while graph.sole_consumer(start) and (step := _step_before(graph, shapes, start, channels)):
        steps.insert(0, step)
        start = step.source
    is_input = _is_graph_input(start)
    for first in range(len(steps)):
        last_steps = steps[first:]
        if not is_input and not all(map(_is_batch_norm, last_steps)):
            continue
        if _fold_into_inputs(graph, shapes, node, channels, last_steps):
            return _disconnect(last_steps, node)
    return []


def _step_before(graph: Graph, shapes: ShapeInfo, tensor: Tensor, channels: Channels) -> AffineStep | None:
    node_before = producer(tensor)
    if node_before is None:
        return None
    readings = (_read_step(graph, node_before, source, channels) for source in node_before.inputs)
    step = next((step for step in readings if step is not None), None)
    if step is None or _is_batch_norm(step):
        return step
    shape = shapes.shape(step.source)  # broadcasting with the constant can add channels or axes
    return step if shape is not None and shape == shapes.shape(tensor) else None


def _is_batch_norm(step: AffineStep) -> bool:
    return op_of(step.node) == "BatchNormalization"


def _is_graph_input(tensor: Tensor) -> bool:
    """Return whether the tensor is a graph input, or a Cast of one."""
    node_before = producer(tensor)
    return node_before is None or (op_of(node_before) == "Cast" and producer(node_before.inputs[0]) is None)


def _fold_into_inputs(graph: Graph, shapes: ShapeInfo, node: Node, channels: Channels, steps: list[AffineStep]) -> bool:
    scale, shift = _compose(steps)
    is_matmul = op_of(node) == "MatMul"
    if is_matmul and shift.any() and len(steps) == 1 and not _is_batch_norm(steps[0]):
        return False  # folding would only replace one Add by another
    new = scale_inputs(graph, node, channels, scale, shift)
    if new is None:
        return False
    node.inputs[0] = steps[0].source
    if is_matmul and new.bias is not None:
        end = node.outputs[0]
        node.outputs[0] = graph.variable(f"{end.name}_unbiased", end)
        shapes.record(node.outputs[0], shapes.shape(end), shapes.dtype(end))
        _add_bias(graph, shapes, node, end, new)
    else:
        set_weights(graph, node, new)
    return True


def _change_bias(graph: Graph, node: Node, add: Node, new: RescaledWeights) -> None:
    """Make the Add that follows a MatMul read the MatMul's output and the new bias."""
    assert new.bias is not None
    set_weights(graph, node, RescaledWeights(new.weight, None))
    index = 0 if is_constant(add.inputs[0]) else 1
    add.inputs[index] = graph.constant(f"{add.inputs[index].name}_folded", new.bias)
    add.inputs[1 - index] = node.outputs[0]


def _add_bias(graph: Graph, shapes: ShapeInfo, node: Node, end: Tensor, new: RescaledWeights) -> None:
    """Append an Add of the new bias to a MatMul; the Add computes `end`."""
    assert new.bias is not None
    set_weights(graph, node, RescaledWeights(new.weight, None))
    bias = graph.constant(f"{node.inputs[1].name}_bias", new.bias)
    infer_node(shapes, graph.add_node("Add", [node.outputs[0], bias], [end]))


def _read_step(graph: Graph, node: Node, source: Tensor, channels: Channels) -> AffineStep | None:
    """Return a node that scales or shifts `source` per channel as an AffineStep; None for any other node."""
    if op_of(node) not in FOLDED_KINDS or op_of(node) == "Cast":
        return None
    if op_of(node) == "BatchNormalization":
        return _read_batch_norm(graph, node, source, channels)
    index = 0 if node.inputs[0] is source else 1
    if node.inputs[index] is not source or is_constant(source) or (node.op == "Div" and index == 1):
        return None
    value = read_per_channel(graph, node.inputs[1 - index], channels)
    if value is None:
        return None
    one, zero, sign = np.ones(1), np.zeros(1), 1 - 2 * index
    scale = {"Mul": value, "Div": 1 / value, "Add": one, "Sub": one * sign}[node.op]
    shift = {"Mul": zero, "Div": zero, "Add": value, "Sub": -value * sign}[node.op]
    return AffineStep(node, source, scale, shift)


def _read_batch_norm(graph: Graph, node: Node, source: Tensor, channels: Channels) -> AffineStep | None:
    """Return a BatchNormalization, in inference mode and with the channels on axis 1, as an `AffineStep`; else None."""
    constants = [t for t in node.inputs[1:5] if is_constant(t)]
    if node.inputs[0] is not source or len(constants) < len(node.inputs[1:5]):
        return None
    is_on_axis_1 = channels.rank is not None and channels.axis_from_end == channels.rank - 1
    if not is_on_axis_1 or any(t.name for t in node.outputs[1:]):
        return None
    values = [constant_value(graph, t).astype(np.float64) for t in constants]
    if attribute_or_input(graph, node, "spatial") == 0:  # before opset 9: statistics per element instead of per channel
        return None
    if attribute_or_input(graph, node, "training_mode") or any(v.shape != (channels.count,) for v in values):
        return None
    gamma, beta, mean, variance = values
    scale = gamma / np.sqrt(variance + number_parameter(graph, node, "epsilon"))
    return AffineStep(node, source, scale, beta - mean * scale)


def _compose(steps: Sequence[AffineStep]) -> tuple[Array, Array]:
    """Return the scale and the shift that have the effect of all steps together."""
    scale, shift = np.ones(1), np.zeros(1)
    for step in steps:
        scale, shift = scale * step.scale, shift * step.scale + step.shift
    return scale, shift
