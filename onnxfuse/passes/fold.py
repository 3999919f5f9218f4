"""What depends on no input is computed now: constants, shape arithmetic, and the targets of Reshape, Expand, Slice."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxfuse.model.graph import (
    Array,
    Graph,
    Node,
    Tensor,
    array_of,
    attribute,
    constant_value,
    is_constant,
    op_of,
    producer,
    unique,
)
from onnxfuse.model.linking import node_proto
from onnxfuse.passes.linear import SMALL
from onnxfuse.shapes.dims import Size
from onnxfuse.shapes.inference import Shapes

# Deterministic and the same in every runtime.  Quantization is not here: it tells how to run a model.
FOLDABLE = re.compile(
    "Abs|Add|And|Cast|Ceil|Clip|Concat|ConstantOfShape|Cos|CumSum|Div|Equal|Exp|Expand|Flatten|Floor|"
    "Gather(Elements|ND)?|(Greater|Less)(OrEqual)?|Identity|IsNaN|Log|MatMul|Max|Min|Mod|Mul|Neg|Not|Or|Pow|Range|"
    "Reciprocal|Reduce(L2|Max|Mean|Min|Prod|Sum)|Reshape|ScatterND|Shape|Sign|Sin|Size|Slice|Split|Sqrt|Squeeze|Sub|"
    "Sum|Tile|Transpose|Trilu|Unsqueeze|Where|Xor"
)
GROWING = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})  # their size is a value
END = np.iinfo(np.int64).max  # of a Slice that goes to the end


@dataclass(frozen=True)
class Folded:
    """A node that vanished: `what` it was (constant, shape, batch_norm, scale, bias), its name, and what took it."""

    what: str
    node: str
    into: str


def label(node: Node) -> str:
    """What to call a node: its name, or its first output's."""
    return str(node.name or node.outputs[0].name)


def only_reader(graph: Graph, tensor: Tensor) -> Node | None:
    """The node that is all that reads the tensor; None where there are several, or none, or its name must stay."""
    return tensor.outputs[0] if len(tensor.outputs) == 1 and not graph.is_kept(tensor) else None


def fold_constants(graph: Graph, shapes: Shapes) -> list[Folded]:
    """Turn Constant nodes, shape arithmetic with a fixed result, and nodes that read only constants into initializers.

    Left alone: results over 64 KiB that make the file bigger, and big weights that lie in an external file.
    """
    graph.sort()
    folded = [*_fold_constant_nodes(graph), *_fold_known_values(graph, shapes), *_fold_evaluated(graph, shapes)]
    graph.remove_dead()
    return folded


def _fold_constant_nodes(graph: Graph) -> Iterator[Folded]:
    for node in list(graph.nodes):
        op = op_of(node)
        if op == "Identity" and is_constant(node.inputs[0]):
            if graph.replace(node.outputs[0], node.inputs[0]):
                yield Folded("constant", label(node), node.inputs[0].name)
        elif op == "Constant" and id(node) in graph.protos and not graph.is_kept(node.outputs[0]):
            value = _attribute_value(graph, graph.protos[id(node)][1])
            if value is not None:
                yield _make_constant(node, node.outputs[0], value)


def _attribute_value(graph: Graph, constant: onnx.NodeProto) -> Array | None:
    """The value of a Constant node's one attribute; None for a sparse one."""
    value = onnx.helper.get_attribute_value(constant.attribute[0])
    match constant.attribute[0].name:
        case "value":
            return array_of(graph, value, constant.output[0])
        case "value_float" | "value_floats":
            return np.array(value, np.float32)
        case "value_int" | "value_ints":
            return np.array(value, np.int64)
        case "value_string" | "value_strings":
            return np.array(value, object)
    return None


def _make_constant(node: Node, tensor: Tensor, value: Array) -> Folded:
    """Let the tensor be an initializer of that value, under its name."""
    folded = Folded("constant", label(node), tensor.name)
    tensor.inputs.clear()
    tensor.to_constant(np.array(value, order="C", copy=None))
    return folded


def _fold_known_values(graph: Graph, shapes: Shapes) -> Iterator[Folded]:
    """Shape arithmetic whose result is known although its inputs are not."""
    for node in list(graph.nodes):
        for tensor in list(node.outputs):
            if not tensor.outputs or graph.is_kept(tensor):
                continue
            value, dtype = shapes.value(tensor), shapes.dtype(tensor)
            if value is not None and dtype and all(isinstance(v, (int, np.integer)) for v in value.flat):
                numbers = np.array(value.tolist(), onnx.helper.tensor_dtype_to_np_dtype(dtype))
                yield _make_constant(node, tensor, numbers.reshape(value.shape))


def _fold_evaluated(graph: Graph, shapes: Shapes) -> list[Folded]:
    nodes = _foldable_nodes(graph, shapes)
    values = _evaluate(graph, shapes, nodes)
    computed = {id(n) for n in nodes if all(t.name in values for t in n.outputs if t.name)}
    folded = []
    for node in nodes:
        for tensor in list(node.outputs):
            is_read = any(id(reader) not in computed for reader in tensor.outputs)
            if is_read and tensor.name in values:
                folded.append(_make_constant(node, tensor, values[tensor.name]))
    return folded


def _foldable_nodes(graph: Graph, shapes: Shapes) -> list[Node]:
    """The nodes that depend on constants only, in execution order."""
    known: dict[int, int | None] = {}  # bytes of the tensors that will be known
    nodes = []
    for node in graph.nodes:
        if not _is_foldable(op_of(node)) or not node.inputs or any(map(graph.is_kept, node.outputs)):
            continue
        if all(not t.name or id(t) in known or is_constant(t) for t in node.inputs):
            sizes = [_bytes(shapes, t) for t in node.outputs]
            if _is_affordable(graph, shapes, node, sizes, known):
                nodes.append(node)
                known.update(zip(map(id, node.outputs), sizes, strict=True))
    return nodes


@functools.cache
def _is_foldable(op: str) -> bool:
    return FOLDABLE.fullmatch(op) is not None


def _is_affordable(
    graph: Graph, shapes: Shapes, node: Node, sizes: list[int | None], known: dict[int, int | None]
) -> bool:
    """Whether the results are small, or take the place of constants that only this node reads."""
    freed = 0
    for tensor in node.inputs:
        size = known[id(tensor)] if id(tensor) in known else _bytes(shapes, tensor)
        if size and size > SMALL and _is_external(tensor):
            return False
        freed += (size or 0) if only_reader(graph, tensor) else 0
    if None in sizes:
        return op_of(node) not in GROWING and freed <= SMALL
    total = sum(size for size in sizes if size is not None)
    return total <= max(SMALL, freed)


def _bytes(shapes: Shapes, tensor: Tensor) -> int | None:
    shape, dtype = shapes.shape(tensor), shapes.dtype(tensor)
    if shape is None or not dtype or not all(isinstance(size, int) for size in shape):
        return None
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize
    return math.prod(size for size in shape if isinstance(size, int)) * itemsize


def _is_external(tensor: Tensor) -> bool:
    stored = getattr(getattr(tensor, "_values", None), "tensor", None)
    return isinstance(stored, onnx.TensorProto) and onnx.external_data_helper.uses_external_data(stored)


def _evaluate(graph: Graph, shapes: Shapes, nodes: list[Node]) -> dict[str, Array]:
    """What the reference implementation computes, by tensor name; nodes that it cannot compute are left out."""
    if not nodes:
        return {}
    values = {t.name: constant_value(graph, t) for n in nodes for t in n.inputs if is_constant(t)}
    made = onnx.helper.make_graph([node_proto(graph, node) for node in nodes], "constants", [], [])
    opset = onnx.helper.make_opsetid("", graph.opset)
    evaluator = ReferenceEvaluator(onnx.helper.make_model(made, opset_imports=[opset]))
    results: dict[str, Array] = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for node, step in zip(nodes, evaluator.rt_nodes_, strict=True):
            try:
                outputs = [np.asarray(v) for v in step.run(*(values[name] if name else None for name in step.input))]
            except Exception:  # whatever numpy raises: the runtime will say more when it meets the node
                continue
            if all(_is_as_inferred(shapes, tensor, v) for tensor, v in zip(node.outputs, outputs, strict=False)):
                results.update(zip(step.output, outputs, strict=False))
                values.update(zip(step.output, outputs, strict=False))
    return results


def _is_as_inferred(shapes: Shapes, tensor: Tensor, value: Array) -> bool:
    """Whether an evaluated value has the type and the shape that inference says, where it says any."""
    shape, dtype = shapes.shape(tensor), shapes.dtype(tensor)
    if dtype not in (0, onnx.helper.np_dtype_to_tensor_dtype(value.dtype)):
        return False
    if shape is None:
        return value.nbytes <= SMALL
    sizes = zip(shape, value.shape, strict=False)
    return len(shape) == value.ndim and all(not isinstance(want, int) or want == has for want, has in sizes)


def fold_shapes(graph: Graph, shapes: Shapes) -> list[Folded]:
    """Make computed targets of Reshape and Expand, and computed ends of Slice, constant where they keep dimensions.

    A Reshape target keeps a dimension by 0, and has at most one other unknown entry, which becomes -1.  (A runtime
    may refuse -1 beside a dimension that is 0 at run time, so an entry is -1 only where 0 cannot say it.)
    """
    folded = []
    for node in unique(graph.nodes):
        rule = TARGETS.get(op_of(node))
        if rule is None or len(node.inputs) <= rule[0] or is_constant(node.inputs[rule[0]]):
            continue
        place, find = rule
        old = node.inputs[place]
        value = shapes.value(old)
        target = None if value is None or value.ndim != 1 else find(graph, shapes, node, value.tolist())
        if target is not None:
            maker = producer(old)
            folded.append(Folded("shape", label(maker) if maker else old.name, label(node)))
            dtype = onnx.helper.tensor_dtype_to_np_dtype(shapes.dtype(old) or onnx.TensorProto.INT64)
            node.inputs[place] = graph.constant(f"{old.name}_known", np.array(target, dtype))
            if node.attrs.get("allowzero") and 0 in target:
                inputs, outputs = list(node.inputs), list(node.outputs)
                node.inputs.clear()
                node.outputs.clear()
                graph.add("Reshape", inputs, outputs, node.name)
    if folded:
        graph.remove_dead()
        graph.sort()
    return folded


def _find_reshape_target(graph: Graph, shapes: Shapes, node: Node, wanted: list[Size]) -> list[int] | None:
    if attribute(graph, node, "allowzero") and 0 in wanted:
        return None  # a real 0, which could not be told from one that keeps a dimension
    found = shapes.shape(node.outputs[0]) or wanted
    pairs = zip(wanted, found, strict=True)  # a known size in place of -1, which an empty tensor cannot tell
    sizes = [has if size == -1 and has and isinstance(has, int) else size for size, has in pairs]
    return reshape_target(shapes.shape(node.inputs[0]), sizes)


def reshape_target(shape: Sequence[Size] | None, wanted: Iterable[Size]) -> list[int] | None:
    """The sizes `wanted` as a constant target for a tensor of the shape; None where a constant cannot say them.

    A number stays, the size at the same position becomes 0, one other may become -1.
    """
    sizes = shape or ()
    target: list[int] = []
    for i, size in enumerate(wanted):
        if isinstance(size, int):
            target.append(size)
        else:
            target.append(0 if i < len(sizes) and sizes[i] == size else -1)
    return target if target.count(-1) <= 1 else None


def _find_expand_target(graph: Graph, shapes: Shapes, node: Node, wanted: list[Size]) -> list[int] | None:
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    aligned = [None] * (len(wanted) - len(shape)) + list(shape[max(0, len(shape) - len(wanted)) :])
    target = [size if isinstance(size, int) else 1 for size in wanted]
    fits = all(isinstance(size, int) or size == has for size, has in zip(wanted, aligned, strict=True))
    return target if fits else None


def _find_slice_ends(graph: Graph, shapes: Shapes, node: Node, wanted: list[Size]) -> list[int] | None:
    """Ends that are the size of their axis become "to the end"; only for steps that go forward."""
    shape = shapes.shape(node.inputs[0])
    axes = shapes.value(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3].name else np.arange(len(wanted))
    steps = shapes.value(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4].name else np.ones(len(wanted))
    if shape is None or axes is None or steps is None:
        return None
    ends = []
    for end, axis, step in zip(wanted, axes.tolist(), steps.tolist(), strict=True):
        is_whole = isinstance(axis, int) and isinstance(step, (int, float)) and step > 0 and shape[axis] == end
        ends.append(end if isinstance(end, int) else int(END) if is_whole else None)
    known = [end for end in ends if end is not None]
    return known if len(known) == len(ends) else None


TARGETS = {
    "Reshape": (1, _find_reshape_target),
    "Expand": (1, _find_expand_target),
    "Slice": (2, _find_slice_ends),
}
