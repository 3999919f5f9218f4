"""Decides whether an epilogue program reads an operand as vectors, for W <= 8 adjacent columns of y.

The first of these columns is a multiple of W.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.indices import Atom, Index, function
from onnxfuse.algebra.sizes import Size, divide
from onnxfuse.kernels.region.sizes import Sizes

ROW, COLUMN = "row", "column"  # index variables: flat indices over the first axes of y, and over its last axes
WIDEST: Final = 8


def are_neighbours(index: Index) -> bool:
    """Return whether the elements of W columns, at addresses `index`, are contiguous in memory."""
    plain = _without_remainders(index)
    behind = (atom for atom, _ in plain.terms if atom.kind != "variable" and COLUMN in _of(atom).variables())
    return plain.factor(COLUMN) == 1 and all(_is_one_of_all(atom) for atom in behind)


def is_aligned(index: Index, columns: Size, sizes: Sizes) -> bool:
    """Return whether the address of the first of W columns is a multiple of W elements.

    W is the number of columns per access, and divides `columns`, the number of columns of y.
    """
    plain = _without_remainders(index)
    factors = (plain.constant, *(factor for atom, factor in plain.terms if atom.name != COLUMN))
    return all(sizes.divisor(each) % WIDEST == 0 or divide(each, columns) is not None for each in factors)


def _of(atom: Atom) -> Index:
    return atom.of or Index(0, ((atom, 1),))


def _without_remainders(index: Index) -> Index:
    """Return an index in which each remainder x % n is replaced by x - x / n * n."""
    found = Index(index.constant)
    for atom, factor in index.terms:
        one = Index(0, ((atom, 1),))
        if atom.kind == "mod" and atom.of and COLUMN in atom.of.variables():
            one = _without_remainders(atom.of) + function("div", atom.of, atom.by) * -atom.by
        found = found + one * factor
    return found


def _is_one_of_all(atom: Atom) -> bool:
    """Return whether an atom (a variable or function in an index) is a quotient with one value in all W columns."""
    if atom.kind != "div" or atom.of is None:
        return False
    inner = _without_remainders(atom.of)
    others = (inner.constant, atom.by, *(factor for each, factor in inner.terms if each.name != COLUMN))
    inside = (each for each, _ in inner.terms if each.kind != "variable" and COLUMN in _of(each).variables())
    is_multiple = all(isinstance(size, int) and size % WIDEST == 0 for size in others)
    return inner.factor(COLUMN) == 1 and is_multiple and all(map(_is_one_of_all, inside))
