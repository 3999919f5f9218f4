"""Where runtimes disagree about the end of a backward Slice, write the end that onnxruntime's kernels take.

A backward slice to INT32_MAX or INT64_MAX is empty in ONNX, but goes to the first element in onnxruntime's kernel.
However, onnxruntime plans which tensors share memory as if the slice were empty.  Such a model runs, or ends in "Shape
mismatch attempting to re-use buffer", depending on its other nodes and on whether the shape of the sliced tensor is
known.  Removing unused nodes, or folding the target of a Reshape, was enough to break it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper

from onnxfuse.analysis.shape_inference import infer_behind
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, array_of
from onnxfuse.ir.node import Node, has_subgraph, is_constant, op_of
from onnxfuse.ir.protos import ONNX_DOMAINS, NodeContainer, OneNode, nodes, overridable_initializers, subgraphs
from onnxfuse.ir.slices import ENDS, STEPS, has_steps, is_ambiguous_end
from onnxfuse.passes.fold_constants import value_of_constant_node
from onnxfuse.passes.graph_pass import graph_pass

Part: TypeAlias = "onnx.GraphProto | onnx.FunctionProto"


@graph_pass()
def normalize_backward_slices(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace constant ends that are ambiguous by the lowest integer; return the number of nodes changed.

    Slices in subgraphs and in the model's own functions are changed as well.
    """
    found = [node for node in graph.nodes if op_of(node) == "Slice" and _settle(graph, shapes, node)]
    if found:
        infer_behind(shapes, found)
    return len(found) + _settle_in_subgraphs(graph) + _settle_in_functions(graph)


def _settle(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    if len(node.inputs) <= STEPS or not is_constant(node.inputs[ENDS]):
        return False
    old = node.inputs[ENDS]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(shapes.dtype(old))
    settled = _settled(shapes.value(old), shapes.value(node.inputs[STEPS]), dtype)
    if settled is not None:
        node.inputs[ENDS] = graph.constant(f"{old.name}_settled", settled)
    return settled is not None


def _settled(ends: Array | None, steps: Array | None, dtype: np.dtype[Any]) -> Array | None:
    """Return the ends of a Slice with ambiguous ends replaced; None if no end is ambiguous, or any value is unknown."""
    if ends is None or steps is None or not ends.shape == steps.shape == (ends.size,):
        return None
    ambiguous = [is_ambiguous_end(end, step) for end, step in zip(ends.tolist(), steps.tolist(), strict=True)]
    return np.where(ambiguous, np.iinfo(dtype).min, ends.astype(dtype)) if any(ambiguous) else None


def _settle_in_subgraphs(graph: Graph) -> int:
    count = 0
    for node in filter(has_subgraph, graph.nodes):
        proto = graph.protos[id(node)][1]
        names = _bounds(OneNode((proto,)))
        if names:
            changed = onnx.NodeProto()
            changed.CopyFrom(proto)
            outer = _constants(graph, graph.model.graph, names, overridable_initializers(graph.model))
            count += sum(_settle_messages(graph, inner, outer) for inner in subgraphs(changed))
            graph.protos[id(node)] = (node, changed)
    return count


def _settle_in_functions(graph: Graph) -> int:
    count = 0
    for i, function in enumerate(graph.functions):
        if _bounds(function):
            body = onnx.FunctionProto()
            body.CopyFrom(function)
            count += _settle_messages(graph, body, {})
            graph.functions[i] = body
    return count


def _settle_messages(graph: Graph, part: Part, outer: Mapping[str, Array]) -> int:
    """Replace ambiguous ends of Slices in a graph or function; `outer` are the constants of the graphs around it."""
    inputs = {each if isinstance(each, str) else each.name for each in part.input}
    own = inputs.union(*(node.output for node in part.node), (t.name for t in _initializers(part)))
    constants = {name: value for name, value in outer.items() if name not in own}
    constants |= _constants(graph, part, _bounds(part), inputs)
    made = []
    inner_count = 0
    for node in part.node:
        inner_count += sum(_settle_messages(graph, inner, constants) for inner in subgraphs(node))
        if not has_steps(node):
            continue
        ends, steps = constants.get(node.input[ENDS]), constants.get(node.input[STEPS])
        settled = None if ends is None else _settled(ends, steps, ends.dtype)
        if settled is not None:
            name = graph.unique_name(f"{node.input[ENDS]}_settled")
            made.append(onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(settled)))
            node.input[ENDS] = name
    for each in made:
        part.node.insert(0, each)
    return inner_count + len(made)


def _initializers(part: Part) -> Iterable[onnx.TensorProto]:
    return part.initializer if isinstance(part, onnx.GraphProto) else ()


def _bounds(part: NodeContainer) -> set[str]:
    """Return the names of the ends and steps of Slices, including Slices in subgraphs."""
    return {node.input[i] for node in nodes(part) if has_steps(node) for i in (ENDS, STEPS)}


def _constants(graph: Graph, part: Part, names: Collection[str], overridable: Collection[str]) -> dict[str, Array]:
    """Return the values of the tensors in `names` that are integer constants of this part."""
    found: dict[str, Array | None] = {}
    for tensor in _initializers(part):
        if tensor.name in names and tensor.name not in overridable:
            with suppress(ModelError):  # the file with the constant's data cannot be read
                found[tensor.name] = array_of(graph.folder, tensor)
    for node in part.node:
        if node.op_type == "Constant" and node.domain in ONNX_DOMAINS and node.output[0] in names:
            found[node.output[0]] = value_of_constant_node(graph, node)
    return {name: value for name, value in found.items() if value is not None and value.dtype.kind == "i"}
