"""Find nodes of a match that compute in another precision than its operands and its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.operators import SLICING, VIEWS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import HALF_PRECISION, dtype_name
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import node_name
from onnxfuse.match.state import State

MOVING_OPS: Final = VIEWS | SLICING | {"Concat"}  # operators that do not round


def lossy_precision(m: MatchContext, root: Tensor, state: State) -> str | None:
    """Return why the fused node would lose precision or leave out an intended rounding; None if it would do neither."""
    rounding = _rounding_cast(m, root, state)
    if rounding is not None:
        made = rounding.outputs[0]
        dtype = dtype_name(m.shapes.dtype(made))
        return f"Cast '{node_name(made)}' rounds to {dtype} inside, on purpose: its result is used in another dtype"
    product = _product_of_unrounded(m, root, state)
    if product is not None:
        dtype = dtype_name(m.shapes.dtype(root))
        return f"MatMul '{node_name(product.outputs[0])}' reads values in float32 that the fused node rounds to {dtype}"
    return None


def _product_of_unrounded(m: MatchContext, root: Tensor, state: State) -> Node | None:
    """Return a float32 product of queries or keys that the match itself computes in float32; None if there is none.

    A kernel would round these queries and keys, which it rotates or normalizes, to the dtype of the operands.
    """
    if m.shapes.dtype(root) not in HALF_PRECISION:
        return None
    for node in _float32_products(m.shapes, state.nodes.values()):
        made = [source for tensor in node.inputs if id(source := _computed_by(tensor)) in state.nodes]
        if any(op_of(source) not in {"Cast", "Softmax", "Where"} for source in made if source is not None):
            return node
    return None


def _rounding_cast(m: MatchContext, root: Tensor, state: State) -> Node | None:
    """Return a Cast to half precision that rounds on purpose, and so must stay; None if there is none."""
    inside = {**state.kept, **state.nodes}
    casts = [node for node in inside.values() if m.float_cast(node.outputs[0]) is node and not m.is_to_float32(node)]
    root_dtype = m.shapes.dtype(root)
    return next((cast for cast in casts if _Rounding(m, cast, state, inside).is_on_purpose(root_dtype)), None)


class _Rounding:
    """A Cast to half precision inside a match, with the dtypes before and after it.

    The fused node does not round where the Cast does.  That is fine if the graph merely computes in the Cast's dtype:
    if the result of the match has this dtype, or if an operand of this dtype is read before the Cast or combined with
    the Cast's result.  If the Cast's result is cast to another dtype again, as from float32 to float16
    and back, the purpose of the Cast is to round.
    """

    def __init__(self, m: MatchContext, cast: Node, state: State, inside: Mapping[int, Node]) -> None:
        self._m, self._cast, self._inside = m, cast, inside
        self._dtype = m.shapes.dtype(cast.outputs[0])
        named = {capture.name: capture for capture in m.fusion.captures if capture.kind == "tensor"}
        self._operands = {id(tensor) for name, tensor in state.operands.items() if name in named}
        self._ends = {id(tensor) for tensor in state.operands.values()}

    def is_on_purpose(self, root_dtype: int) -> bool:
        """Return whether the Cast's rounding is intended: neither the operands nor the result have the Cast's dtype."""
        made = self._cast.outputs[0]
        if not self._is_cast_on(made, computed=True):
            return False
        if self._is_cast_on(made, computed=False):
            return True
        before = self._operand_dtypes(self._cast.inputs[0])
        if self._dtype in before and (before == {self._dtype} or root_dtype == self._dtype):
            return False
        return root_dtype != self._dtype and not self._meets_operand(made)

    def _is_cast_on(self, tensor: Tensor, *, computed: bool) -> bool:
        """Return whether another Cast inside the match changes the dtype of the tensor again.

        Only views are allowed between the tensor and that Cast; with `computed`, any operators are.
        """
        seen, work = set[int](), [tensor]
        while work:
            for reader in work.pop().outputs:
                if id(reader) not in self._inside or id(reader) in seen:
                    continue
                seen.add(id(reader))
                if self._m.float_cast(reader.outputs[0]) is reader:
                    if self._m.shapes.dtype(reader.outputs[0]) != self._dtype:
                        return True
                    work.extend(reader.outputs)
                elif computed or op_of(reader) in MOVING_OPS:
                    work.extend(reader.outputs)
        return False

    def _meets_operand(self, tensor: Tensor) -> bool:
        """Return whether an operator combines the tensor, or a view of it, with an operand of the Cast's new dtype."""
        for reader in tensor.outputs:
            if id(reader) not in self._inside:
                continue
            if op_of(reader) in MOVING_OPS:
                if self._meets_operand(reader.outputs[0]):
                    return True
            elif any(self._dtype in self._operand_dtypes(t) for t in reader.inputs if t is not tensor):
                return True
        return False

    def _operand_dtypes(self, tensor: Tensor) -> set[int]:
        """Return the dtypes of the operands (without weights) that a tensor is computed from."""
        found, seen, work = set[int](), set[int](), [tensor]
        while work:
            each = work.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in self._operands:
                found.add(self._m.shapes.dtype(each))
            if id(each) not in self._ends:
                work.extend(t for node in each.inputs if id(node) in self._inside for t in node.inputs)
        return found


def computing_dtype(shapes: ShapeInfo, nodes: Iterable[Node], dtype: int) -> int:
    """Return the dtype in which a body of `nodes` has to compute, if their result has `dtype`.

    If the nodes cast operands in half precision to float32 and multiply them, the product can exceed the range of
    `dtype`.  Then the body computes in float32, too.
    """
    in_float32 = dtype in HALF_PRECISION and any(
        all(_is_cast_to_float32(shapes, tensor) for tensor in node.inputs) for node in _float32_products(shapes, nodes)
    )
    return TensorProto.FLOAT if in_float32 else dtype


def _float32_products(shapes: ShapeInfo, nodes: Iterable[Node]) -> Iterator[Node]:
    return (n for n in nodes if op_of(n) == "MatMul" and shapes.dtype(n.outputs[0]) == TensorProto.FLOAT)


def _is_cast_to_float32(shapes: ShapeInfo, tensor: Tensor) -> bool:
    """Return whether the tensor is a view or a multiple of a tensor that was cast to float32."""
    node = _computed_by(tensor)
    return node is not None and op_of(node) == "Cast" and shapes.dtype(node.outputs[0]) == TensorProto.FLOAT


def _computed_by(tensor: Tensor) -> Node | None:
    """Return the node that computes a tensor; views and scalings by constants after this node are skipped."""
    node = producer(tensor)
    while node is not None and op_of(node) in {*VIEWS, "Mul", "Div"}:
        read = [t for t in node.inputs if not is_constant(t)] if op_of(node) in ("Mul", "Div") else node.inputs[:1]
        if len(read) > 1:
            break
        node = producer(read[0])
    return node
