"""Values in the text of a kernel, and the code that writes them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import Size
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.lanes import Lanes
from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.shapes import Shapes


@dataclass(frozen=True)
class Reference:
    """A value that the text has: a variable of C++, or an array of one for each lane of a vector."""

    text: str
    varies: bool = False  # it is an array
    masked: bool = False  # lanes that do not need it may have another value

    @property
    def lane(self) -> str:
        """The value in lane j."""
        return f"{self.text}[j]" if self.varies else self.text

    def where(self, masked: bool) -> Reference:
        """Return the same variable, in which lanes that do not need it have another value if `masked`."""
        return replace(self, masked=masked)

    def of_text(self, text: str) -> Reference:
        """Return a reference to an expression that all lanes have in common."""
        return Reference(text)


@dataclass(frozen=True)
class Within:
    """What the text may rely on: an index is `begin` or more, and below `end`."""

    index: Index
    begin: Size
    end: Size


class ValueWriter(Protocol):
    """What codegen.py offers to the modules that emit a part of its text."""

    program: Program
    shapes: Shapes
    arguments: Arguments
    lanes: Lanes
    masks: list[str]
    accesses: list[tuple[str, Index]]
    bounds: list[tuple[Index, Size]]

    def line(self, text: str) -> None:
        """Add a line."""

    def branch(self, head: str) -> AbstractContextManager[None]:
        """Write a block that not every thread runs."""

    def mask(self, condition: str) -> AbstractContextManager[str]:
        """Write for the lanes that a condition chooses; yield the array that says which."""

    def is_below(self, index: Index, bound: Size) -> bool | None:
        """Return whether an index is less than a bound; None if it depends."""

    def index(self, index: Index, in_lane: bool = False) -> str:
        """Return an index as an expression."""

    def is_contiguous(self, address: Index) -> bool:
        """Return whether a vector access has all lanes at an address."""

    def value(self, name: str, place: Place) -> Reference:
        """Return a value at a place, which is written unless the text has it."""

    def declare(
        self, kind: str, value: str, varies: bool, masked: bool = False, name: str = "", note: str = ""
    ) -> Reference:
        """Write a variable with its value."""

    def new_name(self, begin: str = "t") -> str:
        """Return a name that no variable has."""

    def name_of(self, value: str) -> str:
        """Return a name for a variable of a value or an operand."""

    def address(self, pointer: str, index: Index, in_lane: bool = False) -> str:
        """Return the address of an element after a pointer."""

    def declared(self, name: str, varies: bool) -> Reference:
        """Declare a variable for a value, without one."""

    def assign(self, to: Reference, value: Reference) -> None:
        """Write an assignment to a variable that was declared before."""
