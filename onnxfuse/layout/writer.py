"""Write channels-last tensors, the nodes that read and compute them, and Transposes at the ends of regions."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx.numpy_helper

from onnxfuse.algebra.index_maps import transposed
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Deferred, Graph, constant_value
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, is_constant
from onnxfuse.layout.axes import (
    IMAGE_RANKS,
    Perm,
    WeightLayout,
    has_one_pixel,
    to_first,
    to_last,
    weight_perm,
)
from onnxfuse.layout.bodies import channels_last_function
from onnxfuse.match.diagnostics import node_name
from onnxfuse.passes.emit import write
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import Fused, LocalFunctions, attributes_of


@dataclass(frozen=True)
class Border:
    """A Transpose of a tensor between the two layouts; if the image has one pixel, a Reshape, which moves nothing."""

    tensor: Tensor  # the channels-first tensor
    node: Node
    inward: bool  # True: from channels-first to channels-last


@dataclass(frozen=True)
class ImageCall:
    """A call of a channels-last function.

    `operands` maps operand names of the body to the tensors that the call reads; `images` names the operands that
    become channels-last, and `perms` maps the names of other transposed operands to their perms.  `attributes` holds
    the fused node's attributes except `fusion`.  Images in the body are channels-first, unless `is_channels_last`.

    If `is_deferred`, the body's last operator is written in place of the call, so that an elementwise region can fuse
    it.  This operator works on channels-last images unchanged.
    """

    fusion: str
    body: onnx.FunctionProto
    operands: Mapping[str, Tensor]
    attributes: Mapping[str, AttributeValue]
    images: Collection[str] = ("x",)
    perms: Mapping[str, Perm] = field(default_factory=dict)
    is_channels_last: bool = False
    is_deferred: bool = False


@dataclass
class Writer:
    """Rewrites regions of a graph to channels-last, node by node in execution order."""

    graph: Graph
    shapes: ShapeInfo
    functions: LocalFunctions
    recorded: frozenset[str]  # names of fused nodes that already have a record
    fused: list[Fused] = field(default_factory=list)  # records of the fused nodes that are not in `recorded`
    borders: list[Border] = field(default_factory=list)
    # New tensor -> the tensor that it is a Transpose of, and the perm.
    originals: dict[str, tuple[str, Perm]] = field(default_factory=dict)
    written: set[Node] = field(default_factory=set)  # the nodes that were written channels-last
    vectors: dict[Hashable, Tensor] = field(default_factory=dict)  # results of `vectors.in_order`, for reuse
    _images: dict[str, Tensor] = field(default_factory=dict)  # channels-first name -> channels-last version
    # Channels-first name -> channels-last version that a node computes.
    _computed: dict[str, Tensor] = field(default_factory=dict)
    _constants: dict[tuple[str, Perm], Constant] = field(default_factory=dict)

    # --- tensors -------------------------------------------------------------------------------------------------

    def is_computed_last(self, tensor: Tensor) -> bool:
        """Return whether an already written node computes the channels-last version of a tensor."""
        return tensor.name in self._computed

    def image(self, tensor: Tensor) -> Tensor:
        """Return the channels-last version of a tensor; if no node computes it, add a Transpose."""
        if tensor.name not in self._images:
            self._images[tensor.name] = self._new(tensor)
            self._add_border(tensor, inward=True)
        return self._images[tensor.name]

    def computed(self, tensor: Tensor) -> Tensor:
        """Return a new tensor for the channels-last version of a tensor, which a node will compute."""
        self._computed[tensor.name] = tensor
        self._images[tensor.name] = self._new(tensor)
        return self._images[tensor.name]

    def broadcast(self, constant: Constant, rank: int) -> Constant:
        """Return a constant that broadcasts to channels-last images of this rank.

        `constant` broadcasts to the same images in the channels-first layout.
        """
        if math.prod(constant.shape) == 1:
            return constant
        key = constant.name, to_last(rank)
        if key not in self._constants:
            value = constant_value(self.graph, constant)
            value = value.reshape((1,) * (rank - value.ndim) + value.shape).transpose(to_last(rank))
            self._constants[key] = self.graph.constant(f"{constant.name}/nhwc", np.ascontiguousarray(value))
        return self._constants[key]

    def computed_by(
        self, op: str, inputs: Sequence[Tensor], stem: str, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Tensor:
        """Add a node, and return its result, with its type and value as far as they are known."""
        output = write(self.shapes, op, inputs, stem, attributes)
        self.graph.record_type(output, self.shapes.dtype(output), self.shapes.shape(output))
        return output

    def weight(self, weight: Constant, layout: WeightLayout) -> Constant:
        """Return a convolution's weights in this layout; the result is cached, so that all users share it."""
        perm = weight_perm(layout, len(weight.shape))
        if (weight.name, perm) not in self._constants:
            value = np.ascontiguousarray(constant_value(self.graph, weight).transpose(perm))
            stored = self.graph.constant(f"{weight.name}/{layout}", value)
            self._constants[weight.name, perm] = stored
            self.originals[stored.name] = weight.name, perm
        return self._constants[weight.name, perm]

    def _new(self, tensor: Tensor) -> Tensor:
        new, perm = self.graph.variable(f"{tensor.name}/nhwc"), to_last(image_rank(self.shapes, tensor))
        shape, dtype = self.shapes.shape(tensor), self.shapes.dtype(tensor)
        self.shapes.record(new, None if shape is None else transposed(shape, perm), dtype)
        self.graph.record_type(new, dtype, self.shapes.shape(new))
        self.originals[new.name] = tensor.name, perm
        return new

    # --- borders -------------------------------------------------------------------------------------------------

    def end_regions(self) -> None:
        """Add a Transpose for each channels-first tensor that is still read or must keep its name."""
        for tensor in self._computed.values():
            if tensor.outputs or self.graph.is_kept(tensor):
                self._add_border(tensor, inward=False)

    def _add_border(self, tensor: Tensor, *, inward: bool) -> None:
        first, last = tensor, self._images[tensor.name]
        source, result = (first, last) if inward else (last, first)
        shape = self.shapes.shape(result)
        target = [0 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(shape or ())]
        is_constant_target = all(isinstance(size, int) for size in target) and 0 not in (shape or ())
        if has_one_pixel(self.shapes.shape(first)) and is_constant_target:
            stored = self.graph.constant(f"{result.name}/shape", np.array(target, np.int64))
            node = self.graph.add_node("Reshape", [source, stored], [result])
        else:
            perm = (to_last if inward else to_first)(image_rank(self.shapes, tensor))
            node = self.graph.add_node("Transpose", [source], [result], {"perm": list(perm)})
        self.borders.append(Border(tensor, node, inward))

    # --- nodes ---------------------------------------------------------------------------------------------------

    def rewrite(
        self,
        node: Node,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attributes: Mapping[str, AttributeValue | None] | None = None,
    ) -> None:
        """Change the inputs and outputs of a node; if its attributes change, a new node replaces it.

        An attribute with the value None is removed.  A node without a name gets its label as its name.
        """
        attrs = {**node.attrs, **(attributes or {})}
        kept, node.name = {name: value for name, value in attrs.items() if value is not None}, node_label(node)
        node.inputs.clear()
        node.outputs.clear()
        if attributes is None:
            node.inputs.extend(inputs)
            node.outputs.extend(outputs)
        else:
            node = self.graph.add_node(node.op, inputs, outputs, kept, name=node.name, domain=node.domain or "")
        self.written.add(node)

    def call(self, node: Node, call: ImageCall) -> None:
        """Replace a node by the call of a channels-last function; only the outputs that `call.body` computes remain."""
        body = call.body
        outputs = node.outputs[: len(body.output)]
        ranks = [self.shapes.rank(output) or 0 for output in outputs]
        perms_of_outputs = {
            name: to_last(rank) for name, rank in zip(body.output, ranks, strict=True) if rank in IMAGE_RANKS
        }
        stated = "fusion", "operands", "output_types", "attributes"
        own = {name: value for name, value in call.attributes.items() if name not in stated}
        own |= {"layout": "nhwc"}
        every = attributes_of(self.shapes, call.fusion, call.operands, outputs, own)
        operands = {name: self.image(t) if name in call.images else t for name, t in call.operands.items()}
        perms = {**call.perms, **{name: to_last(image_rank(self.shapes, call.operands[name])) for name in call.images}}
        inner = {new: perms[name] for name, new in zip(operands, body.input, strict=True) if name in perms}
        function = body if call.is_channels_last else channels_last_function(body, inner, perms_of_outputs)
        function.name, function.attribute[:] = call.fusion, sorted(every)
        name = node.name if node.domain == DOMAIN else self.graph.unique_name(f"{node_name(outputs[0])}/{call.fusion}")
        if name not in self.recorded:
            self.fused.append(Fused(call.fusion, name, (node.name or outputs[0].name,), {}, outputs[0].name))
        node.inputs.clear()
        node.outputs.clear()
        made = [
            self.computed(tensor) if output in perms_of_outputs else tensor
            for output, tensor in zip(body.output, outputs, strict=True)
        ]
        op = self.functions.add(function)
        if call.is_deferred:
            new = self._operator(body, operands, made, name)
            read = list(body.node[-1].input)
            self.graph.deferred[new] = Deferred(op, every, [read.index(operand) for operand in body.input])
        else:
            new = self.graph.add_node(op, operands.values(), made, every, name=name, domain=DOMAIN)
        self.written.add(new)

    def _operator(
        self, body: onnx.FunctionProto, operands: Mapping[str, Tensor], outputs: Sequence[Tensor], name: str
    ) -> Node:
        """Add the last operator of a body, with the constants before it."""
        *constants, last = body.node
        tensors = dict(zip(body.input, operands.values(), strict=True))
        for each in constants:
            value = onnx.numpy_helper.to_array(each.attribute[0].t)
            tensors[each.output[0]] = self.graph.constant(f"{name}/{each.output[0]}", value)
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in last.attribute}
        return self.graph.add_node(last.op_type, [tensors[n] for n in last.input], outputs, attributes, name=name)


def image_rank(shapes: ShapeInfo, tensor: Tensor) -> int:
    """Return the rank of a computed tensor that can be an image; 0 if it cannot be one."""
    rank = shapes.rank(tensor) if tensor.name and not is_constant(tensor) else None
    return rank if rank in IMAGE_RANKS else 0
