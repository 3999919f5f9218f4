"""Rewrite a model to compute in half precision, with Casts around the nodes that must stay in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import read_bodies, write_body
from onnxfuse.half.choose import Known, choose
from onnxfuse.half.masks import adding_masks, masked_inputs
from onnxfuse.half.operators import READS_ANY, half_inputs, half_outputs, keeps_dtypes
from onnxfuse.half.precision import FLOAT16, REAL, Kept
from onnxfuse.half.scope import Scope
from onnxfuse.half.weights import ScratchFolder
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.graphsurgeon import constant_of, copy_of, new_node
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, is_constant, is_outer, op_of
from onnxfuse.ir.protos import has_external_data
from onnxfuse.ir.serde import write_model
from onnxfuse.passes.emit import write
from onnxfuse.passes.folded import node_label

FLOAT = TensorProto.FLOAT
IS_INF_OPSET: Final = 10  # the first opset with IsInf
Io: TypeAlias = Literal["float32", "half"]


@dataclass(frozen=True)
class Converted:
    """A model in half precision, the folder of its external data, and the nodes that stayed in float32."""

    model: onnx.ModelProto
    folder: Path | None
    nodes: int  # number of nodes that compute on floating-point numbers
    kept: tuple[Kept, ...]  # nodes that stay because of their values
    by_rule: tuple[Kept, ...]  # nodes that stay because of their operators
    types: Mapping[str, int]  # the dtypes that tensors of the main graph have now
    scratch: ScratchFolder | None = None
    added_masks: int = 0  # number of softmaxes whose fully masked rows have other weights than in float32


def convert(model: onnx.ModelProto, known: Known, io: Io = "float32") -> Converted:
    """Return the model in half precision.

    io  "half" converts the graph's inputs and outputs too
    """
    weights = known.weights
    if has_external_data(model):
        weights.scratch = ScratchFolder()
    main = _Part(known, read_and_infer(model, weights.folder))
    written = main.converted(io)
    parts = main.everywhere()
    return Converted(
        written,
        weights.folder if weights.scratch is None else weights.scratch.path,
        sum(part.nodes for part in parts),
        tuple(each for part in parts for each in part.kept),
        tuple(each for part in parts for each in part.by_rule),
        main.dtypes,
        weights.scratch,
        sum(part.added_masks for part in parts),
    )


class _Part:
    """A graph during conversion: the main graph, or the body of an If, Loop or Scan in the graph `outer`."""

    def __init__(self, known: Known, shapes: ShapeInfo, outer: _Part | None = None) -> None:
        self.known, self.graph, self.outer = known, shapes.graph, outer
        self.half, self.scope = known.precision.number, Scope(shapes)
        self.choice = choose(self.scope, known)
        self.kept, self.by_rule = (
            [Kept(node_label(node), node.op, why) for node, why in each.items()]
            for each in (self.choice.kept, self.choice.by_rule)
        )
        self.clamped = set(self.choice.clamped)
        self.nodes = sum(map(self.scope.computes, self.graph.nodes))
        self.added_masks = 0
        if known.precision is FLOAT16:  # in bfloat16, as in float32, a score added to the lowest number vanishes
            self.added_masks = sum(1 for _ in adding_masks(self.scope, self._is_lowest, self.choice.is_wide))
        self.dtypes: dict[str, int] = {}  # current dtypes of this graph's tensors
        self.outputs: dict[str, int] = {}  # the dtypes of the graph's outputs
        self.casts: dict[tuple[str, int], Tensor] = {}  # the Cast of a tensor, by the tensor's name and the dtype
        self.weights: dict[tuple[str, int], Constant] = {}  # a converted constant, by its name and the dtype
        self.stored: dict[str, tuple[int, bool]] = {}  # by constant: its dtype now, and whether it is a mask or a bound
        self.sources: dict[str, Tensor] = {}  # inputs of removed Casts, by the Casts' outputs
        self.inner: list[_Part] = []

    def everywhere(self) -> list[_Part]:
        """Return this graph and the graphs of all bodies inside it."""
        return [self, *(each for part in self.inner for each in part.everywhere())]

    def converted(self, io: Io) -> onnx.ModelProto:
        """Return the graph as a model in half precision, except for the nodes that stay in float32."""
        graph, shapes = self.graph, self.scope.shapes
        bodies = list(read_bodies(graph, shapes))
        for tensor in graph.linked.inputs:
            if not is_outer(tensor):
                is_half = io == "half" and self.scope.is_real(tensor) and tensor.name not in graph.fixed_names
                self.dtypes[tensor.name] = self.half if is_half else shapes.dtype(tensor)
        for value in graph.model.graph.output:
            output = self.scope.tensors.get(value.name)
            dtype = value.type.tensor_type.elem_type or (shapes.dtype(output) if output else 0)
            self.outputs[value.name] = self.half if io == "half" and dtype in REAL else dtype
            if is_constant(output) and dtype in REAL:
                self._weight(output, self.outputs[value.name])
        nodes, graph.linked.nodes = graph.nodes, []  # nodes are appended again below, together with Casts
        for node in nodes:
            self._convert(node)
        for body in bodies:
            self.inner.append(_Part(self.known, body.shapes, self))
            write_body(graph, body, self.inner[-1].converted("float32"))
        graph.update_captured()
        graph.remove_dead()
        graph.sort()
        return self._written()

    def _written(self) -> onnx.ModelProto:
        """Return the graph as a model, with the weights and the recorded types in the dtypes that they have now."""
        model = write_model(self.graph)
        graph = model.graph
        for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
            dtype, clamp = self.stored.get(tensor.name, (self.outputs.get(tensor.name) or tensor.data_type, False))
            tensor.CopyFrom(self.known.weights.converted(tensor, dtype, clamp))
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.tensor_type.elem_type in REAL:
                dtype = self.dtypes.get(value.name, value.type.tensor_type.elem_type)
                value.type.tensor_type.elem_type = self.outputs.get(value.name) or dtype
        return model

    # --- nodes -----------------------------------------------------------------------------------------------

    def _convert(self, node: Node) -> None:
        """Append a node, with its inputs cast to the dtypes that it must read, and its outputs in their new dtypes."""
        scope, opset, precision, op = self.scope, self.graph.opset, self.known.precision, op_of(node)
        reads, writes = scope.real_inputs(node), scope.real_outputs(node)
        wide = self.choice.is_wide(node)
        keeps = wide and (keeps_dtypes(op) or bool(scope.untyped(node)))
        takes = half_inputs(op, len(node.inputs), opset, precision)
        inputs = frozenset[int]() if wide else takes
        outputs = frozenset[int]() if wide else half_outputs(node, opset, precision)
        for k, tensor in enumerate(node.inputs):
            if not scope.is_real(tensor):
                continue
            if op in READS_ANY and k in takes and not is_constant(tensor):
                node.inputs[k] = self._source(tensor)
            else:
                dtype = self.half if k in inputs else scope.shapes.dtype(tensor) if keeps else FLOAT
                node.inputs[k] = self._read(tensor, dtype, node)
        if op == "Cast" and reads and writes and not is_constant(reads[0]):
            (result,), source = node.outputs, node.inputs[0]
            if self._dtype(source) == self.half or not self.graph.is_kept(result):
                self.sources[result.name] = source
                node.inputs.clear()
                node.outputs.clear()
                if self.graph.is_kept(result):  # a new Cast writes it; other consumers read the source, unrounded
                    wanted = self.dtypes[result.name] = self.outputs.get(result.name) or self.half
                    self._cast(source, result, wanted)
                    self.casts.setdefault((source.name, wanted), result)
                return
        if op == "Cast" and writes:
            node = self._with_attributes(node, {**node.attrs, "to": FLOAT if wide else self.half})
        elif op in ("Constant", "ConstantOfShape") and writes and not wide:
            node = self._with_attributes(node, {"value": self._filling(node)})
        self.graph.nodes.append(node)
        for k, tensor in enumerate(node.outputs):
            if scope.is_real(tensor):
                dtype = self.half if k in outputs else scope.shapes.dtype(tensor) if keeps else FLOAT
                node.outputs[k] = self._output(tensor, dtype)

    def _with_attributes(self, node: Node, attributes: dict[str, AttributeValue]) -> Node:
        """Return a new node that replaces `node`: it has the same tensors, but other attributes."""
        inputs, outputs = list(node.inputs), list(node.outputs)
        node.inputs.clear()
        node.outputs.clear()
        return new_node(node.op, node.name, attributes, inputs, outputs, None)

    def _filling(self, node: Node) -> Constant:
        """Return the value of a Constant or a ConstantOfShape in half precision."""
        found = next(iter(node.attrs.values()), [0.0])
        value = constant_value(self.graph, found) if is_constant(found) else np.array(found, np.float32)
        return constant_of(onnx.numpy_helper.from_array(self.known.precision.clamped(value)))

    def _output(self, tensor: Tensor, dtype: int) -> Tensor:
        """Return the tensor that a node writes; a new one if a graph output must keep another dtype."""
        wanted = self.outputs.get(tensor.name) or dtype
        self.dtypes[tensor.name] = wanted
        if wanted == dtype:
            return tensor
        own = self.casts[tensor.name, dtype] = self._variable(tensor, dtype)
        self._cast(own, tensor, wanted)
        return own

    def _cast(self, source: Tensor, result: Tensor, to: int) -> Tensor:
        self.graph.add_node("Cast", [source], [result], {"to": to}, name=self.graph.unique_name(f"Cast_{result.name}"))
        return result

    # --- tensors ---------------------------------------------------------------------------------------------

    def _variable(self, tensor: Tensor, dtype: int) -> Tensor:
        return self.graph.variable(self._name(tensor, dtype))

    def _name(self, tensor: Tensor, dtype: int) -> str:
        return f"{tensor.name}_{'half' if dtype == self.half else 'float32'}"

    def _dtype(self, tensor: Tensor) -> int:
        """Return the dtype that a tensor has now."""
        found = self.dtypes.get(tensor.name) or (self.outer._dtype(tensor) if self.outer else 0)
        return found or self.scope.shapes.dtype(tensor)

    def _source(self, tensor: Tensor) -> Tensor:
        """Return the input of a removed Cast, if the tensor was its output; else the tensor itself."""
        return self.sources.get(tensor.name, tensor)

    def _read(self, tensor: Tensor, dtype: int, reader: Node | None = None) -> Tensor:
        """Return a tensor in the dtype `dtype`, through a Cast if it has another dtype."""
        if is_constant(tensor):
            return self._weight(tensor, dtype)
        tensor = self._source(tensor)
        present = self._dtype(tensor)
        if present == dtype:
            return tensor
        if (tensor.name, dtype) not in self.casts:
            source, result = tensor, self._variable(tensor, dtype)
            is_float16 = present == TensorProto.FLOAT16  # float16's range fits into bfloat16
            if dtype == self.half and not is_float16 and reader is not None and self._may_be_mask(tensor, reader):
                source = self._bounded(self._read(tensor, FLOAT))
            self.casts[tensor.name, dtype] = self._cast(source, result, dtype)
        return self.casts[tensor.name, dtype]

    def _may_be_mask(self, tensor: Tensor, reader: Node) -> bool:
        """Return whether a float32 operand may be a mask of attention scores with values below half precision's range.

        Only nodes that compute scores, or addends of scores, read such masks; `reader` reads the operand.
        """
        if reader not in self.choice.scores and not any(each is tensor for each in masked_inputs(reader)):
            return False
        seen, precision = self.known.ranges.get(tensor.name), self.known.precision
        if tensor.inputs:
            return seen is not None and seen.lowest < -precision.largest
        return seen is None or seen.lowest < -precision.limit

    def _is_lowest(self, tensor: Tensor) -> bool:
        """Return whether a constant, or a tensor in the observed runs, holds numbers below half precision's range."""
        lowest, seen = -self.known.precision.largest, self.known.ranges.get(tensor.name)
        if tensor.name in self.clamped and is_constant(tensor):
            return bool((constant_value(self.graph, tensor) < lowest).any())
        return seen is not None and seen.lowest < lowest

    def _bounded(self, tensor: Tensor) -> Tensor:
        """Return a tensor in which half precision's lowest number replaces all lower finite numbers.

        -inf stays as it is, except before opset IS_INF_OPSET.
        """
        shapes, lowest, stem = self.scope.shapes, -self.known.precision.largest, f"{tensor.name}_bounded"
        if self.graph.opset < IS_INF_OPSET:
            return write(shapes, "Clip", [tensor], stem, {"min": lowest})
        bound = self.graph.constant(f"{tensor.name}_lowest", np.array(lowest, np.float32))
        finite = write(shapes, "Max", [tensor, bound], f"{tensor.name}_finite")
        is_infinite = write(shapes, "IsInf", [tensor], f"{tensor.name}_is_infinite")
        return write(shapes, "Where", [is_infinite, tensor, finite], stem)

    def _weight(self, tensor: Constant, dtype: int) -> Constant:
        """Return a constant in the dtype `dtype`; the graph that owns it stores one copy for each dtype."""
        key = tensor.name, dtype
        if key in self.weights:
            return self.weights[key]
        made, is_outer_constant = tensor, tensor.name in self.graph.outer_constants
        if is_outer_constant:
            assert self.outer is not None
            self.outer.clamped |= self.clamped & {tensor.name}
            name = self.outer._weight(tensor, dtype).name
        else:
            is_first = tensor.name not in self.stored
            name = tensor.name if is_first else self.graph.unique_name(self._name(tensor, dtype))
            self.stored[name] = dtype, tensor.name in self.clamped
        if name != tensor.name:
            made = copy_of(tensor, name)
            owned = self.graph.outer_constants if is_outer_constant else self.graph.folded_for_subgraphs
            owned[name] = made
        self.weights[key] = made
        return made
