"""Undo fusing: replace every fused node by the operators of its body."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx
import onnx.inliner

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.errors import ModelError, VerificationError
from onnxfuse.fuse_model import simplify
from onnxfuse.ir.domain import DOMAIN, is_fused
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import load
from onnxfuse.ir.noted_sizes import note_sizes, noted_sizes
from onnxfuse.ir.protos import copy_without, nodes
from onnxfuse.ir.serde import write_model
from onnxfuse.layout.channel_rules import CHANNEL_FUSIONS, between_transposes
from onnxfuse.pipeline import SCORE_PASSES, WEIGHT_PASSES
from onnxfuse.report.traffic import Traffic, estimate_traffic
from onnxfuse.steps import Progress, without_what_raises
from onnxfuse.verify.compare import NOT_VERIFIED, Verification, compare
from onnxfuse.verify.extent import Level, extent_of
from onnxfuse.verify.own_process import DEFAULT_TIMEOUT, own_process

log: Final = logging.getLogger("onnxfuse")


def unfuse(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    verify: bool | Level = True,
    inputs: Mapping[str, Array] | None = None,
    shapes: Sequence[str] = (),
    timeout: float | None = DEFAULT_TIMEOUT,
    tolerance: float | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> tuple[onnx.ModelProto, Verification]:
    """Replace the fused nodes of an optimized model by the operators that they stand for.

    The parameters mean the same as in `onnxfuse.optimize`.  Nodes that `optimize` folded, such as a BatchNormalization
    into weights, stay folded.  Transposes around channels-last nodes cancel where they meet, and other functions of the
    model stay.

    Returns the model, which has no operators of onnxfuse, and the comparison with the fused one.  Raises ModelError if
    the model cannot be read or has no fused node, UsageError for inputs or shapes that do not fit the model,
    VerificationError if the models differ.
    """
    fused, folder = load(model)
    if not has_fused_nodes(fused):
        raise ModelError("the model has no fused node; give one that `onnxfuse optimize` wrote")
    extent = extent_of(verify)
    progress("unfuse", 0, 0)
    result, _ = in_operators(fused, folder)
    if extent is None:
        return result, NOT_VERIFIED
    with own_process(timeout):
        verified = compare(
            fused, result, inputs=inputs, shapes=shapes, folder=folder, tolerance=tolerance,
            progress=lambda step: progress(f"verify: {step}", 0, 0), extent=extent,
        )  # fmt: skip
    if verified.passed is False:
        raise VerificationError(f"undoing the fusions changed the model: {verified.reason}; please report this model")
    return result, verified


def has_fused_nodes(model: onnx.ModelProto) -> bool:
    """Return whether a model has fused nodes."""
    return any(map(is_fused, nodes(model.graph, *model.functions)))


def in_operators(fused: onnx.ModelProto, folder: Path | None) -> tuple[onnx.ModelProto, Traffic]:
    """Replace the fused nodes of a model by the operators of their bodies; return the model and its estimated traffic.

    Transposes, constants and Casts that cancel between adjacent bodies are removed.  Sizes that several bodies compute
    are computed once, and so are tensors that depend only on these sizes, such as a causal mask.
    """
    result, left_out = without_what_raises(lambda raised: _in_operators(fused, folder, raised))
    for one in left_out:
        log.warning("left out: %s", one)
        log.debug(one.traceback)
    return result


def _in_operators(
    fused: onnx.ModelProto, folder: Path | None, raised: Collection[str]
) -> tuple[onnx.ModelProto, Traffic]:
    """Return the result of `in_operators`; passes whose names are in `raised` are left out."""
    names = [(function.domain, function.name) for function in fused.functions if function.domain == DOMAIN]
    noted = noted_sizes(fused)
    inlined = onnx.inliner.inline_selected_functions(_prepared(fused), names)
    note_sizes(inlined, noted)
    shapes = read_and_infer(inlined, folder)
    graph = shapes.graph
    simplify(graph, shapes, {*WEIGHT_PASSES, *SCORE_PASSES, *raised})
    result = write_model(graph)
    note_sizes(result, shapes.to_note(noted))
    return result, estimate_traffic(graph, shapes)


def _prepared(fused: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, prepared for the inlining of its bodies.

    The result imports the opsets of the bodies, and onnxfuse's own only if some of its nodes have no body.  The bodies
    of channels-last concats and splits become a channels-first operator between Transposes, which is the form of other
    channels-last bodies.
    """
    joining = {node.op_type for node in nodes(fused.graph) if _fusion(node) in CHANNEL_FUSIONS}
    imported = {each.domain for each in fused.opset_import}
    result = copy_without(fused, "functions", "opset_import")
    bodies = {function.name for function in fused.functions if function.domain == DOMAIN}
    others = any(n.domain == DOMAIN and n.op_type not in bodies for n in nodes(fused.graph, *fused.functions))
    result.opset_import.extend(each for each in fused.opset_import if each.domain != DOMAIN or others)
    for function in fused.functions:
        is_joining = function.domain == DOMAIN and function.name in joining
        result.functions.append(between_transposes(function) if is_joining else function)
        for each in function.opset_import:
            if each.domain not in (imported | {DOMAIN}):
                imported.add(each.domain)
                result.opset_import.append(each)
    return result


def _fusion(node: onnx.NodeProto) -> str:
    """Return the name of the fusion of a channels-last node; "" for other nodes."""
    values = {each.name: each.s.decode() for each in node.attribute if each.name in ("fusion", "layout")}
    return values.get("fusion", "") if node.domain == DOMAIN and values.get("layout") == "nhwc" else ""
