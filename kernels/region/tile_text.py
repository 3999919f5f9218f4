"""The text of tiles: a block reads along one variable, and stores along another one, through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable
from onnxfuse.kernels.region.operators import BYTES, NUMBER
from onnxfuse.kernels.region.sizes import Size, Sizes
from onnxfuse.kernels.region.tilings import Tiling
from onnxfuse.kernels.region.writer import Reference, Writer


def tiles(nest: Nest, tiling: Tiling, sizes: Sizes) -> list[Variable]:
    """Return the variables that count blocks: those that no tile has, and the tiles along the two that it has."""
    *others, last = nest.lists[ELEMENTS]
    across = next(each for each in others if each.name == tiling.across)

    def count(each: Variable) -> Variable:
        return Variable(f"tile_{each.name}", sizes.ceiling(each.extent, tiling.tile))

    return [*(each for each in others if each != across), count(across), count(last)]


class TileText:
    """Writes what a block does with its tile, whose place is known."""

    def __init__(self, nest: Nest, tiling: Tiling, writer: Writer) -> None:
        """Take what is written, how, and where."""
        self.nest, self.tiling, self.writer = nest, tiling, writer
        self.last = nest.lists[ELEMENTS][-1]
        self.across = next(each for each in nest.lists[ELEMENTS] if each.name == tiling.across)
        self.pitch = tiling.tile + 1  # numbers from one row to the next, so that columns lie in different banks

    def read(self) -> None:
        """Write the loops that compute a tile, by vectors along the variable that is read, into shared memory."""
        writer, width = self.writer, self.tiling.width
        with self._loop(self.across, self.last, width):
            for i, name in enumerate(self.nest.outputs):
                value = writer.value(name, self.nest.place_of(name, writer.shapes))
                at = f"({self._low(self.across)} + j) * {self.pitch} + {self._low(self.last)}"
                writer.line(f"EACH({width}) {self._memory(i)}[{at}] = {value.lane};")

    @contextmanager
    def stored(self) -> Iterator[list[Reference]]:
        """Write the loop over a tile by vectors along the variable that is stored; yield the outputs' vectors."""
        writer, width, found = self.writer, self.tiling.store_width, []
        with self._loop(self.last, self.across, width):
            for i, name in enumerate(self.nest.outputs):
                at = f"{self._low(self.across)} * {self.pitch} + {self._low(self.last)}{' + j' if width > 1 else ''}"
                found.append(writer.declare(self._kind(name), f"{self._memory(i)}[{at}]", width > 1))
            yield found

    def _low(self, variable: Variable) -> str:
        return f"low_{variable.name}"

    def _kind(self, name: str) -> str:
        return NUMBER[self.writer.program.dtypes[name]]

    def _memory(self, output: int) -> str:
        """Return the part of shared memory that has an output's tile."""
        sizes = [8 if BYTES[self.writer.program.dtypes[name]] == 8 else 4 for name in self.nest.outputs]
        cells = self.tiling.tile * self.pitch
        begin = sum(sizes[:output]) * cells
        self.writer.shared(begin + sizes[output] * cells)
        place = f"shared + {begin // 8}" if output else "shared"
        return f"reinterpret_cast<{self._kind(self.nest.outputs[output])}*>({place})"

    @contextmanager
    def _loop(self, along: Variable, other: Variable, width: int) -> Iterator[None]:
        """Write a loop over the vectors of a tile along a variable, without those beyond the ends of both."""
        writer, side, kind = self.writer, self.tiling.tile, self.writer.arguments.index_type
        vectors, threads = side // width, self.tiling.threads
        with writer.block(f'_Pragma("unroll 4") for (int i = threadIdx.x; i < {vectors * side}; i += {threads})'):
            starts = {along: f"i % {vectors}" + (f" * {width}" if width > 1 else ""), other: f"i / {vectors}"}
            conditions = []
            for variable, low in starts.items():
                writer.line(f"const int {self._low(variable)} = {low};")
                start = f"tile_{variable.name} * {side} + {self._low(variable)}"
                writer.line(f"const {kind} {variable.name} = {start};")
                if not _is_multiple(variable.extent, side):
                    conditions.append(f"{variable.name} < {writer.arguments.size(variable.extent)}")
            before, writer.lanes = writer.lanes, Lanes(along.name, width)
            with writer.branch(f"if ({' && '.join(conditions)})") if conditions else nullcontext():
                yield
            writer.lanes = before


def _is_multiple(extent: Size, of: int) -> bool:
    return extent.constant is not None and extent.constant % of == 0
