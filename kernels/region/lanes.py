"""The lanes of a vector: neighbouring values of one variable of a loop nest, which a thread computes at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import Size, number_of
from onnxfuse.kernels.region.sizes import Sizes


def variable_of(index: Index, name: str) -> Index:
    """Return the variable `name` as an index, if a multiple of it is a term of `index`; otherwise return 0."""
    terms = [each for each in index.terms if each[0].kind == "variable" and each[0].name == name]
    return Index(0, tuple((atom, 1) for atom, _ in terms))


@dataclass(frozen=True)
class Lanes:
    """The variable along which a vector lies, and the vector's width; from lane to lane, the variable increases by 1.

    `scattered` are variables that are arrays in the generated code: the elements of different lanes are far apart.
    Shifted vectors begin some elements after the start of a row, so that they are aligned: `rest` plus the variable of
    lane 0 is a multiple of the width.
    """

    variable: str = ""
    width: int = 1
    scattered: frozenset[str] = frozenset()
    rest: Index | None = None  # for shifted vectors: the address of the element where the variable is 0
    # The flat index of an element: in the code, lane j has at[j] if lanes are scattered, else at * width + j.
    linear: Index | None = None

    @property
    def variables(self) -> frozenset[str]:
        """The variables whose values differ between lanes."""
        return frozenset() if self.width == 1 else self.scattered or frozenset((self.variable,))

    def differ(self, variables: Collection[str]) -> bool:
        """Return whether the lanes have different values of any of these variables."""
        return not self.variables.isdisjoint(variables)

    def vary(self, *indices: Index | None) -> bool:
        """Return whether any of these indices differs among the lanes."""
        return any(self.differ(index.variables()) for index in indices if index)

    def are_contiguous(self, address: Index, sizes: Sizes) -> bool:
        """Return whether the lanes are contiguous in memory, and the first is at a multiple of the width."""
        is_one = not self.scattered and address.factor(self.variable) == 1
        behind = self._without_variable(address)
        return is_one and self._is_multiple(behind + self.rest * -1 if self.rest else behind, sizes)

    def are_on_one_side(self, index: Index, bound: Size, sizes: Sizes) -> bool:
        """Return whether an index is below a bound in all lanes or in none."""
        difference = index + -bound
        return not self.vary(difference) or (self.rest is None and self.are_contiguous(difference, sizes))

    def step_of(self, address: Index) -> int:
        """Return how many neighbouring elements share an address, if a vector has at most two addresses; else 0.

        An example is a column that is broadcast along rows, in a nest whose vectors may cross the end of a row: the
        column's address depends on the row number, a quotient by the row's length.
        """
        divisors = None if self.scattered or self.rest else self._divisors(address)
        step = min(divisors, default=0) if divisors else 0
        return step if step >= self.width and all(each % step == 0 for each in divisors or ()) else 0

    def _divisors(self, index: Index) -> list[int] | None:
        """Return the divisors of the lanes' variable in an index; None if the variable occurs outside of a quotient."""
        found = list[int]()
        for atom, _ in index.terms:
            if self.variable not in (atom.of.variables() if atom.of else {atom.name, *atom.varies}):
                continue
            by = number_of(atom.by)
            is_quotient = atom.kind == "div" and atom.of is not None and atom.of == variable_of(atom.of, self.variable)
            inner = [by] if is_quotient and by else self._divisors(atom.of) if atom.of else None
            if inner is None:
                return None
            found += inner
        return found

    def _without_variable(self, index: Index) -> Index:
        return Index(index.constant, tuple(each for each in index.terms if each[0].name != self.variable))

    def _is_multiple(self, index: Index, sizes: Sizes) -> bool:
        """Return whether an index is a multiple of the width and equal in all lanes."""
        factors = (index.constant, *(factor for _, factor in index.terms))
        divides = all(sizes.divisor(each) % self.width == 0 for each in factors)
        return divides and self.variable not in index.variables()
