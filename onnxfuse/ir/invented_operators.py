"""Replace operators that converters write although ONNX lacks them: tf2onnx writes Erfc for the exact GELU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import onnx

from onnxfuse.ir.protos import ONNX_DOMAINS, graphs, nodes, opset_of

log: Final = logging.getLogger("onnxfuse")
FIRST_CAST_LIKE: Final = 15  # the first opset with CastLike


def without_invented_operators(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with each Erfc(x) of the ONNX domain replaced by 1 - Erf(x), and warn about the nodes.

    onnxruntime refuses models with Erfc.  Before opset 15, x must be float32.  `name` is the model's name in the
    warning.
    """
    parts = (model.graph, *model.functions)
    found = [node for node in nodes(*parts) if _is_erfc(node)]
    if not found:
        return model
    log.warning(
        "%s has %s of the operator 'Erfc', which ONNX lacks and onnxruntime refuses; Erfc(x) is read as 1 - Erf(x)",
        name, "a node" if len(found) == 1 else f"{len(found)} nodes",
    )  # fmt: skip
    names = {each for node in nodes(*parts) for each in (*node.input, *node.output)}
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for part in graphs(changed.graph, *changed.functions):
        casts = opset_of(part if isinstance(part, onnx.FunctionProto) else changed) >= FIRST_CAST_LIKE
        written = [each for node in part.node for each in (_spelled(node, names, casts) if _is_erfc(node) else [node])]
        del part.node[:]
        part.node.extend(written)
    return changed


def _is_erfc(node: onnx.NodeProto) -> bool:
    return node.op_type == "Erfc" and node.domain in ONNX_DOMAINS


def _spelled(node: onnx.NodeProto, names: set[str], casts: bool) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute 1 - Erf(x); with `casts`, CastLike gives 1 the dtype of x; `names` are taken."""

    def new(stem: str) -> str:
        while stem in names:
            stem += "_"
        names.add(stem)
        return stem

    (x,), (y,) = node.input, node.output
    one = new(f"{y}_one")
    yield onnx.helper.make_node("Constant", [], [one], value_float=1.0)
    if casts:
        number, one = one, new(f"{y}_one_like_x")
        yield onnx.helper.make_node("CastLike", [number, x], [one])
    erf = new(f"{y}_erf")
    yield onnx.helper.make_node("Erf", [x], [erf])
    yield onnx.helper.make_node("Sub", [one, erf], [y], node.name)
