"""What can be said of a symbolic size that is not known: bounds, the larger of two, the size without a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from onnxfuse.shapes.dims import Dim, Monomial, Opaque, Size, product, symbol

Bounds: TypeAlias = tuple[int | None, int | None]


def maximum(*sizes: Size) -> Size:
    """The largest size."""
    return _extreme("Max", sizes, lambda a, b: _is_negative_or_zero(b - a))


def minimum(*sizes: Size) -> Size:
    """The smallest size."""
    return _extreme("Min", sizes, lambda a, b: _is_negative_or_zero(a - b))


def lower_bound(size: Size) -> int | None:
    """A number that the size never falls below; None where none is known."""
    if isinstance(size, int):
        return size
    total: int | None = 0
    for monomial, factor in size.terms:
        low = _monomial_bounds(monomial)[0 if factor > 0 else 1]
        total = None if low is None or total is None else total + factor * low
    for op, worse in (("Min", -1), ("Max", 1)):
        for monomial, factor in size.terms:
            if factor * worse > 0 and len(monomial) == 1 and isinstance(monomial[0], Opaque) and monomial[0].op == op:
                atom = symbol(monomial[0])
                bounds = [total, *(lower_bound(size + (arg - atom) * factor) for arg in monomial[0].args)]
                return max((bound for bound in bounds if bound is not None), default=None)
    return total


def upper_bound(size: Size) -> int | None:
    """A number that the size never exceeds; None where none is known."""
    low = lower_bound(size * -1)
    return None if low is None else -low


def unclamped(size: Size) -> Size:
    """The size without the numbers that `Min` limits it to: `Min(512, seq)` becomes `seq`."""
    if isinstance(size, int) or not any(isinstance(atom, Opaque) for monomial, _ in size.terms for atom in monomial):
        return size
    return sum((product(map(_unclamped_atom, monomial)) * factor for monomial, factor in size.terms), start=0)


def _is_negative_or_zero(size: Size) -> bool:
    high = upper_bound(size)
    return high is not None and high <= 0


def _extreme(op: str, sizes: Iterable[Size], beats: Callable[[Size, Size], bool]) -> Size:
    flat: list[Size] = []
    for size in sizes:
        only = size.terms[0][0][0] if isinstance(size, Dim) and size == symbol(size.terms[0][0][0]) else None
        flat.extend(only.args if isinstance(only, Opaque) and only.op == op else (size,))
    kept: list[Size] = []
    for size in flat:
        if not any(beats(other, size) for other in kept):
            kept = [*(other for other in kept if not beats(size, other)), size]
    return kept[0] if len(kept) == 1 else symbol(Opaque(op, tuple(sorted(kept, key=str))))


def _monomial_bounds(monomial: Monomial) -> Bounds:
    low, high = 1, 1
    known = True
    for atom in monomial:
        least, most = _atom_bounds(atom)
        if least is None or least < 0:
            return (least, most) if len(monomial) == 1 else (None, None)
        low *= least
        known = known and most is not None
        high *= most or 0
    return low, high if known else None


def _atom_bounds(atom: str) -> Bounds:
    if not isinstance(atom, Opaque):
        return 0, None
    lows, highs = [lower_bound(arg) for arg in atom.args], [upper_bound(arg) for arg in atom.args]
    known_lows, known_highs = [x for x in lows if x is not None], [x for x in highs if x is not None]
    if atom.op == "Max":
        return max(known_lows, default=None), max(known_highs) if None not in highs else None
    if atom.op == "Min":
        return min(known_lows) if None not in lows else None, min(known_highs, default=None)
    return _modulo_bounds(atom.args[1]) if atom.op == "%" else _quotient_bounds(lows[0], highs[0], atom.args[1])


def _modulo_bounds(divisor: Size) -> Bounds:
    low, high = lower_bound(divisor), upper_bound(divisor)
    return (None, None) if low is None or low < 0 else (0, None if high is None else high - 1)


def _quotient_bounds(low: int | None, high: int | None, divisor: Size) -> Bounds:
    if isinstance(divisor, int):  # which `floor_divide` has made positive
        return None if low is None else low // divisor, None if high is None else high // divisor
    least = lower_bound(divisor)
    if least is None or least < 0:
        return None, None
    return None if low is None else min(low, 0), None if high is None else max(high, 0)


def _unclamped_atom(atom: str) -> Size:
    if not isinstance(atom, Opaque) or atom.op not in ("Max", "Min"):
        return symbol(atom)
    if atom.op == "Max":
        return maximum(*map(unclamped, atom.args))
    free = [arg for arg in atom.args if not isinstance(arg, int)]
    return minimum(*map(unclamped, free))
