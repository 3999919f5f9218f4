"""Replace an If with a known condition by its branch that is always taken; exporters write such Ifs for a Squeeze."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import op_of
from onnxfuse.ir.protos import copy_without, defined_names, graphs, is_control_flow, subgraphs


def with_known_branches(model: onnx.ModelProto, shapes: ShapeInfo) -> tuple[onnx.ModelProto, list[onnx.NodeProto]]:
    """Replace each If with a known condition by the nodes of its branch; return the model and the list of these Ifs.

    `shapes` holds the facts about the model's graph.  An If stays where a name in its branch has another meaning
    outside.  If no If is replaced, the same model object is returned.
    """
    conditions = {node.inputs[0].name: node.inputs[0] for node in shapes.graph.nodes if op_of(node) == "If"}
    taken: dict[int, onnx.GraphProto] = {}
    for index, node in enumerate(model.graph.node):
        if not is_control_flow(node) or node.op_type != "If" or node.input[0] not in conditions:
            continue
        value = shapes.exact_value(conditions[node.input[0]])
        flag = value.item() if value is not None and value.size == 1 else None
        branch = _branch(node, bool(flag)) if isinstance(flag, int) else None
        # Identity accepts values other than tensors only since opset 14.
        are_tensors = all(shapes.infos.dtype(name) for name in node.output if name)
        if branch is not None and are_tensors and _defined(branch).isdisjoint(_defined_beside(model.graph, node)):
            taken[index] = branch
    if not taken:
        return model, []
    result = copy_without(model, "graph")
    result.graph.CopyFrom(copy_without(model.graph, "node"))
    for index, node in enumerate(model.graph.node):
        if index in taken:
            _take(result.graph, node, taken[index])
        else:
            result.graph.node.append(node)
    return result, [model.graph.node[index] for index in taken]


def _branch(node: onnx.NodeProto, flag: bool) -> onnx.GraphProto | None:
    wanted = "then_branch" if flag else "else_branch"
    found = (a.g for a in node.attribute if a.name == wanted and a.HasField("g"))
    return next((graph for graph in found if len(graph.output) == len(node.output)), None)


def _take(graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> None:
    """Append the nodes of a branch to a graph, and an Identity from each result of the branch to the If's output."""
    graph.node.extend(branch.node)
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    graph.value_info.extend(branch.value_info)
    for result, output in zip(branch.output, node.output, strict=True):
        if output:
            graph.node.append(onnx.helper.make_node("Identity", [result.name], [output], f"{output}/branch"))


def _defined(*parts: onnx.GraphProto) -> set[str]:
    """Return the names of the tensors that graphs and their subgraphs define."""
    return set[str]().union(*map(defined_names, graphs(*parts)))


def _defined_beside(graph: onnx.GraphProto, one: onnx.NodeProto) -> Collection[str]:
    """Return the names that a graph and its subgraphs define, except those in the subgraphs of the node `one`."""
    others = [inner for node in graph.node if node is not one for inner in subgraphs(node)]
    return _defined(*others) | defined_names(graph)
