"""Write fusions as ONNX's own operators of opset 23 or 24, for runtimes that know these (`--emit standard`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.fuse_model import FusedModel
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.convert_opset import convert_opset, lower_opset
from onnxfuse.ir.domain import DOMAIN, is_fused
from onnxfuse.ir.protos import nodes, opset_of
from onnxfuse.report.standard import Standard, WrittenAs
from onnxfuse.report.traffic import Traffic
from onnxfuse.rewrite.function_body import REFUSED
from onnxfuse.unfuse_model import in_operators

OLDEST, NEWEST = 23, 24  # the range of written opsets: 23 has Attention, 24 Swish
PRIMITIVES: Final = 13  # the last opset without composite operators
NO_OPERATOR: Final = "ONNX has no operator for it"


def in_newest_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model converted to the newest opset, up to NEWEST, in which onnxruntime runs all of its nodes."""
    for opset in range(NEWEST, opset_of(model), -1):
        with suppress(ModelError):
            return convert_opset(model, opset)
    return model


def needs_newer_opset(result: FusedModel, opset: int) -> bool:
    """Return whether a fused node is written as an operator that does not exist in this opset."""
    found = {op for one in _written(result) for op in one.operators}
    return any((has := schema(op, opset)) is None or has.deprecated for op in found)


def in_standard_operators(fused: onnx.ModelProto, folder: Path | None, opset: int) -> tuple[onnx.ModelProto, Traffic]:
    """Return a fused model in which ONNX's operators replace the fused nodes, and its estimated traffic.

    The result has the lowest opset that defines all of its operators, but at least OLDEST and `opset`, which is the
    original's opset.
    """
    standard, after = in_operators(fused, folder)
    if opset:
        lower_opset(standard, max(OLDEST, opset))
    return standard, after


def what_was_written(result: FusedModel) -> Standard:
    """Return which operator the written model has in place of each fused node."""
    return Standard(opset_of(result.written), tuple(_written(result)))


def _written(result: FusedModel) -> Iterator[WrittenAs]:
    bodies = {each.name: each for each in result.model.functions if each.domain == DOMAIN}
    opset = result.graph.opset
    lacking = NO_OPERATOR if opset >= NEWEST else f"{NO_OPERATOR} in opset {opset}"
    called = {node.name: bodies[node.op_type] for node in nodes(result.model.graph) if is_fused(node)}
    for fused in result.fused:
        if fused.node not in called:  # no node reads its result any more
            continue
        body = called[fused.node]
        ops = tuple(
            node.op_type for node in body.node if len(body.node) == 1 or _stands_for_several(node.op_type, opset)
        )
        refused = next((each.value for each in body.metadata_props if each.key == REFUSED), "")
        yield WrittenAs(fused.fusion, fused.node, fused.where, ops, refused or ("" if ops else lacking))


@functools.cache
def _stands_for_several(op: str, opset: int) -> bool:
    """Return whether an operator is composite: ONNX defines it by other operators, and opset PRIMITIVES lacks it."""
    found = schema(op, opset)
    if found is None or schema(op, PRIMITIVES) is not None:
        return False
    return bool(found.has_function or found.has_context_dependent_function)  # type: ignore[attr-defined]
