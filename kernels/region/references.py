"""References to values in a kernel's code, and the protocol of the writer that computes them."""

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
    """A value in the generated code: a C++ variable, or an array with one element per lane of a vector."""

    text: str
    varies: bool = False  # whether the variable is an array with one element per lane
    masked: bool = False  # whether lanes that do not need the value may hold a wrong value

    @property
    def lane(self) -> str:
        """The C++ expression of the value in lane j."""
        return f"{self.text}[j]" if self.varies else self.text

    def where(self, masked: bool) -> Reference:
        """Return a copy that says whether lanes that do not need the value may hold a wrong value."""
        return replace(self, masked=masked)

    def of_text(self, text: str) -> Reference:
        """Return a reference to an expression that is the same in all lanes."""
        return Reference(text)


@dataclass(frozen=True)
class Within:
    """A bound that the generated code can assume: `begin` <= index < `end`."""

    index: Index
    begin: Size
    end: Size


class ValueWriter(Protocol):
    """The methods of codegen.Writer that modules use to emit parts of a kernel."""

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
        """Write a block after a line such as `if (...)`, which only some threads run."""

    def mask(self, condition: str) -> AbstractContextManager[str]:
        """Write branchless code for lanes where a condition is true; yield the name of a bool array that marks them."""

    def is_below(self, index: Index, bound: Size) -> bool | None:
        """Return whether an index is less than a bound; None if that is only known at run time."""

    def index(self, index: Index, in_lane: bool = False) -> str:
        """Return an index as an expression."""

    def is_contiguous(self, address: Index) -> bool:
        """Return whether one vector access reads or writes all lanes at an address."""

    def value(self, name: str, place: Place) -> Reference:
        """Return a value's element at `place`, an index along each axis; write its computation if the code lacks it."""

    def declare(
        self, kind: str, value: str, varies: bool, masked: bool = False, name: str = "", note: str = ""
    ) -> Reference:
        """Declare a variable with a value, an expression that can depend on lane j."""

    def new_name(self, begin: str = "t") -> str:
        """Return an unused name that starts with `begin`."""

    def name_of(self, value: str) -> str:
        """Return an unused name for a variable that holds a value or an operand's element."""

    def address(self, pointer: str, index: Index, in_lane: bool = False) -> str:
        """Return the address of an element, given a pointer and an index that counts from there."""

    def declared(self, name: str, varies: bool) -> Reference:
        """Declare a variable for a value, but do not initialize it."""

    def assign(self, to: Reference, value: Reference) -> None:
        """Write the assignment of a value to an already declared variable."""
