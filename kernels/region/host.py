"""The plan of a region: one kernel, whose text is generated from the node's program for the shapes of its operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.nest_text import NestText, Tiling
from onnxfuse.kernels.region.nests import ROWS, Nest, make_nest
from onnxfuse.kernels.region.operators import BYTES, STORED
from onnxfuse.kernels.region.program import Program, parse, refusal
from onnxfuse.kernels.region.shapes import Shapes, infer
from onnxfuse.kernels.region.sizes import ONE, ZERO, Shape, Sizes, product
from onnxfuse.kernels.region.tilings import of_one_block, tiled, tiling_of
from onnxfuse.kernels.region.writer import Writer
from onnxfuse.kernels.tensors import PDL_ARCH, STREAMED_FROM_BYTES, is_released
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import always, maximum

WORD: Final = 2**31  # elements from which on indices have 64 bits
MAX_OPERATIONS: Final = 200  # of a program: the text of a longer one takes long to compile
HEAD: Final = """\
// {operators}
#include "types.cuh"
#include "activations.cuh"
#include "region.cuh"

#pragma nv_diag_suppress 177  // not every variable of a loop is read
#define EACH(width) _Pragma("unroll") for (int j = 0; j < width; ++j)

extern "C" __global__ void __launch_bounds__({threads}) region({parameters}) {{
    wait_for_predecessor();
"""


def supports(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel can be generated for this node; None if one can."""
    try:
        program = parse(node)
    except ValueError as error:
        return str(error)
    if len(program.operations) > MAX_OPERATIONS:
        return f"region: it has {len(program.operations)} operators; a kernel is generated for {MAX_OPERATIONS}"
    return refusal(program, dtypes, node.output_dtypes)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan.

    Raises ValueError if the operands' shapes do not fit the program, or its kernel would have too many lines.
    """
    program, sizes = parse(node), Sizes()
    shapes = infer(program, {f"x{i}": sizes.read(spec.shape) for i, spec in enumerate(inputs)}, sizes)
    aligned = all(spec.aligned for spec in inputs)
    outputs = tuple(
        TensorSpec(tuple(sizes.value(dim) for dim in shapes.of[name]), program.dtypes[name], aligned)
        for name in program.outputs
    )
    groups: dict[Shape, list[str]] = {}
    for name in dict.fromkeys(program.outputs):
        if not _is_empty(shapes.of[name], sizes):
            groups.setdefault(shapes.of[name], []).append(name)
    if not groups:
        return [Plan(outputs, ())]
    nests = [make_nest(program, shapes, names) for names in groups.values()]
    tilings = of_one_block([tiling_of(nest, program, shapes, aligned, device) for nest in nests])
    nests = [tiled(nest, tiling, program, shapes) for nest, tiling in zip(nests, tilings, strict=True)]
    return [Plan(outputs, (_launch(_Region(program, shapes, nests, tilings, inputs, outputs, aligned), device),))]


def _is_empty(shape: Shape, sizes: Sizes) -> bool:
    """Return whether a tensor has no elements."""
    return not all(dim != ZERO and sizes.at_least(dim, ONE) for dim in shape)


@dataclass
class _Region:
    """A region with all that its kernel's text depends on."""

    program: Program
    shapes: Shapes
    nests: Sequence[Nest]
    tilings: Sequence[Tiling]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    aligned: bool


def _launch(region: _Region, device: Device) -> Launch:
    """Return the launch of a region's kernel: blocks of its nests, one nest after the other."""
    program, sizes = region.program, region.shapes.sizes
    threads = region.tilings[0].threads
    blocks = [_blocks(nest, tiling, sizes) for nest, tiling in zip(region.nests, region.tilings, strict=True)]
    total = sum(blocks)
    largest = maximum(*(sizes.value(product(shape)) for shape in region.shapes.of.values()), total * threads)
    arguments = Arguments(region.shapes.sizes, not largest < WORD)
    moved = sum(math.prod(spec.shape) * BYTES[spec.dtype] for spec in (*region.inputs, *region.outputs))
    leaving = str(int(always(lambda: moved > STREAMED_FROM_BYTES, moved)))
    body = _body(region, blocks, arguments, str(is_released(total, device)), leaving)
    tensors = [f"const {STORED[spec.dtype]}* x{i}" for i, spec in enumerate(region.inputs)]
    tensors += [f"{STORED[spec.dtype]}* y{i}" for i, spec in enumerate(region.outputs)]
    operators = " ".join(each.name for each in program.operations)
    head = HEAD.format(operators=operators, threads=threads, parameters=", ".join([*tensors, *arguments.declared]))
    pointers: list[Argument] = [Pointer("input", i) for i in range(len(region.inputs))]
    pointers += [Pointer("output", i) for i in range(len(region.outputs))]
    precise = int(any(dtype == "float32" for dtype in program.dtypes.values()))
    kernel = Kernel("region", "region", {"PRECISE": precise}, text=f"{head}{body}}}\n")
    return Launch(kernel, (total, 1, 1), (threads, 1, 1), (*pointers, *arguments.values), pdl=device.arch >= PDL_ARCH)


def _blocks(nest: Nest, tiling: Tiling, sizes: Sizes) -> int:
    """Return the blocks of a nest."""
    if tiling.has_tail:
        count = sizes.value(product(nest.shape))
        return -(-(count // tiling.width + count % tiling.width) // tiling.threads)
    if tiling.way == "elements":
        return -(-sizes.value(product(nest.shape)) // (tiling.width * tiling.threads))
    rows = sizes.value(nest.count(ROWS))
    if tiling.way == "warp":
        return -(-rows // (tiling.threads // 32))
    return rows if tiling.way == "block" else -(-rows // (tiling.width * tiling.columns))


def _body(region: _Region, blocks: Sequence[int], arguments: Arguments, release: str, leaving: str) -> str:
    """Return the text of all nests; each block runs one of them."""
    lines, before, begin = [], 0, ""
    for i, (nest, tiling) in enumerate(zip(region.nests, region.tilings, strict=True)):
        end = before + blocks[i]
        bound = arguments.size(region.shapes.sizes.named(f"blocks before {i + 1}", end))
        head = "{" if i == len(blocks) - 1 else f"if (blockIdx.x < {bound}) {{"
        lines.append(f"    {'} else ' if i else ''}{head}")
        lines.append(f"        const u32 block = blockIdx.x{f' - {begin}' if begin else ''};")
        writer = Writer(region.program, region.shapes, arguments, region.aligned, prefix=f"v{i}_", depth=2)
        NestText(nest, tiling, writer, release, leaving).write()
        lines += writer.lines
        before, begin = end, bound
    return "\n".join([*lines, "    }", ""])
