"""Compute nodes that depend on constants only, and known shape arithmetic, and store the results as initializers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx

from onnxfuse.algebra.operators import ARITHMETIC, COMPARISONS, LOGIC, MATRIX_PRODUCTS, MOVES, REGROUPING
from onnxfuse.analysis.scores import is_factored_bias, softmaxes_after
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.dtypes import INTEGER_RANGES, Array
from onnxfuse.ir.graph import Graph, array_of, constant_value
from onnxfuse.ir.graphsurgeon import make_constant, stored_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of
from onnxfuse.ir.serde import node_proto
from onnxfuse.ir.slices import is_ambiguous_end
from onnxfuse.passes.folded import STORED, Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass

MAX_GROWTH_BYTES = 64 * 1024  # constants up to this size are allowed to be added to the file, or stored twice
# Matrix products take time in every run, so folding them is worth a larger file.
MAX_PRODUCTS_GROWTH = 0.1  # maximum bytes that folded products add in total, relative to the constants that nodes read
MOVING = MOVES - {"Pad"} | {"Shape", "Size", "Where"}  # operators that only move or repeat elements
# Operators that are deterministic and the same in every runtime.  Quantization is not among them, because it tells the
# runtime to compute in integers.
FOLDABLE = frozenset({
    *MOVING, *ARITHMETIC, *COMPARISONS, *LOGIC, *MATRIX_PRODUCTS, "Abs", "Cast", "Ceil", "Clip", "ConstantOfShape",
    "Cos", "CumSum", "Exp", "Floor", "InstanceNormalization", "IsNaN", "LayerNormalization", "Log", "Neg", "Range",
    "Reciprocal", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Sign", "Sin", "Sqrt",
    "Sum",
})  # fmt: skip
HALF_DTYPES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
EXPANDING = REGROUPING | {"Expand"}
SIZED_BY_VALUE = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})  # small inputs can have a large output


@graph_pass()
def fold_constants(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Turn Constant nodes, known shape arithmetic, and nodes that read only constants into initializers.

    Results of more than MAX_GROWTH_BYTES are not folded if they would make the file larger.  Only matrix products are
    allowed to make it larger, by MAX_PRODUCTS_GROWTH in total: DeBERTa, for example, projects a constant table of
    relative positions in every layer.  Sizes are compared over whole groups of connected nodes: NFNet standardizes the
    filters of each convolution in several nodes, whose results replace the filters.  Nodes that read large weights from
    an external file are not folded.
    """
    return [*_fold_constant_nodes(graph, shapes), *_fold_known_values(graph, shapes), *_fold_evaluated(graph, shapes)]


def _fold_constant_nodes(graph: Graph, shapes: ShapeInfo) -> Iterator[Folded]:
    for node in list(graph.nodes):
        op = op_of(node)
        if op == "Identity" and is_constant(node.inputs[0]):
            source, output = node.inputs[0], node.outputs[0]
            if graph.replace(output, source):
                yield Folded("constant", node_label(node), source.name)
            elif not graph.must_be_computed(output) and (_byte_count(shapes, source) or 0) <= MAX_GROWTH_BYTES:
                yield _make_constant(graph, node, output, constant_value(graph, source))
        elif op == "Constant" and id(node) in graph.protos and not graph.must_be_computed(node.outputs[0]):
            value = value_of_constant_node(graph, graph.protos[id(node)][1])
            if value is not None:
                yield _make_constant(graph, node, node.outputs[0], value, STORED)


def value_of_constant_node(graph: Graph, constant: onnx.NodeProto) -> Array | None:
    """Return the value of a Constant; None if it is sparse, or does not have exactly one attribute."""
    if len(constant.attribute) != 1:
        return None
    value = onnx.helper.get_attribute_value(constant.attribute[0])
    match constant.attribute[0].name:
        case "value":
            return array_of(graph.folder, value, constant.output[0])
        case "value_float" | "value_floats":
            return np.array(value, np.float32)
        case "value_int" | "value_ints":
            return np.array(value, np.int64)
        case "value_string" | "value_strings":
            return np.array(value, object)
    return None


def _make_constant(graph: Graph, node: Node, tensor: Tensor, value: Array, kind: str = "constant") -> Folded:
    """Turn an output of the node into an initializer of the same name."""
    folded = Folded(kind, node_label(node), tensor.name)
    make_constant(tensor, value)
    if tensor.name in graph.captured and is_constant(tensor):
        graph.folded_for_subgraphs[tensor.name] = tensor
    return folded


def _fold_known_values(graph: Graph, shapes: ShapeInfo) -> Iterator[Folded]:
    """Fold shape arithmetic whose result is known even though its inputs are not constant."""
    for node in list(graph.nodes):
        if op_of(node) in EXPANDING and _is_of_indices(node):
            continue  # as in `_of_constants`
        for tensor in list(node.outputs):
            if not (tensor.outputs or tensor.name in graph.captured) or graph.must_be_computed(tensor):
                continue
            value, dtype = shapes.value(tensor), shapes.dtype(tensor)
            if value is not None and dtype and all(isinstance(v, (int, np.integer)) for v in value.flat):
                numbers = np.array(value.tolist(), onnx.helper.tensor_dtype_to_np_dtype(dtype))
                yield _make_constant(graph, node, tensor, numbers.reshape(value.shape))


def _fold_evaluated(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    nodes = _foldable_nodes(graph, shapes)
    values = _evaluate(graph, shapes, nodes)
    computed = {id(n) for n in nodes if all(t.name in values for t in n.outputs if t.name)}
    folded = []
    for node in nodes:
        for tensor in list(node.outputs):
            is_read = tensor.name in graph.captured or any(id(reader) not in computed for reader in tensor.outputs)
            if is_read and tensor.name in values:
                folded.append(_make_constant(graph, node, tensor, values[tensor.name]))
    return folded


def fold_nodes(shapes: ShapeInfo, nodes: Sequence[Node]) -> None:
    """Turn the results of nodes that depend on constants alone into initializers, however large they are."""
    made: set[int] = set()
    for node in nodes:
        if all(not t.name or is_constant(t) or id(t) in made for t in node.inputs):
            made.update(map(id, node.outputs))
    constant = [node for node in nodes if id(node.outputs[0]) in made]
    values = _evaluate(shapes.graph, shapes, constant)
    for node in constant:
        for tensor in [t for t in node.outputs if t.name in values]:
            _make_constant(shapes.graph, node, tensor, values[tensor.name])


def _foldable_nodes(graph: Graph, shapes: ShapeInfo) -> list[Node]:
    """Return the nodes that depend on constants only, in execution order."""
    folded_bytes: dict[int, int | None] = {}  # size of each tensor that folding will compute, by id; None: not known
    room = MAX_PRODUCTS_GROWTH * sum(_byte_count(shapes, t) or 0 for t in _constants(graph))
    nodes, constant = [], _of_constants(graph, shapes)
    together = {id(node) for group in _groups(constant) if _is_no_larger(graph, shapes, group) for node in group}
    for node in constant:
        if all(not t.name or id(t) in folded_bytes or is_constant(t) for t in node.inputs):
            sizes = [_byte_count(shapes, t) for t in node.outputs]
            growth = 0 if id(node) in together else _growth(graph, shapes, node, sizes, folded_bytes)
            if growth <= (room if op_of(node) in MATRIX_PRODUCTS else 0):
                room -= growth
                nodes.append(node)
                folded_bytes.update(zip(map(id, node.outputs), sizes, strict=True))
    return nodes


def _of_constants(graph: Graph, shapes: ShapeInfo) -> list[Node]:
    """Return the foldable nodes that depend on constants only, in execution order, however large their results are."""
    found, made = list[Node](), set[int]()
    for node in graph.nodes:
        if op_of(node) not in FOLDABLE or not node.inputs or any(map(graph.must_be_computed, node.outputs)):
            continue
        if op_of(node) in ("Mul", "Cast") and is_factored_bias(shapes, node):
            continue  # a fused attention reads fewer bytes if it reads the bias as two factors: slopes and positions
        if op_of(node) == "Expand" and _is_sink(node):
            continue  # a fused attention reads one number per head instead of one per row
        if op_of(node) in EXPANDING and _is_of_indices(node):
            continue  # a fused attention reads indices that all heads share
        if all(not t.name or id(t) in made or is_constant(t) for t in node.inputs):
            found.append(node)
            made.update(map(id, node.outputs))
    return found


def _is_sink(node: Node) -> bool:
    """Return whether the result of a node is concatenated to scores before their Softmax, as the sinks of gpt-oss."""
    joined = [each for tensor in node.outputs for each in consumers(tensor) if op_of(each) == "Concat"]
    return any(softmaxes_after(each.outputs[0]) for each in joined)


def _is_of_indices(node: Node) -> bool:
    """Return whether a GatherElements reads a view of the result of a node as indices, as in DeBERTa's attention."""
    read = [(each, result) for result in node.outputs for each in consumers(result)]
    return any(
        each.inputs[1] is result
        if op_of(each) == "GatherElements"
        else op_of(each) in EXPANDING and _is_of_indices(each)
        for each, result in read
    )


def _groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Split the nodes into connected groups; no node reads a result of another group."""
    group_of: dict[int, list[Node]] = {}  # a node's group, by the node's id
    producers = {id(tensor): node for node in nodes for tensor in node.outputs}
    for node in nodes:
        group_of[id(node)] = own = [node]
        for before in [producers[id(tensor)] for tensor in node.inputs if id(tensor) in producers]:
            if (other := group_of[id(before)]) is not own:
                smaller, own = sorted((own, other), key=len)  # so that a node changes its group log(n) times at most
                own += smaller
                group_of |= dict.fromkeys(map(id, smaller), own)
    return list({id(group): group for group in group_of.values()}.values())


def _is_no_larger(graph: Graph, shapes: ShapeInfo, group: Sequence[Node]) -> bool:
    """Return whether folding a group of nodes does not make the file larger.

    The results that other nodes read replace the constants that only the group reads.  Every result, even an
    intermediate one, must have at most as many bytes as these constants together.
    """
    own = {id(node) for node in group}
    read = {id(t): t for node in group for t in node.inputs if is_constant(t)}.values()
    freed = 0
    for tensor in read:
        size = _byte_count(shapes, tensor)
        if size is None or (size > MAX_GROWTH_BYTES and _is_external(tensor)):
            return False
        freed += size if not graph.is_kept(tensor) and own.issuperset(map(id, tensor.outputs)) else 0
    made = [tensor for node in group for tensor in node.outputs if tensor.name]
    sizes = [_byte_count(shapes, tensor) for tensor in made]
    if any(size is None or size > freed for size in sizes):
        return False
    kept = (size for tensor, size in zip(made, sizes, strict=True) if not own.issuperset(map(id, tensor.outputs)))
    return sum(size or 0 for size in kept) <= freed


def _constants(graph: Graph) -> list[Tensor]:
    return list({id(t): t for node in graph.nodes for t in node.inputs if is_constant(t)}.values())


def _growth(
    graph: Graph, shapes: ShapeInfo, node: Node, output_bytes: list[int | None], folded_bytes: dict[int, int | None]
) -> float:
    """Return by how many bytes folding the node makes the file larger; 0 if its outputs are small.

    Inputs that only this node reads are subtracted, because folding removes them from the file.  Infinity means that
    the node must not be folded: it reads a large external weight, or its outputs have unknown sizes and can be large.
    """
    freed = 0
    for tensor in node.inputs:
        size = folded_bytes[id(tensor)] if id(tensor) in folded_bytes else _byte_count(shapes, tensor)
        if size and size > MAX_GROWTH_BYTES and _is_external(tensor):
            return math.inf
        freed += (size or 0) if graph.sole_consumer(tensor) else 0
    if None in output_bytes:
        return 0 if op_of(node) not in SIZED_BY_VALUE and freed <= MAX_GROWTH_BYTES else math.inf
    total = sum(size for size in output_bytes if size is not None)
    return 0 if total <= MAX_GROWTH_BYTES else max(0, total - freed)


def _byte_count(shapes: ShapeInfo, tensor: Tensor) -> int | None:
    shape, dtype = shapes.shape(tensor), shapes.dtype(tensor)
    if shape is None or not dtype or not all(isinstance(size, int) for size in shape):
        return None
    itemsize = onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize
    return math.prod(size for size in shape if isinstance(size, int)) * itemsize


def _is_external(tensor: Tensor) -> bool:
    stored = stored_value(tensor) if is_constant(tensor) else None
    return isinstance(stored, onnx.TensorProto) and onnx.external_data_helper.uses_external_data(stored)


def _evaluate(graph: Graph, shapes: ShapeInfo, nodes: list[Node]) -> dict[str, Array]:
    """Return the results of onnx's reference implementation by tensor name, without those that it cannot compute."""
    if not nodes:
        return {}
    from onnx.reference import ReferenceEvaluator  # imported here, because that takes longer than reading a small model

    values = {t.name: constant_value(graph, t) for n in nodes for t in n.inputs if is_constant(t)}
    constants = onnx.helper.make_graph([node_proto(graph, node) for node in nodes], "constants", [], [])
    opset = onnx.helper.make_opsetid("", graph.opset)
    evaluator = ReferenceEvaluator(onnx.helper.make_model(constants, opset_imports=[opset]))
    results: dict[str, Array] = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for node, operator in zip(nodes, evaluator.rt_nodes_, strict=True):
            try:
                inputs = [values[name] if name else None for name in operator.input]
                if _depends_on_runtime(node, inputs):
                    continue
                outputs = _run_in_float32(shapes, node, operator, inputs)
            except Exception:  # any error of numpy, or an overflow: the runtime reports an invalid node itself
                continue
            if all(_agrees(shapes, tensor, value) for tensor, value in zip(node.outputs, outputs, strict=False)):
                results.update(zip(operator.output, outputs, strict=False))
                values.update(zip(operator.output, outputs, strict=False))
    return results


class _Operator(Protocol):
    """An operator of onnx's reference implementation, which has no type annotations."""

    def run(self, *inputs: Array | None) -> Sequence[object]:
        """Return the outputs."""


def _run_in_float32(shapes: ShapeInfo, node: Node, operator: _Operator, inputs: list[Array | None]) -> list[Array]:
    """Return the outputs of an operator; half precision is computed in float32 and rounded once.

    numpy would round each partial sum to half precision: the sum of 1,000 ones in bfloat16 is 256.

    Raises OverflowError if only this rounding makes a number infinite: onnxruntime's CPU provider has hardly any
    kernels in half precision, and so continues with the finite float32 number.
    """
    if op_of(node) in MOVING or not any(x is not None and x.dtype in HALF_DTYPES for x in inputs):
        return [np.asarray(value) for value in operator.run(*inputs)]
    wide = [x.astype(np.float32) if x is not None and x.dtype in HALF_DTYPES else x for x in inputs]
    found = [np.asarray(value) for value in operator.run(*wide)]
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(shapes.dtype(tensor)) for tensor in node.outputs]
    pairs = zip(found, dtypes, strict=False)
    rounded = [value.astype(dtype) if dtype in HALF_DTYPES else value for value, dtype in pairs]
    if any(np.any(np.isinf(new) & np.isfinite(old)) for new, old in zip(rounded, found, strict=False)):
        raise OverflowError(f"half precision cannot hold the result of {op_of(node)}")
    return rounded


def _depends_on_runtime(node: Node, inputs: list[Array | None]) -> bool:
    """Return whether results depend on the runtime: ONNX does not define them, or onnxruntime deviates from ONNX."""
    op, (first, *others) = op_of(node), inputs
    if first is None:
        return False
    if op.startswith("Reduce") and first.size == 0:  # the mean of no elements is 0 in onnxruntime, NaN in ONNX
        return True
    if op in ("Div", "Mod"):
        divisor = others[0]
        return first.dtype.kind in "iu" and divisor is not None and bool(np.any(divisor == 0))
    if op == "Cast":
        to = int_attribute(node, "to", 0)
        if to == onnx.TensorProto.STRING or first.dtype.kind in "OSUT":  # runtimes format and parse numbers differently
            return True
        low, high = INTEGER_RANGES.get(to, (-math.inf, math.inf))
        if to == onnx.TensorProto.BOOL or to not in INTEGER_RANGES or first.dtype.kind in "biu":
            return False
        return not bool(np.all((first.astype(np.float64) > low - 1) & (first.astype(np.float64) < high + 1)))
    if op == "Slice" and len(others) == 4:  # `others` is starts, ends, axes and steps
        ends, steps = others[1], others[3]
        if ends is not None and steps is not None:
            return any(map(is_ambiguous_end, ends.tolist(), steps.tolist()))
    return False


def _agrees(shapes: ShapeInfo, tensor: Tensor, value: Array) -> bool:
    """Return whether a value has the dtype and shape that are inferred for the tensor.

    If no shape is known, the value must be small.
    """
    shape, dtype = shapes.shape(tensor), shapes.dtype(tensor)
    if dtype not in (0, onnx.helper.np_dtype_to_tensor_dtype(value.dtype)):
        return False
    if shape is None:
        return value.nbytes <= MAX_GROWTH_BYTES
    sizes = zip(shape, value.shape, strict=False)
    return len(shape) == value.ndim and all(not isinstance(size, int) or size == actual for size, actual in sizes)
