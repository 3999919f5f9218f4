"""Check the bodies of fused nodes with ONNX's checker and its strict shape inference.

The body of a fused node is an ONNX function of standard operators that computes the node's outputs.
"""

from __future__ import annotations

from typing import Final

import onnx
import onnx.checker
import onnx.shape_inference

from onnxfuse.errors import first_line
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.protos import copy_without, opset_of
from onnxfuse.ir.slices import SLICE_INPUTS_SINCE, hide_ends

ERRORS: Final = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError)


def faults_of_bodies(model: onnx.ModelProto) -> dict[str, str]:
    """Return ONNX's errors for the function bodies of fused nodes in a model's main graph, by the body's name.

    A body is checked with the operands of its first call; it is skipped if the model does not declare their types.
    """
    bodies = {body.name: body for body in model.functions if body.domain == DOMAIN}
    first = {node.op_type: node for node in reversed(model.graph.node) if node.domain == DOMAIN}
    known = {value.name: value for value in (*model.graph.value_info, *model.graph.input)} if first else {}
    known |= {t.name: onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer}
    found: dict[str, str] = {}
    for name, node in first.items():
        inputs = [known.get(each) for each in dict.fromkeys(node.input) if each]
        if None in inputs:  # the dtype of an operand is not known
            continue
        call = copy_without(model, "graph", "functions")
        call.functions.extend([*(each for each in model.functions if each.domain != DOMAIN), bodies[name]])
        call.graph.name = "call"
        call.graph.node.append(node)
        call.graph.input.extend(each for each in inputs if each is not None)
        call.graph.output.extend(onnx.ValueInfoProto(name=each) for each in node.output if each)
        if fault := _fault(call):
            found[name] = fault
    return found


def _fault(call: onnx.ModelProto) -> str:
    """Return ONNX's error for a model of one fused node, whose body is the model's last function; "" for none."""
    try:
        onnx.checker.check_function(call.functions[-1])
        hide_ends(call)
        # Below opset SLICE_INPUTS_SINCE, the bounds of a Slice are required attributes.  `hide_ends` has removed them
        # from `call`, so strict inference would reject the Slice.
        is_strict = opset_of(call) >= SLICE_INPUTS_SINCE
        onnx.shape_inference.infer_shapes(call, check_type=True, strict_mode=is_strict)
    except ERRORS as error:
        return first_line(error)
    return ""
