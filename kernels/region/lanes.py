"""The lanes of a vector: neighbouring values of one variable of a loop nest, which a thread takes at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import Size, number_of
from onnxfuse.kernels.region.sizes import Sizes


def variable_of(index: Index, name: str) -> Index:
    """Return the part of an index that is a variable."""
    terms = [each for each in index.terms if each[0].kind == "variable" and each[0].name == name]
    return Index(0, tuple((atom, 1) for atom, _ in terms))


@dataclass(frozen=True)
class Lanes:
    """The variable along which a vector lies, and its width; lane j has the variable's value plus j.

    `scattered` are variables that are arrays in the text: each lane has an element of its own, far from the others.
    """

    variable: str = ""
    width: int = 1
    scattered: frozenset[str] = frozenset()
    rest: Index | None = None  # where the variable is 0, of places of which the first lane's is a multiple of the width
    linear: Index | None = None  # the place among all elements, which the text has as `at[j]`, or as `at` vectors

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
        """Return whether the lanes are neighbours in memory, the first at a multiple of the width."""
        is_one = not self.scattered and address.factor(self.variable) == 1
        behind = self._without_variable(address)
        return is_one and self._is_multiple(behind + self.rest * -1 if self.rest else behind, sizes)

    def are_on_one_side(self, index: Index, bound: Size, sizes: Sizes) -> bool:
        """Return whether an index is below a bound in all lanes or in none."""
        difference = index + -bound
        return not self.vary(difference) or (self.rest is None and self.are_contiguous(difference, sizes))

    def step_of(self, address: Index) -> int:
        """Return a number of neighbours that have one address, of which the lanes meet two at most; 0 if there is none.

        That is so for a column that is broadcast, where vectors lie across rows: the address depends on quotients by
        multiples of a row's elements alone.
        """
        divisors = None if self.scattered or self.rest else self._divisors(address)
        step = min(divisors, default=0) if divisors else 0
        return step if step >= self.width and all(each % step == 0 for each in divisors or ()) else 0

    def _divisors(self, index: Index) -> list[int] | None:
        """Return by what the lanes' variable is divided; None if an index depends on it in another way."""
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
        """Return whether an index is a multiple of the width, and the same for all lanes."""
        factors = (index.constant, *(factor for _, factor in index.terms))
        divides = all(sizes.divisor(each) % self.width == 0 for each in factors)
        return divides and self.variable not in index.variables()
