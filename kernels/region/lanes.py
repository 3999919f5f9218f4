"""The lanes of a vector: neighbouring values of one variable of a loop nest, which a thread takes at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from onnxfuse.kernels.region.indices import Index
from onnxfuse.kernels.region.sizes import ONE, Size, Sizes


@dataclass(frozen=True)
class Lanes:
    """The variable along which a vector lies, and its width; lane j has the variable's value plus j.

    `scattered` are variables that are arrays in the text: each lane has an element of its own, far from the others.
    """

    variable: str = ""
    width: int = 1
    scattered: frozenset[str] = frozenset()
    rest: Index | None = None  # where the variable is 0, of places of which the first lane's is a multiple of the width
    linear: Index | None = None  # of scattered lanes, what the array `at` has in the text: the place among all elements

    def differ(self, variables: Collection[str]) -> bool:
        """Return whether the lanes have different values of any of these variables."""
        own = self.scattered or (self.variable,)
        return self.width > 1 and any(name in own for name in variables)

    def vary(self, *indices: Index | None) -> bool:
        """Return whether any of these indices differs among the lanes."""
        return any(self.differ(index.variables()) for index in indices if index)

    def are_contiguous(self, address: Index, sizes: Sizes) -> bool:
        """Return whether the lanes are neighbours in memory, the first at a multiple of the width."""
        is_one = not self.scattered and address.factor(self.variable) == ONE
        behind = self._without_variable(address)
        return is_one and self._is_multiple(behind + self.rest * -1 if self.rest else behind, sizes)

    def are_on_one_side(self, index: Index, bound: Size, sizes: Sizes) -> bool:
        """Return whether an index is below a bound in all lanes or in none."""
        difference = index + -bound
        return not self.vary(difference) or (self.rest is None and self.are_contiguous(difference, sizes))

    def _without_variable(self, index: Index) -> Index:
        return Index(index.constant, tuple(each for each in index.terms if each[0].name != self.variable))

    def _is_multiple(self, index: Index, sizes: Sizes) -> bool:
        """Return whether an index is a multiple of the width, and the same for all lanes."""
        factors = (index.constant, *(factor for _, factor in index.terms))
        divides = all(sizes.divisor(each) % self.width == 0 for each in factors)
        return divides and self.variable not in index.variables()
