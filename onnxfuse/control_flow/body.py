"""The body of an If, Loop or Scan as a separate graph, in which the tensors that it captures are additional inputs.

Every rewrite of the main graph can therefore also be applied to a body.  The values of outer initializers are known in
a body, but not copied into it, so that no initializer is duplicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx

from onnxfuse.algebra.operators import CONTROL_FLOW
from onnxfuse.algebra.sizes import UNKNOWN, Shape, Size
from onnxfuse.analysis.shape_info import OuterScope, ShapeInfo
from onnxfuse.control_flow.inputs import carried, known_inputs, scanned
from onnxfuse.control_flow.known_branches import with_known_branches
from onnxfuse.control_flow.repeated_shapes import infer_repeated
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.execution_order import outer_reads
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.graphsurgeon import constant_of
from onnxfuse.ir.node import Constant, Node, Tensor, has_subgraph, is_constant, op_of
from onnxfuse.ir.protos import copy_without, is_control_flow, nodes
from onnxfuse.ir.serde import read_subgraph


@dataclass(frozen=True)
class Body:
    """A body of an If, Loop or Scan as a graph, and its place in the graph around it."""

    node: Node
    index: int  # the body's index among the attributes of the node's message
    where: str  # the body's name in reports, such as "the else branch of If 'x'"
    graph: Graph
    shapes: ShapeInfo
    captured: frozenset[str]  # the outer tensors, except constants, that the body reads
    taken: tuple[onnx.NodeProto, ...]  # Ifs that were removed from the body because their conditions are known
    # Maps the name of each carried input of the body to (the name of its initial tensor, None), and the name of each
    # scanned input to (the name of the tensor that is sliced, the axis of the slices).
    begins: Mapping[str, tuple[str, int | None]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the body, including its inputs, by name."""
        return {tensor.name: tensor for tensor in self.graph.linked.inputs} | self.graph.linked.tensors()

    @property
    def result_shapes(self) -> list[Shape | None]:
        """The shapes of the body's results; None for each that is not known."""
        tensors = self.tensors
        names = [value.name for value in self.graph.model.graph.output]
        return [self.shapes.shape(tensors[name]) if name in tensors else None for name in names]


def read_bodies(graph: Graph, shapes: ShapeInfo, ops: Collection[str] = CONTROL_FLOW) -> Iterator[Body]:
    """Yield the bodies, not yet rewritten, of a sorted graph's Ifs, Loops and Scans (or only of operators in `ops`)."""
    found = [node for node in graph.nodes if has_subgraph(node) and is_control_flow(graph.protos[id(node)][1])]
    found = [node for node in found if op_of(node) in ops]
    surroundings = _Surroundings(graph, shapes) if found else None
    for node in found:
        assert surroundings
        message = graph.protos[id(node)][1]
        for index, attribute in enumerate(message.attribute):
            if attribute.HasField("g"):
                yield surroundings.body(node, index, message)


def write_body(outer: Graph, body: Body, written: onnx.ModelProto) -> None:
    """Replace the body of a node by its rewritten version `written`."""
    result = onnx.NodeProto()
    result.CopyFrom(outer.protos[id(body.node)][1])
    graph = result.attribute[body.index].g
    kept = copy_without(graph, "node", "initializer", "sparse_initializer", "value_info", "quantization_annotation")
    graph.CopyFrom(kept)
    for field in "node", "initializer", "sparse_initializer", "value_info", "quantization_annotation":
        getattr(graph, field).extend(getattr(written.graph, field))
    outer.protos[id(body.node)] = body.node, result
    _record_captured(outer, body, graph)
    _record_inputs(body, graph)
    _declare_results(body, graph)


def _record_captured(outer: Graph, body: Body, written: onnx.GraphProto) -> None:
    """Record the types of the captured tensors that fused nodes read in a body of an If, Loop or Scan.

    Kernels are planned from these types.
    """
    read = {name for node in nodes(written) if node.domain == DOMAIN for name in node.input}
    for tensor in body.graph.linked.inputs:
        if tensor.name in read and tensor.name in body.captured:
            outer.record_type(tensor, body.shapes.dtype(tensor), body.shapes.shape(tensor))


def _record_inputs(body: Body, written: onnx.GraphProto) -> None:
    """Record shapes of the body's inputs; the recorded shapes are correct in every iteration.

    Exporters may have recorded shapes that are correct only in the first iteration.  If the body already had fused
    nodes, the recorded shapes stay: an earlier optimization recorded them, and it knew more about the shapes.
    """
    if any(node.domain == DOMAIN for node in nodes(body.graph.model.graph)):
        return
    known = {tensor.name: tensor for tensor in body.graph.linked.inputs}
    for value in written.input:
        tensor = known.get(value.name)
        shape, dtype = (None, 0) if tensor is None else (body.shapes.shape(tensor), body.shapes.dtype(tensor))
        if shape is not None and dtype:
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(dtype, [_dim(size) for size in shape]))


def _declare_results(body: Body, written: onnx.GraphProto) -> None:
    """Declare the known shapes of a Scan's results.

    onnxruntime requires these shapes.  It infers them if an If computes a result, but not if a Loop does, and a Loop
    computes the result where a branch with the Loop has replaced an If whose condition is known.
    """
    if op_of(body.node) != "Scan":
        return
    for value, shape in zip(written.output, body.result_shapes, strict=True):
        tensor_type = value.type.tensor_type
        if shape is not None and tensor_type.elem_type and not tensor_type.HasField("shape"):
            dims = [_dim(size) for size in shape]
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(tensor_type.elem_type, dims))


class _Surroundings:
    """A graph, with the tensors and constants that the bodies of its If, Loop and Scan nodes can read, by name."""

    def __init__(self, graph: Graph, shapes: ShapeInfo) -> None:
        self.graph, self.shapes = graph, shapes
        self.tensors: dict[str, Tensor] = {t.name: t for t in graph.linked.inputs}
        self.tensors |= {t.name: t for node in graph.nodes for t in (*node.inputs, *node.outputs)}
        self.tensors |= graph.folded_for_subgraphs
        self.initializers = {t.name: t for t in graph.model.graph.initializer}
        self.readers = Counter(name for node in graph.nodes if has_subgraph(node) for name in self._captured(node))

    def _captured(self, node: Node) -> Iterator[str]:
        for attribute in self.graph.protos[id(node)][1].attribute:
            if attribute.HasField("g"):
                yield from set(outer_reads(attribute.g))

    def constant(self, name: str) -> Constant | None:
        """Return the constant of this name from this graph or the graphs around it; None if there is none."""
        if name in self.graph.outer_constants:
            return self.graph.outer_constants[name]
        tensor = self.tensors.get(name)
        if (
            tensor is None and name in self.initializers and name not in self.graph.fixed_names
        ):  # a caller can override an initializer with a fixed name
            return constant_of(self.initializers[name])
        return tensor if is_constant(tensor) else None

    def body(self, node: Node, index: int, message: onnx.NodeProto) -> Body:
        """Return a body as a graph, with the facts about its tensors."""
        graph = message.attribute[index].g
        read = dict.fromkeys(outer_reads(graph))
        constants = {name: found for name in read if (found := self.constant(name)) is not None}
        scope = self._scope(read)
        own = known_inputs(self.shapes, node, graph)
        scope = replace(
            scope,
            shapes={**scope.shapes, **{name: shape for name, (shape, _) in own.items()}},
            dtypes={**scope.dtypes, **{name: dtype for name, (_, dtype) in own.items() if dtype}},
            is_repeated=op_of(node) != "If" or self.shapes.is_repeated,
        )
        names = [value.name for value in graph.input]
        begun = carried(node, names)
        model, taken = _model(self.graph.model, graph, scope, read, begun), list[onnx.NodeProto]()
        while True:
            linked = read_subgraph(self.graph, model, read, constants)
            linked.fixed_names = frozenset(name for name in constants if self._is_shared(name))
            linked.sort()
            shapes = infer_repeated(linked, node, graph, scope)
            model, known = with_known_branches(model, shapes)
            taken += known
            if not known:
                break
        begins: dict[str, tuple[str, int | None]] = {name: (tensor.name, None) for name, tensor in begun.items()}
        begins |= {name: (tensor.name, axis) for name, (tensor, axis) in scanned(node, names).items()}
        captured = frozenset(name for name in read if name not in constants)
        where = _where(node, message.attribute[index].name)
        return Body(node, index, where, linked, shapes, captured, tuple(taken), begins)

    def _scope(self, names: Mapping[str, None]) -> OuterScope:
        """Return the facts about the tensors with these names.

        If the graph is itself a subgraph, its captured tensors are among its inputs, so their facts are known too.
        """
        shapes, dtypes, values = dict[str, Shape | None](), dict[str, int](), {}
        for name in names:
            tensor = self.tensors.get(name) or self.constant(name)
            if tensor is not None:
                shapes[name], dtypes[name] = self.shapes.shape(tensor), self.shapes.dtype(tensor)
                values[name] = self.shapes.exact_value(tensor)
        return OuterScope(shapes, {n: dtype for n, dtype in dtypes.items() if dtype}, values, self.shapes.numbers)

    def _is_shared(self, name: str) -> bool:
        """Return whether more than one body, or a node outside all bodies, reads a constant.

        A body must not change a shared constant: the original would stay for the other readers, and the changed copy
        would take more memory.
        """
        tensor = self.tensors.get(name)
        is_read = tensor is not None and bool(tensor.outputs)
        return is_read or self.readers[name] > 1 or name in self.graph.fixed_names or name in self.graph.outputs


def _where(node: Node, attribute: str) -> str:
    op, name = op_of(node), node.name or node.outputs[0].name
    return (
        f"the {attribute.removesuffix('_branch')} branch of If '{name}'" if op == "If" else f"the body of {op} '{name}'"
    )


def _model(
    model: onnx.ModelProto, graph: onnx.GraphProto, scope: OuterScope, read: Collection[str], begun: Collection[str]
) -> onnx.ModelProto:
    """Return a body as a model; the model's inputs are the body's own, followed by the tensors that the body captures.

    The carried inputs, `begun`, get no shape.  Their initial shapes, and the shapes that onnx would infer from these,
    may hold in the first iteration only.
    """
    result = copy_without(model, "graph", "functions")
    result.graph.CopyFrom(copy_without(graph, "input"))
    known = {value.name: value for value in graph.input}
    for name in (*known, *read):
        if name in scope.dtypes:
            dims = None if name in begun else scope.shapes.get(name)
            shape = None if dims is None else [_dim(size) for size in dims]
            result.graph.input.append(onnx.helper.make_tensor_value_info(name, scope.dtypes[name], shape))
        else:
            result.graph.input.append(known.get(name, onnx.ValueInfoProto(name=name)))
    return result


def _dim(size: Size) -> int | str | None:
    if isinstance(size, int):
        return size
    return None if UNKNOWN in str(size) else str(size)
