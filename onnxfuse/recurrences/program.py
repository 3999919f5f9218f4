"""Writes the program of a recurrence: which axes its values have in common, and what a step computes.

Values are functions of named axes.  An elementwise operator gives one name to the axes that it aligns, a view renames
nothing, and a product of matrices is a product of elements and a sum over the axis that both have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onnxfuse.algebra.operators import MATRIX_PRODUCTS
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences.form import NoScan, Recurrence, State
from onnxfuse.recurrences.joining import Joined
from onnxfuse.region_operators import (
    BROADCAST,
    COMPUTED,
    ELEMENTWISE,
    FIRST_FREE,
    MAX_REDUCED,
    MAX_STEP_OPERATIONS,
    REDUCED,
    STEPS,
    SUMS_OF_STEPS,
)
from onnxfuse.regions.normal_form import normal_form
from onnxfuse.regions.steps import Step

Axes: TypeAlias = tuple[int, ...]  # the number of each axis; BROADCAST for a size of 1


@dataclass
class Program:
    """A program that is being written; `operands` are the tensors of the graph that it reads, by name of the value."""

    operands: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, Axes] = field(default_factory=dict)  # by value
    ops: list[list[Any]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    states: list[tuple[str, str]] = field(default_factory=list)
    state_axes: list[Axes] = field(default_factory=list)
    outputs: list[tuple[str, Axes, Tensor]] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    backwards: bool = False
    _sizes: list[Size] = field(default_factory=list)  # by axis
    _same: list[int] = field(default_factory=list)  # another axis that an axis equals, or itself
    _sources: dict[str, str] = field(default_factory=dict)  # a value under other axes -> the value

    # --- axes ---------------------------------------------------------------------------------------------------------

    def axis(self, size: Size) -> int:
        """Return a new axis; BROADCAST for a size of 1."""
        if size == 1:
            return BROADCAST
        self._sizes.append(size)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def add_steps(self, length: Size) -> None:
        """Add the axis STEPS, which is the first one, and may have any size."""
        assert not self._sizes
        self._sizes.append(length)
        self._same.append(STEPS)

    def find(self, axis: int) -> int:
        """Return the axis that represents all axes that equal `axis`."""
        while axis != BROADCAST and self._same[axis] != axis:
            axis = self._same[axis]
        return axis

    def size(self, axis: int) -> Size:
        """Return the size of an axis."""
        return 1 if axis == BROADCAST else self._sizes[self.find(axis)]

    def unite(self, a: int, b: int) -> int:
        """Make two axes one, and return it; BROADCAST gives way.  Raises NoScan if their sizes may differ."""
        a, b = self.find(a), self.find(b)
        if BROADCAST in (a, b):
            return max(a, b)
        if self._sizes[a] != self._sizes[b]:
            raise NoScan(f"a step aligns axes of {self._sizes[a]} and {self._sizes[b]} elements")
        self._same[max(a, b)] = min(a, b)
        return min(a, b)

    def aligned(self, every: Sequence[Axes]) -> Axes:
        """Return the axes of values that are broadcast with each other."""
        rank = max(map(len, every), default=0)
        padded = [(BROADCAST,) * (rank - len(axes)) + axes for axes in every]
        result = [BROADCAST] * rank
        for axes in padded:
            result = [self.unite(a, b) for a, b in zip(result, axes, strict=True)]
        return tuple(result)

    # --- values -------------------------------------------------------------------------------------------------------

    def operand(self, shapes: ShapeInfo, tensor: Tensor) -> str:
        """Add a tensor of the graph as an operand with new axes, and return its value."""
        shape, dtype = shapes.shape(tensor), dtype_name(shapes.dtype(tensor))
        if shape is None or dtype not in COMPUTED:
            raise NoScan(f"'{tensor.name}' is {dtype if shape is not None else 'of unknown rank'}")
        name = f"x{len(self.operands)}"
        self.operands[name], self.dtypes[name] = tensor, dtype
        self.axes[name] = tuple(map(self.axis, shape))
        return name

    def emit(self, op: str, inputs: Sequence[str], axes: Axes, dtype: str, **attributes: object) -> str:
        """Add an operator, and return its value."""
        name = f"v{len(self.ops)}"
        self.ops.append([op, [self.source(each) for each in inputs], [name], attributes])
        self.axes[name], self.dtypes[name] = axes, dtype
        return name

    def view(self, value: str, axes: Axes) -> str:
        """Add a view of a value, which has other axes, and return it."""
        name = f"w{len(self.axes)}"
        self._sources[name], self.axes[name] = self.source(value), axes
        return name

    def source(self, value: str) -> str:
        """Return the operand or the operator's result that `value` is a view of; `value` if it is not a view."""
        return self._sources.get(value, value)

    def dtype(self, value: str) -> str:
        """Return the dtype of a value."""
        return self.dtypes[self.source(value)]

    def node(self, shapes: ShapeInfo, node: Node, names: dict[str, str]) -> None:
        """Add the operators of a node; `names` maps the names of tensors to values, and gets those of its outputs."""
        if op_of(node) == "MatMul":
            names[node.outputs[0].name] = self._matmul(*(names[t.name] for t in node.inputs))
            return
        form = normal_form(shapes, node)
        if isinstance(form, str):
            raise NoScan(f"a step has '{node_label(node)}': {form}")
        inner = dict(names)
        for step in form:
            inner |= dict(zip(step.outputs, self._step(shapes, node, step, inner), strict=True))
        names |= {tensor.name: inner[tensor.name] for tensor in node.outputs if tensor.name}

    def _step(self, shapes: ShapeInfo, node: Node, step: Step, names: Mapping[str, str]) -> list[str]:
        if any(name not in names for name in step.inputs):  # it reads the dims of a tensor that the node does not read
            raise NoScan(f"a step has '{node_label(node)}', a {op_of(node)} to a computed shape")
        given, dtype = [names[name] for name in step.inputs], dtype_name(step.dtype)
        axes = [self.axes[each] for each in given]
        if step.op == "Constant":
            return [self.emit(step.op, [], (), dtype, **step.attributes)]
        if step.op == "Identity":
            return given[:1]
        if step.op in ELEMENTWISE:
            return [self.emit(step.op, given, self.aligned(axes), dtype, **step.attributes)]
        if step.op in SUMS_OF_STEPS:
            return [self._reduction(step, given[0])]
        view = None if step.measured or step.computed else self._view(step, axes[0], _shape_of(shapes, node, step))
        if view is None:
            raise NoScan(f"a step has '{node_label(node)}', a {op_of(node)} that moves elements")
        return [self.view(given[0], view)]

    def _view(self, step: Step, axes: Axes, shape: Shape | None) -> Axes | None:
        """Return the axes of the result of a view; None if it does more than rename, insert, drop and expand axes."""
        a: Mapping[str, Any] = step.attributes
        match step.op:
            case "Transpose":
                return tuple(axes[i] for i in a["perm"])
            case "Squeeze":
                is_single = all(axes[i] == BROADCAST for i in a["axes"])
                return tuple(axis for i, axis in enumerate(axes) if i not in a["axes"]) if is_single else None
            case "Unsqueeze":
                rest = iter(axes)
                rank = len(axes) + len(a["axes"])
                return tuple(BROADCAST if i in a["axes"] else next(rest) for i in range(rank))
            case "Slice":
                is_whole = all(axes[i] == BROADCAST for i in a["axes"]) and (shape is None or 0 not in shape)
                return axes if is_whole else None
            case "Expand" if shape is not None:
                padded = (BROADCAST,) * (len(shape) - len(axes)) + axes
                if any(axis != BROADCAST and self.size(axis) != size for axis, size in zip(padded, shape, strict=True)):
                    return None  # an axis of unknown size that may be 1
                return tuple(self.axis(size) if axis == BROADCAST else axis
                             for axis, size in zip(padded, shape, strict=True))  # fmt: skip
            case "Reshape":
                return self._reshaped(axes, shape if shape is not None else a["shape"])
        return None

    def _reshaped(self, axes: Axes, shape: Sequence[Size]) -> Axes | None:
        """Return the axes after a Reshape that only inserts and drops axes of size 1; None for any other."""
        left, found = [axis for axis in axes if axis != BROADCAST], list[int]()
        for size in shape:
            if size == 1:
                found.append(BROADCAST)
            elif left and self.size(left[0]) == size:
                found.append(left.pop(0))
            else:
                return None
        return None if left else tuple(found)

    def _reduction(self, step: Step, given: str) -> str:
        attributes: Mapping[str, Any] = step.attributes
        axes, over = self.axes[given], set(attributes["axes"])
        kept = [BROADCAST if i in over else axis for i, axis in enumerate(axes)]
        if not attributes["keepdims"]:
            kept = [axis for i, axis in enumerate(kept) if i not in over]
        return self._reduce(step.op, given, [axes[i] for i in over], tuple(kept))

    def _reduce(self, op: str, given: str, over: Iterable[int], axes: Axes) -> str:
        several = [axis for axis in over if axis != BROADCAST]
        if not several:
            return self.view(given, axes)
        if len(several) > 1:
            raise NoScan(f"a step reduces {len(several)} axes at once; kernels reduce one")
        self.reduced += several
        return self.emit(op, [given], axes, self.dtype(given))

    def _matmul(self, a: str, b: str) -> str:
        """Return the product of two matrices: products of elements, and their sum over the axis that both have."""
        rows, columns = self.axes[a], self.axes[b]
        if len(rows) < 2 or len(columns) < 2:
            raise NoScan("a step multiplies a matrix by a vector of one axis")
        inner = self.unite(rows[-1], columns[-2])
        batch = self.aligned([rows[:-2], columns[:-2]])
        products = self.emit("Mul", [a, b], (*batch, rows[-2], inner, columns[-1]), self.dtype(a))
        return self._reduce("ReduceSum", products, [inner], (*batch, rows[-2], columns[-1]))

    # --- the text -----------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the program as compact JSON.  Raises NoScan if kernels are not generated for it."""
        self._check_values()
        numbers = self._numbers()
        axes = {name: [self._number(numbers, axis) for axis in self.axes[name]] for name in self.operands}
        outputs = [[self.source(name), [self._number(numbers, axis) for axis in of]] for name, of, _ in self.outputs]
        if not any(STEPS in of for of in axes.values()):
            raise NoScan("it slices only what is equal in all steps")
        parallel = {axis for axis, number in numbers.items() if number >= FIRST_FREE}
        if not any(parallel <= set(map(self.find, of)) for of in self.axes.values()):
            raise NoScan("it computes values that have no axis in common, which are several recurrences")
        if len(self.ops) > MAX_STEP_OPERATIONS:
            raise NoScan(f"a step has {len(self.ops)} operators; a kernel is generated for {MAX_STEP_OPERATIONS}")
        content: dict[str, object] = {"axes": axes, "states": self.states, "ops": self.ops, "outputs": outputs}
        content |= {"dtypes": self.dtypes} | ({"backwards": True} if self.backwards else {})
        return json.dumps(content, separators=(",", ":"))

    def _numbers(self) -> dict[int, int]:
        """Return the number, as programs have it, of each axis that an operand has.  Axis 0 is the steps."""
        reduced = set(map(self.find, self.reduced))
        if len(reduced) > 1:
            raise NoScan(f"its steps reduce {len(reduced)} different axes; kernels reduce one")
        if any(axis == STEPS or not _is_short(self.size(axis)) for axis in reduced):
            found = self.size(min(reduced))
            raise NoScan(
                f"its steps reduce an axis of {found} elements; required is a known number up to {MAX_REDUCED}"
            )
        if not reduced <= {self.find(axis) for name in self.operands for axis in self.axes[name]}:
            raise NoScan("its steps reduce an axis along which all elements are equal")
        numbers = {STEPS: STEPS} | dict.fromkeys(reduced, REDUCED)
        for name in self.operands:
            for axis in map(self.find, self.axes[name]):
                if axis != BROADCAST and axis not in numbers:
                    numbers[axis] = FIRST_FREE + len(numbers) - 1 - len(reduced)
        return numbers

    def _number(self, numbers: Mapping[int, int], axis: int) -> int:
        if axis == BROADCAST:
            return BROADCAST
        if self.find(axis) not in numbers:
            raise NoScan(f"an axis of {self.size(axis)} elements is one of no operand")
        return numbers[self.find(axis)]

    def _check_values(self) -> None:
        """Raise NoScan if a value has one axis twice: an element of a state then depends on other elements of it."""
        for axes in self.axes.values():
            found = [self.find(axis) for axis in axes if axis != BROADCAST]
            if len(set(found)) < len(found):
                raise NoScan("elements of a state depend on all elements of the state before, as in an RNN's product")


def _is_short(size: Size) -> bool:
    return isinstance(size, int) and 0 < size <= MAX_REDUCED


def _shape_of(shapes: ShapeInfo, node: Node, step: Step) -> Shape | None:
    """Return the shape of a step's result if it is an output of the node, else None."""
    return next((shapes.shape(t) for t in node.outputs if t.name == step.outputs[0]), None)


def program_of(recurrence: Recurrence, outer: ShapeInfo, joined: Joined) -> Program:
    """Return the program of a recurrence in the graph of `outer`, with the nodes that joined it.

    Raises NoScan if kernels cannot run it.
    """
    made, names = Program(backwards=recurrence.backwards), dict[str, str]()
    whole = dict[str, str]()  # values of whole tensors of the graph, which have the axis STEPS
    first = recurrence.inputs[0]
    length = (outer.shape(first.tensor) or ())[first.axis]
    if length == 1:
        raise NoScan("it has one step")
    made.add_steps(length)
    for state in recurrence.states:
        names[state.begin] = _state(made, outer, state)
    _add_nodes(made, outer, joined.before, whole)
    for each in recurrence.inputs:
        shape = outer.shape(each.tensor) or ()
        if shape[each.axis] != length:
            raise NoScan(f"'{first.tensor.name}' has {length} steps, and '{each.tensor.name}' {shape[each.axis]}")
        if each.tensor.name not in whole:
            whole[each.tensor.name] = made.operand(outer, each.tensor)
        value = whole[each.tensor.name]
        axes = list(made.axes[value])
        made.unite(axes[each.axis], STEPS)
        axes[each.axis : each.axis + 1] = [BROADCAST] if each.keeps_axis else []
        names[each.name] = made.view(value, tuple(axes))
    try:
        _add_nodes(made, recurrence.shapes, recurrence.body, names)
    except NoScan as error:
        raise NoScan(_why_mixed(recurrence) or str(error)) from error
    _add_states(made, recurrence, names)
    for each in recurrence.outputs:
        axes = list(made.axes[names[each.name]])
        if each.keeps_axis and axes.pop(each.axis) != BROADCAST:
            raise NoScan(f"a step computes several elements of '{each.tensor.name}' along axis {each.axis}")
        axes.insert(each.axis, STEPS)
        whole[each.tensor.name] = made.view(names[each.name], tuple(axes))
    _add_nodes(made, outer, joined.after, whole)
    outputs = [each.tensor for each in recurrence.outputs]
    for tensor in outputs if joined.output is None else [joined.output]:
        made.outputs.append((whole[tensor.name], made.axes[whole[tensor.name]], tensor))
    return made


def _state(made: Program, outer: ShapeInfo, state: State) -> str:
    """Return the present value of a state; its operand may be broadcast."""
    operand, shape = made.operand(outer, state.initial), outer.shape(state.like)
    if shape is None or shape == outer.shape(state.initial):
        return operand
    full = tuple(map(made.axis, shape))
    if made.aligned([full, made.axes[operand]]) != tuple(map(made.find, full)):
        raise NoScan(f"the state '{state.begin}' changes its shape")
    return made.view(operand, full)


def _add_nodes(made: Program, shapes: ShapeInfo, nodes: Sequence[Node], names: dict[str, str]) -> None:
    for node in nodes:
        for tensor in node.inputs:
            _read(made, shapes, node, tensor, names)
        made.node(shapes, node, names)


def _why_mixed(recurrence: Recurrence) -> str | None:
    """Return why kernels do not run a step that multiplies a state by a matrix, as those of an RNN or an sLSTM do."""
    states = {each.begin for each in recurrence.states}
    of_steps = states | {each.name for each in recurrence.inputs}
    for node in recurrence.body:
        names, made = {tensor.name for tensor in node.inputs}, {tensor.name for tensor in node.outputs}
        if op_of(node) in MATRIX_PRODUCTS and names & states and names - of_steps:
            return (
                f"'{node_label(node)}', {op_of(node)}, multiplies a state by a matrix, so that its elements depend on "
                "all elements of the state before; kernels do so for the operators LSTM, GRU and RNN alone"
            )
        states |= made if names & states else set()
        of_steps |= made if names & of_steps else set()
    return None


def _add_states(made: Program, recurrence: Recurrence, names: Mapping[str, str]) -> None:
    """Add the states, whose next values have the shapes of the present ones, and their last values."""
    for state in recurrence.states:
        begin, end = names[state.begin], names[state.end]
        if len(made.axes[begin]) != len(made.axes[end]) or made.dtype(begin) != made.dtype(end):
            raise NoScan(f"the state '{state.begin}' changes its rank or dtype")
        for a, b in zip(made.axes[begin], made.axes[end], strict=True):
            if made.unite(a, b) != BROADCAST and BROADCAST in (a, b):
                raise NoScan(f"the state '{state.begin}' changes its shape")
        made.state_axes.append(made.axes[begin])
        made.states.append((made.source(begin), made.source(end)))
        if state.final is not None:
            made.outputs.append((begin, made.axes[begin], state.final))


def _read(made: Program, shapes: ShapeInfo, node: Node, tensor: Tensor, names: dict[str, str]) -> None:
    """Give a value to a tensor that a step reads and no step computes, unless it is a number in the program."""
    if not tensor.name or tensor.name in names:
        return
    if op_of(node) == "MatMul" or not is_constant(tensor):
        names[tensor.name] = made.operand(shapes, tensor)
        return
    form = normal_form(shapes, node)
    if not isinstance(form, str) and any(tensor.name in step.inputs for step in form):
        names[tensor.name] = made.operand(shapes, tensor)
