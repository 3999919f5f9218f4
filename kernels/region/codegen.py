"""Writes the code of a kernel: each value of the region's program is computed at the line where it is first needed.

A place is the position of an element in a tensor: an index along each axis, as an expression in loop variables.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import Atom, Index, flat, replaced, text_of, variable_index
from onnxfuse.algebra.sizes import Size, product
from onnxfuse.kernels.region import branches, maps
from onnxfuse.kernels.region.arguments import Arguments, in_parentheses
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.operators import (
    INSTRUCTIONS,
    NUMBER,
    OF_ANGLES,
    OTHER_INSTRUCTIONS,
    STORED,
    dequantized_step,
    expression,
    literal,
    of_equal_inputs,
)
from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.reductions import Instance, Key, finished, instance_of, term
from onnxfuse.kernels.region.references import Reference, Within
from onnxfuse.kernels.region.scratch_reductions import StoredByKey, place_in
from onnxfuse.kernels.region.shapes import Shapes, axis_of
from onnxfuse.kernels.tensors import VECTOR_BYTES
from onnxfuse.region_operators import ELEMENTWISE, FLOATS, GATHERS, HALVES, REDUCTIONS

MAX_LINES: Final = 2000  # per loop nest: longer code takes too long to compile
FUNCTIONS: Final = {"reflect": "reflected", "edge": "nearest", "wrap": "modulo"}


@dataclass
class Writer:
    """Lines of generated code, and the values that they compute."""

    program: Program
    shapes: Shapes
    arguments: Arguments
    aligned: bool  # whether operands and outputs start at multiples of 16 bytes
    stored: StoredByKey  # reductions that an earlier launch computes
    lanes: Lanes = field(default_factory=Lanes)
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: dict[str, int] = field(default_factory=dict)  # number of uses per name or prefix
    conditions: int = 0  # number of open branches
    masks: list[str] = field(default_factory=list)  # open masks: bool arrays, true for lanes that need the code
    scopes: list[dict[Any, Reference]] = field(default_factory=lambda: [{}])
    kept: dict[Any, None] = field(default_factory=dict)  # every key that was passed to `keep`, in order
    masked_scopes: list[int] = field(default_factory=list)  # indices, in `scopes`, of the scopes that `mask` opened
    # Reductions that are written as loops of one thread, and whether the loop is in a branch.
    found: list[tuple[Instance, bool]] = field(default_factory=list)
    stored_read: list[tuple[Key, Index]] = field(default_factory=list)  # reads of stored reductions: key, and index
    accesses: list[tuple[str, Index]] = field(default_factory=list)
    vectors: list[tuple[str, Place]] = field(default_factory=list)  # operands read as whole vectors, and their indices
    bounds: list[tuple[Index, Size]] = field(default_factory=list)  # comparisons of an index with a size, in branches
    instructions: int = 0  # estimated instructions of the operators written
    shared_bytes: int = 0  # bytes of shared memory that the block uses
    row_bytes: int = 0  # bytes of shared memory that keep operands of a row
    arbitrary: tuple[str, ...] = ()  # operands whose last bits are arbitrary, such as a product's result
    within: Within | None = None  # bounds on an index that the next line can assume
    # For the name of a value and the place of one of its elements: the variables on which this element depends.
    dependencies: dict[tuple[str, Place], frozenset[str]] = field(default_factory=dict)

    @functools.cached_property
    def inexact(self) -> frozenset[str]:
        """The values whose last bits are arbitrary, so that quantizers can compute their quotients approximately."""
        return self.program.inexact_after(*self.arbitrary)

    def copy(self) -> Writer:
        """Return a writer for the same program that has written nothing."""
        given = (self.program, self.shapes, self.arguments, self.aligned, self.stored)
        return Writer(*given, depth=self.depth, arbitrary=self.arbitrary)

    # --- lines ----------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Add a line."""
        if len(self.lines) > MAX_LINES:
            raise ValueError(f"region: its kernel has more than {MAX_LINES} lines")
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write a block after a line such as `for (...)`; values that are computed in it are forgotten at its end."""
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        self.scopes.append({})
        yield
        self.scopes.pop()
        self.depth -= 1
        self.line("}")

    @contextmanager
    def branch(self, head: str) -> Iterator[None]:
        """Write a block after a line such as `if (...)`, which only some threads run."""
        self.conditions += 1
        with self.block(head):
            yield
        self.conditions -= 1

    @contextmanager
    def mask(self, condition: str) -> Iterator[str]:
        """Write branchless code for lanes j where `condition` is true; yield the name of the bool array of lanes."""
        name, outer = self.new_name(), f"{self.masks[-1]}[j] && " if self.masks else ""
        self.line(f"bool {name}[{self.lanes.width}]; EACH({self.lanes.width}) {name}[j] = {outer}{condition};")
        self.masks.append(name)
        self.masked_scopes.append(len(self.scopes))
        self.scopes.append({})
        yield name
        self.scopes.pop()
        self.masked_scopes.pop()
        self.masks.pop()

    def new_name(self, begin: str = "t") -> str:
        """Return an unused name: the prefix `begin` and a number."""
        self.names[begin] = count = self.names.get(begin, 0) + 1
        return f"{begin}{count}"

    def own_name(self, name: str) -> str:
        """Return an unused name: `name`, followed by a number if it is taken."""
        self.names[name] = count = self.names.get(name, 0) + 1
        return name if count == 1 else f"{name}_{count}"

    def name_of(self, value: str) -> str:
        """Return an unused name for a variable: the name of a computed value, or an operand's name with a number."""
        return self.own_name(value) if value in self.program.producers else self.new_name(f"{value}_")

    def shared(self, size: int) -> str:
        """Reserve `size` bytes of the block's shared memory and return its name."""
        self.shared_bytes = max(self.shared_bytes, size)
        return "shared"

    def row_memory(self, size: int) -> str:
        """Reserve `size` bytes of the shared memory that keeps a row's operands, and return their address."""
        begin, self.row_bytes = self.row_bytes, self.row_bytes + -(-size // VECTOR_BYTES) * VECTOR_BYTES
        return f"row_memory + {begin // VECTOR_BYTES}"

    def known(self, key: Any) -> Reference | None:
        """Return the variable that holds a key's value at the next line; None if no variable does.

        A key is the (name, place) of a value, the `Instance` of a reduction, or a tuple that names another intermediate
        result.
        """
        return next((scope[key] for scope in reversed(self.scopes) if key in scope), None)

    def values(self) -> list[tuple[str, Place]]:
        """Return all values that the code computes, in branches too, in order of computation."""
        return [key for key in self.kept if isinstance(key, tuple) and len(key) == 2]

    def keep(self, key: Any, reference: Reference) -> Reference:
        """Record that a variable holds a key's value.

        The record is dropped at the end of the current block.  It is also dropped at the end of an open mask (code for
        some lanes of a vector), unless the variable is right in all lanes.
        """
        scope = len(self.scopes) - 1
        while not reference.masked and scope in self.masked_scopes:
            scope -= 1
        self.scopes[scope][key] = reference
        self.kept[key] = None
        return reference

    def declare(
        self, kind: str, value: str, varies: bool, masked: bool = False, name: str = "", note: str = ""
    ) -> Reference:
        """Declare a variable; `value` is an expression that can depend on lane j, and `note` becomes a comment."""
        name, comment = name or self.new_name(), f"  // {note}" if note else ""
        self.instructions += INSTRUCTIONS.get(note, OTHER_INSTRUCTIONS) * (self.lanes.width if varies else 1)
        if varies:
            self.line(f"{kind} {name}[{self.lanes.width}]; EACH({self.lanes.width}) {name}[j] = {value};{comment}")
        else:
            self.line(f"const {kind} {name} = {value};{comment}")
        return Reference(name, varies, masked)

    # --- indices --------------------------------------------------------------------------------------------------

    def index(self, index: Index, in_lane: bool = False) -> str:
        """Return an index as an expression: in lane j if `in_lane`, else in the first lane."""
        lanes = self.lanes
        behind = index + lanes.linear * -1 if lanes.linear else index
        if lanes.linear and not behind.terms and (in_lane or not lanes.scattered):
            own = "at[j]" if lanes.scattered else f"at * {lanes.width}{' + j' if in_lane else ''}"
            return text_of(Index(behind.constant, ((Atom("value", 1, own), 1),)), self.arguments.size, _name)

        def atom(each: Atom) -> str:
            if each.kind == "value" or each.name in self.lanes.scattered:
                varies = self.lanes.differ(each.varies or (each.name,))
                return f"{each.name}[{'j' if in_lane else 0}]" if varies else each.name
            if each.kind == "variable":
                return f"({each.name} + j)" if in_lane and each.name == self.lanes.variable else each.name
            assert each.of is not None
            inner, kind = self.index(each.of, in_lane), self.arguments.index_type
            if each.kind in FUNCTIONS:
                return f"{FUNCTIONS[each.kind]}<{kind}>({inner}, {self.arguments.size(each.by)})"
            return self.arguments.quotient(inner, each.by, "/" if each.kind == "div" else "%")

        return text_of(index, self.arguments.size, atom)

    def address(self, pointer: str, index: Index, in_lane: bool = False) -> str:
        """Return the address of element `index` after a pointer; `in_lane` means the same as for the method `index`."""
        at = self.index(index, in_lane)
        return pointer if at == "0" else f"{pointer} + {in_parentheses(at)}"

    def is_below(self, index: Index, bound: Size) -> bool | None:
        """Return whether an index is less than a bound; None if that is only known at run time."""
        if self.within and self.within.index == index:
            if is_nonnegative(bound - self.within.end):
                return True
            if is_nonnegative(self.within.begin - bound):
                return False
        return index.is_below(bound)

    def is_contiguous(self, address: Index) -> bool:
        """Return whether one vector access reads or writes all lanes at an address."""
        return self.aligned and self.lanes.are_contiguous(address, self.shapes.sizes)

    # --- values ---------------------------------------------------------------------------------------------------

    def value(self, name: str, place: Place) -> Reference:
        """Return a value's element at `place`, an index along each axis; write its computation if the code lacks it."""
        operation = self.program.producers.get(name)
        if operation and operation.name == "Constant":
            return Reference(literal(operation.attributes["value"], self.program.dtypes[name]))
        key = (name, place)
        found = self.known(key)
        if found:
            return found
        if operation is None:
            return self.keep(key, self._load(name, place))
        if operation.name in ELEMENTWISE:
            return self.keep(key, self._elementwise(operation, name, place))
        if operation.name in REDUCTIONS:
            return self.keep(key, self._reduced(operation, place))
        if operation.name == "Concat":
            return self.keep(key, branches.joined(self, operation, name, place))
        if operation.name in GATHERS:
            return self.keep(key, self._gathered(operation, place))
        inner = maps.source(operation, name, place, self.shapes)
        if operation.name == "Pad" and operation.attributes.get("mode", "constant") == "constant":
            return self.keep(key, branches.padded(self, operation, inner))
        return self.value(operation.inputs[0], inner)

    def rounded(self, name: str, value: str) -> str:
        """Return a value's expression, rounded to its dtype if `Program.rounded` contains the value."""
        return f"rounded<{STORED[self.program.dtypes[name]]}>({value})" if name in self.program.rounded else value

    def _load(self, name: str, place: Place) -> Reference:
        address = flat(place, self.shapes.of[name])
        self.accesses.append((name, address))
        kind = NUMBER[self.program.dtypes[name]]
        if self.masks and not maps.is_inside(place, self.shapes.of[name]):
            text = f"{self.masks[-1]}[j] ? load_one({self.address(name, address, in_lane=True)}) : ({kind})1"
            return self.declare(kind, text, True, masked=True, name=self.name_of(name))
        if not self.lanes.vary(address):
            return self.declare(kind, f"load_one({self.address(name, address)})", False, name=self.name_of(name))
        if self.is_contiguous(address):
            if not self.conditions and not any(each.kind == "value" for each in address.atoms()):
                self.vectors.append((name, place))
            found = Reference(self.name_of(name), True)
            self.line(f"{kind} {found.text}[{self.lanes.width}]; load({self.address(name, address)}, {found.text});")
            return found
        step = self.lanes.step_of(address)
        if step:
            return self._load_step(name, address, step)
        text = f"load_one({self.address(name, address, in_lane=True)})"
        return self.declare(kind, text, True, name=self.name_of(name))

    def _load_step(self, name: str, address: Index, step: int) -> Reference:
        """Load the one or two elements that a vector needs if `step` neighbouring lanes share an element.

        Lanes before the next multiple of `step` use the first lane's element; the other lanes use the last lane's.
        """
        kind, lanes = NUMBER[self.program.dtypes[name]], self.lanes
        variable = next(each for each in address.atoms() if each.kind == "variable" and each.name == lanes.variable)
        own = variable_index(lanes.variable, variable.extent)
        last = replaced(address, {lanes.variable: own + (lanes.width - 1)})
        key = ("beyond", lanes, step)
        beyond = self.known(key)
        if beyond is None:
            rest = self.arguments.quotient(lanes.variable, step, "%")
            beyond = self.keep(key, self.declare("bool", f"{rest} + j >= {step}", True))
        near, far = (self.declare(kind, f"load_one({self.address(name, each)})", False) for each in (address, last))
        return self.declare(kind, f"{beyond.lane} ? {far.text} : {near.text}", True, name=self.name_of(name))

    def _elementwise(self, operation: Operation, name: str, place: Place) -> Reference:
        target, given = self.program.dtypes[name], list[Reference]()
        same = of_equal_inputs(operation, self.program.dtypes[operation.inputs[-1]])
        if isinstance(same, str):
            return Reference(same)
        undone = self.program.undone(operation)
        read = operation if undone is None else undone
        for each in read.inputs if same is None else [operation.inputs[same]]:
            inner = maps.broadcast(place, self.shapes.of[name], self.shapes.of[each], self.shapes)
            given.append(self.value(each, inner))
        if operation.name == "Identity" or same is not None:
            return given[0]
        dtypes, masked = [self.program.dtypes[each] for each in read.inputs], any(each.masked for each in given)
        if operation.name == "Cast" and NUMBER[dtypes[0]] == NUMBER[target] and target not in HALVES:
            return given[0]
        nearest = name in self.program.read_by_steps
        if read.name == "QuantizeLinear":
            nearest = read.inputs[0] not in self.inexact
        elif read.name == "DequantizeLinear":
            nearest = not self.program.readers(name) <= self.inexact
        elif read.name == "Gelu":
            nearest = not self.program.is_only_quantized(name)
        if operation.name in OF_ANGLES and NUMBER[dtypes[0]] == "float":
            given = [self._angle(given[0])]
        lanes = [each.lane for each in given]
        if masked and operation.name in ("Div", "Mod") and target not in FLOATS:  # masked lanes can divide by 0
            lanes[1] = f"({self.masks[-1]}[j] ? {lanes[1]} : 1)"
        if undone is None:
            text = expression(operation, lanes, dtypes, target, nearest)
        else:
            text = dequantized_step(undone, lanes, self.program.dtypes[operation.inputs[0]], nearest)
        text = self.rounded(name, text)
        varies = any(each.varies for each in given) or masked
        return self.declare(NUMBER[target], text, varies, masked, self.name_of(name), operation.name)

    def _angle(self, value: Reference) -> Reference:
        """Return a value's angle after range reduction; the value's Sin and Cos both use it."""
        key = ("angle", value.text, self.lanes)
        found = self.known(key)
        if found is None:
            (word,) = re.findall(r"^\w*", value.text)  # the array's name without [j], or a number's digits
            name, text = self.own_name(f"angle_of_{word}"), f"angle({value.lane})"
            found = self.keep(key, self.declare("Angle", text, value.varies, value.masked, name))
        return found

    def declared(self, name: str, varies: bool) -> Reference:
        """Declare a variable for a value, but do not initialize it."""
        found = Reference(self.name_of(name), varies)
        self.line(f"{NUMBER[self.program.dtypes[name]]} {found.text}{f'[{self.lanes.width}]' if varies else ''};")
        return found

    def assign(self, to: Reference, value: Reference) -> None:
        """Write the assignment of a value to an already declared variable."""
        self.line(f"EACH({self.lanes.width}) {to.lane} = {value.lane};" if to.varies else f"{to.text} = {value.text};")

    def _gathered(self, operation: Operation, place: Place) -> Reference:
        x, indices = operation.inputs
        axis, end = axis_of(operation), axis_of(operation) + 1
        dim, at = self.shapes.of[x][axis], place
        if operation.name == "Gather":
            end = axis + len(self.shapes.of[indices])
            at = place[axis:end]
        variables = self._variables_of(indices, at)
        reference, kind = self.value(indices, at), self.arguments.index_type
        key = ("gathered", reference.text, dim)
        chosen = self.known(key)
        if chosen is None:
            text = f"gathered<{kind}>({reference.lane}, {self.arguments.size(dim)})"
            chosen = self.keep(key, self.declare(kind, text, reference.varies, masked=reference.masked))
        own = self.lanes.variables  # a gathered index that differs between lanes depends on all of their variables
        variables = variables | own if chosen.varies else variables - own
        atom = Atom("value", dim, chosen.text, varies=tuple(sorted(variables)))
        return self.value(x, (*place[:axis], Index(0, ((atom, 1),)), *place[end:]))

    def _variables_of(self, name: str, place: Place) -> frozenset[str]:
        """Return those variables of the indices `place` that the value's code uses in addresses or conditions."""
        key = (name, place)
        if key not in self.dependencies:
            draft = Writer(self.program, self.shapes, Arguments(self.shapes.sizes, False), False, {})
            draft.dependencies = self.dependencies
            draft.value(name, place)
            indices = (index for _, index in draft.accesses), (index for index, _ in draft.bounds), place
            read, compared, own = ({each for index in of for each in index.variables()} for of in indices)
            self.dependencies[key] = frozenset((read | compared) & own)
        return self.dependencies[key]

    # --- reductions -----------------------------------------------------------------------------------------------

    def _reduced(self, operation: Operation, place: Place) -> Reference:
        instance = instance_of(operation, place, self.program, self.shapes)
        is_stored = instance.key in self.stored
        accumulator = self.known(instance) or (self._stored(instance) if is_stored else self.in_place(instance))
        own: Callable[[], Reference] = lambda: self.value(operation.inputs[0], place)  # noqa: E731
        given = own() if operation.name in ("Softmax", "LogSoftmax") else None
        count = self.arguments.size(instance.count(self.shapes))
        (name,) = operation.outputs
        target, nearest = self.program.dtypes[name], name in self.program.read_by_steps
        text = finished(operation, accumulator.lane, given.lane if given else "", count, NUMBER[target], nearest)
        varies = accumulator.varies or bool(given and given.varies)
        text, masked = self.rounded(name, text), bool(self.masks)
        return self.declare(NUMBER[target], text, varies, masked, self.name_of(name), operation.name)

    def _stored(self, instance: Instance) -> Reference:
        """Read a reduction's accumulator from scratch memory; if several blocks stored one each, merge all of them."""
        each = self.stored[instance.key]
        address, kind = flat(place_in(instance), each.shape), instance.accumulator(self.program)
        self.stored_read.append((instance.key, address))
        if each.is_whole:
            found = self.known(instance.key)
            assert found is not None
            return found
        varies, masked = self.lanes.vary(address), bool(self.masks)
        at, shares = self.index(address, in_lane=varies), self.arguments.size(each.shares)
        first, step = at, "1"
        if each.is_across:
            step = self.arguments.size(product(each.shape))
        elif shares != "1":
            first = f"{in_parentheses(at)} * {shares}"
        text = f"stored<{kind}>({each.pointer}, {first}, {step}, {shares})"
        text = f"{self.masks[-1]}[j] ? {text} : {kind}()" if masked else text
        return self.keep(instance, self.declare(kind, text, varies or masked, masked=masked))

    def in_place(self, instance: Instance) -> Reference:
        """Write a loop in which each thread reduces all elements alone."""
        accumulator, extents = self.accumulator(instance), instance.extents(self.shapes)
        coordinates = [variable_index(f"q{self.new_name()}", extent) for extent in extents]
        seen = len(self.vectors)
        with self.loops(coordinates, extents):
            self.add(instance, accumulator, coordinates)
        del self.vectors[seen:]  # no other code can read vectors whose addresses use these loops' variables
        self.found.append((instance, self.conditions > 0))
        return self.keep(instance, replace(accumulator, masked=bool(self.masks)))

    @contextmanager
    def loops(self, coordinates: Sequence[Index], extents: Sequence[Size]) -> Iterator[None]:
        """Write nested loops over variables, in a block of their own."""
        with ExitStack() as opened:
            opened.enter_context(self.block(""))
            for index, extent in zip(coordinates, extents, strict=True):
                if extent != 1:
                    kind, name = self.arguments.index_type, index.terms[0][0].name
                    size = self.arguments.size(extent)
                    opened.enter_context(self.block(f"for ({kind} {name} = 0; {name} < {size}; ++{name})"))
            yield

    def accumulator(self, instance: Instance) -> Reference:
        """Declare the accumulator of a reduction; it is an array if the lanes need different results."""
        varies = self.lanes.vary(*instance.kept) or bool(self.masks)
        found = Reference(self.own_name(f"{instance.kind.split()[0].lower()}_of_{instance.value}"), varies)
        self.line(f"{instance.accumulator(self.program)} {found.text}{f'[{self.lanes.width}]' if varies else ''};")
        return found

    def add(self, instance: Instance, accumulator: Reference, coordinates: Sequence[Index]) -> None:
        """Write the addition of the element at `coordinates` along the reduced axes to an accumulator."""
        left = iter(coordinates)
        place = tuple(next(left) if each is None else each for each in instance.kept)
        reference = self.value(instance.value, place)
        has_lanes = accumulator.varies or self.lanes.vary(*coordinates)
        given = [term(instance, reference.lane)]
        if instance.is_extreme:
            given.append(f"int({self.index(coordinates[0], in_lane=has_lanes)})")
        if instance.kind == "Online" and has_lanes and reference.varies and not (accumulator.varies or self.masks):
            self.line(f"{accumulator.text}.add({reference.text});")
            return
        each = f"EACH({self.lanes.width}) " if has_lanes else ""
        self.line(f"{each}{accumulator.lane}.add({', '.join(given)});")


def _name(atom: Atom) -> str:
    return atom.name
