"""Build a graph in which some fused nodes are replaced by the original nodes again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.execution_order import execution_order, reads
from onnxfuse.ir.protos import copy_without
from onnxfuse.verify.parts import Original, UnfusedGraph, transpose, transpose_back, with_other_outputs


def partly_fused(
    fused: onnx.GraphProto,
    unfused: UnfusedGraph,
    originals: Mapping[str, Original],
    without: Collection[str],
    around: Collection[str] = (),
) -> onnx.GraphProto:
    """Return a fused graph in which nodes of the original replace the fused nodes that `without` names.

    unfused    the graph before fusing; a tensor that is in both graphs has the same name in both
    originals  maps a tensor of the fused graph, by name, to the original's tensor and the perm that transposes it
    around     the names of constants in the graphs that contain this one
    """
    given = {*around, *(t.name for t in fused.initializer), *(t.values.name for t in fused.sparse_initializer)}
    given |= {value.name for value in fused.input if value.name not in unfused.constants}
    made: dict[str, onnx.NodeProto] = {}
    for node in fused.node:  # nodes that read a removed fused node, such as Transposes of its layout, go with it
        others = originals if node.domain == DOMAIN else {}
        known = made, given, unfused.types, others
        if node.name not in without and all(any(name in each for each in known) for name in reads(node)):
            made |= {name: node for name in node.output if name}
    # A channels-last output of a fused node is transposed to channels-first, not computed a second time.
    back = {original: (name, perm) for name, (original, perm) in originals.items()
            if name in made and made[name].domain == DOMAIN}  # fmt: skip

    def producer(name: str) -> onnx.NodeProto | None:
        if name in given or name in made:
            return made.get(name)
        if name in back:
            return transpose_back(*back[name], name)
        if name in originals and name not in unfused.producer:
            return transpose(*originals[name], name)
        return unfused.producer.get(name)

    nodes, constants = dict[int, onnx.NodeProto](), dict[str, onnx.TensorProto]()
    work, seen = [value.name for value in fused.output], set[str]()
    while work:
        name = work.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        node = producer(name)
        if node is not None:
            nodes[id(node)] = node
            work += reads(node)
        elif name in unfused.constants and name not in given:
            constants[name] = unfused.initializer(name)
    result = copy_without(fused, "node")
    taken = {node.name for node in made.values()}
    every = [_beside(node, made, taken) for node in nodes.values()]
    order = execution_order([list(reads(node)) for node in every], [list(node.output) for node in every])
    result.node.extend(every[i] for i in order)
    result.initializer.extend(constants.values())
    return result


def _beside(node: onnx.NodeProto, made: Mapping[str, onnx.NodeProto], taken: Collection[str]) -> onnx.NodeProto:
    """Return a copy of an original node that does not conflict with nodes of the fused graph.

    The fused graph may already have other outputs of the node, or another node with its name.
    """
    result = with_other_outputs(node, [name for name in node.output if made.get(name, node) is not node])
    if not node.name or node.name not in taken or any(made.get(name) is node for name in node.output):
        return result
    copy = onnx.NodeProto()
    copy.CopyFrom(result)
    copy.ClearField("name")
    return copy
