"""Handle Slices whose meaning differs between the ONNX specification, onnx's inference and onnxruntime.

A backward Slice, with a negative step, whose end is the largest integer is empty by the ONNX specification; in
onnxruntime it extends to the first element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import onnx
import onnx.numpy_helper

from onnxfuse.ir.protos import ONNX_DOMAINS, graphs, nodes, stored_integers

# tf2onnx writes this number as the end of a slice up to the last element; others write the largest int32 or int64.
TO_THE_END: Final = 10**9
LARGEST_INTEGERS: Final = (2**31 - 1, 2**63 - 1)
ENDS, STEPS = 2, 4  # indices of a Slice's inputs
SLICE_INPUTS_SINCE: Final = 10  # the first opset in which starts and ends are inputs; they are attributes before it


def is_ambiguous_end(end: object, step: object) -> bool:
    """Return whether runtimes disagree about a slice: it is backward, and its end is INT32_MAX or INT64_MAX.

    The pass `normalize_backward_slices` replaces constant ends of this kind by the ends that onnxruntime uses.
    """
    return isinstance(step, int) and step < 0 and end in LARGEST_INTEGERS


def is_slice(node: onnx.NodeProto) -> bool:
    """Return whether a node is ONNX's Slice."""
    return node.op_type == "Slice" and node.domain in ONNX_DOMAINS


def has_steps(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Slice with a `steps` input."""
    return is_slice(node) and len(node.input) > STEPS


def hide_ends(model: onnx.ModelProto) -> bool:
    """Replace the ends of Slices by undefined values, so that onnx infers only the ranks of their outputs.

    `analysis/shape_rules` infers the sizes of these outputs.  If the ends stayed, onnx's inference would end the
    process where it takes the size of a sliced axis to be negative, and in opset 10 it would give outputs the named
    sizes of the uncut input.

    Returns whether the end of any Slice is ambiguous (see `is_ambiguous_end`).  Constant ends and steps are looked up
    by name in the graph, its subgraphs and the functions; if two constants share a name, the result can be true for a
    Slice that is not ambiguous.
    """
    slices = [node for node in nodes(model.graph, *model.functions) if is_slice(node)]
    wanted = {node.input[i] for node in slices if has_steps(node) for i in (ENDS, STEPS)}
    numbers: dict[str, set[int]] = {}
    for name, found in _constants(model) if wanted else ():
        if name in wanted:
            numbers.setdefault(name, set()).update(found)
    is_any_ambiguous = False
    for node in slices:
        if has_steps(node):
            ends, steps = (numbers.get(node.input[i], ()) for i in (ENDS, STEPS))
            is_any_ambiguous |= any(is_ambiguous_end(end, step) for end in ends for step in steps)
        if len(node.input) > ENDS:
            node.input[ENDS] = f"{node.input[ENDS]}::hidden"
        else:
            del node.attribute[:]
    return is_any_ambiguous


def _constants(model: onnx.ModelProto) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield the name and the numbers of each integer constant in the graph, its subgraphs and the functions."""
    for part in graphs(model.graph, *model.functions):
        for tensor in part.initializer if isinstance(part, onnx.GraphProto) else ():
            yield tensor.name, stored_integers(tensor).ravel().tolist()
        for node in part.node:
            for attribute in node.attribute if node.op_type == "Constant" else ():
                yield node.output[0], (*stored_integers(attribute.t).ravel().tolist(), *attribute.ints, attribute.i)
