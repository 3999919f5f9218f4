"""Split a MatMul that packs the gate and the up projection, as in Phi-3, into two products for a gated-product fusion.

The fused gated product never writes its two halves to memory.  The halves of the weight replace the weight in the file.
"""

from __future__ import annotations

from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, consumers, is_constant, op_of
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass

GATE_OPERATORS = frozenset(
    ["Add", "Cast", "Div", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Mul", "Pow", "Relu", "Sigmoid", "Swish", "Tanh"]
)
MAX_GATE_TENSORS = 12  # tensors visited on the way from the product of both halves back to the gate


@graph_pass()
def split_packed_gate(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Split each packed product; return the Slices and Splits that took its halves."""
    folded: list[Folded] = []
    for node in list(graph.nodes):
        if op_of(node) == "MatMul" and is_constant(weight := node.inputs[1]) and len(weight.shape) == 2:
            folded += _split(graph, shapes, node, weight)
    return folded


def _split(graph: Graph, shapes: ShapeInfo, matmul: Node, weight: Constant) -> list[Folded]:
    x = matmul.inputs[0]
    if len(consumers(weight)) > 1 or not weight.outputs or graph.is_kept(weight):
        return []
    packed, bias = _with_bias(graph, matmul, weight.shape[1])
    halves = _halves(graph, shapes, packed, weight.shape[1])
    if halves is None or not (_gates(*halves) or _gates(*reversed(halves))):
        return []
    slices = [half.inputs[0] for half in halves]
    columns = weight.shape[1] // 2
    for i, old in enumerate(halves):
        own_columns = slice(i * columns, (i + 1) * columns)
        values = constant_value(graph, weight)[:, own_columns]
        new = _emit_like(graph, shapes, "MatMul", [x, graph.constant(f"{weight.name}_half", values)], old)
        if bias is not None:
            values = constant_value(graph, bias).reshape(-1)[own_columns]
            new = _emit_like(graph, shapes, "Add", [new, graph.constant(f"{bias.name}_half", values)], old)
        graph.replace(old, new)
    return [Folded("half", node_label(node), node_label(matmul)) for node in dict.fromkeys(slices)]


def _emit_like(graph: Graph, shapes: ShapeInfo, op: str, inputs: list[Tensor], like: Tensor) -> Tensor:
    output = graph.variable(f"{like.name}_product", like)
    shapes.record(output, shapes.shape(like), shapes.dtype(like))
    graph.add_node(op, inputs, [output])
    return output


def _with_bias(graph: Graph, matmul: Node, columns: int) -> tuple[Tensor, Constant | None]:
    """Return the product after its bias is added, and that bias: a constant with one element per column, or None."""
    add = graph.sole_consumer(matmul.outputs[0])
    if add is None or op_of(add) != "Add":
        return matmul.outputs[0], None
    bias = next((t for t in add.inputs if is_constant(t) and tuple(t.shape) == (columns,)), None)
    return (matmul if bias is None else add).outputs[0], bias


def _halves(graph: Graph, shapes: ShapeInfo, packed: Tensor, columns: int) -> tuple[Tensor, Tensor] | None:
    """Return the two halves of a tensor's last axis; None if the tensor has other consumers."""
    rank = shapes.rank(packed)
    slicing = consumers(packed)
    if rank is None or columns % 2 or graph.is_kept(packed):
        return None
    if not all(op_of(consumer) in ("Slice", "Split") for consumer in slicing):
        return None
    found: dict[int, Tensor] = {}
    for part in (t for consumer in slicing if consumer.inputs[0] is packed for t in consumer.outputs):
        try:
            ranges = slice_ranges(shapes, part.inputs[0], part)
        except CannotInfer:
            return None
        (axis, (first, count)), *others = ranges.items()
        if others or axis % rank != rank - 1 or count != columns // 2 or first in found or graph.is_kept(part):
            return None
        found[first] = part
    return (found[0], found[columns // 2]) if found.keys() == {0, columns // 2} else None


def _gates(gate: Tensor, up: Tensor) -> bool:
    """Return whether a function of `gate` and constants multiplies `up`, and nothing else reads `up`."""
    if len(up.outputs) != 1 or op_of(up.outputs[0]) != "Mul":
        return False
    work = [t for t in up.outputs[0].inputs if t is not up]
    for _ in range(MAX_GATE_TENSORS):
        if not work:
            return True
        tensor = work.pop()
        if tensor is gate or is_constant(tensor):
            continue
        if not tensor.inputs or op_of(tensor.inputs[0]) not in GATE_OPERATORS:
            return False
        work += tensor.inputs[0].inputs
    return not work
