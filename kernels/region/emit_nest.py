"""Writes the code of a loop nest: the threads of each row, the loops, and the exchange between threads.

A list is one of `Nest.lists`: the variables of rows, of a row's elements, or of other elements that are reduced.  In a
round of a loop over a list, each thread that shares a row computes one vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import flat
from onnxfuse.algebra.sizes import number_of
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.emit_elements import ElementsText
from onnxfuse.kernels.region.emit_parts import PartsText
from onnxfuse.kernels.region.emit_row_cache import RowCacheText
from onnxfuse.kernels.region.emit_scratch_reductions import merge_shares, merge_whole
from onnxfuse.kernels.region.emit_stores import StoreText
from onnxfuse.kernels.region.emit_tile import TileText, tiles
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, ROWS, Nest, in_variables
from onnxfuse.kernels.region.operators import MAX_INSTRUCTIONS, NUMBER
from onnxfuse.kernels.region.reductions import Instance
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.scratch_reductions import Stored
from onnxfuse.kernels.region.tilings import MAX_HELD, Columns, Elements, Merge, Rows, Tile, Tiling

UNROLLED: Final = 4  # iterations of a reducing loop that are unrolled, so that several loads are in flight


class NestText:
    """Writes the code of a loop nest.  In the code, `block` is the block's index among the blocks of the nest."""

    def __init__(
        self, nest: Nest, tiling: Tiling, writer: Writer, release: str, leaving: str, own: Sequence[Stored] = ()
    ) -> None:
        """Store the loop nest, its tiling (division among threads), and the writer that gets the lines.

        `release` and `leaving` are C++ conditions: whether the next kernel may start before the stores, and whether
        the L2 cache evicts outputs first.  `own` are the reductions that the nest stores.
        """
        self.nest, self.tiling, self.writer, self.own = nest, tiling, writer, own
        self.release, self.leaving = release, leaving
        self.type = writer.arguments.index_type
        self.shifted = tiling.shifted if isinstance(tiling, Rows) else {}
        # Extremes of all elements are found from the end on: L2 may still hold what the kernel before has written last,
        # and afterwards it holds the first elements, which the next launch reads first.
        kinds = [each.instance.accumulator(writer.program) for each in own]
        is_shared = bool(own) and tiling.shares != 1 and nest.count(ROWS) == 1
        self.is_backward = is_shared and {"Min<float>", "Max<float>"}.issuperset(kinds)
        self.parts, self.store = PartsText(nest, writer), StoreText(nest, writer, release, leaving, own)
        self.reads: list[tuple[str, list[tuple[str, Place]]]] = []  # for each loop: its list, and the vectors it reads
        # For each list of variables (see Nest.lists): the vectors that registers hold, and the names of their arrays.
        self.held: dict[str, dict[tuple[str, Place], str]] = {}
        self.kept = RowCacheText(nest, tiling, writer, self._enter)
        self.batched: dict[int, list[tuple[str, Place]]] = {}  # by index of a loop: vectors that are loaded in batches
        self.ahead: list[tuple[str, Place]] = []  # vectors that the storing loop of a tile reads: see `read_ahead`
        self.number = 0  # index of the next loop
        self.instructions = 0  # estimated instructions of all loops together, each counted once

    def write(self) -> None:
        """Write all lines; registers hold the vectors that several loops read, if there are enough registers."""
        if isinstance(self.tiling, Rows | Columns | Tile):
            trial = NestText(self.nest, self.tiling, self.writer.copy(), self.release, self.leaving, self.own)
            trial._write()
            self.instructions = trial.writer.instructions
            self.ahead = trial.ahead
            self.held = trial.repeated() if self.tiling.shares == 1 else {}
            if self.kept.memory:
                held = trial.repeated()
                for name in dict.fromkeys(name for name, _ in trial.reads if name not in held):
                    self.kept.choose(name, [own for of, own in trial.reads if of == name], self._held_width(name))
            for number, (name, keys) in enumerate(trial.reads):
                own = [key for key in dict.fromkeys(keys) if key not in self.kept.vectors.get(name, {})]
                if (
                    name not in self.held
                    and self._rounds(name) != 1
                    and own
                    and self._held_width(name) * len(own) <= 16
                    and self._most_rounds() > 1
                ):
                    self.batched[number] = own
        self._write()

    def _merge_whole(self, writer: Writer) -> None:
        """Write the merges of the reductions with a single result that the nest reads."""
        for key in sorted(self.nest.reads):
            if writer.stored[key].is_whole:
                merge_whole(writer, writer.stored[key], self.tiling.threads)

    def _write(self) -> None:
        if not isinstance(self.tiling, Elements):
            self._merge_whole(self.writer)
        match self.tiling:
            case Merge():
                merge_shares(self.writer, self.own[0], self.tiling, self.parts.bound(ROWS, 1))
            case Elements():
                ElementsText(self.tiling, self.parts, self.store, self._merge_whole).write()
            case Tile():
                self._tile(self.tiling)
            case Columns():
                self._columns(self.tiling)
            case Rows():
                self._rows(self.tiling)

    def _tile(self, tiling: Tile) -> None:
        """Write a tile: the loop that computes it, a barrier, and the loop that stores it."""
        writer, variables = self.writer, tiles(self.nest, tiling, self.writer.shapes.sizes)
        text = TileText(self.nest, tiling, writer)
        writer.line(f"const {self.type} at = block;")
        self.parts.split("at", variables, 1)
        if any(writer.stored[key].is_whole for key in self.nest.reads):
            writer.line("__syncthreads();")  # the merge of reductions has used the same shared memory
        text.read_ahead(self.ahead)
        text.read()
        writer.line("__syncthreads();")
        self.store.write_release()
        seen = len(writer.vectors)
        with text.stored():
            nest = self.nest
            self.store.write_all(
                {name: writer.value(name, nest.place_of(name, writer.shapes)) for name in nest.outputs}
            )
        self.ahead = writer.vectors[seen:]

    def _rows(self, tiling: Rows) -> None:
        """Write rows, each of which the threads of a warp or a block compute together."""
        nest, writer, lanes = self.nest, self.writer, self.row_threads
        exists = ""
        if tiling.lanes:
            exists = self._row_of_lanes(lanes)
        else:
            writer.line(f"const {self.type} row = {self._shared_block()};")
            writer.line("const int lane = threadIdx.x;")
        if nest.lists[ROWS]:
            self.parts.split("row", nest.lists[ROWS], 1)
        for name in self.held:
            self._hold(name, "lane", lanes)
        for name in self.kept.vectors:
            whole = "", self.parts.bound(name, self._held_width(name))
            self.kept.start(name, *(self._head(name) if name in self.shifted else whole))
        for level in nest.levels:
            self._level(level, *self._shared("lane", lanes))
        self.store.write_rows(f"lane == 0{f' && {exists}' if exists else ''}")
        if nest.lists[ELEMENTS]:
            for _ in self._loops(ELEMENTS, "lane", lanes):
                self.store.write(exists)
        else:
            with writer.branch(f"if (lane == 0{f' && {exists}' if exists else ''})"):
                self.store.write()

    @property
    def row_threads(self) -> int:
        """The number of threads that compute a row together."""
        if isinstance(self.tiling, Columns):
            return self.tiling.threads // self.tiling.columns
        return self.tiling.lanes if isinstance(self.tiling, Rows) and self.tiling.lanes else self.tiling.threads

    def _held_width(self, name: str) -> int:
        """Return the elements per vector, along the variables of a list, for vectors in registers or shared memory."""
        if name in self.shifted:
            return self.shifted[name].width
        return self.tiling.width if isinstance(self.tiling, Columns) else self._width_along(name)

    def _row_of_lanes(self, lanes: int) -> str:
        """Write the index of a thread's row; return the condition under which the thread stores it, "" for always.

        If a warp has several rows, even threads beyond the last row compute one, because lanes exchange their results.
        """
        writer, bound = self.writer, self.parts.bound(ROWS, 1)
        writer.line(f"const int lane = threadIdx.x % {lanes};")
        number = f"({self.type})block * {self.tiling.threads // lanes} + threadIdx.x / {lanes}"
        if lanes == 32:
            writer.line(f"const {self.type} row = {number};")
            writer.line(f"if (row >= {bound}) return;")
            return ""
        self._row_that_exists(number, bound)
        return "exists"

    def _row_that_exists(self, number: str, bound: str) -> None:
        """Write the index of a thread's row; threads beyond the last row get the last one, so that all have a row."""
        self.writer.line(f"const {self.type} own = {number};")
        self.writer.line(f"const bool exists = own < {bound};")
        self.writer.line(f"const {self.type} row = exists ? own : {bound} - 1;")

    def repeated(self) -> dict[str, dict[tuple[str, Place], str]]:
        """Return, for each list of variables, the vectors that a thread keeps in registers, with their names.

        A vector is kept if several loops over the list's variables read it, or if a thread reads several vectors of an
        operand in one loop.  A list is missing if its vectors do not fit into registers.
        """
        found: dict[str, dict[tuple[str, Place], str]] = {}
        for name in dict.fromkeys(name for name, _ in self.reads):
            counts = Counter(key for own, keys in self.reads if own == name for key in dict.fromkeys(keys))
            rounds, width = self._rounds(name), self._held_width(name)
            keys = [key for key, count in counts.items() if count > 1 or rounds > 1]
            is_short = rounds * self.writer.instructions <= MAX_INSTRUCTIONS
            if keys and rounds and is_short and rounds * width * len(keys) <= MAX_HELD:
                found[name] = {key: f"held{len(found)}_{i}" for i, key in enumerate(keys)}
        return found

    def _head(self, name: str) -> tuple[str, str]:
        """Write two variables: the numbers of elements before a row's first aligned vector, and of whole vectors.

        Return the names of both variables.
        """
        writer, lanes = self.writer, self.shifted[name]
        assert lanes.rest is not None
        head, count = writer.new_name("head"), writer.new_name("count")
        (variable,), width = self.nest.lists[name], lanes.width
        size, rest = writer.arguments.size(variable.extent), writer.index(lanes.rest)
        shift = writer.arguments.quotient(rest, width, "%")
        writer.line(f"const int {head} = ({width} - {shift}) % {width}, {count} = ({size} - {head}) / {width};")
        return head, count

    def _rounds(self, name: str) -> int:
        """Return a thread's maximum number of vectors in a loop over a list of variables; 0 if it is dynamic."""
        count, width = number_of(self.nest.count(name)), self._width_along(name)
        count = None if name in self.shifted else count
        return -(-count // (width * self.row_threads)) if count else 0

    def _hold(self, name: str, start: str, step: int) -> None:
        """Write the loads of all vectors of a list into the registers that hold them."""
        writer, width = self.writer, self._held_width(name)
        for (operand, _), held in self.held[name].items():
            kind = NUMBER[writer.program.dtypes[operand]]
            writer.line(f"{kind} {held}[{self._rounds(name)}][{width}];")
        with self._loop(name, start, step, fills=True):
            self._load(self.held[name])

    def _columns(self, tiling: Columns) -> None:
        """Write rows that are adjacent in memory; threads without a row compute the last row, and do not store it."""
        nest, writer = self.nest, self.writer
        parts, bound = self.row_threads, self.parts.bound(ROWS, tiling.width)
        writer.line(f"const int column = threadIdx.x % {tiling.columns}, part = threadIdx.x / {tiling.columns};")
        self._row_that_exists(f"{self._shared_block()} * {tiling.columns} + column", bound)
        self.parts.split("row", nest.lists[ROWS], tiling.width)
        writer.lanes = Lanes(nest.lists[ROWS][-1].name, tiling.width)
        for name in self.held:
            self._hold(name, "part", parts)
        for level in nest.levels:
            self._level(level, *self._shared("part", parts))
        self.store.write_rows("exists && part == 0" if parts > 1 else "exists")
        if nest.lists[ELEMENTS]:
            for _ in self._loops(ELEMENTS, "part", parts):
                self.store.write("exists")
        else:
            self.store.write("exists && part == 0" if parts > 1 else "exists")

    def _shared_block(self) -> str:
        """Return the index of a block's group of rows; write the index of its share if blocks share the group."""
        if self.tiling.shares == 1:
            return f"({self.type})block"
        arguments, shares = self.writer.arguments, self.tiling.shares
        self.writer.line(f"const int share = {arguments.quotient('block', shares, '%')};")
        return arguments.quotient("block", shares)

    def _shared(self, start: str, step: int) -> tuple[str, str]:
        """Return a thread's first element and the distance to its next one; blocks can share the elements of a row."""
        if self.tiling.shares == 1:
            return start, str(step)
        return f"share * {step} + {start}", f"{step} * {self.writer.arguments.size(self.tiling.shares)}"

    # --- loops ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _loop(
        self, name: str, start: str, step: int | str, fills: bool = False, head: str = "", count: str = ""
    ) -> Iterator[None]:
        """Write a loop over the elements of a list of variables: by vectors, unless vectors lie across rows.

        If registers hold vectors of the list, the loop is unrolled and reads these registers, unless it `fills` them.
        If vectors are shifted, `head` elements precede them, and `count` is the number of vectors.
        """
        writer, before = self.writer, self.writer.lanes
        seen, at, held = len(writer.vectors), writer.new_name("at"), self.held.get(name, {})
        bound = count or self.parts.bound(name, self._width_along(name))
        unrolled = f'_Pragma("unroll {UNROLLED}") ' if name in self.kept.vectors else ""
        text = f"{unrolled}for ({self.type} {at} = {start}; {at} < {bound}; {at} += {step})"
        if held:
            rounds = self._rounds(name)
            text = f'_Pragma("unroll") for (int k = 0, {at} = {start}; k < {rounds}; ++k, {at} += {step})'
            text += "" if self._divides(name, rounds) else f" if ({at} < {bound})"
        with writer.block(text):
            if not fills:
                self._keep(held)
            self._enter(name, at, head)
            if not fills:
                self.kept.read(name, at, head, bound)
            yield
        if not fills:
            self.reads.append((name, writer.vectors[seen:]))
        writer.lanes = before

    def _keep(self, held: Mapping[tuple[str, Place], str]) -> None:
        for key, text in held.items():
            self.writer.keep(key, Reference(f"{text}[k]", varies=True))

    def _most_rounds(self) -> int:
        """Return the maximum number of rounds per batch; in a round, each thread computes one vector.

        The instructions of a round count three times: for the two copies of a batch in the code, and for its loads.
        """
        return MAX_INSTRUCTIONS // (3 * max(1, self.instructions))

    def _batches(self, name: str, start: str, step: str, head: str, count: str) -> Iterator[None]:
        """Write a loop over batches of rounds; in a round, each thread computes one vector.

        A batch first loads the vectors of all its rounds.  After the loop comes a last batch, in which threads skip the
        rounds beyond the end.
        """
        writer, width, before = self.writer, self._held_width(name), self.writer.lanes
        keys, at = self.batched[self.number], writer.new_name("at")
        most = MAX_HELD // (2 if isinstance(self.tiling, Columns) else 1)  # columns also need an accumulator per lane
        rounds = max(1, min(UNROLLED, most // (width * len(keys)), self._most_rounds()))
        bound, first = count or self.parts.bound(name, self._width_along(name)), f"{at}_first"
        held = {key: writer.new_name(f"{key[0]}_") for key in keys}
        each = f'_Pragma("unroll") for (int k = 0, {at} = {first}; k < {rounds}; ++k, {at} += {step})'
        writer.line(f"{self.type} {first} = {start};")
        heads = [f"for (; {first} + {rounds - 1} * ({step}) < {bound}; {first} += {rounds} * ({step}))"]
        if head or not self._divides(name, rounds):
            heads.append(f"if ({first} < {bound})")
        for text in heads:
            condition = f" if ({at} < {bound})" if text is not heads[0] else ""
            with writer.block(text):
                for (operand, _), own in held.items():
                    writer.line(f"{NUMBER[writer.program.dtypes[operand]]} {own}[{rounds}][{width}];")
                with writer.block(f"{each}{condition}"):
                    self._enter(name, at, head)
                    self._load(held)
                writer.lanes = before
                with writer.block(f"{each}{condition}"):
                    self._keep(held)
                    self._enter(name, at, head)
                    self.kept.read(name, at, head, bound)
                    yield
                writer.lanes = before

    def _load(self, held: Mapping[tuple[str, Place], str]) -> None:
        """Write the loads of a thread's vector number `k` (a variable of the code) into the registers that hold it."""
        for (operand, place), text in held.items():
            address = self.writer.address(operand, flat(place, self.writer.shapes.of[operand]))
            self.writer.line(f"load({address}, {text}[k]);")

    def _enter(self, name: str, at: str, head: str) -> None:
        """Write the values of a list's variables for vector number `at`, and make its elements the writer's lanes."""
        writer, variables, width = self.writer, self.nest.lists[name], self._width_along(name)
        if head:
            writer.lanes = self.shifted[name]
            writer.line(f"const {self.type} {variables[0].name} = {head} + {at} * {writer.lanes.width};")
            return
        if self.is_backward:
            at = f"({self.parts.bound(name, width)} - 1 - {at})"
        if variables:
            self.parts.split(at, variables, width)
        if not isinstance(self.tiling, Columns):
            writer.lanes = Lanes(variables[-1].name if variables else "", width)

    def _width_along(self, name: str) -> int:
        """Return the number of elements per vector along a list of variables."""
        return self.tiling.widths.get(name, 1) if isinstance(self.tiling, Rows) else 1

    def _divides(self, name: str, rounds: int) -> bool:
        """Return whether a list of variables has whole batches only, in which each thread computes `rounds` vectors."""
        count, each = number_of(self.nest.count(name)), rounds * self.row_threads * self._width_along(name)
        return self.tiling.shares == 1 and count is not None and count % each == 0

    def _loops(self, name: str, start: str, step: int | str) -> Iterator[None]:
        """Write the loops over a list of variables: a loop over vectors and, if these are shifted, one over elements.

        Shifted vectors begin at a row's first aligned element; the elements before and after them are single.
        """
        lanes, writer = self.shifted.get(name), self.writer
        if lanes is None:
            yield from self._loops_of_vectors(name, start, str(step))
            return
        (variable,), width, before, at = self.nest.lists[name], lanes.width, writer.lanes, writer.new_name("at")
        size, (head, count) = writer.arguments.size(variable.extent), self._head(name)
        yield from self._loops_of_vectors(name, start, str(step), head, count)
        with writer.block(f"for ({self.type} {at} = {start}; {at} < {size} - {count} * {width}; {at} += {step})"):
            writer.line(f"const {self.type} {variable.name} = {at} < {head} ? {at} : {at} + {count} * {width};")
            writer.lanes = Lanes(variable.name, 1)
            yield
        writer.lanes = before

    def _loops_of_vectors(self, name: str, start: str, step: str, head: str = "", count: str = "") -> Iterator[None]:
        if self.number in self.batched:
            yield from self._batches(name, start, step, head, count)
        else:
            with self._loop(name, start, step, head=head, count=count):
                yield
        self.number += 1
        self.kept.arrived.add(name)

    def _level(self, level: tuple[Instance, ...], start: str, step: str) -> None:
        """Write reductions that do not need each other: loops over the elements, then the merge of the accumulators."""
        nest, writer = self.nest, self.writer
        by_list: dict[str, list[Instance]] = {}
        for instance in level:
            by_list.setdefault(nest.elements_of(instance, writer.shapes)[0], []).append(instance)
        for name, instances in by_list.items():
            places = {in_variables(each, nest): nest.elements_of(each, writer.shapes)[1] for each in instances}
            accumulators = {each: writer.accumulator(each) for each in places}
            for _ in self._loops(name, start, step):
                for each, place in places.items():
                    writer.add(each, accumulators[each], place)
            for each, accumulator in accumulators.items():
                self._merge(each, accumulator)
                writer.keep(each, accumulator)

    def _merge(self, instance: Instance, accumulator: Reference) -> None:
        """Write the merge of the accumulators of all threads that share a row."""
        writer, tiling, name = self.writer, self.tiling, accumulator.text
        kind, size = instance.accumulator(writer.program), instance.accumulator_bytes(writer.program)
        if isinstance(tiling, Rows) and tiling.lanes:
            writer.line(f"merge_warp<{tiling.lanes}>({name});")
        elif isinstance(tiling, Rows):
            memory = writer.shared(tiling.threads // 32 * size)
            writer.line(f"merge_block<{kind}, {tiling.threads}>({name}, {memory});")
        elif isinstance(tiling, Columns) and tiling.columns < tiling.threads:
            width, parts = writer.lanes.width if accumulator.varies else 1, self.row_threads
            own, memory = name if accumulator.varies else f"&{name}", writer.shared(tiling.threads * width * size)
            writer.line(f"merge_columns<{kind}, {width}, {tiling.columns}, {parts}>({own}, {memory}, column, part);")
