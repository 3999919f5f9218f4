"""Estimate the memory traffic, the arithmetic and the kernel launches of a graph, as in a roofline model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import onnx

from onnxfuse.algebra.operators import FREE
from onnxfuse.algebra.sizes import UNKNOWN, name_of, symbol, symbols
from onnxfuse.analysis.flops import count_flops
from onnxfuse.analysis.gathered_tables import gathered_tables
from onnxfuse.analysis.related_sizes import at_sizes
from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import assumed_number, item_bytes, tensor_bytes
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.node import Tensor, op_of

NO_SIZES: Final[Mapping[str, Sequence[int]]] = MappingProxyType({})


class NodeTraffic(NamedTuple):
    """The bytes that a node moves, its floating-point operations, and the TensorProto.DataType of its first input."""

    node: str  # its name, or its first output if it has none
    bytes: int
    flops: int
    dtype: int


@dataclass(frozen=True)
class Traffic:
    """Bytes and launches of a graph in which every node reads its inputs and writes its outputs once, in one launch.

    A node that looks up rows of a table reads only these rows.  `flops` counts the operations of products, convolutions
    and attentions; fused nodes and nodes of unknown shapes count as 0.  `assumed` maps the dynamic dims of the graph's
    inputs to their assumed sizes, by name; a dim without a name is called after its input and axis, as in "image[0]".
    """

    bytes: int
    launches: int
    flops: int = 0
    assumed: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[tuple[str, int, int, int]] = field(default=(), compare=False, repr=False)  # of `nodes`

    @property
    def nodes(self) -> list[NodeTraffic]:
        """The traffic of each node that is not free."""
        return [NodeTraffic(*row) for row in self.rows]


def estimate_traffic(graph: Graph, shapes: ShapeInfo, requested: Mapping[str, Sequence[int]] = NO_SIZES) -> Traffic:
    """Return the traffic of a graph for the sizes of inputs in `requested`; other dynamic dims get assumed sizes.

    A tensor of unknown rank or dtype counts as 0 bytes.  Outputs of nodes that were fused when the model was read have
    the shapes that the bodies of the nodes give them, so that a fused model gets the same estimate whenever it is read.
    """
    inside = _with_bodies(graph)
    with at_sizes(shapes, requested), at_sizes(inside, requested) if inside else nullcontext():
        return _estimate(graph, shapes, inside)


def _estimate(graph: Graph, shapes: ShapeInfo, inside: ShapeInfo | None) -> Traffic:
    """Return the traffic of a graph; `inside` has the shapes of the model as it was read, if it had fused nodes."""
    of_nodes: list[tuple[str, int, int, int]] = []
    total, flops = 0, 0
    computed = {tensor.name: tensor for node in inside.graph.nodes for tensor in node.outputs} if inside else {}
    sizes: dict[object, int] = {}
    of_tensors: dict[tuple[int, int], int] = {}  # by id and first axis
    bodies = {f"{f.domain}::{f.name}": f for f in graph.functions}

    def size_of(tensor: Tensor, first_axis: int = 0) -> int:
        place = id(tensor), first_axis
        if place not in of_tensors:
            known = shapes
            if inside and tensor.name in computed:
                known, tensor = inside, computed[tensor.name]
            key = known.shape(tensor), known.dtype(tensor), first_axis
            if (size := sizes.get(key)) is None:
                size = sizes[key] = tensor_bytes(known, *key)
            of_tensors[place] = size
        return of_tensors[place]

    for node in graph.nodes:
        if (op := op_of(node)) in FREE:
            continue
        moved = {t.name: size_of(t) for t in (*node.inputs, *node.outputs) if t.name}
        axis = int_attribute(node, "axis") if op == "Gather" else None
        for table_index, rows_index in gathered_tables(op, axis, node.inputs, bodies.get(op)).items():
            table, rows = node.inputs[table_index], node.inputs[rows_index]
            if shapes.dtype(rows) and table.name in moved:
                count = size_of(rows) // item_bytes(shapes.dtype(rows))
                moved[table.name] = min(moved[table.name], count * size_of(table, 1))
        label = node.name or next((tensor.name for tensor in node.outputs if tensor.name), "")
        count = assumed_number(shapes, count_flops(shapes, node) or 0)
        dtype = shapes.dtype(node.inputs[0]) if node.inputs and node.inputs[0].name else 0
        own = sum(moved.values())
        total, flops = total + own, flops + count
        of_nodes += [(label, own, count, dtype)]
    return Traffic(total, len(of_nodes), flops, _assumed_sizes(graph, shapes), of_nodes)


def assumed_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Return the sizes that estimates assume for the dynamic dims of a model's inputs, by name."""
    inputs = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    inputs.graph.input.extend(model.graph.input)
    shapes = read_and_infer(inputs, None)
    return _assumed_sizes(shapes.graph, shapes)


def relate_to_bodies(graph: Graph, shapes: ShapeInfo) -> None:
    """Estimate each unknown size of a model with fused nodes by the size that the bodies of these nodes give it."""
    inside = _with_bodies(graph)
    computed = {tensor.name: tensor for node in inside.graph.nodes for tensor in node.outputs} if inside else {}
    for tensor in (t for node in graph.nodes for t in node.outputs if t.name in computed):
        found = inside.shape(computed[tensor.name]) if inside else None
        for size, other in zip(shapes.shape(tensor) or (), found or (), strict=False):
            if inside and (name := name_of(size)) is not None and name.startswith(UNKNOWN):
                shapes.related[name] = assumed_number(inside, other)


def _with_bodies(graph: Graph) -> ShapeInfo | None:
    """Return the facts about the tensors of the model as it was read, with the bodies of its fused nodes inlined.

    None if the model had no fused nodes.
    """
    if not any(function.domain == DOMAIN for function in graph.model.functions):
        return None
    return read_and_infer(inline_functions(graph.model, fused=True).model, graph.folder)


def _assumed_sizes(graph: Graph, shapes: ShapeInfo) -> dict[str, int]:
    """Return the sizes that the estimate assumes for the dynamic dims of the graph's inputs."""
    found: dict[str, int] = {}
    for tensor in graph.linked.inputs:
        for axis, size in enumerate(shapes.shape(tensor) or ()):
            for name in symbols(size):
                shown = f"{tensor.name}[{axis}]" if name.startswith(UNKNOWN) else name
                found[shown] = assumed_number(shapes, symbol(name))
    return found
