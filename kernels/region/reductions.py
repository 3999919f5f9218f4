"""Reductions: the accumulator of each operator, its addends, and its result."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from onnxfuse.algebra.index_maps import Place
from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.operators import EXTREMES, SOFTMAXES
from onnxfuse.algebra.sizes import Size, product
from onnxfuse.kernels.region.operators import BYTES, NUMBER
from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.shapes import Shapes, reduced_axes

ACCUMULATORS: Final = {  # for each operator: the accumulator's type in region.cuh, and an element's addend
    "ReduceSum": ("Sum", "{}"), "ReduceMean": ("Sum", "{}"), "ReduceMax": ("Max", "{}"), "ReduceMin": ("Min", "{}"),
    "ReduceProd": ("Prod", "{}"), "ReduceSumSquare": ("Sum", "{0} * {0}"), "ReduceL2": ("Sum", "{0} * {0}"),
    "ReduceL1": ("Sum", "magnitude({})"), "ReduceLogSumExp": ("Online", "{}"), "Softmax": ("Online", "{}"),
    "LogSoftmax": ("Online", "{}"), "ArgMax": ("Extreme", "{}"), "ArgMin": ("Extreme", "{}"),
}  # fmt: skip
Key: TypeAlias = tuple[str, str, str, tuple[int, ...]]  # identifies a reduction; its results have the same key


@dataclass(frozen=True)
class Instance:
    """One result of a reduction: `kept` has its index along each kept axis, and None for each reduced axis."""

    kind: str
    terms: str
    value: str
    kept: tuple[Index | None, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The reduced axes."""
        return tuple(axis for axis, index in enumerate(self.kept) if index is None)

    @property
    def key(self) -> Key:
        """The kind, the addend, the reduced value and the axes; all results of a reduction have the same key."""
        return self.kind, self.terms, self.value, self.axes

    @property
    def is_extreme(self) -> bool:
        """Whether the result is the index of an element (ArgMax, ArgMin)."""
        return self.kind.startswith("Extreme")

    def extents(self, shapes: Shapes) -> tuple[Size, ...]:
        """Return the sizes of the reduced axes."""
        return tuple(shapes.of[self.value][axis] for axis in self.axes)

    def count(self, shapes: Shapes) -> Size:
        """Return the number of elements that are reduced to one result."""
        return product(self.extents(shapes))

    def accumulator(self, program: Program) -> str:
        """Return the type of the accumulator."""
        number = "long long" if self._is_wide(program) else NUMBER[program.dtypes[self.value]]
        name, _, arguments = self.kind.partition(" ")
        return f"{name}<{', '.join([number, *arguments.split()])}>"

    def accumulator_bytes(self, program: Program) -> int:
        """Return the size of the accumulator in bytes."""
        dtype = program.dtypes[self.value]
        number = 8 if self._is_wide(program) else 4 if NUMBER[dtype] == "float" else BYTES[dtype]
        if self.is_extreme:
            return 2 * max(number, 4)  # the number and an int index, aligned
        return 2 * number if self.kind == "Online" else number

    def _is_wide(self, program: Program) -> bool:
        """Return whether the reduction sums int32 in 64 bits, because a mean fits 32 bits even if the sum does not."""
        return self.kind == "Sum" and program.dtypes[self.value] == "int32"


def instance_of(operation: Operation, place: Place, program: Program, shapes: Shapes) -> Instance:
    """Return the reduction that the element at `place` of an operation's result needs."""
    value, axes = operation.inputs[0], reduced_axes(operation)
    rank = len(shapes.of[value])
    left = iter(place)
    has_all = operation.name in SOFTMAXES or bool(operation.attributes.get("keepdims", 1))
    kept: list[Index | None] = []
    for axis in range(rank):
        if axis in axes:
            kept.append(None)
            if has_all:
                next(left)
        else:
            kept.append(next(left))
    kind, terms = ACCUMULATORS[operation.name]
    if kind == "Sum" and program.dtypes[value] == "int32":
        terms = re.sub(r"\{0?\}", "(long long)({0})", terms)
    if operation.name in EXTREMES:
        last = bool(operation.attributes.get("select_last_index", 0))
        kind = f"{kind} {str(operation.name == 'ArgMax').lower()} {str(last).lower()}"
    return Instance(kind, terms, value, tuple(kept))


def term(instance: Instance, value: str) -> str:
    """Return the expression that an element adds to the accumulator."""
    return instance.terms.format(value)


def finished(operation: Operation, accumulator: str, own: str, count: str, number: str, nearest: bool) -> str:
    """Return an operator's result from an accumulator.

    For Softmax, `own` is the input's element at the result's place.  `nearest` is explained in operators.expression.
    """
    name, total = operation.name, f"{accumulator}.total"
    if name == "ReduceMean":
        is_float = number in ("float", "double")
        way = "nearest_quotient" if nearest else "quotient"
        by = count if count[0] in "123456789" else f"{count} > 0 ? {count} : 1"  # without elements, the mean is 0
        return f"{way}({total}, ({number})({by}))" if is_float else f"{total} / ({number})({by})"
    if number == "int" and ACCUMULATORS[name][0] == "Sum":
        return f"saturated({total})"
    if name == "ReduceL2":
        return f"{('sqrtf' if number == 'float' else 'sqrt') if nearest else 'root'}({total})"
    if name == "ReduceLogSumExp":
        return f"{accumulator}.top + logarithm({accumulator}.sum)"
    if name == "Softmax":
        power = f"exponential({own} - {accumulator}.top)"
        if number == "double":
            return f"quotient({power}, {accumulator}.sum)"
        return f"{power} * reciprocal({accumulator}.sum)"  # the sum is at least 1, so that this is accurate
    if name == "LogSoftmax":
        return f"{own} - {accumulator}.top - logarithm({accumulator}.sum)"
    return f"(long long)({accumulator}.at)" if name in EXTREMES else total
