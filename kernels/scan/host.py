"""The plans of a scan: one launch of a kernel that is generated from the node's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.host import MAX_BEYOND, WORD
from onnxfuse.kernels.region.operators import STORED
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.region.wrapped import wrapped
from onnxfuse.kernels.scan.codegen import HEAD, ScanText
from onnxfuse.kernels.scan.program import ScanProgram, parse, refusal
from onnxfuse.region_operators import BROADCAST, FIRST_FREE, MAX_REDUCED, REDUCED, STEPS
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import maximum

WARP: Final = 32
THREADS: Final = 64  # threads per block: few, so that the blocks of a small batch are spread evenly
MAX_EACH: Final = 32  # elements of a state that a lane keeps in registers
MAX_AHEAD: Final = 8  # steps whose operands are loaded together
FETCHED: Final = 48  # registers of a thread for the operands of the steps that are loaded together
UNROLLED: Final = 128  # operators of the steps that are written one after another: longer code compiles slowly


def supports(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel can be generated for this node; None if one can."""
    try:
        program = parse(node)
    except ValueError as error:
        return str(error)
    return refusal(program, dtypes, node.output_dtypes)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return plans that differ in the number of lanes that share a state.

    Raises ValueError if the operands' shapes do not fit the program.
    """
    program, sizes = parse(node), Sizes()
    axes = _sizes_of_axes(program, [sizes.read(spec.shape) for spec in inputs], sizes)
    aligned = all(spec.aligned for spec in inputs)
    outputs = tuple(
        TensorSpec(tuple(sizes.value(size) for size in _shape(of, axes)), program.step.dtypes[name], aligned)
        for name, of in program.outputs
    )
    free = [size for axis, size in axes.items() if axis >= FIRST_FREE]
    if any(size == 0 for size in free):
        return [Plan(outputs, ())]
    shapes = [_shape(of, axes) for of in (*program.axes.values(), *(of for _, of in program.outputs))]
    counts = [sizes.value(count) for count in dict.fromkeys(map(product, shapes))]
    groups = sizes.value(product(tuple(free)))
    lanes = _lanes(int(str(axes.get(REDUCED, 1))))
    is_wide = not maximum(*counts, groups * lanes[0]) < WORD - MAX_BEYOND  # there may be more lanes than elements
    if is_wide:  # tensors with more than 2^31 elements are rare: for them, there is one plan
        lanes = lanes[:1]
    return [_plan(program, axes, sizes, is_wide, count, groups, outputs, device) for count in lanes]


def _sizes_of_axes(program: ScanProgram, shapes: Sequence[Shape], sizes: Sizes) -> dict[int, Size]:
    """Return the size of each axis of a program.  Raises ValueError if the operands' shapes differ."""
    found: dict[int, Size] = {}
    for i, shape in enumerate(shapes):
        axes = program.axes[f"x{i}"]
        if len(axes) != len(shape) or len(set(axes) - {BROADCAST}) != len(axes) - axes.count(BROADCAST):
            raise ValueError(f"scan: x{i} has {len(shape)} axes; its program names the axes {axes}")
        for axis, size in zip(axes, shape, strict=True):
            wanted = 1 if axis == BROADCAST else found.setdefault(axis, size)
            if axis < BROADCAST or not sizes.equal(size, wanted):
                raise ValueError(f"scan: x{i} has {sizes.value(size)} elements along axis {axis}; required "
                                 f"{sizes.value(wanted)}")  # fmt: skip
    reduced = found.get(REDUCED, 1)
    if STEPS not in found or not isinstance(reduced, int) or not 0 < reduced <= MAX_REDUCED:
        raise ValueError(f"scan: it sums over {reduced} elements; required are steps, and 1 to {MAX_REDUCED}")
    if absent := {axis for _, of in program.outputs for axis in of if axis != BROADCAST} - set(found):
        raise ValueError(f"scan: no operand has the axis {min(absent)} of an output")
    return found


def _shape(axes: Sequence[int], sizes: Mapping[int, Size]) -> Shape:
    return tuple(1 if axis == BROADCAST else sizes[axis] for axis in axes)


def _lanes(reduced: int) -> list[int]:
    """Return the numbers of lanes that can share a state, the best first.

    In blocks of 128 threads, an H200 took 59, 65, 126, 310 and 1103 us with 16, 8, 4, 2 and 1 lanes for 512 steps of
    1536 states of 16 elements, and 118, 126, 171, 328 and 1091 us for four times as many states: lanes read
    neighbouring elements.
    """
    most = next(lanes for lanes in (1, 2, 4, 8, 16, WARP) if lanes >= min(reduced, WARP))
    return [lanes for lanes in (most, most // 2) if lanes and -(-reduced // lanes) <= MAX_EACH]


def _plan(
    program: ScanProgram, axes: Mapping[int, Size], sizes: Sizes, is_wide: bool, lanes: int, groups: int,
    outputs: tuple[TensorSpec, ...], device: Device,
) -> Plan:  # fmt: skip
    """Return the plan in which so many lanes share a state."""
    each = -(-int(str(axes.get(REDUCED, 1))) // lanes)
    fetched = sum(each if REDUCED in of else 1 for of in program.axes.values() if STEPS in of)
    room = max(1, min(FETCHED // max(1, fetched), UNROLLED // max(1, len(program.step.operations))))
    ahead = next(count for count in (MAX_AHEAD, 4, 2, 1) if count <= room)
    arguments = Arguments(sizes, is_wide)
    body = ScanText(program, axes, arguments, THREADS, lanes, ahead).body()
    parameters: dict[str, tuple[str, Argument]] = {
        name: (f"const {STORED[program.step.dtypes[name]]}* {name}", Pointer("input", i))
        for i, name in enumerate(program.axes)
    }
    for i, (name, _) in enumerate(program.outputs):
        parameters[f"y{i}"] = f"{STORED[program.step.dtypes[name]]}* y{i}", Pointer("output", i)
    declared = ", ".join([*(text for text, _ in parameters.values()), *arguments.declared])
    operators = " ".join(each.name for each in program.step.operations if each.name != "Constant")
    text = HEAD.format(
        operators=operators, each=each, ahead=ahead, threads=THREADS, parameters=declared, body=body
    )  # fmt: skip
    precise = int(any(dtype == "float32" for dtype in program.step.dtypes.values()))
    kernel = Kernel("scan", "scan", {"PRECISE": precise}, text=wrapped(text))
    passed = (*(argument for _, argument in parameters.values()), *arguments.values)
    blocks = -(-(groups * lanes) // THREADS)
    return Plan(outputs, (Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), passed, pdl=device.has_pdl),))
