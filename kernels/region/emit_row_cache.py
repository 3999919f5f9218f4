"""Writes the cache of rows in shared memory: vectors that several loops read are copied there before the first loop.

In this module, a list is one of `Nest.lists`: the variables of one loop over the elements of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import flat
from onnxfuse.algebra.sizes import number_of
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.nests import Nest
from onnxfuse.kernels.region.operators import BYTES, STORED
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.tilings import KEPT_DTYPES, MIN_COPIED, Rows, Tiling

COPIED_AHEAD: Final = 8  # vectors whose copies are in flight while a thread reads another vector
Vector: TypeAlias = tuple[str, Place]  # an operand, and the vector's index along each of its axes


class RowCacheText:
    """Writes the copies and reads of a row's vectors.  A thread reads only its own copies, so it needs no barrier."""

    def __init__(self, nest: Nest, tiling: Tiling, writer: Writer, enter: Callable[[str, str, str], None]) -> None:
        """Store the loop nest, its tiling (division among threads) and the writer.

        `enter(name, at, head)` writes the variables of list `name` at vector number `at`, where `head` elements precede
        the first vector of a row.
        """
        self.nest, self.tiling, self.writer, self.enter = nest, tiling, writer, enter
        self.memory = tiling.memory if isinstance(tiling, Rows) else 0
        self.vectors: dict[str, dict[Vector, str]] = {}  # for each list of variables: array names by vector
        self.widths: dict[str, int] = {}  # for each list of variables: elements per vector
        self.arrived: set[str] = set()  # lists of variables whose vectors a loop has already read

    def choose(self, name: str, reads: Sequence[Collection[Vector]], width: int) -> None:
        """Choose which of the vectors that the loops over a list read are kept in shared memory: as many as fit."""
        count, program = number_of(self.nest.count(name)) or 0, self.writer.program
        left = self.memory - sum(self._bytes(each, of) for each in self.vectors for of in self.vectors[each])
        counts = Counter(vector for own in reads for vector in dict.fromkeys(own))
        for vector in [each for each, loops in counts.items() if loops > 1]:
            dtype = program.dtypes[vector[0]]
            is_copied = dtype in KEPT_DTYPES and width * BYTES[dtype] >= MIN_COPIED
            if is_copied and count and self._bytes(name, vector) <= left:
                left -= self._bytes(name, vector)
                self.widths[name] = width
                own = self.vectors.setdefault(name, {})
                own[vector] = f"kept{len(self.vectors)}_{len(own)}"

    def _bytes(self, name: str, vector: Vector) -> int:
        return (number_of(self.nest.count(name)) or 0) * BYTES[self.writer.program.dtypes[vector[0]]]

    def start(self, name: str, head: str, bound: str) -> None:
        """Write the arrays that keep the vectors of a list of variables, and the copies of a thread's first vectors."""
        writer, width = self.writer, self.widths[name]
        for vector, text in self.vectors[name].items():
            kind = f"Pack<{STORED[writer.program.dtypes[vector[0]]]}, {width}>"
            memory = writer.row_memory(self._bytes(name, vector))
            writer.line(f"{kind}* const {text} = reinterpret_cast<{kind}*>({memory});")
        at, step, index = writer.new_name("at"), self.tiling.threads, writer.arguments.index_type
        with writer.block(f"for ({index} {at} = lane; {at} < {COPIED_AHEAD * step}; {at} += {step})"):
            self._copy(name, at, head, bound)

    def _copy(self, name: str, at: str, head: str, bound: str) -> None:
        """Write the copies of one vector of each operand, under a condition that `at` is below `bound`."""
        writer, before = self.writer, self.writer.lanes
        with writer.block(f"if ({at} < {bound})"):
            self.enter(name, at, head)
            for (operand, place), text in self.vectors[name].items():
                address = writer.address(operand, flat(place, writer.shapes.of[operand]))
                writer.line(f"copy_to_shared({text}[{at}], {address});")
        writer.lanes = before
        writer.line("commit_copies();")

    def read(self, name: str, at: str, head: str, bound: str) -> None:
        """Write the reads of the vectors of a list of variables, inside a loop over this list.

        In the first loop over the list, each iteration also waits for the copies of its vectors, and starts the copies
        of the vectors of a later iteration.
        """
        if name not in self.vectors:
            return
        writer, is_first = self.writer, name not in self.arrived
        if is_first:
            writer.line(f"wait_for_copies_but<{COPIED_AHEAD - 1}>();")
        for vector, text in self.vectors[name].items():
            found = writer.name_of(vector[0])
            writer.line(f"float {found}[{self.widths[name]}]; unpack(read_packed({text}[{at}]), {found});")
            writer.keep(vector, Reference(found, varies=True))
        if is_first:
            ahead, step = f"{at}_ahead", COPIED_AHEAD * self.tiling.threads
            writer.line(f"const {writer.arguments.index_type} {ahead} = {at} + {step};")
            self._copy(name, ahead, head, bound)
