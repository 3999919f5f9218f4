"""Programs of regions whose blocks keep rows in shared memory, exchange what they store, or store in two steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from region_drafts import FLOATS, Made, RegionProgram, made, numbers, one
from region_speed_cases import layer_norm


def kept_rows() -> Iterator[Made]:
    """Rows that several loops read, and registers do not hold."""
    for dtype, length in (("float32", 9000), ("float16", 33000)):
        x, factor = numbers((9, length), dtype), numbers((length,), dtype, 1)
        yield made(f"softmax of rows of {length} {dtype}", [x, factor],
                   lambda p, x, f: p.op("Softmax", p.op("Mul", x, f), axis=1))  # fmt: skip
    yield one("log-softmax of rows of 9001 bfloat16", "LogSoftmax", numbers((9, 9001), "bfloat16"), axis=1)
    yield made("norm of long rows and their variance", [numbers((9, 8600), "float16")], norm_and_variance)


def norm_and_variance(program: RegionProgram, x: str) -> tuple[str, str]:
    norm = layer_norm(program, x, [1])
    return norm, program.op("ReduceMax", program.op("Neg", x), axes=[1], keepdims=1)


def interleaved_axes() -> Iterator[Made]:
    """Planes that become the innermost axis of outputs; blocks are not full in the last two."""
    for dtype, planes in (("float16", 3), ("bfloat16", 6), ("float32", 2), ("uint8", 3), ("int64", 3), ("bool", 4)):
        high = 1 if dtype == "bool" else 12
        x = numbers((1, planes, 128, 136), dtype, low=0, high=high)
        yield made(f"{planes} planes of {dtype} side by side", [x, numbers((planes,), dtype, 1, 0, high)],
                   lambda p, x, c, op="And" if dtype == "bool" else "Max": p.op(
                       op, p.op("Transpose", x, perm=[0, 2, 3, 1]), c))  # fmt: skip
    yield made("large patches", [numbers((1, 3, 128, 128), "float16")], large_patches)
    yield made("sines and cosines side by side", [numbers((2083, 1)), numbers((10,), seed=1)], sines_and_cosines)
    yield made("two outputs of planes side by side", [numbers((1, 3, 129, 136), "float16")], bytes_of_planes)


def large_patches(program: RegionProgram, x: str) -> str:
    split = program.op("Reshape", program.op("Neg", x), shape=[-1, 3, 8, 16, 8, 16])
    return program.op("Reshape", program.op("Transpose", split, perm=[0, 2, 4, 3, 5, 1]), shape=[-1, 64, 768])


def sines_and_cosines(program: RegionProgram, x: str, powers: str) -> str:
    angles = program.op("Mul", x, powers)
    return program.op("Concat", program.op("Sin", angles), program.op("Cos", angles), axis=1)


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
