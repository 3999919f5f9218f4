"""The normal form of a node: its steps in a region's program, or the reason why it cannot be in a region."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, consumers, is_constant, op_of
from onnxfuse.region_operators import GATHERS, HALVES, dtypes_of
from onnxfuse.regions.maps import MAPS
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.reductions import REDUCTIONS
from onnxfuse.regions.steps import StaysOut, Step, Steps, Writer, require_dtypes

WRITERS: Final[Mapping[str, Writer]] = {**POINTWISE, **MAPS, **REDUCTIONS}
MIN_OPSET: Final = 9  # functions need integer Constant nodes, which exist since this opset


def normal_form(shapes: ShapeInfo, node: Node) -> tuple[Step, ...] | str:
    """Return the steps of a node, or a sentence that says why it cannot be in a region."""
    op = op_of(node)
    if op not in WRITERS:
        return f"{op} is none of the operators of regions"
    steps = Steps(shapes, node)
    try:
        data = [t for t in node.inputs if t.name and not is_constant(t)]
        if not data and not _is_computed_in_every_run(steps):
            raise StaysOut("it reads constants alone")
        for tensor in (*data, *node.outputs):
            if tensor.name:
                steps.shape(tensor)
        WRITERS[op](steps)
        read = {name for step in steps.found for name in step.inputs}
        require_dtypes(shapes, [t for t in (*node.inputs, *node.outputs) if not is_constant(t) or t.name in read])
        _require_kernels(steps)
        _require_declared(steps)
    except (StaysOut, ModelError, TypeError) as error:
        return f"{op} stays out of regions: {error}"
    return tuple(steps.found)


def _is_computed_in_every_run(steps: Steps) -> bool:
    """Return whether a node that reads only constants can be in a region, because onnxruntime does not fold it.

    onnxruntime has no kernel to fold a Tile in half precision, and it never folds a DequantizeLinear.  The
    DequantizeLinear of a product's weights stays out of regions, though.
    """
    if op_of(steps.node) == "DequantizeLinear":
        return all(op_of(reader) in (*POINTWISE, *GATHERS) for reader in consumers(steps.node.outputs[0]))
    return op_of(steps.node) == "Tile" and dtype_name(steps.dtype()) in HALVES


def _require_declared(steps: Steps) -> None:
    """Raise StaysOut if ONNX does not declare the node's dtypes for the operator at the model's opset.

    In the main graph, onnxruntime runs such a node if it has a kernel.  But a region has a function body, which ONNX
    checks strictly.
    """
    node, opset = steps.node, steps.shapes.graph.opset
    inputs, outputs = _declared_types(op_of(node), opset)
    for tensors, declared in ((node.inputs, inputs), (node.outputs, outputs)):
        for i, tensor in enumerate(tensors):
            dtype = steps.shapes.dtype(tensor) if tensor.name else TensorProto.UNDEFINED
            formal = TensorProto.DataType.Name(dtype).lower()
            if dtype and f"tensor({formal})" not in declared[min(i, len(declared) - 1)]:
                what = f"'{tensor.name}' is {dtype_name(dtype)}"
                raise StaysOut(f"{what}, which ONNX does not declare for it in opset {opset}")


@functools.cache
def _declared_types(op: str, opset: int) -> tuple[tuple[frozenset[str], ...], tuple[frozenset[str], ...]]:
    """Return the types that the inputs and outputs of an operator can have.  Raises StaysOut if the opset lacks it."""
    found = schema(op, opset)
    if found is None:
        raise StaysOut(f"opset {opset} does not have it")
    inputs, outputs = ([frozenset(each.types) for each in formal] for formal in (found.inputs, found.outputs))
    return tuple(inputs), tuple(outputs)


def _require_kernels(steps: Steps) -> None:
    """Raise StaysOut for a step whose first input has a dtype that generated kernels do not support."""
    dtypes = {t.name: steps.shapes.dtype(t) for t in steps.node.inputs if t.name}
    for step in steps.found:
        if step.op != "Constant" and (found := dtype_name(dtypes[step.inputs[0]])) not in dtypes_of(step.op):
            required = ", ".join(dtypes_of(step.op))
            raise StaysOut(f"its {step.op} is of {found}; kernels are generated for it in {required}")
        dtypes |= dict.fromkeys(step.outputs, step.dtype)
