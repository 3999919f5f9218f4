"""Reads a Loop or Scan as a recurrence over a sequence, or says why it cannot become a scan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import Body
from onnxfuse.control_flow.inputs import FIRST_SCAN_WITHOUT_BATCH, carried, leading_results, scanned
from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.node import Node, Tensor, consumers, has_subgraph, is_constant, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences.form import NoScan, Recurrence, Sliced, State, needed

SAME_NUMBER: Final = ("Identity", "Unsqueeze", "Squeeze", "Reshape", "Cast")  # operators on the number of a step


def read_loop(outer: ShapeInfo, body: Body) -> Recurrence:
    """Return a Loop or Scan as a recurrence.  Raises NoScan if it cannot become a scan.

    The body is the node's, after constants in it were folded.
    """
    _require_plain(outer, body)
    found = _of_scan(outer, body) if op_of(body.node) == "Scan" else _Loop(outer, body).recurrence()
    return replace(found, states=[_from_number(outer, state, found.inputs) for state in found.states])


def _from_number(outer: ShapeInfo, state: State, inputs: Sequence[Sliced]) -> State:
    """Return the state with the constant that an Expand repeats to its first value, if sequences have all its sizes."""
    node, shape = producer(state.initial), outer.shape(state.initial)
    if node is None or op_of(node) != "Expand" or not is_constant(node.inputs[0]) or shape is None:
        return state
    sizes = {size for each in inputs for size in outer.shape(each.tensor) or ()}
    is_known = all(isinstance(size, int) or size in sizes for size in shape)
    return replace(state, initial=node.inputs[0]) if is_known else state


def _require_plain(outer: ShapeInfo, body: Body) -> None:
    if outer.graph.opset < FIRST_SCAN_WITHOUT_BATCH:
        raise NoScan(f"a Scan has a batch axis in opset {outer.graph.opset}; required is opset 9 or later")
    if inner := next((each for each in body.graph.nodes if has_subgraph(each)), None):
        raise NoScan(f"'{node_label(inner)}', {op_of(inner)}, is inside of it")


def _finals(node: Node, count: int, outer: ShapeInfo) -> Iterator[Tensor | None]:
    """Yield the tensors that hold the last values of a node's states; None for those that nothing reads."""
    for i in range(count):
        tensor = node.outputs[i] if i < len(node.outputs) else None
        is_read = tensor is not None and tensor.name and (tensor.outputs or outer.graph.is_kept(tensor))
        yield tensor if is_read else None


def _results(body: Body) -> list[str]:
    return [value.name for value in body.graph.model.graph.output]


def _recurrence(
    body: Body, states: Sequence[State], inputs: Sequence[Sliced], outputs: Sequence[Sliced], after: Sequence[Node] = ()
) -> Recurrence:
    """Return the recurrence of a node, and of nodes `after` it that join what its steps give."""
    known = [*(each.begin for each in states), *(each.name for each in inputs)]
    ends = [*(each.end for each in states), *(each.name for each in outputs)]
    if not states or not inputs:
        what = "carries no value from step to step" if not states else "reads no sequence step by step"
        raise NoScan(f"it {what}")
    return Recurrence([body.node, *after], body.shapes, needed(body.graph.nodes, ends, known), states, inputs, outputs)


def _of_scan(outer: ShapeInfo, body: Body) -> Recurrence:
    node, results = body.node, _results(body)
    names = [value.name for value in body.graph.model.graph.input]
    begun = carried(node, names)
    directions = {each for attribute in ("scan_input_directions", "scan_output_directions")
                  for each in ints_attribute(node, attribute, [0])}  # fmt: skip
    if len(directions) > 1:
        raise NoScan("it goes along some sequences forwards, and along others backwards")
    ends = zip(begun.items(), results, _finals(node, len(begun), outer), strict=False)
    states = [State(initial, initial, begin, end, final) for (begin, initial), end, final in ends]
    inputs = [Sliced(tensor, axis % len(_shape(outer, tensor)), name)
              for name, (tensor, axis) in scanned(node, names).items()]  # fmt: skip
    made = node.outputs[len(begun) :]
    axes = ints_attribute(node, "scan_output_axes", [0] * len(made))
    outputs = [
        Sliced(tensor, axis % len(_shape(outer, tensor)), name)
        for tensor, axis, name in zip(made, axes, results[len(begun) :], strict=False)
        if tensor.name
    ]
    return replace(_recurrence(body, states, inputs, outputs), backwards=directions == {1})


def _shape(shapes: ShapeInfo, tensor: Tensor) -> tuple[object, ...]:
    shape = shapes.shape(tensor)
    if not shape:
        raise NoScan(f"'{tensor.name}' is of unknown rank, or has no axis")
    return shape


@dataclass
class _Loop:
    """A Loop that may go along a sequence: the number of the step is the place of each slice."""

    outer: ShapeInfo
    body: Body
    inputs: list[Sliced] = field(default_factory=list)
    joins: list[Node] = field(default_factory=list)  # nodes that concatenate the sequences that the Loop carries
    empty: list[Node] = field(default_factory=list)  # nodes of the sequences with which it begins

    def recurrence(self) -> Recurrence:
        node, results = self.body.node, _results(self.body)
        self.tensors = self.body.tensors
        names = [value.name for value in self.body.graph.model.graph.input]
        self.number, self.condition = names[:2]
        self._require_fixed_count(results[0])
        begun = carried(node, names)
        self.begun = set(begun)
        for each in self.body.graph.nodes:
            self._read_slice(each)
        if not self.inputs:
            raise NoScan("it reads no sequence at the number of its step")
        self._require_length()
        ends = results[leading_results(node) :]
        states, outputs = list[State](), list[Sliced]()
        for (begin, initial), end, final in zip(
            begun.items(), ends, _finals(node, len(begun), self.outer), strict=False
        ):
            appended = self._inserted(begin, initial, end, final) or self._appended(begin, initial, end, final)
            if appended is None:
                states.append(State(initial, initial, begin, end, final))
            elif final is not None:
                outputs.append(appended)
        made = zip(node.outputs[len(begun) :], ends[len(begun) :], strict=False)
        outputs += [Sliced(tensor, 0, name) for tensor, name in made if tensor.name]
        found = _recurrence(self.body, states, self.inputs, outputs, self.joins)
        if any(tensor.name in (self.number, self.condition) for each in found.body for tensor in each.inputs):
            raise NoScan("a step computes with its number")
        return replace(found, begins=self.empty)

    def _require_fixed_count(self, condition: str) -> None:
        """Raise NoScan unless the Loop runs as often as its trip count says."""
        node, made = self.body.node, self.tensors.get(condition)
        begun = node.inputs[1] if len(node.inputs) > 1 else None
        is_true = begun is None or not begun.name or _is_true(self.outer, begun)
        while made is not None and (maker := producer(made)) is not None and op_of(maker) == "Identity":
            made = maker.inputs[0]
        stays = made is not None and (made.name == self.condition or _is_true(self.body.shapes, made))
        if not (is_true and stays):
            raise NoScan("its condition is computed, so that it may end before its trip count")
        if not node.inputs[0].name:
            raise NoScan("it has no trip count")

    def _renumbered(self, tensor: Tensor) -> Tensor:
        """Follow a tensor back through operators that keep the number that it holds."""
        while (node := producer(tensor)) is not None and op_of(node) in SAME_NUMBER:
            if op_of(node) == "Cast" and self.body.shapes.dtype(tensor) not in (TensorProto.INT64, TensorProto.INT32):
                break
            tensor = node.inputs[0]
        return tensor

    def _is_number(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the body holds the number of the step."""
        return bool(self._renumbered(tensor).name == self.number)

    def _is_next_number(self, tensor: Tensor) -> bool:
        node = producer(self._renumbered(tensor))
        if node is None or op_of(node) != "Add":
            return False
        return any(self._is_number(a) and _is_one(self.body.shapes, b) for a, b in (node.inputs, node.inputs[::-1]))

    def _read_slice(self, node: Node) -> None:
        """Add an input if the node takes a tensor's slice at the number of the step."""
        if op_of(node) not in ("Gather", "Slice") or producer(node.inputs[0]) or node.inputs[0].name in self.begun:
            return
        shape, data = self.body.shapes.shape(node.inputs[0]), outer_tensor(self.outer, node.inputs[0])
        if not shape or data is None:
            return
        if op_of(node) == "Gather" and self._is_number(node.inputs[1]):
            index = self.body.shapes.shape(node.inputs[1])
            if index in ((), (1,)):
                axis = int_attribute(node, "axis", 0) % len(shape)
                self.inputs.append(Sliced(data, axis, node.outputs[0].name, index == (1,)))
        elif op_of(node) == "Slice" and len(node.inputs) > 3:
            axes = self.body.shapes.value(node.inputs[3])
            has_steps = len(node.inputs) > 4 and not _is_one(self.body.shapes, node.inputs[4])
            is_next = self._is_number(node.inputs[1]) and self._is_next_number(node.inputs[2])
            if axes is not None and axes.size == 1 and is_next and not has_steps:
                axis = int(axes.reshape(-1)[0]) % len(shape)
                self.inputs.append(Sliced(data, axis, node.outputs[0].name, keeps_axis=True))

    def _require_length(self) -> None:
        """Raise NoScan unless the trip count is the length of what the Loop slices."""
        count = self.outer.value(self.body.node.inputs[0])
        for each in self.inputs:
            length = _shape(self.outer, each.tensor)[each.axis]
            if count is None or count.size != 1 or count.reshape(-1)[0] != length:
                found = "computed" if count is None else count.reshape(-1)[0]
                raise NoScan(f"its trip count is {found}, and '{each.tensor.name}' has {length} steps")

    def _inserted(self, begin: str, initial: Tensor, end: str, final: Tensor | None) -> Sliced | None:
        """Return what the steps insert into an empty sequence whose elements one node joins; None for another state."""
        now, made, begun = self.tensors.get(begin), producer(self.tensors[end]), producer(initial)
        if now is None or made is None or begun is None or op_of(begun) != "SequenceEmpty":
            return None
        join = self.outer.graph.sole_consumer(final) if final is not None else None
        added = self.body.shapes.shape(made.inputs[1]) if op_of(made) == "SequenceInsert" else None
        is_last = len(made.inputs) == 2 and made.inputs[0] is now and consumers(now) == [made]
        if not is_last or added is None or join is None or op_of(join) != "ConcatFromSequence":
            raise NoScan(f"it carries the sequence '{initial.name}', whose elements no ConcatFromSequence joins")
        self.joins.append(join)
        self.empty.append(begun)
        keeps_axis = not int_attribute(join, "new_axis", 0)
        axis = int_attribute(join, "axis", 0) % (len(added) + (not keeps_axis))
        return Sliced(join.outputs[0], axis, made.inputs[1].name, keeps_axis)

    def _appended(self, begin: str, initial: Tensor, end: str, final: Tensor | None) -> Sliced | None:
        """Return what the steps append to an empty tensor that the Loop carries; None if it is another state."""
        now, made = self.tensors.get(begin), producer(self.tensors[end]) if end in self.tensors else None
        if now is None or made is None or op_of(made) != "Concat" or len(made.inputs) != 2:
            return None
        shape, added = self.outer.shape(initial), self.body.shapes.shape(made.inputs[1])
        if not shape or not added or made.inputs[0] is not now or consumers(now) != [made] or made.inputs[1] is now:
            return None
        axis = int_attribute(made, "axis", 0) % len(shape)
        if shape[axis] != 0 or len(added) != len(shape) or added[axis] != 1:
            return None
        # If no step runs, unknown sizes of a Loop's result become 0, but a tensor that it carries stays as it is.
        length = _shape(self.outer, self.inputs[0].tensor)[self.inputs[0].axis]
        if not all(isinstance(size, int) for size in shape) and (not isinstance(length, int) or not length):
            raise NoScan(f"'{initial.name}', to which it appends, is of unknown size, and there may be no step")
        return Sliced(final if final is not None else initial, axis, made.inputs[1].name, keeps_axis=True)


def outer_tensor(outer: ShapeInfo, tensor: Tensor) -> Tensor | None:
    """Return the tensor of a graph that has the name of a body's tensor; None if the graph lacks it."""
    graph = outer.graph
    if tensor.name in graph.outer_constants:
        return graph.outer_constants[tensor.name]
    found = next((t for t in graph.linked.inputs if t.name == tensor.name), None)
    return found if found is not None else graph.linked.tensors().get(tensor.name)


def _is_true(shapes: ShapeInfo, tensor: Tensor) -> bool:
    value = shapes.value(tensor)
    return value is not None and value.size == 1 and bool(value.reshape(-1)[0])


def _is_one(shapes: ShapeInfo, tensor: Tensor) -> bool:
    value = shapes.value(tensor)
    return value is not None and value.size == 1 and value.reshape(-1)[0] == 1 and is_constant(tensor)
