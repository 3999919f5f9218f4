"""One product whose halves gate each other, as Phi-3 packs gate and up, becomes the two products of a gated one.

A gated product never writes its halves; the weight's halves take the room that the weight had.
"""

from __future__ import annotations

from onnxfuse.model.graph import Graph, Node, Tensor, constant_value, is_constant, op_of, unique
from onnxfuse.passes.fold import Folded, label, only_reader
from onnxfuse.shapes.cuts import CUTS, taken
from onnxfuse.shapes.inference import Shapes
from onnxfuse.shapes.rules import Undecided

ELEMENTWISE = frozenset(
    ["Add", "Cast", "Div", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Mul", "Pow", "Relu", "Sigmoid", "Swish", "Tanh"]
)
STEPS = 12  # nodes of an activation


def split_gates(graph: Graph, shapes: Shapes) -> list[Folded]:
    """Split the products; returns the nodes that took halves of them."""
    folded: list[Folded] = []
    for node in list(graph.nodes):
        if op_of(node) == "MatMul" and is_constant(node.inputs[1]) and len(node.inputs[1].shape) == 2:
            folded += _split(graph, shapes, node)
    if folded:
        graph.remove_dead()
        graph.sort()
    return folded


def _split(graph: Graph, shapes: Shapes, product: Node) -> list[Folded]:
    x, weight = product.inputs
    if len(unique(weight.outputs)) > 1 or not weight.outputs or graph.is_kept(weight):
        return []
    bias = _bias(graph, product)
    whole = product.outputs[0] if bias is None else only_reader(graph, product.outputs[0]).outputs[0]  # type: ignore[union-attr]
    halves = _halves(graph, shapes, whole, weight.shape[1])
    if halves is None or not (_gates(*halves) or _gates(*reversed(halves))):
        return []
    cuts = [half.inputs[0] for half in halves]
    half = weight.shape[1] // 2
    for i, old in enumerate(halves):
        columns = slice(i * half, (i + 1) * half)
        values = constant_value(graph, weight)[:, columns]
        made = _made(graph, shapes, "MatMul", [x, graph.constant(f"{weight.name}_half", values)], old)
        if bias is not None:
            some = graph.constant(f"{bias.name}_half", constant_value(graph, bias).reshape(-1)[columns])
            made = _made(graph, shapes, "Add", [made, some], old)
        graph.replace(old, made)
    return [Folded("half", label(cut), label(product)) for cut in unique(cuts)]


def _made(graph: Graph, shapes: Shapes, op: str, inputs: list[Tensor], like: Tensor) -> Tensor:
    made = graph.variable(f"{like.name}_product", like)
    shapes.put(made, shapes.shape(like), shapes.dtype(like))
    graph.add(op, inputs, [made])
    return made


def _bias(graph: Graph, product: Node) -> Tensor | None:
    """The constant, one number for each column, that is added to the product."""
    reader = only_reader(graph, product.outputs[0])
    if reader is None or op_of(reader) != "Add":
        return None
    columns = product.inputs[1].shape[1]
    return next((t for t in reader.inputs if is_constant(t) and tuple(t.shape) == (columns,)), None)


def _halves(graph: Graph, shapes: Shapes, whole: Tensor, columns: int) -> tuple[Tensor, Tensor] | None:
    """The two halves of a tensor's last axis, where they are all that is read of it."""
    rank = shapes.rank(whole)
    readers = unique(whole.outputs)
    if rank is None or columns % 2 or graph.is_kept(whole) or not all(op_of(r) in CUTS - {"Gather"} for r in readers):
        return None
    found: dict[int, Tensor] = {}
    for made in (t for r in readers if r.inputs[0] is whole for t in r.outputs):
        try:
            cut = taken(shapes, made.inputs[0], made)
        except Undecided:
            return None
        (axis, (first, count)), *others = cut.items()
        if others or axis % rank != rank - 1 or count != columns // 2 or first in found or graph.is_kept(made):
            return None
        found[first] = made
    return (found[0], found[columns // 2]) if found.keys() == {0, columns // 2} else None


def _gates(gate: Tensor, up: Tensor) -> bool:
    """Whether `up` is multiplied by elementwise operators of `gate` and constants, and nothing else reads it."""
    if len(up.outputs) != 1 or op_of(up.outputs[0]) != "Mul":
        return False
    work = [t for t in up.outputs[0].inputs if t is not up]
    for _ in range(STEPS):
        if not work:
            return True
        tensor = work.pop()
        if tensor is gate or is_constant(tensor):
            continue
        if not tensor.inputs or op_of(tensor.inputs[0]) not in ELEMENTWISE:
            return False
        work += tensor.inputs[0].inputs
    return not work
