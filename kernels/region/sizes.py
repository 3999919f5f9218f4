"""Queries of a region's generator about sizes, which are polynomials over the dynamic dims of its operands.

Every dynamic dim is at least 1, because a dim of 0 gets a separate plan, where it is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import floordiv, mod

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.sizes import Dim, Shape, Size, divide, divisor, evaluate, symbol
from onnxfuse.runtime.symint import SymInt, is_symbolic, maximum, minimum


@dataclass
class Sizes:
    """The values of dynamic dims.

    Comparisons of symbolic values add guards, conditions on the sizes, to the plan, as in runtime/symint.py.
    """

    values: dict[str, int] = field(default_factory=dict)  # the value of each symbol, as a symbolic integer
    divisors: dict[str, int] = field(default_factory=dict)  # a known divisor of each symbol

    def read(self, shape: Sequence[int]) -> Shape:
        """Return the dims of a tensor as sizes; adds a guard (a condition on sizes) for whether a dynamic dim is 0."""
        return tuple(self._dim(dim) for dim in shape)

    def _dim(self, dim: int) -> Size:
        if not isinstance(dim, SymInt):
            return int(dim)
        return 0 if dim == 0 else self.named(repr(dim), dim)

    def named(self, name: str, value: int) -> Size:
        """Return `value` as a size: the symbol `name` if the value is symbolic, else the number."""
        if not is_symbolic(value):
            return value
        self.values.setdefault(name, value)
        return symbol(name)

    def value(self, size: Size) -> int:
        """Return a size as a number, which is symbolic if the size is not constant."""
        return evaluate(size, self.values)

    def equal(self, a: Size, b: Size) -> bool:
        """Return whether sizes are equal; if the polynomials do not decide it, adds a guard (a condition on sizes)."""
        if isinstance(a - b, int):
            return a == b
        return bool(self.value(a) == self.value(b))

    def at_least(self, a: Size, b: Size) -> bool:
        """Return whether a >= b; if the polynomials do not decide it, adds a guard (a condition on sizes)."""
        if is_nonnegative(a - b):
            return True
        if is_nonnegative(b - a - 1):
            return False
        return bool(self.value(a) >= self.value(b))

    def quotient(self, size: Size, by: Size) -> Size:
        """Return size / by.  Raises ValueError if that is not an integer."""
        exact = divide(size, by)
        if exact is not None:
            return exact
        a, b = self.value(size), self.value(by)
        if b == 0 or a % b != 0:
            raise ValueError(f"a dim of {size} elements cannot be divided by {by}")
        return self.named(f"(({size}) / ({by}))", a // b)

    def computed(self, operator: str, a: Size, b: Size) -> Size:
        """Return the result of //, %, max or min; it becomes a new symbol unless it is a polynomial."""
        exact = divide(a, b) if operator in ("//", "%") else None
        if exact is not None:
            return exact if operator == "//" else 0
        x, y = self.value(a), self.value(b)
        found = {"//": floordiv, "%": mod, "max": maximum, "min": minimum}[operator](x, y)
        if found == 0:  # symbols are at least 1, so 0 gets no symbol
            return 0
        name = f"{operator}(({a}), ({b}))"
        return self.named(name, found) if found > 0 else -self.named(f"-{name}", -found)

    def ceiling(self, size: Size, by: int) -> Size:
        """Return size / by, rounded up."""
        if by == 1 or isinstance(size, int):
            return -(-size // by)
        return self.named(f"ceil(({size}) / {by})", (self.value(size) + by - 1) // by)

    def divisor(self, size: Size) -> int:
        """Return an integer that divides a size for all values of its symbols; 0 for the size 0."""
        return divisor(size, self.divisors)

    def note_divisor(self, size: Size, by: int) -> None:
        """Record that `by` divides a size, if the size is a number times one symbol.

        The recorded number is the divisor that the symbol must then have.
        """
        match size:
            case Dim(terms=(((name,), factor),)):
                self.divisors[name] = math.lcm(self.divisors.get(name, 1), by // math.gcd(by, factor))
