"""Symbolic dimensions: polynomials over named sizes, in a normal form, so that equal expressions are equal objects.

A symbol is a size, so it is never negative.  What is no polynomial (`(s + 1)//2`, `Max(1, s)`) becomes an `Opaque`
symbol that carries its operands; the same expression always gives the same one.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, Union

UNKNOWN = "?"  # symbols that start so stand for sizes of which nothing is known


class Opaque(str):
    """A symbol named by the expression that it stands for."""

    op: str
    args: tuple[Size, ...]

    def __new__(cls, op: str, args: tuple[Size, ...]) -> Opaque:
        """Name the application of `op` (one of `//`, `%`, `Max`, `Min`) to sizes."""
        infix = op in ("//", "%")
        atom = super().__new__(cls, op.join(map(_operand, args)) if infix else f"{op}({', '.join(map(str, args))})")
        atom.op, atom.args = op, args
        return atom


Monomial: TypeAlias = tuple[str, ...]  # sorted symbols, repeated for powers


@dataclass(frozen=True, slots=True)
class Dim:
    """A size that is no number: a polynomial with integer coefficients.  Made by `symbol` and by arithmetic."""

    terms: tuple[tuple[Monomial, int], ...]  # no zero coefficient; highest degree first, so the constant comes last

    def __add__(self, other: Size) -> Size:
        if other == 0:
            return self
        terms = dict(self.terms)
        for monomial, factor in _terms(other):
            terms[monomial] = terms.get(monomial, 0) + factor
        return _size(terms)

    def __mul__(self, other: Size) -> Size:
        if other == 1:
            return self
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _size(terms)

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + other * -1

    def __rsub__(self, other: int) -> Size:
        return self * -1 + other

    def __floordiv__(self, other: Size) -> Size:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return floor_divide(other, self)

    def __mod__(self, other: Size) -> Size:
        return modulo(self, other)

    def __rmod__(self, other: int) -> Size:
        return modulo(other, self)

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        text = " + ".join(_term_text(monomial, factor) for monomial, factor in self.terms)
        return text.replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Dim({self})"


Size: TypeAlias = Union[int, Dim]  # noqa: UP007 - Opaque and Dim name it before it exists


def symbol(name: str) -> Dim:
    """The size called `name`."""
    return Dim((((name,), 1),))


def product(sizes: Iterable[Size]) -> Size:
    """Of all sizes: how many elements a shape has."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def is_known(size: Size) -> bool:
    """Whether no part of the size is an unknown (`?12`) symbol."""
    return isinstance(size, int) or _is_known(size)


@functools.lru_cache(maxsize=4096)  # asked for every axis of every tensor, of the few sizes that a model has
def _is_known(size: Dim) -> bool:
    return all(_is_known_atom(atom) for monomial, _ in size.terms for atom in monomial)


def _is_known_atom(atom: str) -> bool:
    return all(map(is_known, atom.args)) if isinstance(atom, Opaque) else not atom.startswith(UNKNOWN)


def symbols(size: Size) -> Iterator[str]:
    """The names that the size depends on, those inside opaque symbols included."""
    if isinstance(size, int):
        return
    for monomial, _ in size.terms:
        for atom in monomial:
            if isinstance(atom, Opaque):
                for part in atom.args:
                    yield from symbols(part)
            else:
                yield atom


def divide(a: Size, b: Size) -> Size | None:
    """The exact quotient of two polynomials; None where there is none."""
    if isinstance(b, int):
        if b == 0 or any(factor % b for _, factor in _terms(a)):
            return None
        return _size({monomial: factor // b for monomial, factor in _terms(a)})
    rest: Size = a
    quotient: Size = 0
    lead, lead_factor = b.terms[0]
    while isinstance(rest, Dim):
        monomial, factor = rest.terms[0]
        remaining = _without(monomial, lead)
        if remaining is None or factor % lead_factor:
            return None
        step = _size({remaining: factor // lead_factor})
        quotient, rest = quotient + step, rest - step * b
    return quotient if rest == 0 else None


def floor_divide(a: Size, b: Size) -> Size:
    """`a // b` rounded down; symbols in `b` are taken to be positive."""
    exact = divide(a, b)
    if exact is not None:
        return exact
    a, b = _cancel(a, b)
    if not isinstance(b, int):
        return symbol(Opaque("//", (a, b)))
    if b == 0:
        raise ZeroDivisionError(f"{a} // 0")
    if b < 0:
        a, b = a * -1, -b
    whole = _size({monomial: factor // b for monomial, factor in _terms(a)})
    return whole + _fraction(a - whole * b, b)


def modulo(a: Size, b: Size) -> Size:
    """`a % b` with the sign of `b`."""
    if divide(a, b) is not None:
        return 0
    if isinstance(b, int):
        a = _size({monomial: factor % b for monomial, factor in _terms(a)})
        if isinstance(a, int):
            return a % b
    return symbol(Opaque("%", (a, b)))


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """The size as a number.  Raises KeyError for a symbol without a value."""
    if isinstance(size, int):
        return size
    return sum(factor * math.prod(_evaluate_atom(atom, values) for atom in monomial) for monomial, factor in size.terms)


def _terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    if isinstance(size, Dim):
        return size.terms
    return (((), int(size)),) if size else ()


def _order(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return -len(term[0]), term[0]  # graded lexicographic: a monomial order, as the long division needs


def _size(terms: dict[Monomial, int]) -> Size:
    kept = [term for term in terms.items() if term[1]]
    if not kept:
        return 0
    if len(kept) == 1:
        return Dim((kept[0],)) if kept[0][0] else kept[0][1]
    return Dim(tuple(sorted(kept, key=_order)))


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    rest = list(monomial)
    for atom in part:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _cancel(a: Size, b: Size) -> tuple[Size, Size]:
    """Divide both by what every term of both has in common."""
    terms = (*_terms(a), *_terms(b))
    common = terms[0][0]
    for monomial, _ in terms:
        rest = list(monomial)
        common = tuple(atom for atom in common if atom in rest and rest.remove(atom) is None)  # type: ignore[func-returns-value]
    scale = {common: math.gcd(*(factor for _, factor in terms))}
    return divide(a, _size(scale)) or 0, divide(b, _size(scale)) or 0


def _fraction(a: Size, b: int) -> Size:
    """`a // b` where every coefficient lies in [0, b), with `(x//m + c)//n` written as `(x + c*m)//(m*n)`."""
    constant = next((factor for monomial, factor in _terms(a) if not monomial), 0)
    common = math.gcd(b, *(factor for monomial, factor in _terms(a) if monomial))
    if not isinstance(a - constant, Dim):
        return constant // b
    if common > 1:
        return floor_divide(_exact(a - constant, common) + constant // common, b // common)
    (monomial, factor), *others = _terms(a - constant)
    inner = monomial[0]
    if not others and factor == 1 and len(monomial) == 1 and isinstance(inner, Opaque) and inner.op == "//":
        numerator, denominator = inner.args
        if isinstance(denominator, int):
            return floor_divide(numerator + denominator * constant, denominator * b)
    return symbol(Opaque("//", (a, b)))


def _exact(a: Size, b: int) -> Size:
    quotient = divide(a, b)
    assert quotient is not None
    return quotient


def _evaluate_atom(atom: str, values: Mapping[str, int]) -> int:
    if not isinstance(atom, Opaque) or atom in values:
        return values[atom]
    numbers = [evaluate(arg, values) for arg in atom.args]
    if atom.op in ("Max", "Min"):
        return (max if atom.op == "Max" else min)(numbers)
    return numbers[0] // numbers[1] if atom.op == "//" else numbers[0] % numbers[1]


def _operand(size: Size) -> str:
    text = str(size)
    return text if re.fullmatch(r"[\w.?]+", text) else f"({text})"


def _term_text(monomial: Monomial, factor: int) -> str:
    if not monomial:
        return str(factor)
    if len(monomial) == 1 and factor == 1:
        return str(monomial[0])
    names = "*".join(f"({atom})" if isinstance(atom, Opaque) and atom.op in ("//", "%") else atom for atom in monomial)
    return names if factor == 1 else f"-{names}" if factor == -1 else f"{factor}*{names}"
