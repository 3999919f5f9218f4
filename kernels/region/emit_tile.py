"""Writes tiles: a block reads along one variable and stores along another, through shared memory.

The loop that reads computes staged values, and the loop that stores takes them from shared memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import flat
from onnxfuse.algebra.sizes import Size
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.costs import WARP
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.nests import ELEMENTS, Nest, Variable
from onnxfuse.kernels.region.operators import BYTES, NUMBER
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.shared_memory_staging import staged_values
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.region.tilings import Tile

MAX_AHEAD: Final = 32  # numbers that a thread loads before the barrier and uses after it
SKEWS: Final = (0, 1, 2, 4)  # candidates: words of padding after every 32 rows, or columns


def tiles(nest: Nest, tiling: Tile, sizes: Sizes) -> list[Variable]:
    """Return the variables that number the blocks; a block computes one tile.

    They are the variables of the loop nest that a tile does not span, and then two that count tiles along its two axes.
    """
    *others, last = nest.lists[ELEMENTS]
    across = next(each for each in others if each.name == tiling.across)

    def count(each: Variable, side: int) -> Variable:
        return Variable(f"tile_{each.name}", sizes.ceiling(each.extent, side))

    return [*(each for each in others if each != across), count(across, tiling.sides[0]), count(last, tiling.sides[1])]


@functools.lru_cache(maxsize=256)
def layout(sides: tuple[int, int], width: int, store_width: int) -> tuple[int, int, int]:
    """Return the pitch of a tile's rows in words, and the skews: padding after every 32 rows or columns.

    A row lies along the last variable.  In one access, each thread of a warp writes a vector of a column; later, each
    thread reads a vector of a row.  The layout has the fewest bank conflicts in both accesses together.
    """
    rows, columns = sides

    def conflicts(cells: Iterable[int]) -> int:
        banks = [cell % WARP for cell in set(cells)]
        return max(map(banks.count, banks))

    def taken(found: tuple[int, int, int]) -> int:
        pitch, row_skew, column_skew = found
        if pitch < columns + (columns - 1) // WARP * column_skew + (row_skew if rows > WARP else 0):
            return rows * columns

        def cell(row: int, column: int) -> int:
            return row * pitch + row // WARP * row_skew + column + column // WARP * column_skew

        written = [cell(i % (rows // width) * width, i // (rows // width)) for i in range(WARP)]
        read = [cell(i // (columns // store_width), i % (columns // store_width) * store_width) for i in range(WARP)]
        return conflicts(written) + conflicts(read)

    found = itertools.product(range(columns + 1, columns + 16), SKEWS, SKEWS)
    return min(found, key=lambda each: (taken(each), each))


class TileText:
    """Writes the loops of a block over its tile, after the code that computes the tile's position."""

    def __init__(self, nest: Nest, tiling: Tile, writer: Writer) -> None:
        """Store the loop nest, its tiling (division among threads), and the writer that gets the lines."""
        self.nest, self.tiling, self.writer = nest, tiling, writer
        self.last = nest.lists[ELEMENTS][-1]
        self.across = next(each for each in nest.lists[ELEMENTS] if each.name == tiling.across)
        self.layout = layout(tiling.sides, tiling.width, tiling.store_width)
        self.staged = staged_values(nest, self.across, writer.program, writer.shapes)
        self.ahead: dict[tuple[str, Place], str] = {}  # vectors of operands loaded before the barrier, and their names

    def read(self) -> None:
        """Write the loop that computes the values to keep in shared memory, by vectors along the variable `across`."""
        writer, width = self.writer, self.tiling.width
        with self._loop(self.across, self.last, width, *self.tiling.sides):
            for i, (name, place) in enumerate(self.staged):
                value = writer.value(name, place)
                writer.line(f"EACH({width}) {self._memory(i)}[{self._cell('j', '')}] = {value.lane};")

    def read_ahead(self, vectors: Sequence[tuple[str, Place]]) -> None:
        """Write the loads of vectors that the storing loop reads, as many as registers hold.

        The loads are then in flight while the block waits at its barrier.
        """
        writer, width = self.writer, self.tiling.store_width
        sides = reversed(self.tiling.sides)
        rounds = -(-self.tiling.sides[0] * self.tiling.sides[1] // (width * self.tiling.threads))
        keys = list(dict.fromkeys(vectors))[: MAX_AHEAD // (rounds * width)]
        self.ahead = {key: writer.new_name(f"{key[0]}_") for key in keys}
        for (operand, _), name in self.ahead.items():
            writer.line(f"{self._kind(operand)} {name}[{rounds}][{width}];")
        if keys:
            with self._loop(self.last, self.across, width, *sides):
                for (operand, place), name in self.ahead.items():
                    address = writer.address(operand, flat(place, writer.shapes.of[operand]))
                    writer.line(f"load({address}, {name}[k]);")

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Write the loop that stores a tile by vectors along the last variable, and reads values from shared memory."""
        writer, width = self.writer, self.tiling.store_width
        with self._loop(self.last, self.across, width, *reversed(self.tiling.sides)):
            for key, name in self.ahead.items():
                writer.keep(key, Reference(f"{name}[k]", varies=True))
            for i, key in enumerate(self.staged):
                text = f"{self._memory(i)}[{self._cell('', 'j' if width > 1 else '')}]"
                name = writer.name_of(key[0])
                writer.keep(key, writer.declare(self._kind(key[0]), text, width > 1, name=name))
            yield

    def _cell(self, row_lane: str, column_lane: str) -> str:
        """Return an element's index in shared memory; no vector crosses a multiple of 32 rows or columns."""
        pitch, row_skew, column_skew = self.layout
        row, column = (f"low_{each.name}" for each in (self.across, self.last))
        parts = [f"({row} + {row_lane}) * {pitch}" if row_lane else f"{row} * {pitch}", column]
        parts += [f"{row} / {WARP} * {row_skew}"] if row_skew and self.tiling.sides[0] > WARP else []
        parts += [f"{column} / {WARP} * {column_skew}"] if column_skew and self.tiling.sides[1] > WARP else []
        return " + ".join([*parts, *filter(None, [column_lane])])

    def _kind(self, name: str) -> str:
        return NUMBER[self.writer.program.dtypes[name]]

    def _memory(self, staged: int) -> str:
        """Return the address in shared memory of the tile of staged value number `staged`."""
        sizes = [8 if BYTES[self.writer.program.dtypes[name]] == 8 else 4 for name, _ in self.staged]
        cells = self.tiling.sides[0] * self.layout[0] + self.tiling.sides[0] // WARP * self.layout[1]
        cells += cells % 2
        begin = sum(sizes[:staged]) * cells
        self.writer.shared(begin + sizes[staged] * cells)
        place = f"shared + {begin // 8}" if staged else "shared"
        return f"reinterpret_cast<{self._kind(self.staged[staged][0])}*>({place})"

    @contextmanager
    def _loop(self, along: Variable, other: Variable, width: int, side: int, other_side: int) -> Iterator[None]:
        """Write a loop over the vectors of a tile along a variable; it skips vectors beyond the end of either axis."""
        writer, kind = self.writer, self.writer.arguments.index_type
        vectors, threads = side // width, self.tiling.threads
        rounds, left = divmod(vectors * other_side, threads)
        with writer.block(
            f'_Pragma("unroll") for (int k = 0, i = threadIdx.x; k < {rounds + bool(left)}; ++k, i += {threads})'
        ):
            starts = {along: f"i % {vectors}" + (f" * {width}" if width > 1 else ""), other: f"i / {vectors}"}
            conditions = [f"i < {vectors * other_side}"] if left else []
            for variable, low in starts.items():
                own_side = side if variable == along else other_side
                writer.line(f"const int low_{variable.name} = {low};")
                start = f"tile_{variable.name} * {own_side} + low_{variable.name}"
                writer.line(f"const {kind} {variable.name} = {start};")
                if not _is_multiple(variable.extent, own_side):
                    conditions.append(f"{variable.name} < {writer.arguments.size(variable.extent)}")
            before, writer.lanes = writer.lanes, Lanes(along.name, width)
            with writer.block(f"if ({' && '.join(conditions)})" if conditions else ""):
                yield
            writer.lanes = before


def _is_multiple(extent: Size, of: int) -> bool:
    return isinstance(extent, int) and extent % of == 0
