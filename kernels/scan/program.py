"""Parses and checks a node's attribute `program`, which lists the operators of a step of a recurrence.

The program is JSON.  "axes" names the axes of each operand: STEPS is the sequence, REDUCED the axis that the step's
reductions sum over, 2 and more are axes whose elements do not depend on each other, and BROADCAST is a size of 1.
"states" are pairs: the operand that holds the first state, whose name is the present state's, and the value that is the
next one.  "ops" are [operator, inputs, outputs, attributes] as in the program of a region, but the inputs of an
elementwise operator share axes by name, and reductions are over REDUCED.  "outputs" are [value, axes]: a value of each
step if STEPS is among its axes, otherwise the last value of a state.  "dtypes" names the dtype of every value.  With
"backwards", the first step is at the end of STEPS.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.kernels.region.program import MAX_OPERANDS, VALUE_NAME, Operation, Program, operator_refusal
from onnxfuse.region_operators import (
    BROADCAST,
    COMPUTED,
    ELEMENTWISE,
    FLOATS,
    MAX_STEP_OPERATIONS,
    REDUCED,
    STEPS,
    SUMS_OF_STEPS,
)
from onnxfuse.runtime.plan import FusedNode


@dataclass(frozen=True)
class ScanProgram:
    """The operators of a step, and how operands, states and outputs lie."""

    step: Program
    axes: Mapping[str, tuple[int, ...]]  # by operand
    states: Mapping[str, str]  # the present state -> the next state
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    backwards: bool

    @functools.cached_property
    def twice(self) -> Program:
        """Two steps in a row: the last bit of a value can matter to an operator of a later step."""
        moved = (Operation("Identity", (later,), (now,), {}) for now, later in self.states.items())
        return replace(self.step, operations=(*self.step.operations, *moved, *self.step.operations))

    @functools.cached_property
    def vectors(self) -> frozenset[str]:
        """The values that have the axis REDUCED; the operand of such a state may be broadcast along it."""
        found = {name for name, axes in self.axes.items() if REDUCED in axes}
        while True:
            for each in self.step.operations:
                if each.name not in SUMS_OF_STEPS and found.intersection(each.inputs):
                    found |= set(each.outputs)
            widened = {now for now, later in self.states.items() if later in found} - found
            if not widened:
                return frozenset(found)
            found |= widened

    @functools.cached_property
    def late(self) -> tuple[Operation, ...]:
        """The operations on numbers of one step that only outputs of steps need: no state, vector or reduction does."""
        of_steps = {name for name, axes in self.outputs if STEPS in axes and REDUCED not in axes}
        early = {*self.states.values(), *(name for name, axes in self.outputs if name not in of_steps)}
        found = list[Operation]()
        for each in reversed(self.step.operations):
            (name,) = each.outputs
            if name in early or name in self.vectors or each.name in SUMS_OF_STEPS:
                early |= set(each.inputs)
            else:
                found.append(each)
        return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> ScanProgram:
    content = json.loads(text)
    operations = tuple(
        Operation(str(name), tuple(map(str, inputs)), tuple(map(str, outputs)), dict(attributes))
        for name, inputs, outputs, attributes in content["ops"]
    )
    outputs = tuple((str(name), tuple(map(int, axes))) for name, axes in content["outputs"])
    axes = {str(name): tuple(map(int, axes)) for name, axes in content["axes"].items()}
    states = {str(now): str(later) for now, later in content["states"]}
    step = Program(operations, tuple(states.values()), dict(content["dtypes"]))
    return ScanProgram(step, axes, states, outputs, bool(content.get("backwards")))


def parse(node: FusedNode) -> ScanProgram:
    """Return the program of a node.  Raises ValueError if the attribute is malformed or values are not in order."""
    try:
        program = _parsed(node.text("program"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"scan: its program cannot be read: {type(error).__name__}: {error}") from error
    known = {f"x{i}" for i in range(len(node.operands))}
    if set(program.axes) != known:
        raise ValueError(f"scan: its program has axes of {len(program.axes)} operands; the node has {len(known)}")
    for each in program.step.operations:
        if not each.inputs and each.name != "Constant":
            raise ValueError(f"scan: {each.name} reads nothing")
        if missing := [name for name in each.inputs if name not in known]:
            raise ValueError(f"scan: {each.name} reads {missing[0]}, which nothing before it gives")
        if len(each.outputs) != 1 or not VALUE_NAME.fullmatch(each.outputs[0]) or each.outputs[0] in known:
            raise ValueError(f"scan: {each.name} gives {each.outputs}; required is one new value such as v0")
        known |= set(each.outputs)
    named = {*program.states, *program.states.values(), *(name for name, _ in program.outputs)}
    if absent := sorted(named - known) or sorted(known - set(program.step.dtypes)):
        raise ValueError(f"scan: nothing gives {absent[0]}, or its dtype is unknown")
    if stray := set(program.states) - set(program.axes):
        raise ValueError(f"scan: the state {min(stray)} is not an operand")
    return program


def refusal(program: ScanProgram, dtypes: Sequence[str], output_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel can be generated for a program's operators or dtypes; None if one can."""
    step = program.step
    if len(dtypes) > MAX_OPERANDS or len(step.operations) > MAX_STEP_OPERATIONS:
        return f"scan: it has {len(dtypes)} operands and {len(step.operations)} operators; a kernel takes " \
               f"{MAX_OPERANDS} and {MAX_STEP_OPERATIONS}"  # fmt: skip
    for i, dtype in enumerate(dtypes):
        if step.dtypes[f"x{i}"] != dtype:
            return f"scan: x{i} is {dtype}; its program says {step.dtypes[f'x{i}']}"
    given = tuple(step.dtypes[name] for name, _ in program.outputs)
    if given != tuple(output_dtypes):
        return f"scan: its outputs are {', '.join(output_dtypes)}; its program says {', '.join(given)}"
    if wrong := next((dtype for dtype in step.dtypes.values() if dtype not in COMPUTED), None):
        return f"scan: a value is {wrong}; kernels are generated for {', '.join(COMPUTED)}"
    if wrong := next((now for now, later in program.states.items() if step.dtypes[now] != step.dtypes[later]), None):
        return f"scan: the state {wrong} changes its dtype"
    if wrong := next((now for now in program.states if STEPS in program.axes[now]), None):
        return f"scan: the state {wrong} has the axis of the steps"
    found = [*(_output_refusal(program, *each) for each in program.outputs)]
    found += [_operator_refusal(step, each) for each in step.operations]
    return next(filter(None, found), None)


def _output_refusal(program: ScanProgram, name: str, axes: tuple[int, ...]) -> str | None:
    if name in program.vectors and REDUCED not in axes:
        return f"scan: the output {name} lacks an axis of its value"
    if len(set(axes) - {BROADCAST}) < len(axes) - axes.count(BROADCAST):
        return f"scan: the output {name} has an axis twice"
    if STEPS not in axes and name not in program.states:
        return f"scan: the output {name} is neither a value of each step nor a state"
    return None


def _operator_refusal(step: Program, operation: Operation) -> str | None:
    if operation.name == "Constant":
        return None
    dtype = step.dtype_of_input(operation)
    if operation.name in SUMS_OF_STEPS:
        return None if dtype in FLOATS else f"scan: {operation.name} is of {dtype}; required is one of {FLOATS}"
    if operation.name not in ELEMENTWISE:
        return f"scan: kernels are not generated for the operator {operation.name}"
    return operator_refusal(step, operation)
