"""Programs of regions whose sizes are computed from dims: bounds, pads, repeats, parts and targets of Reshapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from region_drafts import Made, RegionProgram, made, numbers


def dim(index: int, axis: int) -> list[Any]:
    """Return the dim of an operator's input as an attribute says it."""
    return ["dim", index, axis]


def computed_sizes() -> Iterator[Made]:
    """Sizes that depend on dynamic dims, which are 5 and 14."""
    scores, buffer = numbers((2, 5, 5), "float16"), numbers((16, 16), "float16", 1) > 0
    yield made("a causal buffer", [scores, buffer], causal, (5,))
    x, table = numbers((2, 5, 24), "float16"), numbers((16, 24), "float16", 1)
    yield made("the first rows of a table", [x, table], lambda p, x, table: p.op("Add", x, p.op(
        "Slice", table, x, axes=[0], starts=[0], ends=[dim(1, 1)], steps=[1])), (5,))  # fmt: skip
    yield made("differences of neighbours", [x], neighbours, (5,))
    bounds = {"starts": [["+", dim(0, 1), -7]], "ends": [["+", dim(0, 1), -1]]}
    yield made("from a negative bound on", [x], lambda p, x: p.op("Neg", p.op(
        "Slice", x, axes=[1], **bounds, steps=[1])), (5,))  # fmt: skip
    yield made("rows for every image", [x, table[:1]], lambda p, x, row: p.op("Add", x, p.op(
        "Tile", p.op("Unsqueeze", row, axes=[0]), x, repeats=[dim(1, 0), dim(1, 1), 1])), (5,))  # fmt: skip
    for length in (5, 14):
        yield made(f"rows of {length} padded to a multiple of 4", [numbers((2, length, 24), "float16")], padded,
                   (length,))  # fmt: skip
    image = numbers((1, 12, 5, 14), "float16")
    yield made("pixels out of channels", [image], lambda p, x: shuffled(p, p.op("Tanh", x)), (5, 14))
    yield made("channels out of pixels", [numbers((1, 3, 10, 14), "float16")], unshuffled, (10, 14))
    yield made("windows of 7", [numbers((5, 14, 14, 8), "float16")], windows, (5, 14))
    yield made("halves of rows", [numbers((3, 14, 8), "float16")], halves, (14,))
    yield made("a target of two dims", [x], lambda p, x: p.op("Abs", p.op("Reshape", p.op("Neg", x), shape=[
        ["*", dim(0, 0), dim(0, 1)], ["//", dim(0, 2), 8], ["max", 8, ["%", dim(0, 1), 3]]])), (5,))  # fmt: skip
    yield made("a mask of every row", [x, numbers((5, 1), "int64") > 0], lambda p, x, mask: p.op(
        "Where", p.op("Expand", mask, x, shape=[dim(1, 0), dim(1, 1), 1]), x, p.op("Neg", x), dtype="float16"),
        (5,))  # fmt: skip


def causal(p: RegionProgram, x: str, buffer: str) -> str:
    rows = p.op("Slice", buffer, x, axes=[0], starts=[0], ends=[dim(1, 1)], steps=[1])
    mask = p.op("Slice", rows, x, axes=[1], starts=[0], ends=[dim(1, 2)], steps=[1])
    low = p.op("Constant", dtype="float16", value=-100)
    return p.op("Softmax", p.op("Where", mask, x, low, dtype="float16"), axis=2)


def neighbours(p: RegionProgram, x: str) -> str:
    left = p.op("Slice", x, axes=[1], starts=[0], ends=[["+", dim(0, 1), -1]], steps=[1])
    return p.op("Sub", p.op("Slice", x, axes=[1], starts=[1], ends=[dim(0, 1)], steps=[1]), left)


def padded(p: RegionProgram, x: str) -> str:
    more = ["%", ["*", -1, dim(0, 1)], 4]
    return p.op("Neg", p.op("Pad", x, pads=[0, 0, 0, 0, more, 0], mode="constant", value=0.5))


def shuffled(p: RegionProgram, x: str) -> str:
    split = p.op("Reshape", x, shape=[dim(0, 0), 3, 2, 2, dim(0, 2), dim(0, 3)])
    moved = p.op("Transpose", split, perm=[0, 1, 4, 2, 5, 3])
    return p.op("Reshape", moved, shape=[dim(0, 0), 3, ["*", dim(0, 2), 2], ["*", 2, dim(0, 4)]])


def unshuffled(p: RegionProgram, x: str) -> str:
    rows, columns = ["//", dim(0, 2), 2], ["//", dim(0, 3), 2]
    split = p.op("Reshape", p.op("Neg", x), shape=[1, 3, rows, 2, columns, 2])
    moved = p.op("Transpose", split, perm=[0, 3, 5, 1, 2, 4])
    return p.op("Reshape", moved, x, shape=[1, 12, ["//", dim(1, 2), 2], ["//", dim(1, 3), 2]])


def windows(p: RegionProgram, x: str) -> str:
    rows, columns = ["//", dim(0, 1), 7], ["//", dim(0, 2), 7]
    split = p.op("Reshape", p.op("Neg", x), shape=[dim(0, 0), rows, 7, columns, 7, 8])
    return p.op("Reshape", p.op("Transpose", split, perm=[0, 1, 3, 2, 4, 5]), shape=[-1, 49, 8])


def halves(p: RegionProgram, x: str) -> str:
    half = ["//", dim(0, 1), 2]
    gate, value = p.ops_of("Split", x, count=2, axis=1, sizes=[half, half])
    return p.op("Mul", p.op("Sigmoid", gate), value)
