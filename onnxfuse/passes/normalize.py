"""Spellings that mean the same become one: no-ops vanish, moves are composed, repeats are computed once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import onnx

from onnxfuse.model.graph import Graph, Node, Tensor, attribute, constant_value, is_constant, op_of, producer, schema
from onnxfuse.passes.linear import WIDER
from onnxfuse.passes.views import compose_views
from onnxfuse.shapes.inference import Shapes

ROUNDS = 10
REPEATS_LIMIT = 4096  # bytes: constants up to this size are compared by value

Rule = Callable[[Graph, Shapes, Node], bool]


def normalize(graph: Graph, shapes: Shapes) -> int:
    """Apply every rule until none applies; returns the number of changes."""
    total = 0
    for _ in range(ROUNDS):
        changes = remove_no_ops(graph, shapes) + compose_views(graph, shapes) + merge_repeats(graph, shapes)
        total += changes
        if not changes:
            break
    return total


def remove_no_ops(graph: Graph, shapes: Shapes) -> int:
    """Remove the nodes that compute what one of their inputs is."""
    count = sum(RULES[op](graph, shapes, node) for node in list(graph.nodes) if (op := op_of(node)) in RULES)
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _pass_on(graph: Graph, node: Node, source: Tensor) -> bool:
    """Let the readers of the node's output read the source; False where both names must stay."""
    if not graph.replace(node.outputs[0], source):
        return False
    node.inputs.clear()
    return True


def _rebuild(graph: Graph, node: Node, op: str, inputs: Iterable[Tensor], **attributes: Any) -> None:
    """Another node in the place of this one, under its name."""
    inputs, outputs = list(inputs), list(node.outputs)
    node.inputs.clear()
    node.outputs.clear()
    graph.add(op, inputs, outputs, node.name, **attributes)


def _drop(graph: Graph, shapes: Shapes, node: Node) -> bool:
    return _pass_on(graph, node, node.inputs[0])


def _drop_lone(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """Concat, Max, Min, Mean of one tensor; Split into one."""
    return len(node.inputs) == 1 and len(node.outputs) == 1 and _pass_on(graph, node, node.inputs[0])


def _drop_empty(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """Concat without what has no elements on its axis, such as what a rotary embedding of whole heads leaves."""
    axis = node.attrs.get("axis", 1)
    found = [shapes.shape(t) for t in node.inputs]
    full = [t for t, shape in zip(node.inputs, found, strict=True) if shape is None or shape[axis] != 0]
    if not full or len(full) == len(node.inputs):
        return _drop_lone(graph, shapes, node)
    node.inputs = full
    _drop_lone(graph, shapes, node)
    return True


def _drop_split(graph: Graph, shapes: Shapes, node: Node) -> bool:
    return len(node.outputs) == 1 and _pass_on(graph, node, node.inputs[0])


def _drop_dropout(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """In inference: no training flag, or a false one, and nobody reads the mask."""
    if any(t.outputs or graph.is_kept(t) for t in node.outputs[1:]):
        return False
    if graph.opset < 7:
        return bool(node.attrs.get("is_test")) and _pass_on(graph, node, node.inputs[0])
    flag = attribute(graph, node, "training_mode")
    return (flag is None or isinstance(flag, int)) and not flag and _pass_on(graph, node, node.inputs[0])


def _simplify_cast(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """A Cast to the type that is there; a Cast after one that lost nothing reads that one's input."""
    source, wanted = node.inputs[0], shapes.dtype(node.outputs[0])
    if wanted and shapes.dtype(source) == wanted:
        return _pass_on(graph, node, source)
    maker = producer(source)
    if maker is None or op_of(maker) != "Cast":
        return False
    origin = maker.inputs[0]
    if not _keeps_values(shapes.dtype(origin), shapes.dtype(source)) or wanted == onnx.TensorProto.STRING:
        return False
    if shapes.dtype(origin) == wanted:
        return _pass_on(graph, node, origin)
    node.inputs[0] = origin
    return True


def _rewrite_cast_like(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """CastLike is a Cast to a type that is known."""
    wanted = shapes.dtype(node.inputs[1])
    if not wanted:
        return False
    if shapes.dtype(node.inputs[0]) == wanted:
        return _pass_on(graph, node, node.inputs[0])
    _rebuild(graph, node, "Cast", node.inputs[:1], **node.attrs, to=wanted)
    return True


def _keeps_values(narrow: int, wide: int) -> bool:
    """Whether every value of the first type is exactly a value of the second."""
    return wide in KEEPING.get(narrow, ())


T = onnx.TensorProto
KEEPING: dict[int, tuple[int, ...]] = WIDER | {
    T.BOOL: (T.INT8, T.UINT8, T.INT32, T.INT64, T.FLOAT16, T.BFLOAT16, T.FLOAT, T.DOUBLE),
    T.INT8: (T.INT16, T.INT32, T.INT64, T.FLOAT, T.DOUBLE),
    T.UINT8: (T.UINT16, T.INT16, T.INT32, T.INT64, T.FLOAT, T.DOUBLE),
    T.INT16: (T.INT32, T.INT64, T.FLOAT, T.DOUBLE),
    T.INT32: (T.INT64, T.DOUBLE),
}


def _drop_same_shape(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """Expand or Tile to the shape that is there."""
    shape = shapes.shape(node.inputs[0])
    same = shape is not None and shape == shapes.shape(node.outputs[0])
    return same and _pass_on(graph, node, node.inputs[0])


def _drop_slice(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """A Slice that goes forward and takes everything."""
    steps = attribute(graph, node, "steps")
    forward = steps is None or (isinstance(steps, list) and all(step > 0 for step in steps))
    return forward and _drop_same_shape(graph, shapes, node)


def _drop_pad(graph: Graph, shapes: Shapes, node: Node) -> bool:
    pads = attribute(graph, node, "pads")
    return isinstance(pads, list) and not any(pads) and _pass_on(graph, node, node.inputs[0])


def _drop_neutral(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """`x * 1`, `x / 1`, `x + 0`, `x - 0` with a scalar that broadcasts nothing.

    Only scalars: a vector of ones is the weight of a norm.  `x + 0` makes -0 to +0, which no runtime promises.
    """
    neutral, commutes = NEUTRAL[op_of(node)]
    if graph.opset < 7:
        return False
    for place in (1, 0) if commutes else (1,):
        constant, source = node.inputs[place], node.inputs[1 - place]
        if is_constant(constant) and math.prod(constant.shape) == 1 and not is_constant(source):
            rank = shapes.rank(source)
            fits = not constant.shape or (rank is not None and len(constant.shape) <= rank)
            return fits and bool(constant_value(graph, constant) == neutral) and _pass_on(graph, node, source)
    return False


def _flatten_row(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """A weight of (1, d) or (1, 1, d) beside a tensor of as many axes broadcasts as one of (d).

    One of four axes may be a table of rotary embedding at one position, or a mask.
    """
    for place, row in enumerate(node.inputs if graph.opset >= 7 else ()):
        rank = shapes.rank(node.inputs[1 - place]) or 0
        if is_constant(row) and 1 < len(row.shape) <= rank <= WEIGHT_AXES and math.prod(row.shape) == row.shape[-1] > 1:
            node.inputs[place] = graph.constant(f"{row.name}_row", constant_value(graph, row).reshape(-1))
            return True
    return False


def _simplify_arithmetic(graph: Graph, shapes: Shapes, node: Node) -> bool:
    return _drop_neutral(graph, shapes, node) or _flatten_row(graph, shapes, node)


WEIGHT_AXES = 3  # of an activation: batch, sequence, features
NEUTRAL = {"Mul": (1, True), "Div": (1, False), "Add": (0, True), "Sub": (0, False)}


def _rewrite_sum(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """Sum of two is Add, of one nothing."""
    if len(node.inputs) == 1:
        return _pass_on(graph, node, node.inputs[0])
    if len(node.inputs) != 2 or graph.opset < 8:
        return False
    _rebuild(graph, node, "Add", node.inputs)
    return True


def _read_shape_of_ids(graph: Graph, shapes: Shapes, node: Node) -> bool:
    """Sizes of rows that ids choose are read off the ids, so that the rows need not be there by themselves."""
    rows, sizes = producer(node.inputs[0]), node.outputs[0]
    if rows is None or op_of(rows) != "Gather" or rows.attrs.get("axis", 0) or node.attrs or graph.is_kept(sizes):
        return False
    rank = shapes.rank(ids := rows.inputs[1])
    if not rank or not all(0 <= axis < rank for reader in sizes.outputs for axis in _axes_read(graph, reader)):
        return False
    node.inputs = [ids]
    return True


def _axes_read(graph: Graph, node: Node) -> Iterable[int]:
    """The sizes that a reader of a Shape takes; -1 where it may take any."""
    whole = op_of(node) != "Gather" or not is_constant(node.inputs[1])
    return [-1] if whole else constant_value(graph, node.inputs[1]).reshape(-1).tolist()


RULES: dict[str, Rule] = {
    "Identity": _drop,
    "Dropout": _drop_dropout,
    "Cast": _simplify_cast,
    "CastLike": _rewrite_cast_like,
    "Expand": _drop_same_shape,
    "Tile": _drop_same_shape,
    "Slice": _drop_slice,
    "Pad": _drop_pad,
    "Concat": _drop_empty,
    "Max": _drop_lone,
    "Min": _drop_lone,
    "Mean": _drop_lone,
    "Split": _drop_split,
    "Sum": _rewrite_sum,
    "Shape": _read_shape_of_ids,
    **dict.fromkeys(NEUTRAL, _simplify_arithmetic),
}


RANDOM = re.compile("Bernoulli|Dropout|Multinomial|Random.*")


def merge_repeats(graph: Graph, shapes: Shapes) -> int:
    """Let nodes that compute the same from the same be one node; the graph must be sorted."""
    alike: dict[Hashable, list[Node]] = {}
    keys: dict[Node, Hashable] = {}
    constants: dict[int, Hashable] = {}
    count = 0
    for node in list(graph.nodes):
        rough = node.op, tuple(None if is_constant(t) else id(t) for t in node.inputs)
        others = alike.setdefault(rough, [])
        others.append(node)
        for other in others if len(others) > 1 else ():  # few nodes are alike, so few keys are made
            if other not in keys:
                keys[other] = _key(graph, other, constants)
        known = next((o for o in others if len(others) > 1 and keys[o] is not None and keys[o] == keys[node]), node)
        if known is not node and _merge(graph, known, node):
            others.pop()
            count += 1
    if count:
        graph.remove_dead()
    return count


def _merge(graph: Graph, known: Node, node: Node) -> bool:
    """Let the readers of `node` read `known`, unless that would take a name away that must stay."""
    pairs = list(zip(list(node.outputs), list(known.outputs), strict=True))
    if any(graph.is_kept(old) and graph.is_kept(new) for old, new in pairs):
        return False
    node.inputs.clear()
    for old, new in pairs:
        if old.name:
            graph.replace(old, new)
    return True


def _key(graph: Graph, node: Node, constants: dict[int, Hashable]) -> Hashable:
    """What two nodes have in common that compute the same; None for a node that may differ from its like."""
    op = op_of(node)
    if RANDOM.fullmatch(op) or schema(op, graph.opset) is None or not node.inputs:
        return None
    if id(node) in graph.protos and not _has_plain_attributes(graph, node):
        return None
    attributes = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
    names = tuple(bool(t.name) for t in node.outputs)
    return op, attributes, names, tuple(_input_key(graph, tensor, constants) for tensor in node.inputs)


def _has_plain_attributes(graph: Graph, node: Node) -> bool:
    """Whether all attributes are numbers, strings, or lists of them, which graphsurgeon all reads."""
    plain = (int, float, str, bytes, list)
    stored = graph.protos[id(node)][1].attribute
    return len(stored) == len(node.attrs) and all(isinstance(value, plain) for value in node.attrs.values())


def _input_key(graph: Graph, tensor: Tensor, constants: dict[int, Hashable]) -> Hashable:
    if not tensor.name:
        return None
    if not is_constant(tensor):
        return id(tensor)
    if id(tensor) not in constants:
        constants[id(tensor)] = _constant_key(graph, tensor)
    return constants[id(tensor)]


def _constant_key(graph: Graph, tensor: Tensor) -> Hashable:
    if math.prod(tensor.shape) > REPEATS_LIMIT or np.dtype(object) == tensor.dtype:
        return id(tensor)
    value = constant_value(graph, tensor)
    return (str(value.dtype), value.shape, value.tobytes()) if value.nbytes <= REPEATS_LIMIT else id(tensor)
