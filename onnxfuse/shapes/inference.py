"""What is known of every tensor before the model runs: symbolic shape, dtype, and the values of shape arithmetic.

Own rules (the rules*.py beside this file) come first, then onnx's of a node.  What they leave open is taken from the
shapes that the exporter stored, which may be of other inputs than the model has now, and from onnx's inference.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxfuse.errors import ModelError
from onnxfuse.model.graph import Array, Graph, Node, Tensor, constant_value, is_constant, op_of
from onnxfuse.shapes import arithmetic, rules_of_views, rules_of_windows
from onnxfuse.shapes.dims import UNKNOWN, Dim, Size, is_known, symbol
from onnxfuse.shapes.rules import SHAPE_RULES, Partial, Shape, Undecided
from onnxfuse.shapes.sources import Stated, constant_dtype, infer_by_onnx, output_dtype
from onnxfuse.shapes.values import LIMIT, VALUE_RULES, exact

assert arithmetic and rules_of_views and rules_of_windows  # imported for their rules
INTEGERS = {int(TensorProto.BOOL): (0, 1)} | {  # the smallest and the largest number of each dtype
    int(TensorProto.DataType.Value(name.upper())): (int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def infer_shapes(graph: Graph, strict: bool = False) -> Shapes:
    """Infer everything about a sorted graph.  `strict` lets a rule's error out, where otherwise nothing is known."""
    shapes = Shapes(graph, strict)
    for node in graph.nodes:
        shapes.node(node)
    return shapes


class Shapes:
    """What is known of a graph's tensors, by name; kept up to date by `put` and `node` while the graph is rewritten."""

    def __init__(self, graph: Graph, strict: bool = False) -> None:
        """Take over what the model states and what onnx infers; `infer_shapes` then visits the nodes."""
        self.graph = graph
        self.strict = strict
        self._unknown: dict[Hashable, Dim] = {}
        self._shapes: dict[str, Shape | None] = {}
        self._dtypes: dict[str, int] = {}
        self._values: dict[str, Array | None] = {}
        self._stated = Stated(graph.model)

    def shape(self, tensor: Tensor) -> Shape | None:
        """The dimensions, of which unknown ones are symbols `?12` that equal only themselves; None: rank unknown."""
        name = tensor.name
        if name not in self._shapes:
            self._shapes[name] = tuple(tensor.shape) if is_constant(tensor) else self._stated_shape(name)
        return self._shapes[name]

    def rank(self, tensor: Tensor) -> int | None:
        """How many dimensions, where known."""
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def dtype(self, tensor: Tensor) -> int:
        """The element type, an onnx.TensorProto.DataType; 0 if unknown."""
        name = tensor.name
        if name not in self._dtypes:
            self._dtypes[name] = constant_dtype(tensor) if is_constant(tensor) else self._stated.dtype(name)
        return self._dtypes[name]

    def value(self, tensor: Tensor) -> Array | None:
        """The elements (int, Dim or bool) of an integer or bool tensor of up to 64, where all are known."""
        return self.exact_value(tensor) if self.dtype(tensor) in INTEGERS else None

    def exact_value(self, tensor: Tensor) -> Array | None:
        """As `value`, and for float tensors all of whose elements are integers."""
        if tensor.name not in self._values:
            self._values[tensor.name] = self.constant(tensor) if is_constant(tensor) else None
        return self._values[tensor.name]

    def constant(self, tensor: Tensor) -> Array | None:
        """The exact value of a constant, be it a tensor of the graph or an attribute."""
        if math.prod(tensor.shape) > LIMIT:
            return None
        try:
            return exact(constant_value(self.graph, tensor))
        except ModelError:  # its file is out of reach
            return None

    def put(self, tensor: Tensor, shape: Sequence[Size] | None, dtype: int) -> None:
        """State what a rewrite knows of a tensor that it made."""
        self._shapes[tensor.name] = None if shape is None else tuple(shape)
        self._dtypes[tensor.name] = dtype
        self._values.pop(tensor.name, None)

    def unknown(self, *key: Hashable) -> Dim:
        """A size of which nothing is known; the same one for the same key."""
        if key not in self._unknown:
            self._unknown[key] = symbol(f"{UNKNOWN}{len(self._unknown)}")
        return self._unknown[key]

    def node(self, node: Node) -> None:
        """Infer the outputs of one node anew from its inputs."""
        op = op_of(node)
        shapes = self._try(SHAPE_RULES, op, node)
        if shapes is None:
            shapes = self._try({op: infer_by_onnx}, op, node)
        for i, out in enumerate(node.outputs):
            shape = shapes if isinstance(shapes, tuple) else shapes[i] if shapes and i < len(shapes) else None
            self._shapes[out.name] = self._settled(out.name, shape)
            self._dtypes[out.name] = output_dtype(self, node, i) or self._stated.dtype(out.name)
        values = self._try(VALUE_RULES, op, node)
        for i, out in enumerate(node.outputs):
            value = values[i] if isinstance(values, list) else values
            fits = value is not None and value.size <= LIMIT and _fits(value, self._dtypes[out.name])
            self._values[out.name] = value if fits else None
            if value is not None:
                self._shapes[out.name] = value.shape
        for known in (self._shapes, self._dtypes, self._values):
            known.pop("", None)  # the name of every output that is left out

    def _stated_shape(self, name: str) -> Shape | None:
        stated = self._stated.shape(name)
        if stated is None:
            return None
        return tuple(
            size if isinstance(size, int | Dim) else self.unknown("onnx", size) if size else self.unknown(name, i)
            for i, size in enumerate(stated)
        )

    def _try(self, rules: Any, op: str, node: Node) -> Any:
        """The answer of the operator's rule; None where there is none."""
        found = rules.get(op)
        try:
            return found(self, node) if found else None
        except Undecided:
            return None
        except Exception:
            if self.strict:
                raise
            return None

    def _settled(self, name: str, shape: Partial | None) -> Shape | None:
        """Of a rule's and the stated shape the one that says more, dimension by dimension."""
        known = tuple(size for size in shape or () if size is not None and is_known(size))
        if shape is not None and len(known) == len(shape):
            return known
        stated = self._stated_shape(name)
        if shape is None:
            return stated
        if stated is None or len(stated) != len(shape):
            return tuple(self.unknown(name, i) if size is None else size for i, size in enumerate(shape))
        return tuple(
            other if size is None or (is_known(other) and not is_known(size)) else size
            for size, other in zip(shape, stated, strict=True)
        )


def _fits(value: Array, dtype: int) -> bool:
    """Whether the numbers among the elements are in the range of the dtype: what is not, the runtime wraps around."""
    low, high = INTEGERS.get(dtype, (-math.inf, math.inf))
    return all(low <= element <= high for element in value.flat if isinstance(element, int))
