"""Replace operators that ONNX and onnxruntime lack: tf2onnx's Erfc, and TensorRT's quantizers to float8."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import onnx

from onnxfuse.ir.protos import ONNX_DOMAINS, graphs, nodes, opset_of

log: Final = logging.getLogger("onnxfuse")
FIRST_CAST_LIKE: Final = 15  # the first opset with CastLike
FIRST_FLOAT8: Final = 19  # the first opset with quantizers to float8
TENSORRT: Final = "trt"
READ_AS: Final = {
    "Erfc": "1 - Erf(x)",
    "TRT_FP8QuantizeLinear": "QuantizeLinear to float8e4m3fn",
    "TRT_FP8DequantizeLinear": "DequantizeLinear of float8e4m3fn",
}


def without_invented_operators(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with each operator of READ_AS replaced by operators of ONNX, and warn about the nodes.

    tf2onnx writes Erfc for the exact GELU; before opset 15, its x must be float32.  TensorRT's tools write quantizers
    to float8, which are replaced from opset 19 on.  `name` is the model's name in the warning.
    """
    parts = (model.graph, *model.functions)
    counts = Counter(node.op_type for part in parts for node in nodes(part) if _is_invented(node, opset_of(model)))
    if not counts:
        return model
    for op, count in counts.items():
        log.warning(
            "%s has %s of the operator '%s', which ONNX lacks and onnxruntime refuses; %s is read as %s",
            name, "a node" if count == 1 else f"{count} nodes", op, "Erfc(x)" if op == "Erfc" else op, READ_AS[op],
        )  # fmt: skip
    taken = {each for node in nodes(*parts) for each in (*node.input, *node.output)}

    def new(stem: str) -> str:
        while stem in taken:
            stem += "_"
        taken.add(stem)
        return stem

    sizes = {each.name: list(each.dims) for part in graphs(model.graph) for each in part.initializer}
    sizes |= {node.output[0]: list(a.t.dims) for node in nodes(*parts) for a in node.attribute if a.name == "value"}
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for part in graphs(changed.graph, *changed.functions):
        opset, written = opset_of(part if isinstance(part, onnx.FunctionProto) else changed), list[onnx.NodeProto]()
        for node in part.node:
            if _is_invented(node, opset_of(model)):
                written += _erfc(node, new, opset) if node.op_type == "Erfc" else _quantizer(node, new, sizes)
            else:
                written.append(node)
        of_quantizers = {out for node in part.node if node.domain == TENSORRT for out in node.output}
        kept = [value for value in part.value_info if value.name not in of_quantizers]  # exporters state uint8
        del part.node[:], part.value_info[:]
        part.node.extend(written)
        part.value_info.extend(kept)
    return changed


def _is_invented(node: onnx.NodeProto, opset: int) -> bool:
    if node.op_type == "Erfc":
        return node.domain in ONNX_DOMAINS
    return node.op_type in READ_AS and node.domain == TENSORRT and opset >= FIRST_FLOAT8


def _erfc(node: onnx.NodeProto, new: Callable[[str], str], opset: int) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute 1 - Erf(x); CastLike, if the opset has it, gives 1 the dtype of x."""
    (x,), (y,) = node.input, node.output
    one = new(f"{y}_one")
    yield onnx.helper.make_node("Constant", [], [one], value_float=1.0)
    if opset >= FIRST_CAST_LIKE:
        number, one = one, new(f"{y}_one_like_x")
        yield onnx.helper.make_node("CastLike", [number, x], [one])
    erf = new(f"{y}_erf")
    yield onnx.helper.make_node("Erf", [x], [erf])
    yield onnx.helper.make_node("Sub", [one, erf], [y], node.name)


def _quantizer(
    node: onnx.NodeProto, new: Callable[[str], str], sizes: Mapping[str, list[int]]
) -> Iterator[onnx.NodeProto]:
    """Yield ONNX's quantizer; its zero points of 0 say that the numbers are float8.

    `sizes` are the shapes of constants; a scale that is computed is one number.
    """
    zero, shape = new(f"{node.output[0]}_zero"), sizes.get(node.input[1], [])
    zeros = bytes(math.prod(shape))
    value = onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT8E4M3FN, shape, zeros, raw=True)
    yield onnx.helper.make_node("Constant", [], [zero], value=value)
    op = node.op_type.removeprefix("TRT_FP8")
    written = onnx.helper.make_node(op, [*node.input[:2], zero], node.output, node.name)
    written.attribute.extend(node.attribute)
    yield written
