"""Sizes as polynomials over a region's dynamic dims, so that the generator can prove what holds for all of them.

Every dynamic dim is 1 or more: a plan is made apart for a dim of 0, which is then a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import floordiv, mod
from typing import Final, TypeAlias

from onnxfuse.runtime.symint import SymInt, is_symbolic, maximum, minimum

Monomial: TypeAlias = tuple[str, ...]  # the names of its variables in order, one as often as its power


@dataclass(frozen=True)
class Size:
    """A polynomial with integer coefficients, of which none is 0."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def constant(self) -> int | None:
        """The number that it is for all sizes; None if it depends on them."""
        if not self.terms:
            return 0
        return self.terms[0][1] if self.terms[0][0] == () and len(self.terms) == 1 else None

    def __add__(self, other: Size | int) -> Size:
        return _size([*self.terms, *as_size(other).terms])

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size(tuple((monomial, -factor) for monomial, factor in self.terms))

    def __sub__(self, other: Size | int) -> Size:
        return self + -as_size(other)

    def __rsub__(self, other: int) -> Size:
        return as_size(other) + -self

    def __mul__(self, other: Size | int) -> Size:
        return _size((tuple(sorted((*a, *b))), x * y) for a, x in self.terms for b, y in as_size(other).terms)

    __rmul__ = __mul__

    def divided(self, by: Size) -> Size | None:
        """Return the quotient if the division is exact for all sizes as far as can be seen; None otherwise."""
        if self == by:
            return ONE
        if len(by.terms) != 1:
            return None
        monomial, factor = by.terms[0]
        found = []
        for own, number in self.terms:
            rest = list(own)
            for name in monomial:
                if name not in rest:
                    return None
                rest.remove(name)
            if number % factor:
                return None
            found.append((tuple(rest), number // factor))
        return _size(found)

    @property
    def is_nonnegative(self) -> bool:
        """Whether it is proved to be 0 or more where every variable is 1 or more."""
        if all(factor >= 0 for _, factor in self.terms):
            return True
        total = ZERO
        for monomial, factor in self.terms:
            product = as_size(factor)
            for name in monomial:
                product = product * (variable(name) + 1)
            total = total + product
        return all(factor >= 0 for _, factor in total.terms)

    def __str__(self) -> str:
        return " + ".join("*".join([str(factor), *monomial]) for monomial, factor in self.terms) or "0"


def _size(terms: Iterable[tuple[Monomial, int]]) -> Size:
    sums: dict[Monomial, int] = {}
    for monomial, factor in terms:
        sums[monomial] = sums.get(monomial, 0) + factor
    return Size(tuple(sorted((monomial, factor) for monomial, factor in sums.items() if factor)))


def variable(name: str) -> Size:
    """Return a size that is one variable."""
    return Size((((name,), 1),))


def as_size(value: Size | int) -> Size:
    """Return a number as a size."""
    return value if isinstance(value, Size) else Size((((), value),) if value else ())


ZERO: Final = as_size(0)
ONE: Final = as_size(1)
Shape: TypeAlias = tuple[Size, ...]


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    found = ONE
    for each in sizes:
        found = found * each
    return found


@dataclass
class Sizes:
    """The values of variables, and what was asked about them: answers are guards, as in runtime/symint.py."""

    values: dict[str, int] = field(default_factory=dict)  # symbolic integers
    divisors: dict[str, int] = field(default_factory=dict)  # known divisors of variables

    def read(self, shape: Sequence[int]) -> Shape:
        """Return the dims of a tensor as sizes; whether a dynamic one is 0 is asked."""
        return tuple(self._dim(dim) for dim in shape)

    def _dim(self, dim: int) -> Size:
        if not isinstance(dim, SymInt):
            return as_size(int(dim))
        return ZERO if dim == 0 else self.named(repr(dim), dim)

    def named(self, name: str, value: int) -> Size:
        """Return a variable of that value."""
        if not is_symbolic(value):
            return as_size(value)
        self.values.setdefault(name, value)
        return variable(name)

    def value(self, size: Size) -> int:
        """Return a size as a number, which is symbolic if the size is not constant."""
        return sum(factor * math.prod(self.values[name] for name in monomial) for monomial, factor in size.terms)

    def equal(self, a: Size, b: Size) -> bool:
        """Return whether two sizes are equal; asked only where neither is known."""
        if a == b:
            return True
        if (a - b).constant is not None:
            return False
        return bool(self.value(a) == self.value(b))

    def at_least(self, a: Size, b: Size) -> bool:
        """Return whether a >= b; asked only where neither is known."""
        if (a - b).is_nonnegative:
            return True
        if (b - a - 1).is_nonnegative:
            return False
        return bool(self.value(a) >= self.value(b))

    def quotient(self, size: Size, by: Size) -> Size:
        """Return size / by.  Raises ValueError if that is no integer."""
        exact = size.divided(by)
        if exact is not None:
            return exact
        a, b = self.value(size), self.value(by)
        if b == 0 or a % b != 0:
            raise ValueError(f"a dim of {size} elements cannot be divided by {by}")
        return self.named(f"(({size}) / ({by}))", a // b)

    def computed(self, operator: str, a: Size, b: Size) -> Size:
        """Return what an operator (//, %, max or min) makes of two sizes: a variable where that is no polynomial."""
        exact = a.divided(b) if operator in ("//", "%") and b != ZERO else None
        if exact is not None:
            return exact if operator == "//" else ZERO
        x, y = self.value(a), self.value(b)
        found = {"//": floordiv, "%": mod, "max": maximum, "min": minimum}[operator](x, y)
        if found == 0:  # a variable is 1 or more
            return ZERO
        name = f"{operator}(({a}), ({b}))"
        return self.named(name, found) if found > 0 else -self.named(f"-{name}", -found)

    def ceiling(self, size: Size, by: int) -> Size:
        """Return size / by, rounded up."""
        if (size + by - 1).constant is not None or by == 1:
            return as_size(-(-(size.constant or 0) // by)) if by != 1 else size
        return self.named(f"ceil(({size}) / {by})", (self.value(size) + by - 1) // by)

    def divisor(self, size: Size) -> int:
        """Return an integer that divides a size for all values of its variables; 0 for the size 0."""
        return math.gcd(
            *(factor * math.prod(self.divisors.get(name, 1) for name in monomial) for monomial, factor in size.terms)
        )

    def note_divisor(self, size: Size, by: int) -> None:
        """Note what follows for the one variable of a size, if it has one, from an integer that divides the size."""
        if len(size.terms) == 1 and len(size.terms[0][0]) == 1:
            (name,), factor = size.terms[0]
            self.divisors[name] = math.lcm(self.divisors.get(name, 1), by // math.gcd(by, factor))
