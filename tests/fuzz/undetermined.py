"""What onnxruntime 1.32 itself leaves open, so that two models may differ in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_slice import Slice_10

from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.extract import extract
from onnxfuse.ir.protos import nodes

FIRST_SLICE_WITH_STEPS = 10  # the opset


def joins_unequal_sizes(model: onnx.ModelProto, outputs: Sequence[str], feeds: Mapping[str, Any]) -> bool:
    """Return whether outputs depend on a Concat whose operands have unequal sizes along the axes that it does not join.

    ONNX does not allow that.  onnxruntime takes it if an operand is empty, and leaves elements of the result unwritten.
    """
    part = extract(in_execution_order(model), outputs)
    if not any(node.op_type == "Concat" for node in nodes(part.graph)):
        return False
    has_steps = any(opset.domain == "" and opset.version >= FIRST_SLICE_WITH_STEPS for opset in part.opset_import)
    try:
        with np.errstate(all="ignore"):
            ReferenceEvaluator(part, new_ops=[Slice] if has_steps else None).run(None, dict(feeds))
    except Exception as error:  # whatever NumPy raises
        return "array dimensions except for the concatenation axis must match" in str(error)
    return False


class Slice(Slice_10):  # the evaluator finds it by the name of the operator
    """Slice as onnxruntime's kernel reads it.

    A backward one to the largest integer goes to the first element, which is empty in ONNX, and one that starts before
    the first element takes that element, which is empty in NumPy.
    """

    op_domain = ""

    def _run(self, data: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
        if steps is not None:
            sizes = np.array(data.shape)[range(len(starts)) if axes is None else axes]
            starts = np.where(steps < 0, np.maximum(starts, -sizes), starts)
            is_open = (ends == np.iinfo(np.int32).max) | (ends == np.iinfo(np.int64).max)
            ends = np.where((steps < 0) & is_open, np.iinfo(np.int64).min, ends)
        return super()._run(data, starts, ends, axes, steps)


def normalizes_nothing(optimized: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether the model may run an InstanceNormalization of no elements, on which onnxruntime crashes."""
    is_used = any(node.op_type == "InstanceNormalization" for f in optimized.functions for node in f.node)
    return is_used and not all(value.size for value in feeds.values())
