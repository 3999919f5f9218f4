"""Masks become no larger than what they say: what is the same along an axis is broadcast by who reads it.

A padding mask gathered by the ranges of its own axes is a Reshape of itself; `And(x, range >= 0)` is x, and where that
has fewer axes than the And, those who read it broadcast it; a mask that is true everywhere is none.  So it is with the
embedding of token types that are all 0.  What is joined gets its reader's axes, so that each mask is seen for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.model.graph import Graph, Node, Tensor, constant_value, input_place, is_constant, op_of, producer
from onnxfuse.passes.fold import only_reader, reshape_target
from onnxfuse.passes.linear import SMALL
from onnxfuse.shapes.dims import Size
from onnxfuse.shapes.indices import Entry, along
from onnxfuse.shapes.inference import Shapes
from onnxfuse.shapes.places import VIEWS, Places
from onnxfuse.shapes.rules import Undecided, broadcast

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
ELEMENTWISE = frozenset({"Add", "And", "Cast", "Mul", "Not", "Or", "Sub", "Where", "Xor"})
NEUTRAL = {"And": True, "Or": False, "Add": 0, "Mul": 1}


def thin_masks(graph: Graph, shapes: Shapes) -> int:
    """Let elementwise operators read the smallest tensor of the same values; returns the number of changes."""
    graph.sort()
    thinner = Thinner(graph, shapes)
    count = sum(thinner.visit(node) for node in list(graph.nodes) if len(node.outputs) == 1)
    if count or thinner.known:
        graph.remove_dead()
        graph.sort()
    return count


class Thinner:
    """What may stand for a tensor where operators broadcast, by the tensor's name."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        """Look at what integer and boolean tensors hold."""
        self.graph, self.shapes = graph, shapes
        self.places = Places(graph, shapes)
        self.known: dict[str, Tensor] = {}

    def visit(self, node: Node) -> bool:
        """Make what may stand for the node's output; where that is as large, it does: True."""
        out = node.outputs[0]
        value = self.places.values.get(out.name)
        if isinstance(value, bool):
            return self._stand_for(node, self.graph.constant("everywhere", np.array(value)))
        op = op_of(node)
        if op == "Expand":
            return self._stand_for(node, node.inputs[0])
        if isinstance(value, Entry) and op.startswith("Gather"):
            return self._stand_for(node, self._reshaped(out, value))
        if op == "Gather" and not node.attrs.get("axis", 0) and is_constant(node.inputs[0]):
            return self._stand_for(node, self._row(node))
        joined = producer(node.inputs[0]) if op in VIEWS else None
        if joined is not None and op_of(joined) in ("And", "Or"):
            return self._axes_first(joined, node)
        if op in ("And", "Or") or (op in ELEMENTWISE and any(t.name in self.known for t in node.inputs)):
            return self._elementwise(node, [self.known.get(t.name, t) for t in node.inputs])
        return False

    def _stand_for(self, node: Node, tensor: Tensor | None) -> bool:
        """Another tensor for the node's output."""
        out = node.outputs[0]
        if tensor is None:
            return False
        shape = self.shapes.shape(tensor)
        same = shape is not None and shape == self.shapes.shape(out)
        if not same or self.graph.is_kept(out) or not self.graph.replace(out, tensor):
            self.known[out.name] = tensor
            return False
        return True

    def _reshaped(self, out: Tensor, value: Entry) -> Tensor | None:
        """A tensor's entries in their own order, with one place for all along the other axes."""
        sizes, shape = self.shapes.shape(value.tensor), self.shapes.shape(out)
        if sizes is None or shape is None:
            return None
        axes = [index.terms[0][0] if index.terms else 0 for index in value.indices]
        whole = all(index == along(axis, size) for index, axis, size in zip(value.indices, axes, sizes, strict=True))
        used = [axis for axis in axes if axis]
        if any(-axis > len(shape) or shape[axis] != size for axis, size in zip(axes, sizes, strict=True) if axis):
            return None  # sizes that only broadcast: one is 1
        new = [i for i in range(len(shape)) if i - len(shape) not in used]
        thin = [1 if i in new else size for i, size in enumerate(shape)]
        target = reshape_target(sizes, thin)
        if not whole or used != sorted(set(used)) or (target is None and 0 in axes):
            return None
        made = self.graph.variable(f"{out.name}_thin")
        self.shapes.put(made, thin, self.shapes.dtype(out))
        # A source's axes of size 1 may have another place; without such a -1 for a size of 0 is avoided.
        if 0 not in axes:
            return self._unsqueezed(value.tensor, made, new)
        self.graph.add("Reshape", [value.tensor, self._numbers(made, target)], [made])
        return made

    def _unsqueezed(self, tensor: Tensor, made: Tensor, axes: Sequence[int]) -> Tensor:
        """`made`, computed as the tensor with axes of one element."""
        if input_place("Unsqueeze", "axes", self.graph.opset) is None:
            self.graph.add("Unsqueeze", [tensor], [made], axes=list(axes))
        else:
            self.graph.add("Unsqueeze", [tensor, self._numbers(made, axes)], [made])
        return made

    def _numbers(self, made: Tensor, numbers: Sequence[int] | None) -> Tensor:
        return self.graph.constant(f"{made.name}_places", np.array(numbers))

    def _row(self, node: Node) -> Tensor | None:
        """The one row of a small table that all indices name, such as the embedding of tokens that are of one type."""
        table, index = node.inputs[0], self.places.index(node, 1)
        row, dtype = index.offset if index is not None and not index.terms else None, self.shapes.dtype(table)
        if not isinstance(row, int) or not -table.shape[0] <= row < table.shape[0]:
            return None
        if dtype not in FLOATS or math.prod(table.shape) * tensor_dtype_to_np_dtype(dtype).itemsize > SMALL:
            return None
        return self.graph.constant(f"{table.name}_row", constant_value(self.graph, table)[row])

    def _axes_first(self, joined: Node, view: Node) -> bool:
        """Put axes of one element into what is joined, so that masks have the axes of what reads them."""
        out = view.outputs[0]
        shapes = [self.shapes.shape(t) for t in (joined.outputs[0], out, *joined.inputs)]
        known = [shape for shape in shapes if shape is not None]
        if only_reader(self.graph, joined.outputs[0]) is None or len(known) < len(shapes):
            return False
        before, after, *own = known
        new, inputs = _put_in(before, after), []
        if not new:
            return False
        for tensor, shape in zip(joined.inputs, own, strict=True):
            kept = [axis for axis in range(len(after)) if axis not in new]
            first = kept[len(kept) - len(shape)] if shape else len(after)
            inside = [axis - first for axis in new if axis > first]
            if inside:
                made = self.graph.variable(f"{out.name}_part")
                whole = list(shape)
                for axis in inside:
                    whole.insert(axis, 1)
                self.shapes.put(made, whole, self.shapes.dtype(tensor))
                tensor = self._unsqueezed(tensor, made, inside)
            inputs.append(tensor)
        made = self.graph.variable(f"{out.name}_joined")
        self.shapes.put(made, after, self.shapes.dtype(out))
        self.graph.add(joined.op, inputs, [made])
        return self.graph.replace(out, made)

    def _elementwise(self, node: Node, inputs: list[Tensor]) -> bool:
        if (only := self._only(op_of(node), inputs)) is not None:
            return self._stand_for(node, only)
        known = [self.shapes.shape(t) for t in inputs]
        if None in known or inputs == list(node.inputs):
            return False
        try:
            shape = broadcast(self.shapes, *(each for each in known if each is not None))
        except Undecided:
            return False
        if shape == self.shapes.shape(node.outputs[0]):
            for place, tensor in enumerate(inputs):
                node.inputs[place] = tensor
            return True
        made = self.graph.variable(f"{node.outputs[0].name}_thin")
        self.shapes.put(made, shape, self.shapes.dtype(node.outputs[0]))
        self.graph.add(node.op, inputs, [made], **node.attrs)
        self.known[node.outputs[0].name] = made
        return False

    def _only(self, op: str, inputs: Sequence[Tensor]) -> Tensor | None:
        """The input that is the result, broadcast, because the others have no say."""
        if op == "Where" and isinstance(chosen := self._number(inputs[0]), bool):
            return inputs[1 if chosen else 2]
        left = [t for t in inputs if self._number(t) != NEUTRAL.get(op)] if op in NEUTRAL else []
        return left[0] if len(left) == 1 else None

    def _number(self, tensor: Tensor) -> bool | float | None:
        """The value of all elements."""
        value = self.places.of(tensor)
        if isinstance(value, bool):
            return value
        single = is_constant(tensor) and tuple(tensor.shape) == () and np.dtype(object) != tensor.dtype
        return constant_value(self.graph, tensor).item() if single else None


def _put_in(before: Sequence[Size], after: Sequence[Size]) -> list[int]:
    """The axes of one element that `after` has and `before` has not; none where more than such axes differs."""
    new, left = [], list(before)
    for axis, size in enumerate(after):
        if left and left[0] == size:
            left.pop(0)
        elif size == 1:
            new.append(axis)
        else:
            return []
    return [] if left else new
