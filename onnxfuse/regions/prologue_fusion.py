"""Fuse a norm into a product if nothing else reads its result, so that the product's kernel normalizes its own rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import onnx

from onnxfuse.ir.domain import DOMAIN, OF_NORM, PROLOGUE
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, consumers, is_constant, producer
from onnxfuse.regions.joining import Joining
from onnxfuse.rewrite.chain_bodies import chained, with_operands
from onnxfuse.rewrite.replace import FunctionCall, Fused, attributes_of, drop_functions, own_attributes, put_call

NORMS: Final = ("rms_norm", "add_rms_norm")  # norms that product kernels can compute


def fuse_prologues(joining: Joining, records: Mapping[str, Fused]) -> list[Fused]:
    """Fuse each norm whose result only a fused product reads into this product; return the products' new records.

    `joining` says which fused nodes take a norm, and `records` holds the records of all fused nodes, by the node's
    name.  The graph is sorted before and after.
    """
    graph = joining.graph
    pairs = [(norm, node) for node in graph.nodes if (norm := _norm_of(joining, node, records))]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    if pairs and not graph.is_subgraph:
        drop_functions(graph, {node for pair in pairs for node in pair})
    made = [_fuse(joining, records, bodies, norm, node) for norm, node in pairs]
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _norm_of(joining: Joining, node: Node, records: Mapping[str, Fused]) -> Node | None:
    """Return the norm that computes a node's operand `x`, if it can be fused into the node; else None.

    No other node reads `x`, and the node's other operands are constants, so that no cycle is possible.
    """
    if not joining.takes_prologue(node) or "program" in node.attrs or node.name not in records:
        return None
    x, *others = node.inputs
    norm = producer(x)
    if norm is None or norm.domain != DOMAIN or norm.name not in records or x is not norm.outputs[0]:
        return None
    is_plain = str(norm.attrs["fusion"]) in NORMS and "program" not in norm.attrs
    is_alone = not joining.graph.is_kept(x) and list(consumers(x)) == [node] and all(map(is_constant, others))
    tensors = (x, *norm.inputs[:-1], *norm.outputs)  # all tensors of the norm except its last input, the scale
    of_one_dtype = len({joining.shapes.dtype(each) for each in tensors}) == 1
    excluded = (records[node.name].fusion, x.name) in joining.exclude
    return norm if is_plain and is_alone and of_one_dtype and not excluded else None


def _fuse(
    joining: Joining, records: Mapping[str, Fused], bodies: Mapping[str, onnx.FunctionProto], norm: Node, node: Node
) -> Fused:
    """Replace a norm and the node that reads its result by one node.

    The body of the new node (its ONNX function) consists of the bodies of both nodes in sequence.
    """
    record, shapes = records[node.name], joining.shapes
    operands = str(norm.attrs["operands"]).split()
    names = {name: name if name == "x" else OF_NORM + name for name in operands}
    said = {
        "fusion": norm.attrs["fusion"], "operands": operands, "attributes": own_attributes(norm),
        "dtypes": [dtype_name(shapes.dtype(each)) for each in norm.outputs],
    }  # fmt: skip
    own = {**own_attributes(node), PROLOGUE: json.dumps(said, separators=(",", ":"), sort_keys=True)}
    inputs, outputs = [*norm.inputs, *node.inputs[1:]], [*node.outputs, *norm.outputs[1:]]
    all_names = (*names.values(), *str(node.attrs["operands"]).split()[1:])
    attributes = attributes_of(shapes, record.fusion, all_names, outputs, own)
    before = with_operands(bodies[norm.op], names)
    both = chained(before, bodies[node.op], "x")
    both.name, both.doc_string = record.fusion, f"A norm comes first.\n\n{bodies[node.op].doc_string}"
    both.attribute[:] = sorted(attributes)
    call = FunctionCall(joining.functions.add(both), node.name, inputs, outputs, attributes)
    put_call(shapes, (norm, node), call)
    return replace(record, replaces=(*records[norm.name].replaces, *record.replaces))
