"""The kernels of a region, one for each launch.

A launch computes one or several loop nests, each over outputs of one shape.  A tiling divides a nest among blocks: each
block of the launch computes a part of one nest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from onnxfuse.algebra.sizes import product
from onnxfuse.kernels.region.arguments import Arguments
from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.emit_nest import NestText
from onnxfuse.kernels.region.emit_tile import tiles
from onnxfuse.kernels.region.launch_schedule import Stages, Work
from onnxfuse.kernels.region.nests import ROWS, Nest
from onnxfuse.kernels.region.operators import BYTES, STORED
from onnxfuse.kernels.region.reductions import Key
from onnxfuse.kernels.region.region import Region
from onnxfuse.kernels.region.scratch_reductions import Stored
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.region.tilings import Columns, Elements, Merge, Rows, Tile, Tiling
from onnxfuse.kernels.region.wrapped import wrapped
from onnxfuse.kernels.tensors import STREAMED_FROM_BYTES, is_released
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import always

HEAD: Final = """\
// {operators}
#include "types.cuh"
#include "activations.cuh"
#include "region.cuh"

#pragma nv_diag_suppress 177  // not every variable of a loop is read
#pragma nv_diag_suppress 550
#define EACH(width) _Pragma("unroll") for (int j = 0; j < width; ++j)

extern "C" __global__ void __launch_bounds__({threads}) region({parameters}) {{
    wait_for_predecessor();
"""


def plan_of(region: Region, stages: Stages, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Plan:
    """Return the plan that runs the launches of a region in order."""
    stored = {each.pointer: each for works in stages.launches for work in works for each in work.stored}
    parameters: dict[str, tuple[str, Argument]] = {}
    for i, spec in enumerate(inputs):
        parameters[f"x{i}"] = (f"const {STORED[spec.dtype]}* x{i}", Pointer("input", i))
    for i, spec in enumerate(outputs):
        parameters[f"y{i}"] = (f"{STORED[spec.dtype]}* y{i}", Pointer("output", i))
    for i, name in enumerate(stored):
        parameters[name] = (f"u64* {name}", Pointer("scratch", i))
    moved = sum(math.prod(spec.shape) * BYTES[spec.dtype] for spec in (*inputs, *outputs))
    leaving = str(int(always(lambda: moved > STREAMED_FROM_BYTES, moved)))
    steps = tuple(_launch(region, works, stages.stored, parameters, leaving) for works in stages.launches)
    sizes = region.shapes.sizes
    scratch = tuple(
        sizes.value(each.count) * each.instance.accumulator_bytes(region.program) for each in stored.values()
    )
    return Plan(tuple(outputs), steps, scratch)


def _launch(
    region: Region,
    works: Sequence[Work],
    stored: Mapping[Key, Stored],
    parameters: Mapping[str, tuple[str, Argument]],
    leaving: str,
) -> Launch:
    """Return one launch; its grid has the blocks of the first of `works`, then those of the second, and so on."""
    program, sizes = region.program, region.shapes.sizes
    threads = works[0].tiling.threads
    blocks = [_blocks(work.nest, work.tiling, sizes) for work in works]
    total = sum(blocks)
    arguments = Arguments(sizes, region.is_wide)
    given = str(is_released(total, region.device)), leaving
    body, shared = _body(region, works, blocks, arguments, stored, given)
    body = arguments.numbers(body)
    read = {name: each for name, each in parameters.items() if re.search(rf"\b{name}\b", body)}
    declared = ", ".join([*(text for text, _ in read.values()), *arguments.declared])
    operators = " ".join(each.name for each in program.operations if each.name != "Constant")
    head = HEAD.format(operators=operators, threads=threads, parameters=declared)
    precise = int(any(dtype == "float32" for dtype in program.dtypes.values()))
    kernel = Kernel("region", "region", {"PRECISE": precise}, text=wrapped(f"{head}{body}}}\n"))
    passed = (*(argument for _, argument in read.values()), *arguments.values)
    return Launch(kernel, (total, 1, 1), (threads, 1, 1), passed, shared, pdl=region.device.has_pdl)


def _blocks(nest: Nest, tiling: Tiling, sizes: Sizes) -> int:
    """Return the number of thread blocks that compute a loop nest."""
    match tiling:
        case Elements():
            count, width = sizes.value(product(nest.shape)), tiling.width
            if tiling.has_tail:
                return -(-(count // width + count % width) // tiling.threads)
            return -(-count // (width * tiling.repeats * tiling.rounds * tiling.threads))
        case Tile():
            return math.prod(sizes.value(each.extent) for each in tiles(nest, tiling, sizes))
    rows, shares = sizes.value(nest.count(ROWS)), sizes.value(tiling.shares)
    match tiling:
        case Rows(lanes=0):
            return shares * rows
        case Rows(lanes=lanes) | Merge(lanes=lanes):
            return -(-rows // (tiling.threads // lanes))
        case Columns():
            return shares * -(-rows // (tiling.width * tiling.columns))
    raise AssertionError(f"a nest runs as {tiling}")


def _body(
    region: Region,
    works: Sequence[Work],
    blocks: Sequence[int],
    arguments: Arguments,
    stored: Mapping[Key, Stored],
    given: tuple[str, str],
) -> tuple[str, int]:
    """Return the code, in which each block computes a part of one loop nest, and the bytes of dynamic shared memory."""
    lines, before, begin, shared, row_bytes = list[str](), 0, "", 0, 0
    for i, work in enumerate(works):
        end = before + blocks[i]
        bound = arguments.size(region.shapes.sizes.named(f"blocks before {end!r}", end))
        head = "{" if i == len(works) - 1 else f"if (blockIdx.x < {bound}) {{"
        lines.append(f"    {'} else ' if i else ''}{head}")
        lines.append(f"        const u32 block = blockIdx.x{f' - {begin}' if begin else ''};")
        writer = Writer(region.program, region.shapes, arguments, region.aligned, stored, depth=2)
        NestText(work.nest, work.tiling, writer, *given, work.stored).write()
        lines += writer.lines
        before, begin, shared = end, bound, max(shared, writer.shared_bytes)
        row_bytes = max(row_bytes, writer.row_bytes)
    declared = [f"    __shared__ u64 shared[{-(-shared // 8)}];"] if shared else []
    declared += ["    extern __shared__ uint4 row_memory[];"] if row_bytes else []
    return "\n".join([*declared, *lines, "    }", ""]), row_bytes
