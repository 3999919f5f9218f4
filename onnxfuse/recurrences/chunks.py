"""Finds the nodes that may compute linear attention in chunks of tokens, around a CumSum of logarithms of decays.

The region ends at the first tensor in which everything that depends on the CumSum meets.  It begins at its operands,
which views, Pads and Expands divide into chunks.  linear_attention.py finds out what the region computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.algebra.operators import MATRIX_PRODUCTS, MOVES, REARRANGING, VIEWS
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.slices import slice_bounds
from onnxfuse.ir.attributes import perm_of, str_attribute
from onnxfuse.ir.dtypes import FLOATS
from onnxfuse.ir.node import Node, Tensor, consumers, has_subgraph, is_constant, op_of, producer, tensor_before
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences.form import NoScan

SPREADING: Final = VIEWS | {"Cast", "Pad", "Tile"}  # between an operand and its chunks
JOINING: Final = REARRANGING | {"Identity", "Slice"}  # between the chunks of the output and its rows
SHAPES: Final = ("Shape", "Size")
PRODUCTS: Final = MATRIX_PRODUCTS | {"Einsum", "ReduceSum"}
# Operators whose results are analytic functions of their float inputs; of Where, these do not include the condition.
ANALYTIC: Final = MOVES | PRODUCTS | {
    "Add", "Cast", "CumSum", "Exp", "Mul", "Neg", "ScatterElements", "Sub", "Sum", "Where",
}  # fmt: skip
MAX_OPERANDS: Final = 5  # query, key, value, decay, beta


@dataclass(frozen=True)
class Chunks:
    """Nodes, in execution order, that compute `output` from the tensors `decay` and `others`.

    `decay` holds the logarithms that the CumSum adds up, of `length` tokens.  `shape` is that of the output, and
    `size` is the number of tokens in a chunk.
    """

    decay: Tensor
    others: tuple[Tensor, ...]
    output: Tensor
    shape: Shape
    nodes: tuple[Node, ...]
    length: Size
    size: int


def read_chunks(
    shapes: ShapeInfo, cumsum: Node, allowed: Set[str] = ANALYTIC, spreading: Set[str] = SPREADING
) -> Iterator[Chunks]:
    """Yield the nodes around a CumSum of a sorted graph, for each length that the sequence can have.

    `allowed` are the operators inside, and `spreading` those between the operand `decay` and the CumSum.  Raises NoScan
    if the nodes cannot be linear attention.
    """
    decay = tensor_before(cumsum.inputs[0], spreading)
    summed, axis, shape = shapes.shape(cumsum.inputs[0]), shapes.value(cumsum.inputs[1]), shapes.shape(decay)
    size = summed[int(axis.reshape(-1)[0])] if summed and axis is not None else None
    if not isinstance(size, int) or is_constant(decay) or shape is None or not 3 <= len(shape) <= 4:
        raise NoScan("it does not add up decays (batch, length, heads) in chunks of a known size")
    firsts = [node for node in consumers(decay) if op_of(node) in spreading or node is cumsum]
    end, dependent = _Flow(shapes, firsts, allowed).end()
    found = [(length, *each) for length in dict.fromkeys(shape[1:3]) if (each := rows_of(shapes, end, length))]
    if not found:
        raise NoScan(f"its chunks meet in '{end.name}', which does not become rows of tokens")
    for length, output, rows, joining in found:
        inside = _Inside(shapes, dependent | {*joining}, length, shapes.dtype(output), allowed, spreading)
        decay = inside.begin(cumsum.inputs[0])
        inside.add(output)
        others = tuple(tensor for tensor in inside.operands() if tensor is not decay)
        if len(others) + 1 > MAX_OPERANDS:
            raise NoScan(f"its chunks depend on {len(others) + 1} tensors; required {MAX_OPERANDS} at most")
        yield Chunks(decay, others, output, rows, tuple(_in_order(output, inside.nodes)), length, size)


def _in_order(output: Tensor, nodes: Set[Node]) -> list[Node]:
    """Return the nodes in an execution order that is the same for equal graphs, whatever lies between the nodes."""
    found, work = dict[Node, None](), list(output.inputs)
    while work:
        node = work[-1]
        left = [p for t in node.inputs for p in t.inputs if p in nodes and p not in found]
        if node in found or not left:
            found[work.pop()] = None
        work += left
    return [*found]


def _is_allowed(node: Node, allowed: Set[str]) -> bool:
    """Return whether an operator is allowed; a Scatter of maxima or minima is not."""
    return op_of(node) in allowed and str_attribute(node, "reduction", "none") not in ("max", "min")


@dataclass
class _Flow:
    """All nodes that depend on what `firsts` read; `waiting` counts the later readers of each tensor, by its name."""

    shapes: ShapeInfo
    firsts: list[Node]
    allowed: Set[str]
    waiting: dict[str, int] = field(default_factory=dict)
    dependent: set[Node] = field(default_factory=set)

    def end(self) -> tuple[Tensor, set[Node]]:
        """Return the first tensor after CumSum, Exp and a product that alone is read later, and the nodes up to it.

        Raises NoScan if a node does not belong to linear attention, or if the nodes do not meet in one tensor.
        """
        graph = self.shapes.graph
        done, to_come = set[str](), {*self.firsts}
        for node in graph.nodes[min(graph.position[node] for node in self.firsts) :]:
            if node not in to_come and not any(tensor.name in self.waiting for tensor in node.inputs):
                continue
            to_come.discard(node)
            self._read(node)
            done.add(op_of(node))
            if (
                "CumSum" in done
                and "Exp" in done
                and len(self.waiting) == 1
                and not to_come
                and not PRODUCTS.isdisjoint(done)
            ):
                (name,) = self.waiting
                return next(t for one in self.dependent for t in one.outputs if t.name == name), self.dependent
        raise NoScan("what depends on the sums of its decays does not meet in one tensor")

    def _read(self, node: Node) -> None:
        for tensor in node.inputs:
            if tensor.name in self.waiting:
                self.waiting[tensor.name] -= 1
                if not self.waiting[tensor.name]:
                    del self.waiting[tensor.name]
        if op_of(node) in SHAPES:
            return
        fixed = node.inputs[:1] if op_of(node) == "Where" else ()
        is_fixed = not any(producer(t) in self.dependent for t in fixed)
        if not (_is_allowed(node, self.allowed) and is_fixed) or any(
            self.shapes.dtype(tensor) not in FLOATS for tensor in node.outputs
        ):
            raise NoScan(f"'{node_label(node)}', {op_of(node)}, is not a part of linear attention")
        self.dependent.add(node)
        for tensor in node.outputs:
            if self.shapes.graph.is_kept(tensor):
                raise NoScan(f"'{tensor.name}' is read as an output or by the body of another node")
            if tensor.outputs:
                self.waiting[tensor.name] = len(tensor.outputs)


@dataclass
class _Inside:
    """The nodes of a region, which grows from its output back to its operands.

    `dependent` are nodes that depend on decays.  Others are inside if they spread operands over chunks, compute sizes
    or masks, or multiply chunks; operands are rows of `length` tokens, of the output's `dtype`.
    """

    shapes: ShapeInfo
    dependent: set[Node]
    length: Size
    dtype: int
    allowed: Set[str]
    spreading: Set[str]
    nodes: set[Node] = field(default_factory=set)
    found: list[Tensor] = field(default_factory=list)  # operands
    seen: set[str] = field(default_factory=set)

    def add(self, output: Tensor) -> None:
        """Add the nodes that a tensor depends on, up to operands, and up to Shapes of tensors outside."""
        work = [output]
        while work:
            tensor = work.pop()
            if tensor.name in self.seen or is_constant(tensor) or not tensor.name:
                continue
            self.seen.add(tensor.name)
            node = producer(tensor)
            if node is None or has_subgraph(node) or self._is_operand(tensor, node):
                if self.shapes.dtype(tensor) not in FLOATS or _rows(self.shapes, tensor, self.length) is None:
                    raise NoScan(f"it depends on '{tensor.name}', which holds no rows of {self.length} tokens")
                self.found.append(tensor)
                continue
            self.nodes.add(node)
            if op_of(node) not in SHAPES:
                self._require_sizes(tensor, node)
                work += node.inputs
            elif producer(node.inputs[0]) in self.dependent:
                work += node.inputs

    def begin(self, tensor: Tensor) -> Tensor:
        """Follow views, Pads and Casts back from a tensor to an operand, and return it."""
        while (node := producer(tensor)) is not None and op_of(node) in self.spreading and not self._is_cast(tensor):
            tensor = node.inputs[0]
        return tensor

    def _is_cast(self, tensor: Tensor) -> bool:
        """Return whether a Cast gives rows the dtype of the output."""
        node, dtype = producer(tensor), self.shapes.dtype(tensor)
        is_cast = node is not None and op_of(node) == "Cast" and dtype == self.dtype
        return is_cast and _rows(self.shapes, tensor, self.length) is not None

    def _require_sizes(self, tensor: Tensor, node: Node) -> None:
        """Raise NoScan if a tensor holds no floats, but depends on floats other than constants and sizes."""
        if self._floats(node) and self.shapes.dtype(tensor) not in FLOATS:
            raise NoScan(f"'{node_label(node)}', {op_of(node)}, is not a part of linear attention")

    def _floats(self, node: Node) -> list[Tensor]:
        """Return the inputs of a node that hold floats, except constants."""
        return [each for each in node.inputs if self.shapes.dtype(each) in FLOATS and not is_constant(each)]

    def _is_operand(self, tensor: Tensor, node: Node) -> bool:
        """Return whether a tensor is an operand: what comes before it neither spreads operands nor multiplies chunks.

        Raises NoScan if it is not one, but is computed by an operator that does not belong to linear attention.
        """
        if self.shapes.dtype(tensor) not in FLOATS or not self._floats(node) or self.begin(tensor) is not tensor:
            return False
        if node in self.dependent:
            return self._is_cast(tensor)
        if _rows(self.shapes, tensor, self.length) is not None:
            return True
        if not _is_allowed(node, self.allowed):
            raise NoScan(f"'{node_label(node)}', {op_of(node)}, computes no rows of {self.length} tokens")
        return False

    def operands(self) -> list[Tensor]:
        """Return the operands, after taking in every operand that is a Mul of another operand.

        The rates of the delta rule multiply keys and values in this way, before these are divided into chunks.
        """
        while product := next(filter(self._is_product, self.found), None):
            self.found = [tensor for tensor in self.found if tensor is not product]
            self.nodes.add(node := product.inputs[0])
            for tensor in node.inputs:
                self.add(tensor)
        return self.found

    def _is_product(self, tensor: Tensor) -> bool:
        node = producer(tensor)
        if node is None or op_of(node) != "Mul":
            return False
        begins = [*map(self.begin, node.inputs)]
        return not any(map(is_constant, begins)) and any(a is b for a in begins for b in self.found)


# --- the output ------------------------------------------------------------------------------------------------------


def rows_of(shapes: ShapeInfo, tensor: Tensor, length: Size) -> tuple[Tensor, Shape, list[Node]] | None:
    """Follow the views and the Slice that make (batch, length, ...) or (batch, heads, length, ...) of chunks.

    Returns the tensor that has this shape, the shape, and the nodes followed; None if no tensor has it.  The
    first of the two shapes is preferred.
    """
    nodes = list[Node]()
    while (shape := _rows(shapes, tensor, length)) is None:
        node = shapes.graph.sole_consumer(tensor)
        if node is None or op_of(node) not in JOINING:
            return None
        nodes.append(node)
        tensor = node.outputs[0]
    node = shapes.graph.sole_consumer(tensor)
    if shape[1] != length and node is not None and op_of(node) == "Transpose":
        perm = perm_of(node, len(shape))
        if perm[:3] == [0, 2, 1]:
            return node.outputs[0], tuple(shape[i] for i in perm), [*nodes, node]
    return tensor, shape, nodes


def _rows(shapes: ShapeInfo, tensor: Tensor, length: Size) -> Shape | None:
    """Return the shape of a tensor that has `length` tokens along axis 1 or 2; None if it has not."""
    shape, node = shapes.shape(tensor), producer(tensor)
    if shape is None or not 3 <= len(shape) <= 4:
        return None
    if length in shape[1:3]:
        return shape
    if node is None or op_of(node) != "Slice" or isinstance(length, int):
        return None
    source = shapes.shape(node.inputs[0]) or shape
    bounds = slice_bounds(shapes, node, source)
    found = [axis for axis, (start, end, step) in bounds.items() if (start, end, step) == (0, length, 1)]
    if len(bounds) != 1 or found not in ([1], [2]) or isinstance(source[found[0]], int):
        return None  # a source of a fixed size has no more rows than that for a greater length
    return (*shape[: found[0]], length, *shape[found[0] + 1 :])
