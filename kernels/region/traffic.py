"""The bytes that a loop nest moves along each variable, to choose the variable along which neighbouring threads lie."""

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

DYNAMIC_DIM: Final = 64  # assumed size of a dynamic dim
PADDED: Final = ("reflect", "edge", "wrap")  # functions of an index that equal the index except in the padding
ACCUMULATOR_BYTES: Final = 8  # estimated bytes per stored accumulator


@dataclass(frozen=True)
class Access:
    """An address at which an operand is read, or at which the outputs are stored: then `operand` is ""."""

    operand: str
    address: Index
    item_bytes: int  # bytes of the widest element at this address
    moved: int  # bytes in total, if dynamic dims are DYNAMIC_DIM


def accesses(nest: Nest, program: Program) -> list[Access]:
    """Return the memory accesses of a loop nest without duplicates."""
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
    """Return the value of a size if each dynamic dim is DYNAMIC_DIM."""
    if isinstance(size, int):
        return size
    return sum(factor * DYNAMIC_DIM ** len(monomial) for monomial, factor in terms_of(size))


def moved_along(nest: Nest, variable: Variable, program: Program) -> int:
    """Return the bytes of the accesses that are contiguous along a variable, including stored reductions."""
    extents = _extents(nest)
    stored = [
        Access(str(key), at, ACCUMULATOR_BYTES, _moved(at, ACCUMULATOR_BYTES, extents)) for key, at in nest.stored_read
    ]
    found = [*accesses(nest, program), *stored]
    return sum(each.moved for each in found if is_side_by_side(each.address, variable))


def is_side_by_side(address: Index, variable: Variable) -> bool:
    """Return whether an address changes by 1 or -1 element when a variable increases by 1."""
    inner = (atom.of for atom, factor in address.terms if atom.kind in PADDED and factor == 1)
    is_one = address.factor(variable.name) in (1, -1)
    return is_one or any(is_side_by_side(index, variable) for index in inner if index)


def with_contiguous_last(nest: Nest, program: Program) -> Nest:
    """Move the variable with the most contiguous bytes to the end of each list, in a loop nest with reductions."""
    lists = {
        name: tuple(sorted(variables, key=lambda each: each == _most_contiguous(nest, variables, program)))
        for name, variables in nest.lists.items()
    }
    return replace(nest, lists=lists) if nest.levels else nest


def _most_contiguous(nest: Nest, variables: tuple[Variable, ...], program: Program) -> Variable:
    return max(reversed(variables), key=lambda each: moved_along(nest, each, program))
