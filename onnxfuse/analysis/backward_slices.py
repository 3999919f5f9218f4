"""Backward Slices to the largest integer: they are empty in ONNX, and go to the first element in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import onnx
import onnx.numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.ir.graph import OPSET_OF_UNCUT_SLICES
from onnxfuse.ir.protos import ONNX_DOMAINS, graphs, nodes

TO_THE_END: Final = 2**31 - 1  # exporters write this, or the largest int64, as the end of a slice that takes the rest
ENDS, STEPS = 2, 4  # inputs of a Slice


def is_ambiguous_end(end: object, step: object) -> bool:
    """Return whether runtimes disagree about a slice: backward with the end INT32_MAX or INT64_MAX.

    The pass `normalize_backward_slices` writes constant ends as onnxruntime reads them.
    """
    return isinstance(step, int) and step < 0 and end in (TO_THE_END, 2**63 - 1)


def has_steps(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Slice whose steps are given."""
    return node.op_type == "Slice" and node.domain in ONNX_DOMAINS and len(node.input) > STEPS


def hide_ambiguous_ends(model: onnx.ModelProto) -> bool:
    """Give each Slice with such an end an undefined one, so that onnx infers only the rank of its output.

    Constants count by name, at any depth.  Where two have one name, too much may be hidden.  Returns whether there was
    such a Slice.  All ends are hidden in the opset in which onnx infers that a Slice keeps the sizes of what it cuts.
    """
    slices = [node for node in nodes(model.graph, *model.functions) if has_steps(node)]
    wanted = {node.input[i] for node in slices for i in (ENDS, STEPS)}
    numbers: dict[str, set[int]] = {}
    for name, found in _constants(model) if wanted else ():
        if name in wanted:
            numbers.setdefault(name, set()).update(found)
    count = 0
    for node in slices:
        ends, steps = (numbers.get(node.input[i], ()) for i in (ENDS, STEPS))
        if any(is_ambiguous_end(end, step) for end in ends for step in steps):
            node.input[ENDS] = f"{node.input[ENDS]}::hidden"
            count += 1
    if any(each.domain in ONNX_DOMAINS and each.version == OPSET_OF_UNCUT_SLICES for each in model.opset_import):
        for node in nodes(model.graph, *model.functions):
            if node.op_type == "Slice" and node.domain in ONNX_DOMAINS and "::hidden" not in node.input[ENDS]:
                node.input[ENDS] = f"{node.input[ENDS]}::hidden"
    return count > 0


def _constants(model: onnx.ModelProto) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield the names and numbers of integers that are constants, at any depth."""
    for part in graphs(model.graph, *model.functions):
        for tensor in part.initializer if isinstance(part, onnx.GraphProto) else ():
            yield tensor.name, _integers(tensor)
        for node in part.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                yield node.output[0], (*_integers(attribute.t), *attribute.ints, attribute.i)


def _integers(tensor: onnx.TensorProto) -> list[int]:
    if tensor.data_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) or uses_external_data(tensor):
        return []
    return [int(number) for number in onnx.numpy_helper.to_array(tensor).flat]
