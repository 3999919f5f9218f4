"""Loop nests over the elements of a region's outputs, with the variables that are later divided among threads.

A nest computes outputs of one shape.  Its variables are at first the axes of these outputs.  If all elements along some
axes read the same results of reductions, these elements form a row.  The variables of such axes count the elements of a
row, and the nest's other variables count the rows.  Variables are then split and merged until, where possible, the
addresses that are read are sums of multiples of variables.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.index_maps import Place, reshaped
from onnxfuse.algebra.indices import NOTHING, Index, divided, flat, replaced, variable_index
from onnxfuse.algebra.sizes import Shape, Size, divide, product
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.operators import MERGE_INSTRUCTIONS
from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.reductions import Instance, Key
from onnxfuse.kernels.region.scratch_reductions import Stored, StoredByKey
from onnxfuse.kernels.region.shapes import Shapes

MAX_REFINEMENTS: Final = 24
ROWS: Final = "row"
ELEMENTS: Final = "element"


@dataclass(frozen=True)
class Variable:
    """A variable of a loop nest, with values from 0 to `extent` - 1."""

    name: str
    extent: Size


@dataclass(frozen=True)
class Nest:
    """A loop nest over outputs of one shape, or over the accumulators of a reduction, and its variables.

    `lists` holds several lists of variables, each with the innermost variable last: the variables of rows, those of a
    row's elements, and those of other elements that are reduced.
    `places` expresses the axes of outputs and of reductions in these variables.
    """

    outputs: tuple[str, ...]
    shape: Shape
    lists: Mapping[str, tuple[Variable, ...]]
    places: Mapping[str, Index]
    levels: tuple[tuple[Instance, ...], ...] = ()  # reductions with one result per row; each can read earlier levels
    accesses: tuple[tuple[str, Index], ...] = ()  # operands that are read, with their addresses; "" means the outputs
    bounds: tuple[tuple[Index, Size], ...] = ()  # indices, each with a size that it is compared with
    row_outputs: Mapping[str, Shape] = field(default_factory=dict)  # outputs with one element per row
    stores: tuple[Instance, ...] = ()  # results of reductions whose accumulators the nest stores
    inner: tuple[Instance, ...] = ()  # other reductions, each computed by the single thread that needs it
    stored_read: tuple[tuple[Key, Index], ...] = ()  # reductions of earlier launches that are read, with indices
    instructions: int = 0  # estimated instructions per element

    @property
    def place(self) -> Place:
        """The computed element's index along each axis, as expressions in the loop nest's variables."""
        return self._place_in(self.shape)

    def place_of(self, name: str, shapes: Shapes) -> Place:
        """Return the index of the computed element along each axis of the output `name`."""
        own, shape = self.row_outputs.get(name, self.shape), shapes.of[name]
        return self._place_in(own) if own == shape else reshaped(self._place_in(own), own, shape)

    def _place_in(self, shape: Shape) -> Place:
        """Return the computed element's indices in a tensor whose axes have the nest's sizes, or size 1."""
        return tuple(NOTHING if dim == 1 else self.places.get(f"o{axis}", NOTHING) for axis, dim in enumerate(shape))

    @property
    def reads(self) -> set[Key]:
        """The reductions of earlier launches that the loop nest reads."""
        return {key for key, _ in self.stored_read}

    def count(self, name: str) -> Size:
        """Return the number of elements of a list: the product of its variables' extents."""
        return product(each.extent for each in self.lists[name])

    def elements_of(self, instance: Instance, shapes: Shapes) -> tuple[str, tuple[Index, ...]]:
        """Return the key, in `lists`, of the variables over a reduction's elements, and an index per reduced axis."""
        extents = instance.extents(shapes)
        name = self.list_of(extents)
        if name != ELEMENTS:
            return name, tuple(self.places.get(f"{name}_{i}", NOTHING) for i in range(len(extents)))
        own = iter(axis for axis in self.element_axes() if self.shape[axis] != 1)
        return name, tuple(NOTHING if dim == 1 else self.places[f"o{next(own)}"] for dim in extents)

    def list_of(self, extents: Sequence[Size]) -> str:
        """Return the key, in `lists`, of the variables that loop over reduced axes with these extents.

        The key is ELEMENTS if the outputs' axes within a row (see `element_axes`) have the same extents, apart from
        axes of size 1.
        """
        dims = [dim for dim in extents if dim != 1]
        if dims and dims == [self.shape[axis] for axis in self.element_axes() if self.shape[axis] != 1]:
            return ELEMENTS
        return "reduced " + " ".join(f"[{dim}]" for dim in extents)

    def element_axes(self) -> list[int]:
        """Return the axes of the outputs along which a row's elements lie; the other axes count rows."""
        rows = {name for level in self.levels for each in level for name in _variables(each)}
        return [axis for axis in range(len(self.shape)) if f"o{axis}" not in rows]


def _variables(instance: Instance) -> set[str]:
    return {name for index in instance.kept if index for name in index.variables()}


def _is_of(instance: Instance, variables: set[str]) -> bool:
    """Return whether the indices of a reduction's result depend on these variables alone, and on no loaded value."""
    atoms = (atom for index in instance.kept if index for atom in index.atoms())
    return _variables(instance) <= variables and not any(atom.kind == "value" for atom in atoms)


def draft(program: Program, shapes: Shapes, stored: StoredByKey) -> Writer:
    """Return a writer whose code is discarded; it records the operands that are read, and their addresses."""
    return Writer(program, shapes, Arguments(shapes.sizes, False), False, stored)


def make_nest(
    program: Program,
    shapes: Shapes,
    outputs: Sequence[str],
    stored: StoredByKey,
    row_outputs: Mapping[str, Shape] | None = None,
) -> Nest:
    """Return the loop nest of outputs with equally many elements; other launches compute the `stored` reductions."""
    nest = Nest(tuple(outputs), shapes.of[outputs[0]], {}, {}, row_outputs=row_outputs or {})
    return _made(nest, program, shapes, stored)


def make_stored_nest(program: Program, shapes: Shapes, group: Sequence[Stored], stored: StoredByKey) -> Nest:
    """Return the loop nest that computes stored reductions whose results have the same indices."""
    instances = tuple(each.instance for each in group)
    return _made(Nest((), group[0].shape, {}, {}, stores=instances), program, shapes, stored)


def _made(nest: Nest, program: Program, shapes: Shapes, stored: StoredByKey) -> Nest:
    """Complete a loop nest that has only its outputs and its shape."""
    axes = [Variable(f"o{axis}", dim) for axis, dim in enumerate(nest.shape) if dim != 1]
    places = {each.name: variable_index(each.name, each.extent) for each in axes}
    nest = _with_levels(replace(nest, lists={ROWS: (), ELEMENTS: tuple(axes)}, places=places), program, shapes, stored)
    elements = {f"o{axis}" for axis in nest.element_axes()}
    lists: dict[str, tuple[Variable, ...]] = {
        ROWS: tuple(each for each in axes if each.name not in elements),
        ELEMENTS: tuple(each for each in axes if each.name in elements),
    }
    for instance in (each for level in nest.levels for each in level):
        extents = instance.extents(shapes)
        name = nest.list_of(extents)
        if name not in lists:
            letter = f"r{len(lists)}"
            variables = [Variable(f"{letter}_{i}", dim) for i, dim in enumerate(extents)]
            lists[name] = tuple(each for each in variables if each.extent != 1)
            places |= {f"{name}_{i}": variable_index(each.name, each.extent) for i, each in enumerate(variables)}
    return _refined(replace(nest, lists=lists, places=places), program, shapes, stored)


def _with_levels(nest: Nest, program: Program, shapes: Shapes, stored: StoredByKey) -> Nest:
    """Add `levels`, the reductions with one result per row, and `inner`, all other reductions.

    A reduction has one result per row if it is computed outside of branches, and the indices of its result depend only
    on the indices along the axes of the outputs.
    """
    writer = draft(program, shapes, stored)
    for name in (*nest.outputs, *nest.row_outputs):
        writer.value(name, nest.place_of(name, shapes))
    for each in nest.stores:
        writer.in_place(each)
    own = {f"o{axis}" for axis in range(len(nest.shape))}
    found = dict.fromkeys(each for each, _ in writer.found)
    left = list(
        dict.fromkeys(each for each, is_conditional in writer.found if not is_conditional and _is_of(each, own))
    )
    inner = tuple(each for each in found if each not in left)
    levels: list[tuple[Instance, ...]] = []
    reads = {each: _reads(each, program, shapes, stored) for each in left}
    while left:
        ready = tuple(each for each in left if reads[each] & set(left) <= {each}) or (left[0],)
        levels.append(ready)
        left = [each for each in left if each not in ready]
    return replace(nest, levels=tuple(levels), inner=inner)


def _reads(instance: Instance, program: Program, shapes: Shapes, stored: StoredByKey) -> set[Instance]:
    """Return the reductions whose results the computation of `instance` needs."""
    writer = draft(program, shapes, stored)
    writer.in_place(instance)
    return {each for each, _ in writer.found}


def flattened(nest: Nest, program: Program, shapes: Shapes, stored: StoredByKey, kept: int = 0) -> Nest:
    """Merge the variables of a loop nest without reductions into one, except the first `kept` variables."""
    variables, by = nest.lists[ELEMENTS][kept:], dict[str, Index]()
    one = Variable("e", product(each.extent for each in variables))
    left = variable_index(one.name, one.extent)
    for each in reversed(variables):
        left, by[each.name] = divided(left, each.extent)
    return traced(_with_variables(nest, variables, (one,), by), program, shapes, stored)


def with_row_outputs(nests: Sequence[Nest], program: Program, shapes: Shapes, stored: StoredByKey) -> list[Nest]:
    """Merge loop nests that compute one element per row into other nests with the same rows."""
    found = list(nests)
    for nest in nests:
        if nest.levels and not nest.inner and not nest.lists[ELEMENTS]:
            for i, other in enumerate(found):
                if other.lists[ELEMENTS] and _reductions(nest) <= _reductions(other):
                    rows = dict.fromkeys(nest.outputs, nest.shape)
                    found[i] = replace(other, row_outputs={**other.row_outputs, **rows})
                    found[i] = traced(found[i], program, shapes, stored)
                    found.remove(nest)
                    break
    return found


def _reductions(nest: Nest) -> set[Instance]:
    return {each for level in nest.levels for each in level}


def in_variables(instance: Instance, nest: Nest) -> Instance:
    """Return a reduction with the indices of its result expressed in the loop nest's variables."""
    kept = tuple(None if index is None else replaced(index, nest.places) for index in instance.kept)
    return replace(instance, kept=kept)


# --- split and merge variables, so that addresses become sums --------------------------------------------------------


def _refined(nest: Nest, program: Program, shapes: Shapes, stored: StoredByKey) -> Nest:
    """Split variables where the program splits dims, and merge variables where it merges dims."""
    nest = traced(nest, program, shapes, stored)
    for _ in range(MAX_REFINEMENTS):
        found = next(_splits(nest), None)
        if found is None:
            break
        nest = traced(split(nest, *found), program, shapes, stored)
    for _ in range(MAX_REFINEMENTS):
        pair = next(_mergeable(nest), None)
        if pair is None:
            break
        nest = traced(_with_merged(nest, *pair), program, shapes, stored)
    return nest


def traced(nest: Nest, program: Program, shapes: Shapes, stored: StoredByKey) -> Nest:
    """Return a loop nest with the accesses, bounds and instructions of its code, which is written and discarded."""
    writer = draft(program, shapes, stored)
    for level in nest.levels:
        for instance in level:
            here = in_variables(instance, nest)
            accumulator = writer.accumulator(here)
            with writer.block(""):
                writer.add(here, accumulator, nest.elements_of(instance, shapes)[1])
            writer.keep(here, accumulator)
    for name in nest.row_outputs:
        writer.value(name, nest.place_of(name, shapes))
    with writer.block(""):
        for name in nest.outputs:
            writer.value(name, nest.place_of(name, shapes))
    stores = [("", flat(nest.place, nest.shape))]
    accesses, bounds, read = (*writer.accesses, *stores), tuple(writer.bounds), tuple(writer.stored_read)
    found = replace(nest, accesses=accesses, bounds=bounds, stored_read=read)
    return replace(found, instructions=writer.instructions + MERGE_INSTRUCTIONS * sum(map(len, nest.levels)))


def _indices(nest: Nest) -> Iterator[Index]:
    yield from (index for _, index in nest.accesses)
    yield from (index for index, _ in nest.bounds)
    yield from (index for _, index in nest.stored_read)


def _splits(nest: Nest) -> Iterator[tuple[Variable, Size]]:
    """Yield variables that occur in quotients or remainders, each with the argument `part` with which to `split` it."""
    variables = {each.name: each for of in nest.lists.values() for each in of}
    for atom in dict.fromkeys(atom for index in _indices(nest) for atom in index.atoms()):
        if atom.kind not in ("div", "mod") or atom.of is None:
            continue
        for term, factor in atom.of.terms:
            part = divide(atom.by, factor if is_nonnegative(factor) else -factor)
            found = variables.get(term.name) if term.kind == "variable" else None
            if found and part and part != 1 and part != found.extent and divide(found.extent, part):
                yield found, part


def split(nest: Nest, variable: Variable, part: Size) -> Nest:
    """Split one variable of a loop nest into two; the second one has the extent `part`."""
    whole = divide(variable.extent, part)
    assert whole is not None
    high = Variable(f"{variable.name}h", whole)
    low = Variable(f"{variable.name}l", part)
    index = variable_index(high.name, whole) * part + variable_index(low.name, part)
    return _with_variables(nest, (variable,), (high, low), {variable.name: index})


def _mergeable(nest: Nest) -> Iterator[tuple[Variable, Variable]]:
    for variables in nest.lists.values():
        for high, low in itertools.pairwise(variables):
            if all(_merges(index, high, low) for index in _indices(nest)):
                yield high, low


def _merges(index: Index, high: Variable, low: Variable) -> bool:
    """Return whether an index contains two variables only as high * (extent of low) + low, so they can be merged."""
    if index.factor(high.name) != index.factor(low.name) * low.extent:
        return False
    inner = [atom for atom, _ in index.terms if atom.kind != "variable"]
    return all(atom.of is None or _merges(atom.of, high, low) for atom in inner)


def _with_merged(nest: Nest, high: Variable, low: Variable) -> Nest:
    one = Variable(f"{high.name}{low.name}", high.extent * low.extent)
    quotient, rest = divided(variable_index(one.name, one.extent), low.extent)
    return _with_variables(nest, (high, low), (one,), {high.name: quotient, low.name: rest})


def _with_variables(nest: Nest, old: tuple[Variable, ...], new: tuple[Variable, ...], by: Mapping[str, Index]) -> Nest:
    """Replace adjacent variables `old` of a list by `new`; `by` expresses each old variable in the new ones."""
    lists = {}
    for name, variables in nest.lists.items():
        found: list[Variable] = []
        for each in variables:
            if each == old[0]:
                found += [variable for variable in new if variable.extent != 1]
            elif each not in old:
                found.append(each)
        lists[name] = tuple(found)
    places = {name: replaced(index, by) for name, index in nest.places.items()}
    return replace(nest, lists=lists, places=places)
