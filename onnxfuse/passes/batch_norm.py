"""BatchNormalization, and constant scales and biases per channel, folded into the weights of the node beside them.

Conv, ConvTranspose, Gemm and MatMul are linear, so `y = x * scale + shift` per channel after them, or before them where
no padding is in the way, is a change of their weights.  The arithmetic is done in double precision and rounded once.
Nothing is folded where the rounded weights would overflow or vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.model.graph import Array, Graph, Node, Tensor, attribute, constant_value, is_constant, op_of, producer
from onnxfuse.passes.fold import Folded, label, only_reader
from onnxfuse.passes.linear import (
    WIDER,
    Side,
    Weights,
    input_side,
    is_linear,
    output_side,
    per_channel,
    scale_inputs,
    scale_outputs,
    set_weights,
)
from onnxfuse.shapes.inference import Shapes

KINDS = {
    "BatchNormalization": "batch_norm", "Mul": "scale", "Div": "scale", "Add": "bias", "Sub": "bias", "Cast": "cast",
}


@dataclass(frozen=True)
class Step:
    """A node that computes `source * scale + shift`; float64 arrays of one element or one per channel."""

    node: Node
    source: Tensor
    scale: Array
    shift: Array


def fold_batch_norm(graph: Graph, shapes: Shapes) -> list[Folded]:
    """Fold per-channel scales and shifts into constant weights; returns what vanished, and into which node."""
    if graph.opset < 9:  # BatchNormalization had other attributes, and so had broadcasting
        return []
    folded: list[Folded] = []
    with np.errstate(all="ignore"):
        for node in list(graph.nodes):
            if is_linear(node):
                folded += _fold_before(graph, shapes, node)
                folded += _fold_after(graph, shapes, node)
    if folded:
        graph.remove_dead()
        graph.sort()
    return folded


def _fold_after(graph: Graph, shapes: Shapes, node: Node) -> list[Folded]:
    """Fold the chain of steps that reads the node's output."""
    side = output_side(graph, shapes, node)
    steps = _steps_after(graph, shapes, node, side)
    if not _is_worth_it(node, steps):
        return []
    end = steps[-1].node.outputs[0]
    new = scale_outputs(graph, node, side, *_compose(steps))
    if new is None:
        return []
    keeper = None
    if op_of(node) == "MatMul" and new.bias is not None:
        keeper = next((step.node for step in reversed(steps) if op_of(step.node) == "Add"), None)
    gone = [step for step in steps if step.node is not keeper]
    done = _disconnect(gone, node)
    if op_of(node) != "MatMul" or new.bias is None:
        set_weights(graph, node, new)
        graph.replace(end, node.outputs[0])
    elif keeper:
        _change_bias(graph, node, keeper, new)
        if keeper.outputs[0] is not end:
            graph.replace(end, keeper.outputs[0])
    else:
        end.inputs.clear()
        _add_bias(graph, shapes, node, end, new)
    return done


def _steps_after(graph: Graph, shapes: Shapes, node: Node, side: Side) -> list[Step]:
    """What follows the node's output, one after the other, as long as its type ends where it began."""
    steps: list[Step] = []
    end = node.outputs[0]
    dtype = shapes.dtype(end)
    while reader := only_reader(graph, end):
        loses_nothing = shapes.dtype(reader.outputs[0]) in (dtype, *WIDER.get(dtype, ()))
        if op_of(reader) == "Cast" and loses_nothing and op_of(node) != "MatMul":
            step: Step | None = Step(reader, end, np.ones(1), np.zeros(1))
        else:
            step = _read_step(graph, reader, end, side)
        if step is None:
            break
        steps.append(step)
        end = reader.outputs[0]
    while steps and shapes.dtype(end) != dtype:
        end = steps.pop().source
    return steps


def _disconnect(steps: Sequence[Step], node: Node) -> list[Folded]:
    done = [Folded(KINDS[step.node.op], label(step.node), label(node)) for step in steps]
    for step in steps:
        step.node.inputs.clear()
    return done


def _is_worth_it(node: Node, steps: list[Step]) -> bool:
    """A MatMul has no bias input: a shift comes back as an Add, so a lone bias stays."""
    if all(op_of(step.node) == "Cast" for step in steps):
        return False
    if op_of(node) != "MatMul" or any(map(_is_batch_norm, steps)):
        return True
    return len(steps) > int(_compose(steps)[1].any())


def _fold_before(graph: Graph, shapes: Shapes, node: Node) -> list[Folded]:
    """Fold the chain of steps that computes the node's input: as many of its last ones as is exact.

    Only BatchNormalization, and what scales a graph input: other scales before a node are the affine part of a norm
    or the 0.5 of a GELU, which belong to what is before them.
    """
    side = input_side(graph, shapes, node)
    steps: list[Step] = []
    start = node.inputs[0]
    while side and only_reader(graph, start) and (step := _read_maker(graph, shapes, start, side)):
        steps.insert(0, step)
        start = step.source
    is_input = _is_graph_input(start)
    for first in range(len(steps)):
        part = steps[first:]
        if side and (is_input or all(map(_is_batch_norm, part))) and _absorb_inputs(graph, shapes, node, side, part):
            return _disconnect(part, node)
    return []


def _read_maker(graph: Graph, shapes: Shapes, tensor: Tensor, side: Side) -> Step | None:
    maker = producer(tensor)
    if maker is None:
        return None
    step = next((step for source in maker.inputs if (step := _read_step(graph, maker, source, side))), None)
    if step is None or _is_batch_norm(step):
        return step
    shape = shapes.shape(step.source)  # the constant may bring channels or axes that the source does not have
    return step if shape is not None and shape == shapes.shape(tensor) else None


def _is_batch_norm(step: Step) -> bool:
    return op_of(step.node) == "BatchNormalization"


def _is_graph_input(tensor: Tensor) -> bool:
    maker = producer(tensor)
    return maker is None or (op_of(maker) == "Cast" and producer(maker.inputs[0]) is None)


def _absorb_inputs(graph: Graph, shapes: Shapes, node: Node, side: Side, steps: list[Step]) -> bool:
    scale, shift = _compose(steps)
    is_matmul = op_of(node) == "MatMul"
    if is_matmul and shift.any() and len(steps) == 1 and not _is_batch_norm(steps[0]):
        return False  # an Add would only become another Add
    new = scale_inputs(graph, node, side, scale, shift)
    if new is None:
        return False
    node.inputs[0] = steps[0].source
    if is_matmul and new.bias is not None:
        end = node.outputs[0]
        node.outputs[0] = graph.variable(f"{end.name}_unbiased", end)
        shapes.put(node.outputs[0], shapes.shape(end), shapes.dtype(end))
        _add_bias(graph, shapes, node, end, new)
    else:
        set_weights(graph, node, new)
    return True


def _change_bias(graph: Graph, node: Node, add: Node, new: Weights) -> None:
    """Let the Add that follows a MatMul read its output and the new bias."""
    set_weights(graph, node, Weights(new.weight, None))
    place = 0 if is_constant(add.inputs[0]) else 1
    add.inputs[place] = graph.constant(f"{add.inputs[place].name}_folded", new.bias)  # type: ignore[arg-type]
    add.inputs[1 - place] = node.outputs[0]


def _add_bias(graph: Graph, shapes: Shapes, node: Node, end: Tensor, new: Weights) -> None:
    """A MatMul followed by an Add that computes `end`."""
    set_weights(graph, node, Weights(new.weight, None))
    bias = graph.constant(f"{node.inputs[1].name}_bias", new.bias)  # type: ignore[arg-type]
    shapes.node(graph.add("Add", [node.outputs[0], bias], [end]))


def _read_step(graph: Graph, node: Node, source: Tensor, side: Side) -> Step | None:
    """The node as a per-channel scale and shift of `source`; None where it is something else."""
    if op_of(node) not in KINDS or op_of(node) == "Cast":
        return None
    if op_of(node) == "BatchNormalization":
        return _read_batch_norm(graph, node, source, side)
    place = 0 if node.inputs[0] is source else 1
    if node.inputs[place] is not source or is_constant(source) or (node.op == "Div" and place == 1):
        return None
    value = per_channel(graph, node.inputs[1 - place], side)
    if value is None:
        return None
    one, zero, sign = np.ones(1), np.zeros(1), 1 - 2 * place
    scale = {"Mul": value, "Div": 1 / value, "Add": one, "Sub": one * sign}[node.op]
    shift = {"Mul": zero, "Div": zero, "Add": value, "Sub": -value * sign}[node.op]
    return Step(node, source, scale, shift)


def _read_batch_norm(graph: Graph, node: Node, source: Tensor, side: Side) -> Step | None:
    """Inference form only; its channels are on axis 1."""
    if node.inputs[0] is not source or not all(is_constant(t) for t in node.inputs[1:5]):
        return None
    if side.rank is None or side.back != side.rank - 1 or any(t.name for t in node.outputs[1:]):
        return None
    values = [constant_value(graph, t).astype(np.float64) for t in node.inputs[1:5]]
    if attribute(graph, node, "training_mode") or any(v.shape != (side.channels,) for v in values):
        return None
    gamma, beta, mean, variance = values
    scale = gamma / np.sqrt(variance + attribute(graph, node, "epsilon"))
    return Step(node, source, scale, beta - mean * scale)


def _compose(steps: Sequence[Step]) -> tuple[Array, Array]:
    scale, shift = np.ones(1), np.zeros(1)
    for step in steps:
        scale, shift = scale * step.scale, shift * step.scale + step.shift
    return scale, shift
