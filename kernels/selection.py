"""Products whose fused operators end in an ArgMax or ArgMin of each row, which is then all that they store.

The product's kernel stores an accumulator for each part of a row (finish_rows.cuh), and select_index.cu merges those of
a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

from onnxfuse.algebra.operators import EXTREMES
from onnxfuse.kernels.epilogue_node import RESULT
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.shapes import Shapes, axis_of
from onnxfuse.kernels.tensors import int32
from onnxfuse.region_operators import PRODUCTS
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Pointer

ACCUMULATORS: Final = Pointer("scratch", 0)  # where the product's kernel stores them
ACCUMULATOR_BYTES: Final = 8  # of program::Selected: a float, and an int
WARP: Final = 32
THREADS: Final = 512  # BLOCK of select_index.cu


@dataclass(frozen=True)
class Selection:
    """An ArgMax or ArgMin of a program, over the last axis of its operand."""

    operation: Operation

    @property
    def value(self) -> str:
        """The value from whose rows elements are selected."""
        return self.operation.inputs[0]

    @property
    def accumulator(self) -> str:
        """The type of accumulators, of extreme.cuh."""
        flags = (self.operation.name == "ArgMax", bool(self.operation.attributes.get("select_last_index", 0)))
        return f"Extreme<float,{','.join(str(flag).lower() for flag in flags)}>"


class Ending(Protocol):
    """An EpilogueProgram."""

    @property
    def selection(self) -> Selection | None:
        """The ArgMax or ArgMin that ends the program."""


class Selecting(Protocol):
    """A product, and what its epilogue runs."""

    @property
    def rows(self) -> int:
        """The number of rows of y."""

    @property
    def program(self) -> Ending | None:
        """The operators fused after the product."""


def selection_of(program: Program, shapes: Shapes, outputs: tuple[str, ...]) -> Selection | None:
    """Return the ArgMax or ArgMin of each row that computes the only output of a program; None if none does.

    A row has the elements of the last axis of the product's result.
    """
    last = program.operations[-1] if program.operations else None
    if last is None or last.name not in EXTREMES or last.outputs != outputs:
        return None
    shape, whole = shapes.of[last.inputs[0]], shapes.of[RESULT]
    has_rows = axis_of(last) == len(shape) - 1 and whole and shapes.sizes.equal(shape[-1], whole[-1])
    return Selection(last) if has_rows and program.dtypes[last.inputs[0]] in PRODUCTS else None


def selects(problem: Selecting) -> bool:
    """Return whether a program ends in a selection, which only kernels that call finish_rows run."""
    return problem.program is not None and problem.program.selection is not None


def by_rows(name: str, launch: Launch, problem: Selecting, n: int, columns: int) -> Implementation:
    """Return the implementation of a launch whose kernel calls finish_rows, for y of n columns.

    The kernel's blocks have `columns` columns.  With a selection, a launch that merges accumulators follows.
    """
    selection = problem.program.selection if problem.program else None
    if selection is None:
        return Implementation(name, (launch,))
    each = min(columns, WARP * int(launch.kernel.defines["WIDTH"]))
    kernel = replace(launch.kernel, defines={**launch.kernel.defines, "SELECTED_COLUMNS": each})
    parts = -(-n // each)
    merge = Kernel("select_index", "select_index", {"SELECTED": selection.accumulator})
    arguments: tuple[Argument, ...] = (ACCUMULATORS, Pointer("output", 0), *int32(parts))
    merging = Launch(merge, (problem.rows, 1, 1), (THREADS, 1, 1), arguments, pdl=launch.pdl)
    return Implementation(name, (replace(launch, kernel=kernel), merging), (problem.rows * parts * ACCUMULATOR_BYTES,))
