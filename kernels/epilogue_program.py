"""Generates C++ for the elementwise operators after a fused node: the `Program` of program.cuh, which its kernel calls.

Operands of the program are broadcast to the shape of y, or read through views such as Transpose and Slice.  After a
product, the program may end in an ArgMax or ArgMin of each row: see finish_rows.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from onnxfuse.algebra.index_maps import Place, reshaped
from onnxfuse.algebra.indices import flat, variable_index
from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.kernels.epilogue_node import MAX_TWO_STEPS, RESULT, Joined, Planner, in_two_steps, joined
from onnxfuse.kernels.epilogue_reads import COLUMN, ROW, are_neighbours, is_aligned
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.operators import NUMBER, STORED
from onnxfuse.kernels.region.program import Program, parse
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.round_trips import without_round_trips
from onnxfuse.kernels.region.shapes import Shapes, infer
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.selection import ACCUMULATORS, Selection, selection_of
from onnxfuse.kernels.tensors import element_count
from onnxfuse.region_operators import ELEMENTWISE, VIEWS
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import first_plan_suffices, for_later_plans

OPERANDS: Final = ("of_row", "of_columns", "of_elements")  # operands with one value per row, column, or element
WORDS: Final = {"float16": 1, "bfloat16": 1, "float64": 4, "int64": 4}  # 32-bit words per 2 elements; else 2
MAX_EPILOGUES: Final = 8 - MAX_TWO_STEPS  # maximum number of plans whose epilogue runs the program


class Product(Protocol):
    """A Gemm or a Conv."""

    @property
    def residual(self) -> Pointer | None:
        """The address of a tensor of y's shape that is added to the product."""

    @property
    def rows(self) -> int:
        """The number of rows of y; the columns are y's last axis."""


Problem = TypeVar("Problem", bound=Product)
WORD: Final = 2**31  # number of elements from which indices have 64 bits
OUTPUT_REGISTERS: Final = 8  # per thread, for the values and addresses of each output that the program stores
PRECISE_REGISTERS: Final = 40  # further registers per thread, for an exact Tanh in float32
# The kinds of generated lines. The lines of a kind fill the field of TEXT that has the kind's name; only those of
# "computing" fill the field "lines".
KINDS: Final = (*OPERANDS, *(f"load_{each}" for each in OPERANDS), "reading", "computing", "storing")
TEXT: Final = """\
// {operators}
#define HAS_PROGRAM 1
#define STORES_Y {stores_y}
#define PROGRAM_RESIDUAL {residual}
#define PROGRAM_PARAMETERS {parameters}
#define PROGRAM_ARGUMENTS {arguments}
#include "epilogue_program.cuh"

#pragma nv_diag_suppress 177  // not every variable is read

namespace program {{
{selected}
struct Program {{
{members}
    struct OfRow {{
{of_row}
    }};
    template <int W>
    struct OfColumns {{
{of_columns}
    }};
    template <int W>
    struct OfElements {{
{of_elements}
    }};

    __device__ __forceinline__ void load(OfRow& to, int row, bool inside) const {{
{load_of_row}
    }}
    template <bool ALIGNED, int W>
    __device__ __forceinline__ void load(OfColumns<W>& to, int column, int left) const {{
{load_of_columns}
    }}
    template <bool ALIGNED, int W>
    __device__ __forceinline__ void load(OfElements<W>& to, int row, int column, long long at, int left) const {{
{load_of_elements}
    }}

{located}    template <bool ALIGNED, int W>
    __device__ __forceinline__ void apply(float (&x0)[W], const float (&residual)[W], const OfRow& of_row,
                                          const OfColumns<W>& of_columns, const OfElements<W>& of_elements,
                                          long long at, int left) const {{
{reading}
#pragma unroll
        for (int j = 0; j < W; ++j) {{
{lines}
        }}
{storing}
    }}
}};

}}  // namespace program

#include "{source}.cu"
"""
LOCATED: Final = """\
    __device__ __forceinline__ Located locate(int batch, int head, int query) const {{
        const int at = {at}, row = {row};
        return {{row, at - row * {columns}, at}};
    }}
"""


@dataclass(frozen=True)
class EpilogueProgram:
    """The generated code of a program (operators fused into an epilogue), and the properties that planning needs."""

    text: str
    arguments: tuple[Argument, ...]  # arguments of the launch after the kernel's own
    y: Pointer  # the output that the kernel stores, or any output if the program stores all
    residual: Pointer | None  # the operand that the kernel loads as its residual
    # Registers per thread: for stores of outputs, for an exact Tanh, and for the program's operands at 2 rows x 16
    # columns of y, which are a thread's share of 64 x 64 elements under wgmma.
    registers: int
    dtype: str  # dtype of y
    is_precise: bool  # whether some output is float32
    element_bytes: int  # sum of the bytes per value of operands that have one value per element or per column
    selection: Selection | None = None  # the ArgMax or ArgMin of each row that ends the program; `y` is ACCUMULATORS

    def kernel(self, kernel: Kernel) -> Kernel:
        """Return a kernel with the program in its epilogue."""
        defines = {**kernel.defines, "PRECISE": 1} if self.is_precise else kernel.defines
        return Kernel(kernel.source, kernel.entry, defines, kernel.arch_specific,
                      self.text.replace("{source}", kernel.source))  # fmt: skip

    def launch(self, launch: Launch) -> Launch:
        """Return the launch of a norm or an attention, extended by the program.

        If y is float32, the kernel's functions, such as exp, are the precise ones.
        """
        defines = {"PRECISE": int(self.dtype == "float32"), **launch.kernel.defines}
        kernel, arguments = with_program(replace(launch.kernel, defines=defines), launch.arguments, self)
        return replace(launch, kernel=kernel, arguments=arguments)


def with_program(
    kernel: Kernel, arguments: tuple[Argument, ...], program: EpilogueProgram | None
) -> tuple[Kernel, tuple[Argument, ...]]:
    """Return a kernel and its arguments, extended by the program if there is one."""
    return (program.kernel(kernel), (*arguments, *program.arguments)) if program else (kernel, arguments)


def in_epilogue(problem: Problem, program: EpilogueProgram) -> Problem:
    """Return a product whose epilogue runs a program; the kernel loads the program's residual, if it has one."""
    given = {"residual": program.residual, "residual_first": False} if program.residual else {}
    return replace(problem, y=program.y, program=program, **given)  # type: ignore[type-var]


def epilogue_program(
    both: Joined,
    y: TensorSpec,
    inputs: Sequence[TensorSpec],
    takes_residual: bool,
    stored: Sequence[str] = (),
    axes: int = 1,
    strides: tuple[int, int, int] | None = None,
    selects: bool = False,
) -> tuple[EpilogueProgram, tuple[TensorSpec, ...]] | None:
    """Return (program after a fused node with result `y`, specs of all outputs), or None if no epilogue can run it.

    `takes_residual` says that the kernel can load an operand of the program as residual, because the node itself has
    none.  `stored` are the dtypes other than y's that the kernel can store.  If `stored` is empty and no output has y's
    dtype, the program stores all outputs; the kernel must support that.  `axes`: how many of the last axes of y are its
    columns.  `strides`: for attention, the strides of y's batch, heads and queries in elements, by which its kernel
    locates results.  `selects`: the kernel calls finish_rows, so that the program may end in an ArgMax or ArgMin of
    each row.  Raises ValueError if shapes do not fit.
    """
    program, sizes = without_round_trips(parse(both.behind)), Sizes()
    specs = both.region_inputs(y, inputs)
    operands = {name: sizes.read(spec.shape) for name, spec in zip(both.behind.operands, specs, strict=True)}
    shapes = infer(program, operands, sizes)
    results, selection = both.outputs, selection_of(program, shapes, both.outputs) if selects else None
    if selection:
        both = replace(both, outputs=(selection.value,))
    places = _places(both, shapes, axes)
    dtypes = [program.dtypes[name] for name in both.outputs]
    kept = next((dtypes.index(dtype) for dtype in (y.dtype, *stored) if dtype in dtypes), 0 if selection else None)
    own = program.operations[: -1 if selection else None]
    is_known = all(each.name in (*ELEMENTWISE, *VIEWS, "Constant") for each in own)
    if places is None or not is_known or (kept is None and stored) or (strides and element_count(y) >= WORD):
        return None
    text = _Text(both, program, shapes, places, kept, axes, strides)
    others = [(name, spec) for name, spec in zip(operands, specs, strict=True) if name != RESULT]
    is_moved = any(name == RESULT for name, _ in text.reads)
    if is_moved or any(element_count(spec) >= WORD and not text.is_whole(name) for name, spec in others):
        return None
    return text.made(takes_residual, selection), tuple(
        TensorSpec(tuple(map(sizes.value, shapes.of[name])), program.dtypes[name], y.aligned) for name in results
    )


def joined_plans(
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    device: Device,
    problem_of: Callable[[FusedNode, Sequence[TensorSpec], Device], tuple[Problem, TensorSpec]],
    of_programs: Callable[[Problem, Device], Sequence[Implementation]],
    candidates: Planner,
    selects: bool = False,
    others: Sequence[TensorSpec] = (),
) -> list[Plan]:
    """Return the plans of a product with fused operators: in the product's epilogue first, then in a second launch.

    `of_programs` returns implementations of a product with a program, and `candidates` plans of a product without one.
    `selects`: `of_programs` takes programs that end in an ArgMax or ArgMin of each row.  `others` are the outputs after
    those of the program.  Raises ValueError if shapes do not fit.
    """
    both = joined(node)
    aligned = all(each.aligned for each in inputs)  # vectors of all operands are as wide as those of y
    own = [replace(each, aligned=aligned) for each in inputs[: both.own]]
    problem, y = problem_of(both.product, own, device)
    made, found = epilogue_program(both, y, inputs, problem.residual is None, selects=selects), list[Plan]()
    if made is not None and element_count(y):
        program, outputs = made
        ways = of_programs(in_epilogue(problem, program), device)[:MAX_EPILOGUES]
        found = [Plan((*outputs, *others), each.steps, each.scratch) for each in ways]
    if found and first_plan_suffices():
        return found
    with for_later_plans(problem.rows if found else 0):
        return [*found, *in_two_steps(both, inputs, device, candidates)]


def _places(both: Joined, shapes: Shapes, axes: int) -> dict[str, Place] | None:
    """Return, for the result and each output, the place (one index per axis) of the element at `row`, `column` of y.

    Return None if an output does not have the columns of y: the product of some last axes must equal y's number of
    columns.
    """
    whole, sizes = shapes.of[RESULT], shapes.sizes
    if not whole:
        return None
    rows, columns = product(whole[:-axes]), product(whole[-axes:])
    found = dict[str, Place]()
    for name in (RESULT, *both.outputs):
        shape, first = shapes.of[name], len(whole) - axes  # `first`: y's first axis of columns
        if len(shape) != len(whole) or not all(map(sizes.equal, shape, whole)):
            first = next((i for i in range(len(shape) - 1, -1, -1) if product(shape[i:]) == columns), -1)
            if first < 0 or not sizes.equal(product(shape[:first]), rows):
                return None
        found[name] = (*_parts(ROW, shape[:first]), *_parts(COLUMN, shape[first:]))
    return found


class _Text:
    """Writes `struct Program` for W elements of a row of y, the first one at `row` and `column`."""

    def __init__(
        self,
        both: Joined,
        program: Program,
        shapes: Shapes,
        places: Mapping[str, Place],
        stored: int | None,
        axes: int,
        strides: tuple[int, int, int] | None,
    ) -> None:
        """Take the program, the index of the output that the kernel stores, and the arguments of `epilogue_program`."""
        self.both, self.program, self.shapes, self.stored, self.strides = both, program, shapes, stored, strides
        whole, self.places = shapes.of[RESULT], places
        self.columns = product(whole[-axes:])
        self.whole = flat(places[RESULT], whole)
        self.arguments, self.registers, self.element_bytes = Arguments(shapes.sizes, False), 0, 0
        self.writer = self._writer(self.arguments)
        self.reads = self._reads()

    def _writer(self, arguments: Arguments) -> Writer:
        writer = Writer(self.program, self.shapes, arguments, False, {}, depth=3, arbitrary=(RESULT,))
        writer.keep((RESULT, self.places[RESULT]), Reference(writer.rounded(RESULT, "x0[j]")))
        return writer

    def _reads(self) -> list[tuple[str, Place]]:
        """Return each operand with each place at which it is read.

        Reads of the product's result at the place of the computed element are left out.
        """
        draft = self._writer(Arguments(self.shapes.sizes, False))
        for name in self.both.outputs:
            draft.value(name, self.places[name])
        in_place = RESULT, self.places[RESULT]
        return [each for each in draft.values() if each[0] in self.both.behind.operands and each != in_place]

    def made(self, takes_residual: bool, selection: Selection | None) -> EpilogueProgram:
        """Return the generated program."""
        dtypes, lines, others = self.program.dtypes, list[dict[str, str]](), self.both.behind.operands
        residual = next(
            (n for n, _ in self.reads if takes_residual and self.is_whole(n) and dtypes[n] == dtypes[RESULT]), ""
        )
        members, given = list[str](), list[Argument]()
        for i, (name, place) in enumerate(self.reads):
            if name == residual:
                self.writer.keep((name, place), Reference("residual[j]"))
                continue
            is_first = all(name != before for before, _ in self.reads[:i])
            lines.append(self._operand(name, place, name if is_first else f"{name}_{i}"))
            if is_first:
                members.append(f"const {STORED[dtypes[name]]}* {name}")
                given.append(Pointer("input", self.both.own + others.index(name) - 1))
        located = self._located(members, given) if self.strides else ""
        results = [self.writer.value(name, self.places[name]).text for name in self.both.outputs]
        results, computed = ([self.arguments.numbers(each) for each in found] for found in (results, self.writer.lines))
        for i, name in enumerate(self.both.outputs):
            if i != self.stored:
                lines.append(_output(i, STORED[dtypes[name]], results[i]))
                members.append(f"{STORED[dtypes[name]]}* y{i}")
                self.registers += OUTPUT_REGISTERS
                given.append(Pointer("output", i))
        if self.stored is not None:
            lines.append({"computing": f"x0[j] = {results[self.stored]};"})
        assert not self.writer.accesses
        members += self.arguments.declared
        parts = {kind: [each[kind] for each in lines if kind in each] for kind in KINDS}
        inner = "\n".join([*computed, *(f"            {each}" for each in parts["computing"])])
        names = [each.split()[-1].lstrip("*") for each in members]
        text = TEXT.format(
            operators=" ".join(each.name for each in self.program.operations), residual=int(bool(residual)),
            stores_y=int(self.stored is not None),
            parameters="".join(f", {each}" for each in members), arguments=", ".join(names),
            members="".join(f"    {each};\n" for each in members), lines=inner, source="{source}", located=located,
            selected=f"using Selected = {selection.accumulator};\n" if selection else "",
            **{kind: "\n".join(f"        {each}" for each in parts[kind]) for kind in KINDS if kind != "computing"},
        )  # fmt: skip
        taken = Pointer("input", self.both.own + others.index(residual) - 1) if residual else None
        given_dtypes, stored = [dtypes[name] for name in self.both.outputs], self.stored or 0
        is_precise = "float32" in given_dtypes
        if is_precise and any(each.name == "Tanh" for each in self.program.operations):
            self.registers += PRECISE_REGISTERS
        return EpilogueProgram(
            text, (*given, *self.arguments.values), ACCUMULATORS if selection else Pointer("output", stored), taken,
            self.registers, given_dtypes[stored], is_precise, self.element_bytes, selection,
        )  # fmt: skip

    def _located(self, members: list[str], given: list[Argument]) -> str:
        """Return the C++ function that computes the positions of attention's results in y."""
        assert self.strides is not None
        terms = []
        for name, stride in zip(("batch", "head", "query"), self.strides, strict=True):
            members.append(f"int {name}_stride")
            given.append(Scalar(stride, "int32"))
            terms.append(f"{name} * {name}_stride")
        row = self.arguments.quotient("at", self.columns) if self.columns != 1 else "at"
        return LOCATED.format(at=" + ".join(terms), row=row, columns=self.arguments.size(self.columns))

    def is_whole(self, name: str) -> bool:
        """Return whether an operand is read only at the same flat index as y."""
        return [flat(place, self.shapes.of[each]) for each, place in self.reads if each == name] == [self.whole]

    def _operand(self, name: str, place: Place, variable: str) -> dict[str, str]:
        """Return the lines of code that read an operand, by kind (see KINDS): an element per column, or one for all."""
        index, dtype = flat(place, self.shapes.of[name]), self.program.dtypes[name]
        varies = COLUMN in index.variables()
        self.writer.keep((name, place), Reference(f"{variable}_[{'j' if varies else 0}]"))
        width, left = ("W", "left") if varies else ("1", "inside")
        self.registers += WORDS.get(dtype, 2) * (2 if not varies else 16 if ROW in index.variables() else 8)
        self.element_bytes += 2 * WORDS.get(dtype, 2) if varies else 0
        of = "of_row" if not varies else "of_elements" if ROW in index.variables() else "of_columns"
        at = "at" if of == "of_elements" and index == self.whole else self.writer.index(index)
        if not varies or are_neighbours(index):
            aligned = "true" if not varies else "ALIGNED"
            if varies and not is_aligned(index, self.columns, self.shapes.sizes):
                aligned = "false"
            load = f"load<{aligned}>({name} + ({at}), {left})"
        else:
            load = f"load_each(column, left, [&](int column) {{ return {name} + ({at}); }})"
        return {
            of: f"Elements<{STORED[dtype]}, {width}> {variable};",
            f"load_{of}": f"to.{variable}.{'template ' if load.startswith('load<') else ''}{load};",
            "reading": f"{NUMBER[dtype]} {variable}_[{width}];\n        {of}.{variable}.read({variable}_);",
        }


def _parts(variable: str, dims: Shape) -> Place:
    """Return the index along each of the axes `dims` for the flat index `variable` over these axes."""
    whole = (product(dims),)
    return reshaped((variable_index(variable, *whole),), whole, dims)


def _output(index: int, stored: str, value: str) -> dict[str, str]:
    """Return the lines, by kind (see KINDS), for an output that the program stores."""
    return {
        "reading": f"typename Number<{stored}>::Type y{index}_[W];",
        "computing": f"y{index}_[j] = {value};",
        "storing": f"store<ALIGNED>(y{index} + at, y{index}_, left);",
    }
