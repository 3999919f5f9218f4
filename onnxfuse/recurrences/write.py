"""Replaces a recurrence by a fused node, and writes the function that it calls: a Loop and what joined it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, Array
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.graphsurgeon import constant_of, copy_of
from onnxfuse.ir.node import Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.match.diagnostics import node_name
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences import SCAN
from onnxfuse.recurrences.form import Recurrence, State
from onnxfuse.recurrences.joining import Joined
from onnxfuse.recurrences.loops import outer_tensor
from onnxfuse.recurrences.program import Program
from onnxfuse.region_operators import FLOATS, HALVES
from onnxfuse.rewrite.replace import FunctionCall, Fused, LocalFunctions, attributes_of, put_call

DOC: Final = "A recurrence that one kernel runs."
LAST: Final = "/last step"  # a key for the number of the last step
MAX_STEPS: Final = 2**31
FIRST_AXES_AS_INPUT: Final = 13  # from this opset on, the axes of Squeeze and Unsqueeze are an input


@dataclass
class Written:
    """Nodes that are being written; `names` maps tensors to names in the function.

    Tensors that have the dtype `half` in the model are float32 in the function; if `half` is 0, none are changed.
    """

    shapes: ShapeInfo
    names: dict[str, str]
    stem: str
    half: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[bytes, str] = field(default_factory=dict)  # names of constants, by their serialized values

    def put(self, op: str, *inputs: str, target: str = "", **attributes: Any) -> str:
        """Add a node of one output, and return the output's name: `target`, or a new one."""
        target = target or f"{self.stem}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [target], **attributes))
        return target

    def axes(self, op: str, source: str, axis: int) -> str:
        """Add a Squeeze or Unsqueeze of one axis, and return its output."""
        if self.shapes.graph.opset < FIRST_AXES_AS_INPUT:
            return self.put(op, source, axes=[axis])
        return self.put(op, source, self.constant(np.array([axis])))

    def constant(self, value: Array) -> str:
        """Add a constant unless there is one of this value, and return its name."""
        stored = onnx.numpy_helper.from_array(value)
        if stored.data_type == self.half:
            stored = onnx.numpy_helper.from_array(value.astype(np.float32))
        key = stored.SerializeToString(deterministic=True)
        if key not in self.constants:
            self.constants[key] = self.put("Constant", value=stored)
        return self.constants[key]

    def value(self, name: str, tensor: Tensor, without: int | None = None) -> onnx.ValueInfoProto:
        """Return the type of a value of the body: a tensor or, if `without` is given, its slice along this axis."""
        shape, dtype = self.shapes.shape(tensor), self.shapes.dtype(tensor)
        sizes = None if shape is None else [size for i, size in enumerate(shape) if i != without]
        dims = None if sizes is None else [size if isinstance(size, int) else None for size in sizes]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT if dtype == self.half else dtype, dims)

    def add(self, node: Node) -> None:
        """Add a node of the graph, and the constants that it reads and that have no name yet."""
        for tensor in node.inputs:
            if tensor.name and tensor.name not in self.names:
                assert is_constant(tensor)
                self.names[tensor.name] = self.constant(constant_value(self.shapes.graph, tensor))
        proto = node_proto(self.shapes.graph, node)
        made = [f"{self.stem}{len(self.nodes)}_{i}" for i in range(len(proto.output))]
        self.names |= {name: new for name, new in zip(proto.output, made, strict=True) if name}
        inputs, outputs = ([self.names[n] if n else "" for n in part] for part in (proto.input, proto.output))
        self.nodes.append(helper.make_node(proto.op_type, inputs, outputs))
        self.nodes[-1].attribute.extend(proto.attribute)


def write_scan(
    shapes: ShapeInfo, functions: LocalFunctions, recurrence: Recurrence, joined: Joined, program: Program
) -> Fused:
    """Replace a recurrence by one node that calls its function, and return the node's record.

    The caller must sort the graph afterwards.
    """
    text = program.text()
    outputs = [tensor for _, _, tensor in program.outputs]
    operands = program.operands
    if recurrence.shapes is not shapes:
        operands = {name: _of_graph(shapes, tensor) for name, tensor in operands.items()}
    attributes = attributes_of(shapes, SCAN, operands, outputs, {"program": text})
    body = _function(shapes, recurrence, joined, program, sorted(attributes))
    name = shapes.graph.unique_name(f"{node_name(outputs[0])}/{SCAN}")
    call = FunctionCall(functions.add(body), name, list(operands.values()), outputs, attributes)
    replaced = [*joined.before, *recurrence.replaced, *joined.after]
    labels = tuple(map(node_label, (*replaced, *recurrence.begins)))
    put_call(shapes, replaced, call)
    return Fused(SCAN, name, labels, {}, outputs[0].name)


def _of_graph(shapes: ShapeInfo, tensor: Tensor) -> Tensor:
    """Return an operand as a tensor of the graph; constants of a step become constants of the graph."""
    found = outer_tensor(shapes, tensor)
    if found is not None:
        return found
    assert is_constant(tensor)
    stored = next((t for t in shapes.graph.model.graph.initializer if t.name == tensor.name), None)
    return constant_of(stored) if stored is not None else copy_of(tensor, shapes.graph.unique_name(tensor.name))


def _function(
    shapes: ShapeInfo, recurrence: Recurrence, joined: Joined, program: Program, attributes: list[str]
) -> onnx.FunctionProto:
    """Return the function of a recurrence: a Loop, which takes slices at the number of its step, and what joined it.

    A Scan would not do: onnxruntime 1.31 ends the process (SIGFPE) where a Scan transposes an empty tensor.
    """
    names, states, first = list(program.operands), recurrence.states, recurrence.inputs[0]
    written = Written(shapes, {tensor.name: name for name, tensor in program.operands.items()}, "f", _half(program))
    for name, tensor in program.operands.items():
        if written.half == shapes.dtype(tensor):
            written.names[tensor.name] = written.put("Cast", name, to=TensorProto.FLOAT)
    for node in joined.before:
        written.add(node)
    length = written.put("Shape", written.names[first.tensor.name])
    count = written.put("Gather", length, written.constant(np.array(first.axis)))
    if recurrence.backwards:
        written.names[LAST] = written.put("Sub", count, written.constant(np.array(1)))
    body = _body(recurrence, written)
    finals = [f"y{i}" for i in range(len(states))]
    made = [f"y{len(states) + i}" for i in range(len(recurrence.outputs))]
    firsts = [_first(shapes, written, program, i, state) for i, state in enumerate(states)]
    given = [count, written.constant(np.array(True)), *firsts]
    written.nodes.append(helper.make_node("Loop", given, [*finals, *made], body=body))
    for each, name in zip(recurrence.outputs, made, strict=True):
        if recurrence.backwards:
            bounds = map(written.constant, (np.array([-1]), np.array([-1 - MAX_STEPS]), np.array([0]), np.array([-1])))
            name = written.put("Slice", name, *bounds)
        perm = [*range(1, each.axis + 1), 0, *range(each.axis + 1, shapes.rank(each.tensor) or 0)]
        written.names[each.tensor.name] = written.put("Transpose", name, perm=perm) if each.axis else name
    for state, name in zip(states, finals, strict=True):
        if state.final is not None:
            written.names[state.final.name] = name
    for node in joined.after:
        written.add(node)
    outputs = []
    for _, _, tensor in program.outputs:
        name, is_half = written.names[tensor.name], written.half == shapes.dtype(tensor)
        outputs.append(written.put("Cast", name, to=written.half) if is_half else name)
    opsets = [helper.make_opsetid("", shapes.graph.opset)]
    return helper.make_function(DOMAIN, SCAN, names, outputs, written.nodes, opsets, attributes, doc_string=DOC)


def _first(shapes: ShapeInfo, written: Written, program: Program, place: int, state: State) -> str:
    """Return the first value of a state; an operand that is broadcast is expanded."""
    operand = written.names[state.initial.name]
    if shapes.shape(state.initial) == shapes.shape(state.like):
        return operand
    sizes = []
    for axis in program.state_axes[place]:
        size = program.size(axis)
        if isinstance(size, int):
            sizes.append(written.constant(np.array([size])))
            continue
        name, at = next((name, i) for name in program.operands for i, other in enumerate(program.axes[name])
                        if program.find(other) == program.find(axis))  # fmt: skip
        sizes.append(written.put("Gather", written.put("Shape", name), written.constant(np.array([at]))))
    return written.put("Expand", operand, written.put("Concat", *sizes, axis=0))


def _half(program: Program) -> int:
    """Return the half precision that all floats of a program have, if it has no Cast to it; else 0.

    The function of such a program computes in float32, as its kernel does.  onnxruntime's CPU provider computes a trace
    in float32, too; states that are rounded in each step would overflow earlier.
    """
    floats = {dtype for dtype in program.dtypes.values() if dtype in FLOATS}
    is_cast = any(op == "Cast" and program.dtypes[made[0]] in floats for op, _, made, _ in program.ops)
    return DTYPE_NUMBERS[floats.pop()] if len(floats) == 1 and floats <= {*HALVES} and not is_cast else 0


def _body(recurrence: Recurrence, outer: Written) -> onnx.GraphProto:
    """Return the body of the Loop in the function `outer`, which is one step of the recurrence."""
    states = recurrence.states
    begins = {state.begin: f"s{i}" for i, state in enumerate(states)}
    written = Written(recurrence.shapes, {**outer.names, **begins}, "t", outer.half)
    values = [helper.make_tensor_value_info("number", TensorProto.INT64, [])]
    values += [helper.make_tensor_value_info("going", TensorProto.BOOL, [])]
    values += [outer.value(f"s{i}", state.like) for i, state in enumerate(states)]
    results = [helper.make_tensor_value_info(written.put("Identity", "going"), TensorProto.BOOL, [])]
    place = written.put("Sub", outer.names[LAST], "number") if recurrence.backwards else "number"
    for each in recurrence.inputs:
        index = written.axes("Unsqueeze", place, 0) if each.keeps_axis else place
        written.names[each.name] = written.put("Gather", outer.names[each.tensor.name], index, axis=each.axis)
    for node in recurrence.body:
        written.add(node)
    ends = [written.put("Identity", written.names[state.end]) for state in states]
    results += [outer.value(name, state.like) for name, state in zip(ends, states, strict=True)]
    for each in recurrence.outputs:
        source = written.names[each.name]
        source = written.axes("Squeeze", source, each.axis) if each.keeps_axis else source
        results.append(outer.value(written.put("Identity", source), each.tensor, each.axis))
    return helper.make_graph(written.nodes, "step", values, results)
