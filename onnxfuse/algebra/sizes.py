"""Symbolic dimensions: polynomials over named sizes, in a normal form, so that equal expressions are equal objects.

A symbol stands for a size, so it is never negative.  An expression that is not a polynomial, such as `(s + 1)//2` or
`Max(1, s)`, becomes a `NonPolynomial` symbol, which holds its operands.  Equal expressions become equal symbols.

Expressions are limited: if the degree, the number of terms or a coefficient exceeds its limit below, the expression
becomes an unknown size that is named by a digest of the expression.  Arithmetic therefore takes bounded time for any
input.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, Union

UNKNOWN = "?"  # first character of symbols for unknown sizes
TOO_LARGE = f"{UNKNOWN}x"  # prefix of symbols for expressions beyond the limits below; such a symbol can be negative
MAX_DEGREE, MAX_TERMS, MAX_COEFFICIENT = 16, 64, 2**63 - 1  # limits of a polynomial
MAX_TEXT = 512  # maximum number of characters of an expression that is not a polynomial


class NonPolynomial(str):
    """A symbol for the result of `//`, `%`, `Max` or `Min`; its name is the text of the expression."""

    op: str
    args: tuple[Size, ...]

    def __new__(cls, op: str, args: tuple[Size, ...]) -> NonPolynomial:
        """Return the symbol for `op` (one of `//`, `%`, `Max`, `Min`) applied to sizes."""
        infix = op in ("//", "%")
        made = super().__new__(cls, op.join(map(_operand, args)) if infix else f"{op}({', '.join(map(str, args))})")
        made.op, made.args = op, args
        return made


class Broadcast(str):
    """The symbol of an unknown size to which `parts` broadcast: each of the parts is 1 or the unknown size."""

    parts: frozenset[str]  # the sizes as text, none of them a Broadcast

    def __new__(cls, name: str, parts: frozenset[str]) -> Broadcast:
        """Return a symbol called `name`; it stands for the size to which `parts` broadcast."""
        made = super().__new__(cls, name)
        made.parts = parts
        return made


Monomial: TypeAlias = tuple[str, ...]  # sorted symbols, repeated for powers: s*s*t is ("s", "s", "t")


@dataclass(frozen=True, slots=True)
class Dim:
    """A size that is not a number: a polynomial with integer coefficients, created by `symbol` and by arithmetic.

    Each of `terms` is (monomial, coefficient).  No coefficient is 0.  The highest degree is first, the constant last.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Size) -> Size:
        if other == 0:
            return self
        terms = dict(self.terms)
        for monomial, coefficient in terms_of(other):
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _size(terms)

    def __mul__(self, other: Size) -> Size:
        if other == 1:
            return self
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in terms_of(other):
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
        text = " + ".join(_term_text(monomial, coefficient) for monomial, coefficient in self.terms)
        return text.replace("+ -", "- ")

    def __repr__(self) -> str:
        return f"Dim({self})"


Size: TypeAlias = Union[int, Dim]  # noqa: UP007 - the annotations of NonPolynomial and Dim use it before it is defined


Shape: TypeAlias = tuple[Size, ...]


def symbol(name: str) -> Dim:
    """Return the size called `name`."""
    return Dim((((name,), 1),))


def non_polynomial(op: str, *args: Size) -> Dim:
    """Return the symbol for `//`, `%`, `Max` or `Min` of sizes; an unknown size if the symbol's text is too long."""
    name = NonPolynomial(op, args)
    return symbol(name) if len(name) <= MAX_TEXT else _unknown(name)


def _unknown(text: str) -> Dim:
    """Return the unknown size that stands for the expression with this text."""
    return symbol(f"{TOO_LARGE}{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}")


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of the sizes; for a shape, this is the number of elements."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def cancelled(sizes: Iterable[Size], others: Iterable[Size]) -> tuple[list[Size], list[Size]]:
    """Return the factors of two products after equal factors are cancelled, one for one."""
    rest, divisors = list(sizes), list[Size]()
    for size in others:
        if size in rest:
            rest.remove(size)
        else:
            divisors.append(size)
    return rest, divisors


def is_known(size: Size) -> bool:
    """Return whether the size depends on known symbols only, not on an unknown one such as `?12`."""
    return isinstance(size, int) or _is_known(size)


@functools.lru_cache(maxsize=4096)  # cached: called for every axis of every tensor; a model has few different sizes
def _is_known(size: Dim) -> bool:
    return all(_is_known_symbol(name) for monomial, _ in size.terms for name in monomial)


def _is_known_symbol(name: str) -> bool:
    return all(map(is_known, name.args)) if isinstance(name, NonPolynomial) else not name.startswith(UNKNOWN)


def terms_of(size: Size) -> tuple[tuple[Monomial, int], ...]:
    """Return the (monomial, coefficient) terms of a size; a number has one term, and 0 has none."""
    if isinstance(size, Dim):
        return size.terms
    return (((), int(size)),) if size else ()


def number_of(size: Size) -> int | None:
    """Return the value of a size that is constant; None where it depends on symbols."""
    return size if isinstance(size, int) else None


def name_of(size: object) -> str | None:
    """Return the name of a size that is a single symbol; None for a number or any other expression."""
    match size:
        case Dim(terms=(((name,), 1),)) if not isinstance(name, NonPolynomial):
            return name
    return None


def broadcast_parts(size: Size) -> frozenset[str]:
    """Return the sizes, as text, that broadcast to this size: the parts of a Broadcast, or else the size itself."""
    name = name_of(size)
    return name.parts if isinstance(name, Broadcast) else frozenset([str(size)])


def symbols(size: Size) -> Iterator[str]:
    """Yield the names that the size depends on, including names in the operands of non-polynomial symbols."""
    if isinstance(size, int):
        return
    for monomial, _ in size.terms:
        for name in monomial:
            if isinstance(name, NonPolynomial):
                for operand in name.args:
                    yield from symbols(operand)
            else:
                yield name


def divide(a: Size, b: Size) -> Size | None:
    """Return the quotient of two polynomials by long division; None if there is a remainder."""
    if isinstance(b, int):
        if b == 1:
            return a
        if b == 0 or any(coefficient % b for _, coefficient in terms_of(a)):
            return None
        return _size({monomial: coefficient // b for monomial, coefficient in terms_of(a)})
    rest: Size = a
    quotient: Size = 0
    lead, lead_coefficient = b.terms[0]
    for _ in range(2 * MAX_TERMS):
        if not isinstance(rest, Dim):
            break
        monomial, coefficient = rest.terms[0]
        remaining = _divide_monomial(monomial, lead)
        if remaining is None or coefficient % lead_coefficient:
            return None
        step = _size({remaining: coefficient // lead_coefficient})
        quotient, rest = quotient + step, rest - step * b
    return quotient if rest == 0 else None


def floor_divide(a: Size, b: Size) -> Size:
    """Return `a // b`, rounded down; symbols in `b` are assumed to be positive."""
    exact = divide(a, b)
    if exact is not None:
        return exact
    a, b = _cancel_common_factor(a, b)
    if not isinstance(b, int):
        return non_polynomial("//", a, b)
    if b == 0:
        raise ZeroDivisionError(f"{a} // 0")
    if b < 0:
        a, b = a * -1, -b
    whole = _size({monomial: coefficient // b for monomial, coefficient in terms_of(a)})
    return whole + _floor_divide_remainder(a - whole * b, b)


def modulo(a: Size, b: Size) -> Size:
    """Return `a % b`, which has the sign of `b`."""
    if divide(a, b) is not None:
        return 0
    if isinstance(b, int):
        a = _size({monomial: coefficient % b for monomial, coefficient in terms_of(a)})
        if isinstance(a, int):
            return a % b
    return non_polynomial("%", a, b)


def divisor(size: Size, known: Mapping[str, int] | None = None) -> int:
    """Return the largest number known to divide a size; `known` maps symbols to numbers that divide them.

    The result is 0 for the size 0.
    """
    factors = known or {}
    return math.gcd(*(factor * math.prod(factors.get(name, 1) for name in m) for m, factor in terms_of(size)))


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Return the number that the size has for these values of its symbols.  Raises KeyError if a value is missing."""
    if isinstance(size, int):
        return size
    total = 0
    for monomial, coefficient in size.terms:
        total += coefficient * math.prod(_evaluate_symbol(name, values) for name in monomial)
    return total


def _order(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return -len(term[0]), term[0]  # graded lexicographic order, a monomial order as required by the long division


def _size(terms: dict[Monomial, int]) -> Size:
    kept = [term for term in terms.items() if term[1]]
    if not kept:
        return 0
    if len(kept) == 1:
        ((monomial, coefficient),) = kept
        if not monomial:
            return coefficient
        if len(monomial) <= MAX_DEGREE and -MAX_COEFFICIENT <= coefficient <= MAX_COEFFICIENT:
            return Dim((kept[0],))
    elif len(kept) <= MAX_TERMS and all(len(m) <= MAX_DEGREE and abs(c) <= MAX_COEFFICIENT for m, c in kept):
        return Dim(tuple(sorted(kept, key=_order)))
    # A digest of this text names the unknown size, so the text includes the coefficients.  They are written by `hex`,
    # because `str` refuses very long integers.
    return _unknown(str([(monomial, hex(coefficient)) for monomial, coefficient in sorted(kept)]))


def _divide_monomial(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    rest = list(monomial)
    for name in divisor:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


def _cancel_common_factor(a: Size, b: Size) -> tuple[Size, Size]:
    """Return both sizes divided by the greatest common divisor of all their terms."""
    terms = (*terms_of(a), *terms_of(b))
    common = functools.reduce(operator.and_, (Counter(monomial) for monomial, _ in terms))
    divisor = _size({tuple(sorted(common.elements())): math.gcd(*(coefficient for _, coefficient in terms))})
    return divide(a, divisor) or 0, divide(b, divisor) or 0


def _floor_divide_remainder(a: Size, b: int) -> Size:
    """Return `a // b` in the normal form of nested divisions; the coefficients of `a` must lie in [0, b).

    `(x//m + c)//n` becomes `(x + c*m)//(m*n)`.
    """
    constant = next((coefficient for monomial, coefficient in terms_of(a) if not monomial), 0)
    common = math.gcd(b, *(coefficient for monomial, coefficient in terms_of(a) if monomial))
    if not isinstance(a - constant, Dim):
        return constant // b
    if common > 1:
        return floor_divide(_divide_exactly(a - constant, common) + constant // common, b // common)
    (monomial, coefficient), *others = terms_of(a - constant)
    inner = monomial[0]
    if not others and coefficient == 1 and len(monomial) == 1 and isinstance(inner, NonPolynomial) and inner.op == "//":
        numerator, denominator = inner.args
        if isinstance(denominator, int):
            return floor_divide(numerator + denominator * constant, denominator * b)
    return non_polynomial("//", a, b)


def _divide_exactly(a: Size, b: int) -> Size:
    quotient = divide(a, b)
    assert quotient is not None
    return quotient


def _evaluate_symbol(name: str, values: Mapping[str, int]) -> int:
    if not isinstance(name, NonPolynomial) or name in values:
        return values[name]
    numbers = [evaluate(arg, values) for arg in name.args]
    if name.op in ("Max", "Min"):
        return (max if name.op == "Max" else min)(numbers)
    return numbers[0] // numbers[1] if name.op == "//" else numbers[0] % numbers[1]


def _operand(size: Size) -> str:
    text = str(size)
    return text if re.fullmatch(r"[\w.?]+", text) else f"({text})"


def _term_text(monomial: Monomial, coefficient: int) -> str:
    if not monomial:
        return str(coefficient)
    if len(monomial) == 1 and coefficient == 1:
        return str(monomial[0])
    infix = [isinstance(name, NonPolynomial) and name.op in ("//", "%") for name in monomial]
    names = "*".join(f"({name})" if inside else name for name, inside in zip(monomial, infix, strict=True))
    return names if coefficient == 1 else f"-{names}" if coefficient == -1 else f"{coefficient}*{names}"
