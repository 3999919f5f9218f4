"""Fuse a norm into a product if nothing else reads its result, so that the product's kernel normalizes its own rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import onnx

from onnxfuse.ir.domain import DOMAIN, OF_NORM, PROLOGUE
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, consumers, is_constant
from onnxfuse.regions.joining import Joining
from onnxfuse.rewrite.chain_bodies import chained, with_operands
from onnxfuse.rewrite.function_body import is_static
from onnxfuse.rewrite.replace import FunctionCall, Fused, attributes_of, own_attributes, put_call

NORMS: Final = ("rms_norm", "add_rms_norm")  # norms that product kernels can compute
DTYPES: Final = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}  # the dtypes of x for which they can
MAX_ROWS: Final = 64  # if x is known to have more rows, no product kernel computes its norm


def fuse_prologues(joining: Joining, records: Mapping[str, Fused]) -> list[Fused]:
    """Fuse each norm whose result only one product reads into this product; return the products' new records.

    `joining` says which fused nodes take a norm, and `records` holds the records of all fused nodes, by the node's
    name.  A product that is not fused becomes a fused node if it takes a norm.  The graph is sorted before and after.
    """
    graph = joining.graph
    norms = [node for node in graph.nodes if node.name in records and _can_join(joining, node)]
    records = {**records, **{one.node: one for norm in norms if (one := _fused_product(joining, norm))}}
    pairs = [(norm, node) for norm in norms if (node := _product_after(joining, norm, records))]
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    joining.drop_functions({node for pair in pairs for node in pair})
    made = [_fuse(joining, records, bodies, norm, node) for norm, node in pairs]
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _can_join(joining: Joining, norm: Node) -> bool:
    """Return whether a node is a fused norm whose result has one reader, and that a product kernel may compute."""
    if norm.domain != DOMAIN or str(norm.attrs["fusion"]) not in NORMS or "program" in norm.attrs:
        return False
    x, shapes = norm.outputs[0], joining.shapes
    dtypes = {shapes.dtype(each) for each in (x, *norm.inputs[:-1], *norm.outputs)}  # all but the scale
    known_rows = math.prod(size for size in (shapes.shape(x) or ())[:-1] if is_static(size))
    is_alone = not joining.graph.is_kept(x) and len(consumers(x)) == 1
    return is_alone and len(dtypes) == 1 and dtypes <= DTYPES and known_rows <= MAX_ROWS


def _fused_product(joining: Joining, norm: Node) -> Fused | None:
    """Fuse the reader of a norm's result if it is a product that pays only with a norm; return its record, or None."""
    x = norm.outputs[0]
    (reader,) = consumers(x)
    match = None if reader.domain == DOMAIN else joining.match_at(reader.outputs[0])
    if match is None or not match.fusion.prologue or (match.fusion.name, x.name) in joining.exclude:
        return None
    others = [tensor for name, tensor in match.operands.items() if name != "x"]
    return joining.replace(match) if match.operands["x"] is x and all(map(is_constant, others)) else None


def _product_after(joining: Joining, norm: Node, records: Mapping[str, Fused]) -> Node | None:
    """Return the fused node that reads a norm's result as its operand `x`, if the norm can be fused into it; else None.

    No other node reads `x`, and the node's other operands are constants, so that no cycle is possible.
    """
    (node,) = consumers(norm.outputs[0])
    if not joining.takes_prologue(node) or node.name not in records:
        return None
    if "program" in node.attrs and len(node.outputs) > 1:
        return None  # the kernels of products take a norm before operators of one result
    x, *others = node.inputs
    excluded = (records[node.name].fusion, x.name) in joining.exclude
    return node if x is norm.outputs[0] and all(map(is_constant, others)) and not excluded else None


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
