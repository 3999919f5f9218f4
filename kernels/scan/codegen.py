"""The text of a scan's kernel: a group of lanes walks along the steps with its part of the states in registers.

The elements along the axis REDUCED are distributed over the lanes of a group, `EACH` of them to a lane, and a value
without this axis is a number that all lanes of the group compute.  Operands of the next steps are loaded before the
present ones are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from onnxfuse.algebra.sizes import Size, product
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.operators import NUMBER, OF_ANGLES, QUOTIENTS, STORED, expression, literal
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.scan.program import ScanProgram
from onnxfuse.region_operators import FIRST_FREE, REDUCED, STEPS, SUMS_OF_STEPS

ACCUMULATORS: Final = {"ReduceSum": "Sum", "ReduceMean": "Sum", "ReduceMax": "Max", "ReduceMin": "Min"}
HEAD: Final = """\
// {operators}
#include "types.cuh"
#include "activations.cuh"
#include "region.cuh"

#pragma nv_diag_suppress 177  // not every variable is read
#pragma nv_diag_suppress 550
#define EACH _Pragma("unroll") for (int e = 0; e < {each}; ++e)
#define AHEAD _Pragma("unroll") for (int u = 0; u < {ahead}; ++u)

extern "C" __global__ void __launch_bounds__({threads}) scan({parameters}) {{
    wait_for_predecessor();
{body}}}
"""


@dataclass
class ScanText:
    """Writes the kernel of a program for the sizes of its axes, by name of the axis."""

    program: ScanProgram
    sizes: Mapping[int, Size]
    arguments: Arguments
    threads: int  # threads of a block
    lanes: int  # threads of a group, a power of two
    ahead: int  # steps whose operands are loaded together
    lines: list[str] = field(default_factory=list)

    @property
    def reduced(self) -> int:
        """The number of elements along the axis REDUCED."""
        return int(str(self.sizes.get(REDUCED, 1)))

    @property
    def each(self) -> int:
        """The number of elements along REDUCED that a lane has."""
        return -(-self.reduced // self.lanes)

    def body(self) -> str:
        """Return the lines of the kernel after its head."""
        index, program = self.arguments.index_type, self.program
        groups, steps = self.arguments.size(product(tuple(self._free().values()))), self._size(STEPS)
        self._line(f"const int lane = threadIdx.x % {self.lanes};")
        self._line(f"const {index} own = (({index})(blockIdx.x) * {self.threads} + threadIdx.x) / {self.lanes};")
        self._line(f"const bool is_inside = own < {groups};")
        # All lanes of a warp run, because they exchange values; those beyond the last group store nothing.
        self._line(f"const {index} group = is_inside ? own : {groups} - 1;")
        self._coordinates()
        for name, axes in program.axes.items():
            self._line(f"const {self._stored(name)}* const from_{name} = {name} + {self._place(axes)};")
        for i, (name, axes) in enumerate(program.outputs):
            self._line(f"{self._stored(name)}* const to_{i} = y{i} + {self._place(axes)};")
        stepped = [name for name in self._stepped() if name not in self.late_operands]
        for name in program.axes:
            if name not in self._stepped():
                self._declare(name)
                self._load(name, name, "0")
        for name in stepped:
            extent = f"[{self.ahead}]" + (f"[{self.each}]" if name in program.vectors else "")
            self._line(f"{self._number(name)} now_{name}{extent}, next_{name}{extent};")
        for name in self.late_operands:
            self._line(f"{self._number(name)} now_{name}, next_{name};")
        with_steps = [(i, name, axes) for i, (name, axes) in enumerate(program.outputs) if STEPS in axes]
        self._line(f"{index} first = 0;")
        self._line(f"if ({self.ahead} <= {steps}) {{")
        self._fetch("now", stepped, "first")
        self._line("}")
        self._line(f"for (; first + {self.ahead} <= {steps}; first += {self.ahead}) {{")
        self._line(f"if (first + {2 * self.ahead} <= {steps}) {{")
        self._fetch("next", stepped, f"first + {self.ahead}")
        self._line("}")
        self._steps(stepped, with_steps)
        for name in stepped:
            copied = f"EACH now_{name}[u][e] = next_{name}[u][e];"
            self._line(f"AHEAD {copied if name in program.vectors else copied[5:].replace('[e]', '')}")
        for name in self.late_operands:
            self._line(f"now_{name} = next_{name};")
        self._line("}")
        if self.ahead > 1:
            self._line(f"if (first < {steps}) {{")
            self._fetch("now", stepped, "first", steps)
            self._steps(stepped, with_steps, steps)
            self._line("}")
        for i, (name, axes) in enumerate(program.outputs):
            if STEPS not in axes:
                self._store(i, name, axes, "0")
        return "".join(f"    {line}\n" for line in self.lines)

    def _line(self, text: str) -> None:
        self.lines.append(text)

    def _number(self, name: str) -> str:
        return NUMBER[self.program.step.dtypes[name]]

    def _stored(self, name: str) -> str:
        return STORED[self.program.step.dtypes[name]]

    def _size(self, axis: int) -> str:
        return self.arguments.size(self.sizes[axis])

    def _free(self) -> dict[int, Size]:
        """Return the sizes of the axes whose elements are independent; neighbouring groups differ along the last."""
        order = dict.fromkeys(axis for name in self.program.states for axis in self.program.axes[name])
        return {axis: self.sizes[axis] for axis in (*order, *self.sizes) if axis >= FIRST_FREE}

    def _coordinates(self) -> None:
        """Declare i2, i3, ...: the place of the group along each independent axis."""
        rest = "group"
        for axis, size in reversed(self._free().items()):
            index = self.arguments.index_type
            self._line(f"const {index} i{axis} = {self.arguments.quotient(rest, size, '%')};")
            self._line(f"const {index} rest{axis} = {self.arguments.quotient(rest, size)};")
            rest = f"rest{axis}"

    def _stride(self, axes: Sequence[int], axis: int) -> str:
        """Return the distance of neighbours along an axis of a tensor with these axes."""
        after = axes[axes.index(axis) + 1 :]
        return self.arguments.size(product(tuple(self.sizes[each] for each in after if each >= 0)))

    def _place(self, axes: Sequence[int]) -> str:
        terms = [f"i{axis} * {self._stride(axes, axis)}" for axis in axes if axis >= FIRST_FREE]
        return " + ".join(terms) or "0"

    def _along(self, axes: Sequence[int], step: str) -> str:
        """Return the offset, from a tensor's place, of an element of a step; `r` is its place along REDUCED."""
        index = self.arguments.index_type
        place = f"({self._size(STEPS)} - 1 - ({index})({step}))" if self.program.backwards else f"({index})({step})"
        terms = [f"{place} * {self._stride(axes, STEPS)}"] if STEPS in axes else []
        terms += [f"({index})(r) * {self._stride(axes, REDUCED)}"] if REDUCED in axes else []
        return " + ".join(terms) or "0"

    # --- operands and outputs -----------------------------------------------------------------------------------------

    def _declare(self, name: str) -> None:
        self._line(f"{self._number(name)} value_{name}{f'[{self.each}]' if name in self.program.vectors else ''};")

    def _elements(self, condition: str = "") -> str:
        """Return the head of a loop over the elements of a lane, in which `r` is the place along REDUCED."""
        is_whole = self.each * self.lanes == self.reduced
        guard = " && ".join(filter(None, (condition, "" if is_whole else f"r < {self.reduced}")))
        return f"EACH {{ const int r = lane + e * {self.lanes};{f' if ({guard})' if guard else ''} "

    def _load(self, name: str, variable: str, step: str) -> None:
        """Load an operand's elements of a step into `value_{variable}`; elements beyond REDUCED become 0."""
        source = f"load_one(from_{name} + {self._along(self.program.axes[name], step)})"
        if name not in self.program.vectors:
            self._line(f"value_{variable} = {source};")
            return
        zero = literal(0, self.program.step.dtypes[name])
        if self.each * self.lanes != self.reduced:
            self._line(f"EACH value_{variable}[e] = {zero};")
        self._line(f"{self._elements()}value_{variable}[e] = {source}; }}")

    def _fetch(self, buffer: str, stepped: Iterable[str], first: str, steps: str = "") -> None:
        """Load the operands of as many steps as are loaded together; `steps` is their number if some may be missing."""
        index = self.arguments.index_type
        for name in self.late_operands:
            zero = literal(0, self.program.step.dtypes[name])
            source = f"load_one(from_{name} + {self._along(self.program.axes[name], f'{first} + lane')})"
            is_there = f"lane < {self.ahead}" + (f" && {first} + lane < {steps}" if steps else "")
            self._line(f"{buffer}_{name} = {is_there} ? {source} : {zero};")
        step = f"smaller<{index}>({first} + u, {steps} - 1)" if steps else f"{first} + u"
        self._line(f"AHEAD {{ const {index} t = {step};")
        for name in stepped:
            begin = len(self.lines)
            self._load(name, name, "t")
            self.lines[begin:] = [line.replace(f"value_{name}", f"{buffer}_{name}[u]") for line in self.lines[begin:]]
        self._line("}")

    def _store(self, output: int, name: str, axes: Sequence[int], step: str) -> None:
        target, value = f"to_{output} + {self._along(axes, step)}", self._given(name)
        if REDUCED in axes:
            self._line(f"{self._elements('is_inside')}put_one(false, {target}, {value}); }}")
        else:
            self._line(f"if (is_inside && lane == 0) put_one(false, {target}, {value});")

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def stores_together(self) -> bool:
        """Whether there is a lane for each step that is loaded together, which stores the results of this step."""
        return 1 < self.ahead <= self.lanes

    @cached_property
    def late(self) -> Sequence[Operation]:
        """The operations that one lane of a group computes for each step, after all steps that are loaded together."""
        return self.program.late if self.stores_together else ()

    @cached_property
    def _read_early(self) -> set[str]:
        """The values that all lanes of a group have in each step."""
        early = [each for each in self.program.step.operations if each not in self.late]
        read = {name for each in early for name in each.inputs} | {*self.program.states.values()}
        return read | {name for name, axes in self.program.outputs if REDUCED in axes}  # which all lanes store

    @cached_property
    def late_operands(self) -> list[str]:
        """The operands with a number for each step that only `late` operations read."""
        names = self._stepped() if self.late else []
        return [name for name in names if name not in self._read_early and name not in self.program.vectors]

    @cached_property
    def late_sums(self) -> list[Operation]:
        """The reductions whose lanes add up only after all steps that are loaded together, for all of them at once."""
        reductions = [each for each in self.program.step.operations if each.name in SUMS_OF_STEPS]
        return [each for each in reductions if self.stores_together and each.outputs[0] not in self._read_early]

    def _stepped(self) -> list[str]:
        return [name for name, axes in self.program.axes.items() if STEPS in axes]

    def _kept(self, outputs: Sequence[tuple[int, str, Sequence[int]]]) -> list[str]:
        """Return the numbers that each lane keeps from the step of its number until all steps loaded together are done.

        These are the outputs that the steps compute themselves, and what `late` operations read.
        """
        if not self.stores_together:
            return []
        made = {name for each in (*self.late, *self.late_sums) for name in each.outputs}
        read = [name for each in self.late for name in each.inputs]
        read += [name for _, name, axes in outputs if REDUCED not in axes]
        constants = {name for name, each in self.program.step.producers.items() if each.name == "Constant"}
        equal = set(self.program.axes) - {*self._stepped(), *self.program.states}  # operands that all steps share
        known = {*made, *self.late_operands, *constants, *equal}
        return [name for name in dict.fromkeys(read) if name not in known]

    def _steps(
        self, stepped: Iterable[str], outputs: Sequence[tuple[int, str, Sequence[int]]], steps: str = ""
    ) -> None:
        """Write the steps whose operands are loaded; `steps` is their number if the last of them may be missing.

        A lane keeps the results of the step of its number, so that the lanes of a group then store neighbouring steps
        together.
        """
        program, kept = self.program, self._kept(outputs)
        is_here = f"lane < {self.ahead}" + (f" && first + lane < {steps}" if steps else "")
        self._line("{")
        for name in kept:
            self._line(f"{self._number(name)} kept_{name} = {literal(0, program.step.dtypes[name])};")
        for operation in self.late_sums:
            self._line(f"{self._accumulator(operation)} sums_{operation.outputs[0]}[{self.ahead}];")
        self._line(f"AHEAD if (first + u < {steps}) {{" if steps else "AHEAD {")
        for name in stepped:
            self._line(f"const auto& value_{name} = now_{name}[u];")
        for operation in program.step.operations:
            if operation not in self.late:
                self._operation(operation)
        for name in kept:
            self._line(f"if (lane == u) kept_{name} = value_{name};")
        for i, name, axes in outputs:
            if REDUCED in axes or not self.stores_together:
                self._store(i, name, axes, "first + u")
        self._advance()
        self._line("}")
        for name in kept:
            self._line(f"const {self._number(name)} value_{name} = kept_{name};")
        for name in self.late_operands:
            self._line(f"const auto& value_{name} = now_{name};")
        for operation in self.late_sums:
            (name,) = operation.outputs
            self._line(f"merge_each<{self.lanes}>(sums_{name});")
            self._line(f"const {self._number(name)} value_{name} = {self._total(operation, f'sums_{name}[0]')};")
        for operation in self.late:
            self._operation(operation)
        for i, name, axes in outputs:
            if REDUCED not in axes and self.stores_together:
                stored = f"put_one(false, to_{i} + {self._along(axes, 'first + lane')}, {self._given(name)});"
                self._line(f"if (is_inside && {is_here}) {stored}")
        self._line("}")

    def _advance(self) -> None:
        """Make the next states the present ones; a next state may be another present one, so all are read first."""
        for place, (now, later) in enumerate(self.program.states.items()):
            read = f"value_{later}{'[e]' if later in self.program.vectors else ''}"
            is_vector = now in self.program.vectors
            self._line(f"{self._number(now)} later_{place}{f'[{self.each}]' if is_vector else ''};")
            self._line(f"EACH later_{place}[e] = {read};" if is_vector else f"later_{place} = {read};")
        for place, now in enumerate(self.program.states):
            is_vector = now in self.program.vectors
            self._line(f"EACH value_{now}[e] = later_{place}[e];" if is_vector else f"value_{now} = later_{place};")

    def _operation(self, operation: Operation) -> None:
        (name,), program = operation.outputs, self.program
        dtype, is_vector = program.step.dtypes[name], name in program.vectors
        if operation.name == "Constant":
            self._line(f"const {NUMBER[dtype]} value_{name} = {literal(operation.attributes['value'], dtype)};")
        elif operation.name in SUMS_OF_STEPS:
            self._reduction(operation)
        elif is_vector:
            self._line(f"{NUMBER[dtype]} value_{name}[{self.each}]; EACH value_{name}[e] = {self._value(operation)};")
        else:
            self._line(f"const {NUMBER[dtype]} value_{name} = {self._value(operation)};")

    def _given(self, name: str) -> str:
        made = self.program.step.producers.get(name)
        if made is not None and made.name == "Constant":
            return literal(made.attributes["value"], self.program.step.dtypes[name])
        return f"value_{name}" + ("[e]" if name in self.program.vectors else "")

    def _value(self, operation: Operation) -> str:
        (name,), dtypes = operation.outputs, self.program.step.dtypes
        given, of = [self._given(each) for each in operation.inputs], [dtypes[each] for each in operation.inputs]
        if operation.name in OF_ANGLES and NUMBER[of[0]] == "float":
            given = [f"angle({given[0]})"]
        # Errors of one step grow in the next ones, so that quotients and roots are as exact as onnxruntime's.
        nearest = name in self.program.twice.read_by_steps or operation.name in (*QUOTIENTS, "Log")
        text = expression(operation, given, of, dtypes[name], nearest)
        return self._rounded(name, text)

    def _rounded(self, name: str, text: str) -> str:
        return f"rounded<{self._stored(name)}>({text})" if name in self.program.twice.rounded else text

    def _reduction(self, operation: Operation) -> None:
        """Write a reduction over REDUCED: each lane adds up its elements, and then the lanes of the group."""
        (name,), (given,) = operation.outputs, operation.inputs
        is_late = operation in self.late_sums
        own = f"sums_{name}[u]" if is_late else f"sum_{name}"
        if not is_late:
            self._line(f"{self._accumulator(operation)} {own};")
        self._line(f"{self._elements()}{own}.add({self._given(given)}); }}")
        if not is_late:
            if self.lanes > 1:
                self._line(f"merge_warp<{self.lanes}>({own});")
            self._line(f"const {self._number(name)} value_{name} = {self._total(operation, own)};")

    def _accumulator(self, operation: Operation) -> str:
        return f"{ACCUMULATORS[operation.name]}<{self._number(operation.outputs[0])}>"

    def _total(self, operation: Operation, accumulator: str) -> str:
        (name,), text = operation.outputs, f"{accumulator}.total"
        if operation.name == "ReduceMean":
            text += f" / {literal(self.reduced, self.program.step.dtypes[name])}"
        return self._rounded(name, text)
