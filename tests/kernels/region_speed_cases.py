"""Programs of regions whose kernels are divided in ways of their own: by shares, by columns, by flat vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from region_drafts import FLOATS, Made, RegionProgram, made, numbers, one

from onnxfuse.region_operators import SUMS

END = 2**63 - 1


def stored_reductions() -> Iterator[Made]:
    """Reductions that launches of their own compute: of few rows, or read where no row shares them."""
    for dtype in (*FLOATS, "int32", "int64"):
        ops = SUMS if dtype in ("float32", "float16") else ("ReduceSum", "ReduceMax", "ReduceMin")
        for op in ops:
            x = numbers((3, 2737), dtype, low=1 if op == "ReduceProd" else -12, high=4 if op == "ReduceProd" else 12)
            yield one(f"{op} of all of {dtype}", op, x, axes=[0, 1], keepdims=0)
    for dtype, (rows, length) in itertools.product(("float32", "float64", "int32"), ((1, 9001), (3, 8211))):
        for op in ("ArgMax", "ArgMin"):
            yield one(f"{op} of {rows} rows of {length} {dtype}", op, numbers((rows, length), dtype), dtype="int64",
                      axis=1, keepdims=0, select_last_index=rows - 1 and 1)  # fmt: skip
    for d in (False, True):
        name = ", dynamic" if d else ""
        yield one(f"Softmax of two long rows{name}", "Softmax", numbers((2, 20011), "float16"),
                  dynamic=(2, 20011) if d else (), axis=1)  # fmt: skip
        yield made(f"layer norm of all{name}", [numbers((33000,))], lambda p, x: layer_norm(p, x, [0]),
                   (33000,) if d else ())  # fmt: skip
        yield made(f"a clamp of many{name}", [numbers((2, 33000), "float16")], lambda p, x: clamp(p, x, [0, 1]),
                   (33000,) if d else ())  # fmt: skip
    for axis, shape in itertools.product((0, 1), ((2100, 24), (3, 1900, 7))):
        yield one(f"ReduceMean over {axis} of {shape}", "ReduceMean", numbers(shape, "float16"), axes=[axis],
                  keepdims=0)  # fmt: skip
    x = numbers((40, 96), "float16")
    yield made("mean of gathered rows", [x, np.array([[0, -1, 39], [5, 2, 7]])],
               lambda p, x, at: p.op("Gather", p.op("ReduceMean", x, axes=[1], keepdims=0), at, axis=0))  # fmt: skip
    yield made("norm of gathered rows", [x, np.array([3, -2])],
               lambda p, x, at: p.op("Gather", layer_norm(p, x, [1]), at, axis=0), (40,))  # fmt: skip
    yield made("rows rolled behind a minimum", [numbers((3, 40, 50), "bfloat16")], rolled_minimum)
    yield made("mean of a softmax", [numbers((3, 40, 64), "bfloat16")], mean_of_softmax)
    yield made("outputs that share a mean", [numbers((33000,))], shared_mean)


def columns() -> Iterator[Made]:
    """Reductions that are not over the axis that is contiguous."""
    for dynamic in ((), (3, 40)):
        d = f" {dynamic}" if dynamic else ""
        x, mask = numbers((3, 40, 48), "float16"), numbers((3, 40, 1), "int64", 1, 0, 1)
        yield made(f"mean pooling{d}", [x, mask], mean_pooling, dynamic)
        yield made(f"sum of transposed rows{d}", [numbers((3, 40, 16))], lambda p, x: p.op(
            "ReduceSum", p.op("Transpose", x, perm=[0, 2, 1]), axes=[2], keepdims=0), dynamic)  # fmt: skip
        yield made(f"sum of transposed images{d}", [numbers((3, 40, 16), "float16")], lambda p, x: p.op(
            "ReduceSum", p.op("Transpose", x, perm=[0, 2, 1]), axes=[1, 2], keepdims=1), dynamic)  # fmt: skip
    for dtype in (*FLOATS, "float64", "int32", "int64"):
        x = numbers((2, 70, 37), dtype)
        yield one(f"ReduceSum of odd columns of {dtype}", "ReduceSum", x, axes=[1], keepdims=1)
        yield one(f"ReduceMax of even columns of {dtype}", "ReduceMax", numbers((70, 48), dtype), axes=[0], keepdims=0)
    for dtype in ("float16", "float64"):
        x = numbers((2, 70, 24), dtype)
        yield one(f"ArgMin of columns of {dtype}", "ArgMin", x, dtype="int64", axis=1, keepdims=0, select_last_index=0)
        if dtype == "float16":
            yield one(f"Softmax of columns of {dtype}", "Softmax", x, axis=1)
    yield made("mean of tiled columns", [numbers((40, 12, 6), "int64")], mean_of_tiles)
    yield made("sums of columns of index sums", [numbers((20, 40), "bfloat16")], sums_of_places)


def mean_pooling(program: RegionProgram, x: str, mask: str) -> str:
    wide = program.op("Cast", program.op("Expand", mask, shape=[1, 1, 48]), dtype="float16", to="float16")
    total = program.op("ReduceSum", program.op("Mul", x, wide), axes=[1], keepdims=0)
    count = program.op("ReduceSum", wide, axes=[1], keepdims=0)
    return program.op("Div", total, program.op("Max", count, program.op("Constant", dtype="float16", value=0.5)))


def mean_of_tiles(program: RegionProgram, x: str) -> str:
    tiles = program.op("Cast", program.op("Tile", x, repeats=[1, 1, 2]), dtype="float32", to="float32")
    return program.op("Transpose", program.op("ReduceMean", tiles, axes=[0], keepdims=1), perm=[0, 2, 1])


def sums_of_places(program: RegionProgram, x: str) -> Sequence[str]:
    """A reduction of what another one finds along the other axis."""
    places = program.op("ArgMax", x, dtype="int64", axis=0, keepdims=1, select_last_index=0)
    return program.op("ReduceSum", places, axes=[1], keepdims=0), program.op("Sub", places, places)


def rolled_minimum(program: RegionProgram, x: str) -> str:
    least = program.op("ReduceMin", x, axes=[2], keepdims=0)
    parts = [program.op("Slice", least, axes=[1], starts=[a], ends=[b], steps=[1]) for a, b in ((11, END), (0, 11))]
    return program.op("Concat", *parts, axis=1)


def mean_of_softmax(program: RegionProgram, x: str) -> Sequence[str]:
    softmax = program.op("Softmax", x, axis=2)
    return program.op("Add", x, softmax), program.op("ReduceMean", softmax, axes=[1], keepdims=1)


def shared_mean(program: RegionProgram, x: str) -> Sequence[str]:
    norm = layer_norm(program, x, [0])
    mean = program.op("ReduceMean", x, axes=[0], keepdims=1)
    return norm, program.op("Reshape", program.op("Neg", norm), shape=[2, -1]), program.op("Exp", mean)


def flat_vectors() -> Iterator[Made]:
    """Outputs whose innermost axes are short or odd, so that vectors lie across several of them."""
    for dynamic in ((), (5,)):
        d = f" {dynamic}" if dynamic else ""
        scores = [numbers((5, 2, 7, 7), "float16"), numbers((7, 7), "int64", 1, 0, 8), numbers((9, 2), "float16", 2)]
        yield made(f"bias of windows of 49{d}", scores, bias_of_windows, dynamic)
        yield made(f"bytes of an image{d}", [numbers((5, 3, 6, 11), "float16")], image_bytes, dynamic)
        yield made(f"patches{d}", [numbers((5, 3, 8, 12))], patches, dynamic)
        yield made(f"upsampling by two{d}", [numbers((5, 3, 1, 6, 1), "float16"), numbers((5, 6, 12), "float16")],
                   upsampled, dynamic)  # fmt: skip
    for dtype in (*FLOATS, "float64", "int32", "int64", "int8"):
        x, row, column = (numbers(shape, dtype, i) for i, shape in enumerate([(3, 5, 7), (5, 1), (7,)]))
        yield made(f"sums of broadcasts of {dtype}", [x, row, column],
                   lambda p, x, a, b: p.op("Add", p.op("Add", x, a), b))  # fmt: skip
    for dynamic in ((), (6,)):
        shapes = (6, 14, 28, 22), (6, 14, 28, 1), (6, 14, 1, 22), (6, 1, 1, 1)
        yield made(f"sums of what several elements share {dynamic}", [numbers(shape, "float16") for shape in shapes],
                   lambda p, x, a, b, c: p.op("Mul", p.op("Add", p.op("Add", x, a), b), c), dynamic)  # fmt: skip
    yield made("mask of odd rows", [numbers((3, 5, 9), "bool", 1, 0, 1), numbers((3, 1, 9), "bool", 2, 0, 1)],
               lambda p, a, b: p.op("And", a, p.op("Not", b)))  # fmt: skip
    yield made("two outputs of odd rows", [numbers((6, 5, 3), "float16"), numbers((3,), "int64")],
               lambda p, x, a: (p.op("Exp", x), p.op("Add", p.op("Expand", a, shape=[6, 5, 1]), a)))  # fmt: skip


def row_outputs() -> Iterator[Made]:
    """Outputs of which a row has one element, beside those of which it has all."""
    for shape, axis in itertools.product(((37, 96), (5, 7, 300), (3, 40, 48)), (-1, -2)):
        for keepdims in (0, 1):
            x = numbers(shape, "float16")
            yield made(f"quantized {shape} along {axis}, keepdims {keepdims}", [x],
                       lambda p, x, a=len(shape) + axis, k=keepdims: quantized(p, x, a, k))  # fmt: skip
    yield made("quantized rows, dynamic", [numbers((37, 96))], lambda p, x: quantized(p, x, 1, 1), (37, 96))
    yield made("quantized long rows", [numbers((2, 33000))], lambda p, x: quantized(p, x, 1, 1))
    for dynamic in ((), (5, 7)):
        yield made(f"sums of rows with other axes {dynamic}", [numbers((5, 7, 96), "float16")], sums_of_rows, dynamic)
    yield made("least of the first and the last rows", [numbers((37, 96))], least_of_parts)
    yield made("log-softmax of long odd rows", [numbers((6, 8211), "float16")],
               lambda p, x: p.op("LogSoftmax", x, axis=1))  # fmt: skip


def quantized(program: RegionProgram, x: str, axis: int, keepdims: int) -> Sequence[str]:
    """Bytes, their scales, and a sum that has no axis of one element if `keepdims` is 0."""
    magnitude = program.op("Abs", x)
    highest = program.op("ReduceMax", magnitude, axes=[axis], keepdims=1)
    scale = program.op("Add", highest, program.op("Constant", dtype=program.dtypes[x], value=0.5))
    rounded = program.op("Floor", program.op("Mul", x, program.op("Constant", dtype=program.dtypes[x], value=4)))
    largest = program.op("ReduceMax", magnitude, axes=[axis], keepdims=keepdims)
    return program.op("Div", rounded, scale), program.op("Neg", scale), program.op("Exp", program.op("Neg", largest))


def repeated_reads() -> Iterator[Made]:
    """Elements of which neighbouring rows, or images, read what is the same for all of them."""
    padding, k, q = (numbers(shape, "int64", i, 0, 64) for i, shape in enumerate([(4, 64), (1, 64), (256, 1)]))
    yield made("a mask of padding and of causality", [padding, k, q], masked_places)
    for dtype in FLOATS:
        x, bias, places = numbers((64, 3, 16, 16), dtype), numbers((12, 3), dtype), numbers((16, 16), "int64", 1, 0, 11)
        yield made(f"biases of windows at places of {dtype}", [x, bias, places], biased_windows)
    yield made("biases and masks of odd windows", odd_windows(8), masked_windows)
    x, rows, columns = (numbers(shape, "float16", i) for i, shape in enumerate([(64, 32, 48), (32, 1), (48,)]))
    yield made("rows and columns of images", [x, rows, columns], lambda p, x, a, b: (
        p.op("Mul", p.op("Add", x, p.op("Exp", a)), b), p.op("Max", x, p.op("Abs", b))))  # fmt: skip


def masked_places(program: RegionProgram, padding: str, k: str, q: str) -> str:
    """0 where a key is there and not behind its query, and the least float16 elsewhere."""
    is_there = program.op("Unsqueeze", program.op("Cast", padding, dtype="bool", to="bool"), axes=[1, 2])
    is_seen = program.op("And", is_there, program.op("LessOrEqual", k, q, dtype="bool"))
    values = [program.op("Constant", dtype="float16", value=value) for value in (0.0, -65504.0)]
    return program.op("Where", is_seen, *values, dtype="float16")


def biased_windows(program: RegionProgram, x: str, bias: str, places: str) -> str:
    """The biases of Swin's windows, of which each pair of places has an index."""
    return program.op("Add", x, program.op("Transpose", program.op("Gather", bias, places, axis=0), perm=[2, 0, 1]))


def odd_windows(images: int, windows: int = 8, places: int = 15) -> list[np.ndarray]:
    """Return scores of three heads, a table of biases, its places, and a mask of each window."""
    square = (places, places)
    return [numbers((images * windows, 3, *square), "float16"), numbers((12, 3), "float16", 1),
            numbers(square, "int64", 2, 0, 11), numbers((windows, 1, *square), "float16", 3)]  # fmt: skip


def masked_windows(program: RegionProgram, x: str, bias: str, places: str, mask: str) -> str:
    """The same with the mask of each shifted window."""
    windows, _, *square = program.operands[mask].shape
    scores = program.op("Reshape", biased_windows(program, x, bias, places), shape=[-1, windows, 3, *square])
    return program.op("Reshape", program.op("Add", scores, mask), shape=[-1, 3, *square])


def sums_of_rows(program: RegionProgram, x: str) -> Sequence[str]:
    """Comparisons with a row's sum, and its maximum and sum with axes of one element elsewhere."""
    wide = program.op("Unsqueeze", program.op("Abs", x), axes=[1])
    total = program.op("ReduceSum", wide, axes=[3], keepdims=1)
    largest = program.op("ReduceMax", program.op("Neg", wide), axes=[3], keepdims=0)
    turned = program.op("Transpose", program.op("ReduceMin", x, axes=[2], keepdims=1), perm=[0, 2, 1])
    return program.op("Neg", x), program.op("Less", wide, total, dtype="bool"), largest, turned


def least_of_parts(program: RegionProgram, x: str) -> Sequence[str]:
    """All elements, and the least ones of two parts of the rows."""
    least = program.op("ReduceMin", x, axes=[1], keepdims=1)
    return program.op("Neg", x), *program.ops_of("Split", least, count=2, axis=0, sizes=[16, 21])


def transposed_tiles() -> Iterator[Made]:
    """Outputs that are read along one axis and stored along another."""
    for dtype in (*FLOATS, "float64", "int64", "int8", "bool"):
        x = numbers((2, 33, 70), dtype, low=0 if dtype == "bool" else -12, high=1 if dtype == "bool" else 12)
        yield one(f"Transpose of odd tiles of {dtype}", "Transpose", x, perm=[0, 2, 1])
        yield one(f"Transpose of large tiles of {dtype}", "Transpose", np.tile(x[:, :32], (3, 2, 2)), perm=[0, 2, 1])
    for dynamic in ((), (3,), (3, 5)):
        for dtype in ("float16", "float32", "int64"):
            yield one(f"pixels of patches of {dtype} {dynamic}", "Transpose", numbers((3, 5, 6, 2, 2, 8), dtype),
                      dynamic=dynamic, perm=[0, 5, 1, 3, 2, 4])  # fmt: skip
    for dynamic in ((), (48,), (3, 40, 48)):
        d = f" {dynamic}" if dynamic else ""
        x, row, column = (numbers(shape, "float16", i) for i, shape in enumerate([(3, 40, 48), (40,), (48, 1)]))
        yield made(f"a sum behind a Transpose{d}", [x, row, column], lambda p, x, a, b: p.op(
            "Add", p.op("Mul", p.op("Transpose", x, perm=[0, 2, 1]), a), b), dynamic)  # fmt: skip
        yield made(f"two outputs of tiles{d}", [x, numbers((3, 48, 40), "int32")], two_transposed, dynamic)
        yield made(f"a padded Transpose{d}", [x], padded_transpose, dynamic)
    yield made("rows backwards with a factor for each", [numbers((3, 48, 70), "float16"), numbers((48, 1), "float16")],
               lambda p, x, a: p.op("Mul", p.op(
                   "Slice", x, axes=[2], starts=[END], ends=[0], steps=[-1]), a))  # fmt: skip
    yield made("a transposed clamp", [numbers((33000, 2), "float16")],
               lambda p, x: p.op("Transpose", clamp(p, x, [0, 1]), perm=[1, 0]))  # fmt: skip
    yield made("a transposed softmax of few rows", [numbers((2, 20000))],
               lambda p, x: p.op("Transpose", p.op("Reshape", p.op("Softmax", x, axis=1), shape=[2, 100, 200]),
                                 perm=[0, 2, 1]))  # fmt: skip
    yield made("a transposed, normalised tensor of one place", [numbers((180, 200))], lambda p, x: p.op(
        "Transpose", layer_norm(p, x, [0, 1]), perm=[1, 0]))  # fmt: skip


def padded_transpose(program: RegionProgram, x: str) -> str:
    turned = program.op("Transpose", x, perm=[0, 2, 1])
    return program.op("Pad", turned, pads=[0, 1, 0, 0, 0, 3], mode="constant")


def two_transposed(program: RegionProgram, x: str, y: str) -> Sequence[str]:
    turned = program.op("Transpose", x, perm=[0, 2, 1])
    return program.op("Exp", turned), program.op("Add", program.op("Cast", turned, dtype="int32", to="int32"), y)


def short_rows() -> Iterator[Made]:
    """Rows of which a warp has several, and rows that are few, of which it has one."""
    for dtype, length in itertools.product((*FLOATS, "int32"), (9, 16, 24, 32, 63, 64, 96)):
        if dtype == "int32":
            yield one(f"ReduceMax of short rows of {length} {dtype}", "ReduceMax", numbers((83, length), dtype),
                      axes=[1], keepdims=1)  # fmt: skip
        else:
            yield one(f"Softmax of short rows of {length} {dtype}", "Softmax", numbers((83, length), dtype), axis=1)
    for dynamic in ((), (9, 49)):
        x, scale = numbers((9, 49, 3, 32), "float16"), numbers((3, 1, 1), "float16", 1)
        d = f" {dynamic}" if dynamic else ""
        yield made(f"cosine normalisation of heads{d}", [x, scale], cosine_of_heads, dynamic)
    for rows in (3, 700):
        yield one(f"ArgMax of {rows} short rows", "ArgMax", numbers((rows, 64), "float16"), dtype="int64", axis=1,
                  keepdims=0, select_last_index=1)  # fmt: skip
        yield made(f"layer norm of {rows} short rows", [numbers((rows, 40), "bfloat16")],
                   lambda p, x: layer_norm(p, x, [1]))  # fmt: skip


def cosine_of_heads(program: RegionProgram, x: str, scale: str) -> str:
    heads = program.op("Transpose", x, perm=[0, 2, 1, 3])
    least = program.op("Constant", dtype="float16", value=0.001)
    length = program.op("Max", program.op("ReduceL2", heads, axes=[3], keepdims=1), least)
    return program.op("Mul", program.op("Div", heads, length), scale)


def bias_of_windows(program: RegionProgram, x: str, at: str, table: str) -> str:
    bias = program.op("Transpose", program.op("Gather", table, at, axis=0), perm=[2, 0, 1])
    return program.op("Add", x, bias)


def image_bytes(program: RegionProgram, x: str) -> str:
    half = program.op("Constant", dtype="float16", value=0.5)
    moved = program.op("Abs", program.op("Mul", program.op("Transpose", x, perm=[0, 2, 3, 1]), half))
    return program.op("Cast", program.op("Round", moved), dtype="uint8", to="uint8")


def patches(program: RegionProgram, x: str) -> str:
    split = program.op("Reshape", x, shape=[0, 3, 2, 4, 3, 4])
    return program.op("Reshape", program.op("Transpose", split, perm=[0, 2, 4, 3, 5, 1]), shape=[0, 6, 48])


def upsampled(program: RegionProgram, x: str, lateral: str) -> str:
    wide = program.op("Reshape", program.op("Expand", x, shape=[1, 1, 2, 1, 2]), shape=[0, 6, 12])
    return program.op("Add", wide, lateral)


def layer_norm(program: RegionProgram, x: str, axes: Sequence[int]) -> str:
    mean = program.op("ReduceMean", x, axes=list(axes), keepdims=1)
    moved = program.op("Sub", x, mean)
    variance = program.op("ReduceMean", program.op("Mul", moved, moved), axes=list(axes), keepdims=1)
    epsilon = program.op("Constant", dtype=program.dtypes[x], value=0.25)
    return program.op("Div", moved, program.op("Sqrt", program.op("Add", variance, epsilon)))


def clamp(program: RegionProgram, x: str, axes: Sequence[int] = (0, 1, 2)) -> str:
    """The clamp of T5 in float16: the range is narrower where a value is infinite."""
    some = program.op("ReduceMax", program.op("Cast", program.op("IsInf", x, dtype="bool"), dtype="int32", to="int32"),
                      axes=list(axes), keepdims=0)  # fmt: skip
    low = program.op("Constant", dtype="float16", value=63504)
    high = program.op("Constant", dtype="float16", value="inf")
    is_some = program.op("Cast", some, dtype="bool", to="bool")
    limit = program.op("Where", is_some, low, high, dtype="float16")
    return program.op("Max", program.op("Min", x, limit), program.op("Neg", limit))
