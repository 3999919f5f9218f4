"""Lower and upper bounds of symbolic sizes, and the maximum and minimum of sizes, which are derived from the bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from onnxfuse.algebra.sizes import (
    TOO_LARGE,
    UNKNOWN,
    Dim,
    Monomial,
    NonPolynomial,
    Size,
    divide,
    floor_divide,
    modulo,
    non_polynomial,
    product,
    symbol,
    terms_of,
)

MAX_OPERANDS = 8  # operands of a `Max` or `Min`; if there are more, they are not compared with each other
MAX_SUBSTITUTIONS = 4
SizeBounds: TypeAlias = tuple[int | None, int | None]  # (lower bound, upper bound); None: not known


def maximum(*sizes: Size) -> Size:
    """Return the largest of the sizes.

    `Max(c, d - size)`, for numbers c and d, is written with `Min`: `d - Min(d - c, size)`.
    """
    for number, other in (sizes, sizes[::-1]) if len(sizes) == 2 else ():
        if isinstance(number, int) and isinstance(other, Dim):
            constant = next((factor for monomial, factor in other.terms if not monomial), 0)
            if all(factor < 0 for monomial, factor in other.terms if monomial):
                return minimum(constant - number, constant - other) * -1 + constant
    return _extreme("Max", sizes, lambda a, b: _is_at_most_zero(b - a))


def minimum(*sizes: Size) -> Size:
    """Return the smallest of the sizes.

    `Min(1, n*size)` is simplified to `Min(1, size)`, because a size is never negative.
    """
    if len(sizes) == 2 and 1 in sizes:
        sizes = tuple(_divided(size) if isinstance(size, Dim) else size for size in sizes)
    return _extreme("Min", sizes, lambda a, b: _is_at_most_zero(a - b))


def _divided(size: Dim) -> Size:
    """Divide a size `n*a` by n, for a number n > 1 and a product a of symbols; return any other size unchanged."""
    ((monomial, factor), *others) = size.terms
    is_multiple = not others and monomial and factor > 1 and (lower_bound(size) or 0) >= 0
    return size // factor if is_multiple else size


def lower_bound(size: Size) -> int | None:
    """Return a lower bound of the size; None if none is known."""
    return size if isinstance(size, int) else _lower_bound(size, MAX_SUBSTITUTIONS)


@functools.lru_cache(maxsize=65536)  # cached, because the same operands occur in many sizes
def _lower_bound(size: Dim, substitutions: int) -> int | None:
    """Return a lower bound of a size; None if none is found.

    At most `substitutions` times, the search replaces a `Max`, a `Min` or all quotients in the size by a bound.
    """
    total: int | None = 0
    for monomial, coefficient in size.terms:
        low = _monomial_bounds(monomial)[0 if coefficient > 0 else 1]
        total = None if low is None or total is None else total + coefficient * low
    if substitutions:
        others = (total, _bound_of_quotients(size, substitutions))
        total = max((bound for bound in others if bound is not None), default=None)
    # -Min(a, b) is at least -a and at least -b; Max(a, b) is at least a and at least b.  The largest of these bounds is
    # used.
    for op, sign in (("Min", -1), ("Max", 1)) if substitutions else ():
        for monomial, coefficient in size.terms:
            first = monomial[0] if len(monomial) == 1 else None
            if coefficient * sign > 0 and isinstance(first, NonPolynomial) and first.op == op:
                replaced = [size + (arg - symbol(first)) * coefficient for arg in first.args]
                bounds = [each if isinstance(each, int) else _lower_bound(each, substitutions - 1) for each in replaced]
                return max((bound for bound in (total, *bounds) if bound is not None), default=None)
    return total


def _bound_of_quotients(size: Dim, substitutions: int) -> int | None:
    """Return a lower bound that uses the bounds of quotients by numbers: `a//4` is at most a/4 and at least (a - 3)/4.

    Example: `h//2 - 2*(h//4)`, the padding of an image that was halved and doubled, is at least -1/2.  Because it is an
    integer, it is at least 0.
    """
    quotients: dict[str, tuple[Size, int]] = {}
    for name in (monomial[0] for monomial, _ in size.terms if len(monomial) == 1):
        if isinstance(name, NonPolynomial) and name.op == "//" and isinstance(number := name.args[1], int):
            quotients[name] = name.args[0], number
    if not quotients:
        return None
    factor = math.lcm(*(number for _, number in quotients.values()))
    total: Size = 0  # a lower bound of `factor * size`, in which bounds replace the quotients
    for monomial, coefficient in size.terms:
        if len(monomial) == 1 and monomial[0] in quotients:
            a, number = quotients[monomial[0]]
            total = total + (a - (number - 1 if coefficient > 0 else 0)) * (coefficient * (factor // number))
        else:
            total = total + product(map(symbol, monomial)) * (coefficient * factor)
    low = total if isinstance(total, int) else _lower_bound(total, substitutions - 1)
    return None if low is None else -(-low // factor)


def upper_bound(size: Size) -> int | None:
    """Return an upper bound of the size; None if none is known."""
    low = lower_bound(size * -1)
    return None if low is None else -low


@functools.lru_cache(maxsize=65536)  # cached, because each step of index arithmetic calls it
def is_nonnegative(size: Size) -> bool:
    """Return whether the size is proved to be 0 or more, assuming that each name in it stands for 1 or more.

    The assumption is safe for index arithmetic: a tensor with a dim of 0 has no elements, so it is never read.
    """
    above, terms = size, terms_of(size)
    # Each name is replaced by name + 1: a name stands for 1 or more, but `lower_bound` assumes only 0 or more.  A size
    # with NonPolynomial symbols stays as it is, because the names in the operands of these symbols would not change.
    if not any(isinstance(name, NonPolynomial) for monomial, _ in terms for name in monomial):
        above = sum((product(symbol(name) + 1 for name in monomial) * factor for monomial, factor in terms), 0)
    low = lower_bound(above)
    return low is not None and low >= 0


def without_min_constants(size: Size, names: Collection[str] | None = None) -> Size:
    """Return the size without the numbers that `Min` limits it to: `Min(512, seq)` becomes `seq`.

    With `names`, only the symbols with these names change.
    """
    if isinstance(size, int):
        return size
    if not any(isinstance(name, NonPolynomial) for monomial, _ in size.terms for name in monomial):
        return size
    return _with_symbols(size, lambda name: _symbol_without_min_constants(name, names))


def substituted(size: Size, values: Mapping[str, Size]) -> Size:
    """Return the size with symbols replaced: `values` maps a symbol's name to the size that replaces it."""
    if isinstance(size, int):
        return size
    return _with_symbols(size, lambda name: _substituted_symbol(name, values))


def _with_symbols(size: Dim, replacement: Callable[[str], Size]) -> Size:
    """Return the size with each symbol replaced by the size that `replacement` returns for its name."""
    total: Size = 0
    for monomial, coefficient in size.terms:
        total = total + product(map(replacement, monomial)) * coefficient
    return total


def _substituted_symbol(name: str, values: Mapping[str, Size]) -> Size:
    if name in values:
        return values[name]
    if not isinstance(name, NonPolynomial):
        return symbol(name)
    args = tuple(substituted(arg, values) for arg in name.args)
    if args == name.args or (name.op in ("//", "%") and args[1] == 0):
        return symbol(name)
    return _OPERATIONS[name.op](*args)


_OPERATIONS: Final[Mapping[str, Callable[..., Size]]] = {
    "//": floor_divide, "%": modulo, "Max": maximum, "Min": minimum,
}  # fmt: skip


def solved(size: Size, number: int) -> tuple[str, int] | None:
    """Solve `size == number` for a size that is linear in one symbol; return the symbol's name and its value.

    Return None for any other size, and where the value is not a positive integer.
    """
    if isinstance(size, int):
        return None
    (monomial, factor), *others = size.terms
    if len(monomial) != 1 or any(other for other, _ in others):
        return None
    value = divide(number - sum(constant for _, constant in others), factor)
    return (monomial[0], value) if isinstance(value, int) and value > 0 else None


def equated(size: Size, other: Size) -> tuple[str, Size] | None:
    """Return the symbol of `size` and the symbol of `other` to replace it with, given that both sizes are equal.

    Return None unless each size is the same number times one symbol, and the symbol of `other` has precedence: a name
    of the model replaces an unknown symbol, and an older unknown symbol replaces a newer one.  Of two names of the
    model (tf2onnx names the batch of each input), the alphabetically first one replaces the other.
    """
    match size, other:
        case Dim(terms=(((unknown,), factor),)), Dim(terms=(((known,), same),)) if factor == same and unknown != known:
            age, other_age = (int(n[1:]) if n.startswith(UNKNOWN) and n[1:].isdigit() else -1 for n in (unknown, known))
            are_names = all(type(name) is str and not name.startswith(UNKNOWN) for name in (unknown, known))
            is_first = age > other_age or (are_names and unknown > known)
            return (unknown, symbol(known)) if is_first else None
    return None


def limited_sizes(size: Size, least: int) -> Iterator[str]:
    """Yield the names of those `Min` symbols of a size, such as `Min(512, seq)`, whose numbers are all >= `least`."""
    for name in () if isinstance(size, int) else (name for monomial, _ in size.terms for name in monomial):
        numbers = name.args if isinstance(name, NonPolynomial) and name.op == "Min" else ()
        if numbers and all(arg >= least for arg in numbers if isinstance(arg, int)):
            yield name


def _is_at_most_zero(size: Size) -> bool:
    high = upper_bound(size)
    return high is not None and high <= 0


def _extreme(op: str, sizes: Iterable[Size], beats: Callable[[Size, Size], bool]) -> Size:
    """Return the `Max` or `Min` of sizes.

    `beats(a, b)` returns whether the result for `a` and `b` is always `a`, so that `b` can be dropped.
    """
    flat: list[Size] = []  # Max(a, Max(b, c)) is Max(a, b, c)
    for size in sizes:
        inner = size.terms[0][0][0] if isinstance(size, Dim) and size == symbol(size.terms[0][0][0]) else None
        flat.extend(inner.args if isinstance(inner, NonPolynomial) and inner.op == op else (size,))
    if len(flat) > MAX_OPERANDS:
        return non_polynomial(op, *sorted(flat, key=str))
    kept: list[Size] = []
    for size in flat:
        if not any(beats(other, size) for other in kept):
            kept = [*(other for other in kept if not beats(size, other)), size]
    return kept[0] if len(kept) == 1 else non_polynomial(op, *sorted(kept, key=str))


def _monomial_bounds(monomial: Monomial) -> SizeBounds:
    """Return the bounds of a product of symbols.

    If no symbol can be negative, the bounds are the products of the symbols' bounds; otherwise only the bounds of a
    single symbol are known.
    """
    low, high = 1, 1
    has_upper_bound = True
    for name in monomial:
        symbol_low, symbol_high = _symbol_bounds(name)
        if symbol_low is None or symbol_low < 0:
            return (symbol_low, symbol_high) if len(monomial) == 1 else (None, None)
        low *= symbol_low
        has_upper_bound = has_upper_bound and symbol_high is not None
        high *= symbol_high or 0
    return low, high if has_upper_bound else None


def _symbol_bounds(name: str) -> SizeBounds:
    if not isinstance(name, NonPolynomial):
        return None if name.startswith(TOO_LARGE) else 0, None  # a symbol for a too large expression can be negative
    lows, highs = [lower_bound(arg) for arg in name.args], [upper_bound(arg) for arg in name.args]
    known_lows, known_highs = [x for x in lows if x is not None], [x for x in highs if x is not None]
    if name.op == "Max":
        return max(known_lows, default=None), max(known_highs) if None not in highs else None
    if name.op == "Min":
        return min(known_lows) if None not in lows else None, min(known_highs, default=None)
    return _modulo_bounds(name.args[1]) if name.op == "%" else _quotient_bounds(lows[0], highs[0], name.args[1])


def _modulo_bounds(divisor: Size) -> SizeBounds:
    low, high = lower_bound(divisor), upper_bound(divisor)
    return (None, None) if low is None or low < 0 else (0, None if high is None else high - 1)


def _quotient_bounds(low: int | None, high: int | None, divisor: Size) -> SizeBounds:
    if isinstance(divisor, int):  # such a divisor is positive, because `floor_divide` normalizes signs
        return None if low is None else low // divisor, None if high is None else high // divisor
    divisor_low = lower_bound(divisor)
    if divisor_low is None or divisor_low < 0:
        return None, None
    return None if low is None else min(low, 0), None if high is None else max(high, 0)


def _symbol_without_min_constants(name: str, names: Collection[str] | None) -> Size:
    if not isinstance(name, NonPolynomial) or name.op not in ("Max", "Min"):
        return symbol(name)
    inner = [without_min_constants(arg, names) for arg in name.args]
    if name.op == "Max":
        return maximum(*inner)
    changes = names is None or name in names
    return minimum(*(arg for arg in inner if not (changes and isinstance(arg, int))))
