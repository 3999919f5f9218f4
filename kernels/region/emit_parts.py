"""Writes a loop nest's variables, which are quotients and remainders of a thread's flat index.

A list is one of `Nest.lists`: the variables of rows, of a row's elements, or of other elements that are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.algebra.sizes import Size, divide
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.nests import Nest, Variable


class PartsText:
    """Writes a loop nest's variables, and the number of vectors in a list of variables."""

    def __init__(self, nest: Nest, writer: Writer) -> None:
        """Store the loop nest, and the writer that gets the lines of code."""
        self.nest, self.writer = nest, writer
        self.type = writer.arguments.index_type

    def variable(self, name: str, value: str) -> str:
        """Declare an index variable, an array if lanes are scattered; return the expression that reads it."""
        if not self.writer.lanes.scattered:
            self.writer.line(f"const {self.type} {name} = {value};")
            return name
        width = self.writer.lanes.width
        self.writer.line(f"{self.type} {name}[{width}]; EACH({width}) {name}[j] = {value};")
        return f"{name}[j]"

    def vectors(self, extent: Size, width: int) -> Size:
        """Return how many whole vectors an extent has."""
        sizes = self.writer.shapes.sizes
        return divide(extent, width) or sizes.named(f"({extent}) / {width}", sizes.value(extent) // width)

    def bound(self, name: str, width: int) -> str:
        """Return the number of vectors of `width` elements in the list `name`, at which loops over the list end."""
        return self.writer.arguments.size(self.vectors(self.nest.count(name), width))

    def split(self, name: str, variables: Sequence[Variable], width: int) -> None:
        """Write variables as parts of the flat index `name`, which counts vectors along the last variable."""
        writer, left = self.writer, f"{name}[j]" if self.writer.lanes.scattered else name
        first, *others = variables
        for variable in reversed(others):
            is_vector = variable is variables[-1] and width > 1
            by = self.vectors(variable.extent, width) if is_vector else variable.extent
            if by == 1:
                self.variable(variable.name, "0")
                continue
            part, rest = (writer.arguments.quotient(left, by, operator) for operator in "%/")
            self.variable(variable.name, f"{part} * {width}" if is_vector else part)
            if variable is variables[1]:
                self.variable(first.name, rest)
                return
            left = self.variable(f"{variable.name}_left", rest)
        self.variable(first.name, left if others or width == 1 else f"{left} * {width}")
