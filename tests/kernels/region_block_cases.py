"""Programs of regions whose blocks exchange what they store, or store in two steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from region_drafts import FLOATS, Made, RegionProgram, made, numbers


def interleaved_axes() -> Iterator[Made]:
    """Planes that become the innermost axis of outputs; blocks are not full in the last one."""
    for dtype, planes in (("float16", 3), ("bfloat16", 6), ("float32", 2), ("uint8", 3), ("int64", 3), ("bool", 4)):
        high = 1 if dtype == "bool" else 12
        x = numbers((1, planes, 128, 136), dtype, low=0, high=high)
        yield made(f"{planes} planes of {dtype} side by side", [x, numbers((planes,), dtype, 1, 0, high)],
                   lambda p, x, c, op="And" if dtype == "bool" else "Max": p.op(
                       op, p.op("Transpose", x, perm=[0, 2, 3, 1]), c))  # fmt: skip
    yield made("large patches", [numbers((1, 3, 128, 128), "float16")], large_patches)
    yield made("two outputs of planes side by side", [numbers((1, 3, 129, 136), "float16")], bytes_of_planes)


def large_patches(program: RegionProgram, x: str) -> str:
    split = program.op("Reshape", program.op("Neg", x), shape=[-1, 3, 8, 16, 8, 16])
    return program.op("Reshape", program.op("Transpose", split, perm=[0, 2, 4, 3, 5, 1]), shape=[-1, 64, 768])


def bytes_of_planes(program: RegionProgram, x: str) -> tuple[str, str]:
    turned = program.op("Transpose", x, perm=[0, 2, 3, 1])
    return program.op("Cast", program.op("Abs", turned), dtype="uint8", to="uint8"), program.op("Exp", turned)


def prevalent_parts() -> Iterator[Made]:
    """A Concat of which one part has nearly all elements of a row."""
    for dtype, sizes in (*((dtype, (2, 2, 81)) for dtype in FLOATS), ("int32", (1, 95, 3)), ("float16", (37, 2))):
        x = numbers((5, 40, sum(sizes)), dtype)
        grid = numbers((40, 1), dtype, 1)
        for dynamic in ((), (5,)):
            yield made(f"parts of {sizes} elements of {dtype} {dynamic}", [x, grid],
                       lambda p, x, g, s=sizes: decoded(p, x, g, s), dynamic)  # fmt: skip


def decoded(program: RegionProgram, x: str, grid: str, sizes: tuple[int, ...]) -> str:
    """All parts but the largest one are added to a number of their row, and multiplied by their place."""
    parts = list(program.ops_of("Split", program.op("Abs", x), count=len(sizes), axis=2, sizes=list(sizes)))
    for i, size in enumerate(sizes):
        if size < max(sizes):
            places = program.operand(np.arange(1, size + 1).astype(program.operands[x].dtype))
            parts[i] = program.op("Mul", program.op("Add", parts[i], grid), places)
    return program.op("Reshape", program.op("Concat", *parts, axis=2), shape=[0, -1])
