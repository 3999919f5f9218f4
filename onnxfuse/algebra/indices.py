"""Index arithmetic: sums of variables with factors, where quotients and remainders appear only if they do not cancel.

An index is computed from the variables of a loop nest.  Quotient and remainder by a size cancel where they are combined
again (a Reshape splits an axis that another Reshape merges), or where the ranges of the variables determine both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.sizes import Size, divide


@dataclass(frozen=True)
class Atom:
    """A number from 0 to `extent` - 1: a variable, or a function of an index.

    `kind` is "variable", "value" (read from memory while the kernel runs), "div" or "mod" (quotient or remainder by the
    size `by`), or one of the padding modes "reflect", "edge" and "wrap" (the place, in a dim of size `by`, of the
    element that the padding repeats).
    """

    kind: str
    extent: Size
    name: str = ""  # the name of a variable or value
    of: Index | None = None
    by: Size = 1
    varies: tuple[str, ...] = ()  # names of the variables on which a value depends


@dataclass(frozen=True)
class Index:
    """A sum: a constant plus atoms with nonzero factors."""

    constant: Size
    terms: tuple[tuple[Atom, Size], ...] = ()

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return Index(self.constant + other, self.terms)
        return _merged(self.constant + other.constant, (*self.terms, *other.terms))

    def __mul__(self, factor: Size) -> Index:
        if factor == 0:
            return NOTHING
        return Index(self.constant * factor, tuple((atom, each * factor) for atom, each in self.terms))

    @property
    def range(self) -> tuple[Size, Size] | None:
        """The bounds of the index, from the ranges of its atoms; None if the sign of a factor is unknown."""
        low = high = self.constant
        for atom, factor in self.terms:
            if is_nonnegative(factor):
                high = high + factor * (atom.extent - 1)
            elif is_nonnegative(-factor):
                low = low + factor * (atom.extent - 1)
            else:
                return None
        return low, high

    def is_below(self, bound: Size) -> bool | None:
        """Return whether the index is always (True) or never (False) less than a bound; None if neither is proved."""
        limits = self.range
        if limits and is_nonnegative(bound - 1 - limits[1]):
            return True
        return False if limits and is_nonnegative(limits[0] - bound) else None

    def factor(self, name: str) -> Size:
        """Return the factor of a variable in this index; 0 if the index does not contain it."""
        return next((f for atom, f in self.terms if atom.kind == "variable" and atom.name == name), 0)

    def variables(self) -> set[str]:
        """Return the names of all variables on which the index depends."""
        found: set[str] = set()
        for atom, _ in self.terms:
            found |= {atom.name} if atom.kind == "variable" else set(atom.varies)
            found |= atom.of.variables() if atom.of else set()
        return found

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms of the index; after an atom that is a function of another index, yield that index's atoms."""
        for atom, _ in self.terms:
            yield atom
            if atom.of:
                yield from atom.of.atoms()


NOTHING = Index(0)
UNBOUNDED: Final = 2**62  # the extent of atoms without a known bound; no tensor has so many elements


def variable_index(name: str, extent: Size) -> Index:
    """Return the index that consists of one variable; the constant 0 if the variable can only be 0."""
    return NOTHING if extent == 1 else Index(0, ((Atom("variable", extent, name), 1),))


def flat(index: Iterable[Index], shape: Iterable[Size]) -> Index:
    """Return the offset of an element in a row-major tensor of this shape."""
    found = NOTHING
    for each, dim in zip(index, shape, strict=True):
        found = found * dim + each
    return found


def function(kind: str, of: Index, by: Size) -> Index:
    """Return an index with one term: the function `kind` ("div", "mod", "reflect" and so on) of another index."""
    return Index(0, ((Atom(kind, by, of=of, by=by), 1),))


def divided(index: Index, by: Size) -> tuple[Index, Index]:
    """Return quotient and remainder of a nonnegative index; the size `by` may be 0 only if no element is ever read."""
    if by in (1, 0):
        return index, NOTHING
    quotient, rest = NOTHING, NOTHING
    for atom, factor in index.terms:
        exact = divide(factor, by)
        if exact is not None:
            quotient = quotient + Index(0, ((atom, exact),))
        else:
            rest = rest + Index(0, ((atom, factor),))
    exact = divide(index.constant, by)
    if exact is not None:
        quotient = quotient + exact
    elif isinstance(index.constant, int) and isinstance(by, int):
        quotient, rest = quotient + index.constant // by, rest + index.constant % by
    else:
        rest = rest + index.constant
    bounds = rest.range
    if bounds and is_nonnegative(bounds[0]) and is_nonnegative(by - 1 - bounds[1]):
        return quotient, rest
    if not bounds or not is_nonnegative(bounds[0]):
        quotient, rest = NOTHING, index
    inner = _remainder_of_multiple(rest, by)
    if inner:
        above, rest = divided(inner[0], by)
        return quotient + divided(above, inner[1])[1], rest
    return quotient + _quotient(rest, by), function("mod", rest, by)


def _remainder_of_multiple(index: Index, by: Size) -> tuple[Index, Size] | None:
    """Return `(inner, multiple)` if the index is `inner mod (by * multiple)`; None otherwise."""
    if len(index.terms) != 1 or index.constant != 0 or index.terms[0][1] != 1:
        return None
    atom = index.terms[0][0]
    multiple = divide(atom.by, by) if atom.kind == "mod" and atom.of else None
    return (atom.of, multiple) if multiple and atom.of else None


def _quotient(index: Index, by: Size) -> Index:
    inner, divisor = index, by
    if len(index.terms) == 1 and index.constant == 0:
        atom, factor = index.terms[0]
        if atom.kind == "div" and atom.of and factor == 1:
            inner, divisor = atom.of, by * atom.by
    bounds = inner.range
    count = bounds[1] + 1 if bounds else UNBOUNDED
    extent = divide(count, divisor) or count
    if isinstance(count, int) and isinstance(divisor, int):
        extent = -(-count // divisor)
    return Index(0, ((Atom("div", extent, of=inner, by=divisor), 1),))


def _merged(constant: Size, terms: Iterable[tuple[Atom, Size]]) -> Index:
    sums: dict[Atom, Size] = {}
    for atom, factor in terms:
        sums[atom] = sums.get(atom, 0) + factor
    for atom, factor in list(sums.items()):
        found = _put_together(atom, factor, sums) if atom.kind == "mod" and factor != 0 else None
        if found:
            del sums[found[0]], sums[atom]
            return Index(constant, tuple((a, f) for a, f in sums.items() if f != 0)) + found[1] * factor
    return Index(constant, tuple(sorted(((a, f) for a, f in sums.items() if f != 0), key=repr)))


def _put_together(atom: Atom, factor: Size, sums: Mapping[Atom, Size]) -> tuple[Atom, Index] | None:
    """Return a term of `sums` that can be merged with the remainder `atom`, and the index that replaces both.

    `n * (x // n) + x % n` becomes x, and `n * ((x // n) % m) + x % n` becomes `x % (n * m)`, both times `factor`.
    """
    assert atom.of is not None
    above = _quotient(atom.of, atom.by).terms[0][0]
    if sums.get(above) == factor * atom.by:
        return above, atom.of
    for other, own in sums.items():
        if other.kind == "mod" and other.of == Index(0, ((above, 1),)) and own == factor * atom.by:
            return other, divided(atom.of, atom.by * other.by)[1]
    return None


def replaced(index: Index, by: Mapping[str, Index]) -> Index:
    """Return the simplified index in which each variable is replaced by the index that `by` maps its name to."""
    found = Index(index.constant)
    for atom, factor in index.terms:
        found = found + _replaced_atom(atom, by) * factor
    return found


def _replaced_atom(atom: Atom, by: Mapping[str, Index]) -> Index:
    if atom.of is None:
        return by.get(atom.name, Index(0, ((atom, 1),)))
    inner = replaced(atom.of, by)
    if atom.kind in ("div", "mod"):
        return divided(inner, atom.by)[atom.kind == "mod"]
    return function(atom.kind, inner, atom.by)


def text_of(index: Index, size: Callable[[Size], str], atom: Callable[[Atom], str]) -> str:
    """Return an index as a C++ expression."""
    parts = [("" if factor == 1 else f"{size(factor)} * ") + atom(each) for each, factor in index.terms]
    if index.constant != 0 or not parts:
        parts.append(size(index.constant))
    return " + ".join(parts).replace(" + -", " - ")
