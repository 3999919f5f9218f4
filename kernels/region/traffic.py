"""How many bytes a nest moves along each of its variables, by which neighbouring threads are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import Size, terms_of
from onnxfuse.kernels.region.nests import Nest, Variable
from onnxfuse.kernels.region.operators import BYTES
from onnxfuse.kernels.region.program import Program

DYNAMIC_DIM: Final = 64  # elements that a dynamic dim is taken to have
PADDED: Final = ("reflect", "edge", "wrap")  # kinds of atoms that go along with an index but for its ends
ACCUMULATOR_BYTES: Final = 8  # per stored reduction, about


@dataclass(frozen=True)
class Access:
    """An operand that is read at an address, or the outputs, whose name is ""."""

    operand: str
    address: Index
    item_bytes: int  # bytes of the widest element there
    moved: int  # bytes, for sizes that dynamic dims usually have


def accesses(nest: Nest, program: Program) -> list[Access]:
    """Return all different accesses of a nest."""
    extents, found = _extents(nest), []
    for operand, address in dict.fromkeys(nest.accesses):
        items = [BYTES[program.dtypes[name]] for name in ([operand] if operand else nest.outputs)]
        if items:
            found.append(Access(operand, address, max(items), _moved(address, sum(items), extents)))
    return found


def _extents(nest: Nest) -> dict[str, int]:
    return {each.name: typical(each.extent) for variables in nest.lists.values() for each in variables}


def _moved(address: Index, item_bytes: int, extents: Mapping[str, int]) -> int:
    return item_bytes * math.prod(extents.get(name, 1) for name in address.variables())


def typical(size: Size) -> int:
    """Return a size for dynamic dims as they usually are."""
    return sum(factor * DYNAMIC_DIM ** len(monomial) for monomial, factor in terms_of(size))


def moved_along(nest: Nest, variable: Variable, program: Program) -> int:
    """Return the bytes of accesses that are contiguous along a variable, of stored reductions as well."""
    extents = _extents(nest)
    stored = [
        Access(str(key), at, ACCUMULATOR_BYTES, _moved(at, ACCUMULATOR_BYTES, extents)) for key, at in nest.stored_read
    ]
    found = [*accesses(nest, program), *stored]
    return sum(each.moved for each in found if is_side_by_side(each.address, variable))


def is_side_by_side(address: Index, variable: Variable) -> bool:
    """Return whether neighbouring values of a variable are neighbours in memory, forwards or backwards."""
    inner = (atom.of for atom, factor in address.terms if atom.kind in PADDED and factor == 1)
    is_one = address.factor(variable.name) in (1, -1)
    return is_one or any(is_side_by_side(index, variable) for index in inner if index)


def with_contiguous_last(nest: Nest, program: Program) -> Nest:
    """Return a nest with reductions in whose lists that variable is the innermost along which most bytes lie."""
    lists = {
        name: tuple(sorted(variables, key=lambda each: each == _most_contiguous(nest, variables, program)))
        for name, variables in nest.lists.items()
    }
    return replace(nest, lists=lists) if nest.levels else nest


def _most_contiguous(nest: Nest, variables: tuple[Variable, ...], program: Program) -> Variable:
    return max(reversed(variables), key=lambda each: moved_along(nest, each, program))
