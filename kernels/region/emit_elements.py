"""Writes the code of independent elements: a thread has vectors of neighbours, or elements that are far apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import Index, flat, variable_index
from onnxfuse.algebra.sizes import product
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.dominant_part import DominantPart, dominant_part
from onnxfuse.kernels.region.emit_parts import PartsText
from onnxfuse.kernels.region.emit_stores import StoreText
from onnxfuse.kernels.region.interleaved import chunk_of, interleaved
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Variable
from onnxfuse.kernels.region.operators import BYTES, NUMBER
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.tilings import Elements

MAX_LOADED: Final = 64  # maximum number of elements that a thread loads for all its rounds before it computes


class ElementsText:
    """Writes the code that finds a thread's elements, computes them and stores them."""

    def __init__(self, tiling: Elements, parts: PartsText, store: StoreText, merge: Callable[[Writer], None]) -> None:
        """Store the tiling (the division among threads), the writer of variables, and the writer of stores.

        `merge` writes the merges of the reductions that the elements read.
        """
        self.tiling, self.parts, self.store, self.merge = tiling, parts, store, merge
        self.nest, self.writer, self.type = parts.nest, parts.writer, parts.type

    def write(self) -> None:
        """Write the code of independent elements."""
        nest, writer, width = self.nest, self.writer, self.tiling.width
        variables = nest.lists[ELEMENTS]
        if self.tiling.rounds > 1:
            self._in_rounds(variables)
            return
        self.merge(writer)
        if self.tiling.is_scattered:
            self._scattered(variables)
            return
        writer.line(f"const {self.type} at = ({self.type})block * {self.tiling.threads} + threadIdx.x;")
        if self.tiling.has_tail:
            self._elements_with_tail(variables[0])
            return
        alike = dominant_part(nest, writer.program, writer.shapes) if width > 1 else None
        if alike and alike.count(self.tiling.threads * width) <= self.tiling.threads:
            self._alike(variables[0], alike)
            return
        if self.tiling.repeats > 1:
            short = interleaved(nest)
            if short and short.name == self.tiling.repeated:
                self._interleaved(short)
            else:
                self._repeated(variables)
            return
        writer.line(f"if (at >= {self.parts.bound(ELEMENTS, width)}) return;")
        if variables:
            self.parts.split("at", variables, width)
            linear = _place_of(variables) if len(variables) > 1 else None
            writer.lanes = Lanes(variables[-1].name, width, linear=linear)
        self.store.write()

    def _in_rounds(self, variables: Sequence[Variable]) -> None:
        """Write loops over a thread's vectors: the loads of all, if there are registers for them, and the results.

        Reductions are merged while the loads are in flight.
        """
        writer, width, threads, rounds = self.writer, self.tiling.width, self.tiling.threads, self.tiling.rounds
        linear = _place_of(variables) if len(variables) > 1 else None
        writer.line(f"const {self.type} first = ({self.type})block * {rounds * threads} + threadIdx.x;")
        writer.lanes = Lanes(variables[-1].name, width, linear=linear)
        trial = self._trial(self.merge).vectors
        keys = list(dict.fromkeys(trial)) if rounds * width * len(dict.fromkeys(trial)) <= MAX_LOADED else []
        loaded = {key: writer.new_name(f"{key[0]}_") for key in keys}
        each = f'_Pragma("unroll") for (int round = 0; round < {rounds}; ++round)'
        at, bound = f"const {self.type} at = first + round * {threads};", self.parts.bound(ELEMENTS, width)
        self._declare(loaded, rounds)
        if loaded:
            with writer.block(each):
                writer.line(at)
                writer.line(f"if (at >= {bound}) break;")
                self.parts.split("at", variables, width)
                self._load(loaded, "round")
        self.merge(writer)
        with writer.block(each if loaded else each.partition(") ")[2]):
            writer.line(at)
            writer.line(f"if (at >= {bound}) break;")
            for key, name in loaded.items():
                writer.keep(key, Reference(f"{name}[round]", varies=True))
            self.parts.split("at", variables, width)
            self.store.write()

    def _declare(self, loaded: Mapping[tuple[str, Place], str], count: int) -> None:
        """Declare arrays for `count` vectors of each of some operands."""
        for (operand, _), name in loaded.items():
            kind = NUMBER[self.writer.program.dtypes[operand]]
            self.writer.line(f"{kind} {name}[{count}][{self.tiling.width}];")

    def _load(self, loaded: Mapping[tuple[str, Place], str], index: str) -> None:
        """Write the loads of vector `index`, a variable of the code, of each of some operands."""
        for (operand, place), name in loaded.items():
            address = self.writer.address(operand, flat(place, self.writer.shapes.of[operand]))
            self.writer.line(f"load({address}, {name}[{index}]);")

    def _alike(self, variable: Variable, alike: DominantPart) -> None:
        """Write vectors as if a Concat's dominant part had all elements, and single elements outside the part.

        The vectors store wrong values at the elements outside the part; the same block then stores the right ones.
        """
        nest, writer, width, threads = self.nest, self.writer, self.tiling.width, self.tiling.threads
        bound, kind, others = self.parts.bound(ELEMENTS, width), self.type, alike.others
        writer.line(f"const {kind} {variable.name} = (at < {bound} ? at : {bound} - 1) * {width};")
        writer.lanes, writer.within = Lanes(variable.name, width), alike.within
        found = self._values()
        writer.lanes, writer.within, known = Lanes(), None, writer.scopes
        own = {name: writer.declared(name, False) for name in nest.outputs}
        begin, other, is_other = (writer.new_name(name) for name in ("begin", "other", "is_other"))
        skipped = alike.end - alike.begin
        behind = f"(threadIdx.x % {others} < {alike.begin} ? 0 : {skipped})" if alike.begin else str(skipped)
        column = f"threadIdx.x % {others} + {behind}"
        row = f"({begin} / {alike.period} + threadIdx.x / {others})"
        writer.line(f"const {kind} {begin} = ({kind})block * {threads * width};")
        writer.line(f"const {kind} {other} = {row} * {alike.period} + {column};")
        ends = f"{other} < {begin} + {threads * width} && {other} < {writer.arguments.size(variable.extent)}"
        writer.line(f"const bool {is_other} = {other} >= {begin} && {ends};")
        # The next branch declares `variable` again, as the index of another element.  So it must not reuse values that
        # were computed for the first index.
        writer.scopes = [{}]
        with writer.branch(f"if ({is_other})"):
            writer.line(f"const {kind} {variable.name} = {other};")
            for name, value in self._values().items():
                writer.assign(own[name], value)
        writer.scopes, writer.lanes = known, Lanes(variable.name, width)
        self.store.write_release()
        self.store.write_all(found)
        writer.lanes = Lanes()
        writer.line("__syncthreads();")
        with writer.branch(f"if ({is_other})"):
            writer.line(f"const {kind} {variable.name} = {other};")
            self.store.write_all(own)

    def _values(self) -> dict[str, Reference]:
        """Write the values of the outputs and return them by name."""
        return {
            name: self.writer.value(name, self.nest.place_of(name, self.writer.shapes)) for name in self.nest.outputs
        }

    def _repeated(self, variables: Sequence[Variable]) -> None:
        """Write vectors at several values of the repeated variable, after the code that does not depend on it."""
        writer, width, repeats = self.writer, self.tiling.width, self.tiling.repeats
        (repeated,) = (each for each in variables if each.name == self.tiling.repeated)
        first = Variable(f"{repeated.name}_first", writer.shapes.sizes.quotient(repeated.extent, repeats))
        own = [first if each == repeated else each for each in variables]
        bound = writer.arguments.size(self.parts.vectors(product(each.extent for each in own), width))
        writer.line(f"if (at >= {bound}) return;")
        self.parts.split("at", own, width)
        writer.lanes = Lanes(variables[-1].name, width)
        value = f"const {self.type} {repeated.name} = {first.name} * {repeats} + k;"
        ahead = self._read_ahead(repeated, value) if self.tiling.reads_ahead else {}
        self._write_without(repeated)
        with self._each_repeat():
            writer.line(value)
            for key, name in ahead.items():
                writer.keep(key, Reference(f"{name}[k]", varies=True))
            self.store.write()

    def _each_repeat(self) -> AbstractContextManager[None]:
        return self.writer.block(f'_Pragma("unroll") for (int k = 0; k < {self.tiling.repeats}; ++k)')

    def _trial(self, merge: Callable[[Writer], None] | None = None) -> Writer:
        """Write the values and the stores of a thread as a trial; return its writer, whose lines are not used.

        Reductions are merged before, if `merge` writes this.
        """
        trial = StoreText(self.nest, self.writer.copy(), self.store.release, self.store.leaving, ())
        trial.writer.lanes = self.writer.lanes
        if merge is not None:
            merge(trial.writer)
        trial.write()
        return trial.writer

    def _read_ahead(self, repeated: Variable, value: str) -> dict[tuple[str, Place], str]:
        """Write the loads of the vectors at all values of `repeated`, before anything is computed; return their arrays.

        All loads are then in flight together.
        """
        writer = self.writer
        found = {
            (operand, place): writer.new_name(f"{operand}_")
            for operand, place in dict.fromkeys(self._trial().vectors)
            if any(repeated.name in index.variables() for index in place)
        }
        self._declare(found, self.tiling.repeats)
        with self._each_repeat():
            writer.line(value)
            self._load(found, "k")
        return found

    def _write_without(self, repeated: Variable) -> None:
        """Write the values that do not depend on a variable; this comes before the loop over the variable."""
        writer = self.writer
        for name, place in self._trial().values():
            # An index can be a loaded value: a variable that only the trial's code declares.  Such places are skipped.
            is_read = any(atom.kind == "value" for index in place for atom in index.atoms())
            if not is_read and not any(repeated.name in index.variables() for index in place):
                writer.value(name, place)

    def _interleaved(self, short: Variable) -> None:
        """Write code in which each thread computes a vector at all values of the outputs' short innermost variable.

        A block's elements are contiguous in the outputs.  Its threads exchange them, so that neighbouring threads store
        neighbouring chunks.  Threads beyond the end compute the last vectors again.
        """
        nest, writer, width, repeats = self.nest, self.writer, self.tiling.width, self.tiling.repeats
        own = [each for each in nest.lists[ELEMENTS] if each != short]
        bound = writer.arguments.size(self.parts.vectors(product(each.extent for each in own), width))
        writer.line(f"const {self.type} own = at < {bound} ? at : {bound} - 1;")
        self.parts.split("own", own, width)
        writer.lanes = Lanes(own[-1].name, width)
        self._write_without(short)
        dtypes = {name: writer.program.dtypes[name] for name in nest.outputs}
        found = {name: writer.new_name() for name in nest.outputs}
        for name, array in found.items():
            writer.line(f"{NUMBER[dtypes[name]]} {array}[{width * repeats}];")
        with self._each_repeat():
            writer.line(f"const {self.type} {short.name} = k;")
            for name, value in self._values().items():
                writer.line(f"EACH({width}) {found[name]}[j * {repeats} + k] = {value.lane};")
        self.store.write_release()
        self._put_by_block({name: Reference(array) for name, array in found.items()})

    def _put_by_block(self, values: Mapping[str, Reference]) -> None:
        """Write code by which the threads of a block exchange contiguous results and store them in adjacent chunks."""
        writer, threads, count = self.writer, self.tiling.threads, self.tiling.width * self.tiling.repeats
        for number, (i, name) in enumerate((i, n) for i, n in enumerate(writer.program.outputs) if n in values):
            dtype = writer.program.dtypes[name]
            size, chunk = BYTES[dtype], chunk_of(count, dtype)
            slots = threads * count // chunk
            memory = writer.shared((slots + slots // 8) * chunk * size)
            if number:
                writer.line("__syncthreads();  // the memory may still be read")
            total = writer.arguments.size(writer.shapes.sizes.quotient(product(self.nest.shape), chunk))
            left, first = f"{total} - ({self.type})block * {slots}", f"({self.type})block * {threads * count}"
            given = f"{self.store.leaving}, y{i} + {first}, {values[name].text}, {left}, {memory}"
            writer.line(f"put_by_block<{chunk}, {threads}>({given});")

    def _scattered(self, variables: Sequence[Variable]) -> None:
        """Write several elements per thread, far apart, so that neighbouring threads have neighbouring elements.

        Threads beyond the end compute the last element again.
        """
        writer, width, threads, kind = self.writer, self.tiling.width, self.tiling.threads, self.type
        count = self.nest.count(ELEMENTS)
        bound, at = writer.arguments.size(count), f"first + j * {threads}"
        writer.line(f"const {kind} first = ({kind})block * {threads * width} + threadIdx.x;")
        writer.line(f"if (first >= {bound}) return;")
        writer.lanes = Lanes("", width, frozenset(each.name for each in variables), linear=_place_of(variables))
        is_whole = writer.shapes.sizes.divisor(count) % (threads * width) == 0
        self.parts.variable("at", at if is_whole else f"{at} < {bound} ? {at} : {bound} - 1")
        self.parts.split("at", variables, 1)
        self.store.write()

    def _elements_with_tail(self, variable: Variable) -> None:
        """Write whole vectors along the loop nest's only variable, and single elements after the last vector."""
        writer, width, sizes = self.writer, self.tiling.width, self.writer.shapes.sizes
        whole, count = self.parts.vectors(variable.extent, width), variable.extent
        with writer.block(f"if (at < {writer.arguments.size(whole)})"):
            writer.line(f"const {self.type} {variable.name} = at * {width};")
            writer.lanes = Lanes(variable.name, width)
            self.store.write()
        writer.lanes = Lanes()
        skipped = sizes.named(f"(({count}) / {width}) * {width - 1}", sizes.value(whole) * (width - 1))
        with writer.block(f"else if (at < {writer.arguments.size(count - skipped)})"):
            writer.line(f"const {self.type} {variable.name} = at + {writer.arguments.size(skipped)};")
            self.store.write()


def _place_of(variables: Sequence[Variable]) -> Index:
    """Return the flat index of an element of a loop nest as an expression in the nest's variables."""
    return flat([variable_index(each.name, each.extent) for each in variables], [each.extent for each in variables])
