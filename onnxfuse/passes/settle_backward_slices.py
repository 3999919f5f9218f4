"""Write the end of a backward Slice that runtimes disagree about as onnxruntime's kernels read it.

A backward slice to INT32_MAX or INT64_MAX is empty in ONNX, and goes to the first element in onnxruntime's kernel. But
onnxruntime takes it for empty when it plans which tensors share memory. Such a model runs or ends in "Shape mismatch
attempting to re-use buffer" depending on which other nodes it has, so that removing unused ones was enough to break it.
"""

from __future__ import annotations

import numpy as np
import onnx

from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.slices import is_ambiguous_end
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, is_constant, op_of

ENDS, STEPS = 2, 4  # inputs of a Slice


def settle_backward_slices(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace constant ends that are ambiguous by the lowest integer; return the number of nodes changed."""
    found = [node for node in graph.nodes if op_of(node) == "Slice" and _settle(graph, shapes, node)]
    for node in found:
        infer_node(shapes, node)
    return len(found)


def _settle(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    if len(node.inputs) <= STEPS or not is_constant(node.inputs[ENDS]):
        return False
    old = node.inputs[ENDS]
    ends, steps = shapes.value(old), shapes.value(node.inputs[STEPS])
    if ends is None or steps is None or not ends.shape == steps.shape == (ends.size,):
        return False
    ambiguous = [is_ambiguous_end(end, step) for end, step in zip(ends.tolist(), steps.tolist(), strict=True)]
    if not any(ambiguous):
        return False
    dtype = onnx.helper.tensor_dtype_to_np_dtype(shapes.dtype(old))
    settled = np.where(ambiguous, np.iinfo(dtype).min, ends.astype(dtype))
    node.inputs[ENDS] = graph.constant(f"{old.name}_settled", settled)
    return True
