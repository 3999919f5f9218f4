"""Shape inference: visit the nodes in order, infer the shapes and values of their outputs by rules, and record them.

A shape comes from the rules of `shape_rules` and `value_rules`, else from onnx's inference of the single node, else
from onnx's inference of the whole model.  The exporter may have recorded shapes for inputs of other sizes than the
model has now.  Its records are used only for operators outside the ONNX domain that have no rule.  They are not used at
all if any of them contradicts an inferred shape, or if runtimes disagree about the size of a Slice in the model.

Operators also constrain the sizes of their inputs.  A table of 512 positions, sliced to [:seq], has Min(512, seq) rows;
if it is added to an input of seq tokens, the Add can run only where Min(512, seq) equals seq.  A Conv can run only on
images with as many channels as its weights have.  After such findings, all tensors are inferred again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import onnx
from onnx import TensorProto

from onnxfuse.algebra.sizes import Dim
from onnxfuse.analysis.onnx_inference import infer_by_onnx
from onnxfuse.analysis.output_dtypes import output_dtype
from onnxfuse.analysis.related_sizes import relate_batch, relate_sizes
from onnxfuse.analysis.rules import apply_rule
from onnxfuse.analysis.shape_info import OuterScope, PartialShape, ShapeInfo
from onnxfuse.analysis.shape_rules import SHAPE_RULES
from onnxfuse.analysis.value_rules import VALUE_RULES
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import INTEGER_RANGES
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, op_of
from onnxfuse.ir.serde import read_graph

MAX_ROUNDS = 4  # maximum number of inference rounds; each can find new constraints on sizes


def read_and_infer(model: onnx.ModelProto, folder: Path | None) -> ShapeInfo:
    """Read and sort a model's main graph, and return the facts about its tensors; `ShapeInfo.graph` is the graph.

    Raises ModelError for a graph with a cycle, and for fused nodes of another version of onnxfuse.
    """
    graph = read_graph(model, folder)
    graph.sort()
    return infer_shapes(graph)


def infer_shapes(graph: Graph, strict: bool = False, scope: OuterScope | None = None) -> ShapeInfo:
    """Infer the tensors of a sorted graph, correct wrong shapes that the model records, and return the facts.

    With `strict`, an error of a rule is raised; otherwise the outputs of the node with the error stay unknown.  `scope`
    holds the facts about a subgraph's inputs.
    """
    scope = scope or OuterScope()  # one for all rounds, so that no round gives a name that an earlier one has given
    shapes = _inferred(ShapeInfo(graph, strict, scope=scope))
    for _ in range(MAX_ROUNDS - 1):
        if shapes.learned() == shapes.known:
            break
        shapes = _inferred(ShapeInfo(graph, strict, scope=scope, learned=shapes.learned()))
    correct_records(shapes, graph.nodes)
    if scope.is_repeated:
        return shapes
    is_stale = any(shapes.contradicts_record(tensor.name) for node in graph.nodes for tensor in node.outputs)
    if is_stale or shapes.infos.has_ambiguous_slices or not any(_needs_records(shapes, node) for node in graph.nodes):
        return shapes
    return _inferred(ShapeInfo(graph, strict, shapes.infos, scope, shapes.learned()))


def _inferred(shapes: ShapeInfo) -> ShapeInfo:
    for tensor in shapes.graph.linked.inputs:
        relate_batch(shapes, tensor)
        shapes.require_noted(tensor)
    for node in shapes.graph.nodes:
        infer_node(shapes, node)
    return shapes


def infer_behind(shapes: ShapeInfo, changed: Collection[Node]) -> None:
    """Infer again the outputs of nodes that a pass changed, and of all nodes after them.

    The shapes that the model records for these tensors date from before the change, so they are corrected.
    """
    behind: list[Node] = []
    moved: set[str] = set()
    for node in shapes.graph.nodes:
        if node in changed or not moved.isdisjoint(shapes.graph.reads(node)):
            moved.update(tensor.name for tensor in node.outputs)
            if not _is_foreign(shapes, node):  # the outputs of operators outside the ONNX domain keep their shapes
                infer_node(shapes, node)
                behind.append(node)
    correct_records(shapes, behind)


def correct_records(shapes: ShapeInfo, nodes: Iterable[Node]) -> None:
    """Correct recorded types that are wrong, or that have a symbol where inference found a number.

    Unproven names of sizes are removed from the recorded shapes of computed tensors, because onnxruntime assumes that
    equal names are equal sizes, and reuses memory accordingly.  A model with fused nodes keeps its names: they were
    proved when it was written.
    """
    is_optimized = any(function.domain == DOMAIN for function in shapes.graph.model.functions)
    inputs = ((tensor, False) for tensor in shapes.graph.linked.inputs)
    computed = ((tensor, _is_foreign(shapes, node)) for node in nodes for tensor in node.outputs)
    for tensor, foreign in (*inputs, *computed):
        # Of the output of a fused node, inference may know less than what was recorded when the node was written.
        is_settled = shapes.is_settled(tensor.name) and not (is_optimized and foreign)
        if shapes.contradicts_record(tensor.name, zeros_count=True) or is_settled:
            shapes.graph.correct_type(tensor, shapes.dtype(tensor), shapes.shape(tensor))
        elif not is_optimized and (proven := shapes.without_unproven_names(tensor.name, foreign)) is not None:
            shapes.graph.record_type(tensor, shapes.recorded_dtype(tensor), proven)


def _needs_records(shapes: ShapeInfo, node: Node) -> bool:
    return _is_foreign(shapes, node) and any(
        shapes.shape(t) is None and shapes.infos.recorded_shape(t.name) is not None for t in node.outputs if t.name
    )


def _is_foreign(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether the operator is outside the ONNX domain."""
    return schema(op_of(node), shapes.graph.opset) is None


def infer_node(shapes: ShapeInfo, node: Node) -> None:
    """Infer the outputs of a node from its inputs; the results replace earlier facts."""
    op = op_of(node)
    inferred = apply_rule(SHAPE_RULES.get(op), shapes, node)
    if inferred is None:
        inferred = apply_rule(infer_by_onnx, shapes, node)
    is_foreign = _is_foreign(shapes, node)
    for i, output in enumerate(node.outputs):
        if isinstance(inferred, list):
            shape = inferred[i] if i < len(inferred) else None
        else:
            shape = inferred
        if shape is not None and not all(map(_is_size, shape)):  # the node is invalid: a size is negative or no integer
            shape = None
        completed = shapes.completed(output.name, shape and _recordable(shapes, output.name, shape), is_foreign)
        if output.name:  # an omitted output has no name
            shapes.record(output, completed, output_dtype(shapes, node, i) or shapes.recorded_dtype(output))
            if shapes.infos.noted:
                shapes.require_noted(output)
    relate_sizes(shapes, node)
    values = apply_rule(VALUE_RULES.get(op), shapes, node)
    for i, output in enumerate(node.outputs):
        if output.name:
            shapes.record_value(output, values[i] if isinstance(values, list) else values)


def _is_size(size: object) -> bool:
    return size is None or isinstance(size, Dim) or (isinstance(size, int) and size >= 0)


def _recordable(shapes: ShapeInfo, name: str, shape: PartialShape) -> PartialShape:
    """Return the shape with an unknown size for each number beyond int64, because models cannot record such numbers."""
    largest = INTEGER_RANGES[TensorProto.INT64][1]
    return [shapes.unknown(name, i) if isinstance(n, int) and n > largest else n for i, n in enumerate(shape)]
