"""Programs of regions by name: each operator, map and reduction, and regions that real models have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from region_block_cases import interleaved_axes, kept_rows, prevalent_parts
from region_drafts import FLOATS, NUMPY, Made, RegionProgram, made, numbers, one
from region_norm_cases import norms
from region_size_cases import computed_sizes
from region_speed_cases import (
    clamp,
    columns,
    flat_vectors,
    layer_norm,
    repeated_reads,
    row_outputs,
    short_rows,
    stored_reductions,
    transposed_tiles,
)

from onnxfuse.algebra.operators import COMPARISONS
from onnxfuse.ir.dtypes import LARGEST_FLOAT8
from onnxfuse.region_operators import QUANTIZED, SUMS

UNARY = (
    "Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sin", "Cos", "Floor", "Ceil", "Round", "Sign", "Reciprocal",
    "Relu", "Sigmoid", "LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Gelu", "Mish",
    "IsNaN", "IsInf", "Identity",
)  # fmt: skip
OF_DOUBLE = ("Neg", "Abs", "Sqrt", "Exp", "Log", "Tanh", "Sin", "Cos", "Floor", "Ceil", "Sign", "Reciprocal")
POWERS = [twice / 2 for twice in range(-8, 9)]  # which kernels compute by products and roots
END = 2**63 - 1


def signed(program: RegionProgram, x: str) -> list[str]:
    """Return a value and its reciprocal, which tells 0 from -0."""
    return [x, program.op("Reciprocal", x)]


def operators() -> Iterator[Made]:
    for op in UNARY:
        for dtype in FLOATS:
            low = 1 if op in ("Sqrt", "Log", "Reciprocal") else -12
            x = numbers((5, 24), dtype, low=low)
            x[0, :3] = [np.nan, np.inf, -np.inf] if op in ("IsNaN", "IsInf", "Relu", "Abs") else 1
            yield one(f"{op} {dtype}", op, x, dtype="bool" if op.startswith("Is") else "")
    angles = np.geomspace(1e-30, 3e38, 4000, dtype=np.float32) * np.where(np.arange(4000) % 3, 1, -1).astype(np.float32)
    angles[:4] = [-0.0, np.inf, -np.inf, np.nan]
    for op in ("Sin", "Cos"):
        yield one(f"{op} of all sizes", op, angles)
    yield made("Sin and Cos of the same angles", [angles], lambda p, x: [p.op("Sin", x), p.op("Cos", x)])
    for op in OF_DOUBLE:
        low = 1 if op in ("Sqrt", "Log", "Reciprocal") else -12
        yield one(f"{op} float64", op, numbers((3, 7), "float64", low=low))
    for dtype in ("float32", "float16", "float64", "int32", "int64"):
        x, y = numbers((4, 6, 8), dtype, 1), numbers((6, 1), dtype, 2, low=1)
        for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Mod"):
            yield one(f"{op} {dtype}", op, x, y)
        for op in COMPARISONS:
            yield one(f"{op} {dtype}", op, x, np.broadcast_to(x[0], (6, 8)).copy(), dtype="bool")
    for dtype in ("int8", "int32", "int64"):
        x, y = numbers((4, 8), dtype, 1), np.where(numbers((8,), dtype, 2) < 0, -5, 3).astype(dtype)
        for fmod in (0, 1):
            yield one(f"Mod {dtype}, negative divisors, fmod {fmod}", "Mod", x, y, fmod=fmod)
    for op in ("Neg", "Abs", "Sign"):
        yield one(f"{op} int64", op, numbers((9,), "int64"))
    for op in ("Max", "Min"):
        yield made(f"{op} of negative int32", [numbers((4, 6), "int32", i) for i in range(3)],
                   lambda p, x, y, z, op=op: p.op(op, p.op(op, x, p.op("Neg", y)), p.op("Neg", z)))  # fmt: skip
        yield made(f"Reduce{op} of negative int32", [numbers((6, 24), "int32")],
                   lambda p, x, op=op: p.op(f"Reduce{op}", p.op("Neg", x), axes=[0], keepdims=1))  # fmt: skip
    x = numbers((3, 8), "float32", 3, low=1)
    yield one("Pow", "Pow", x, numbers((8,), "float32", 4))
    yield one("Pow of float16", "Pow", x.astype(np.float16), np.array(2, np.float16))
    special = np.array([-np.inf, -1e30, -3, -1, -0.0, 0.0, 1e-30, 0.25, 1, 2, 1e9, np.inf, np.nan], np.float32)
    for exponent in POWERS:
        yield made(f"Pow {exponent}", [special], lambda p, x, e=exponent: signed(p, p.op(
            "Pow", x, p.op("Constant", dtype="float32", value=e))))  # fmt: skip
    for dtype in ("int32", "int64"):
        yield made(f"Pow 3 {dtype}", [numbers((4, 8), dtype)], lambda p, x: p.op(
            "Pow", x, p.op("Constant", dtype=p.dtypes[x], value=3)))  # fmt: skip
    for op in ("And", "Or", "Xor"):
        yield one(op, op, numbers((4, 8), "bool", 1, 0, 1), numbers((8,), "bool", 2, 0, 1))
    yield one("Not", "Not", numbers((33,), "bool", 1, 0, 1))
    for dtype in ("int8", "uint8", "int32", "int64"):
        x, y = (np.random.default_rng(i).integers(-(2**63), 2**63, (4, 33)).astype(dtype) for i in range(2))
        yield made(f"bits of {dtype}", [x, y], lambda p, x, y: [
            p.op("BitwiseNot", x), *(p.op(f"Bitwise{each}", x, y) for each in ("And", "Or", "Xor"))])  # fmt: skip
    by = numbers((33,), "uint8", 1, 0, 9)
    for direction in ("LEFT", "RIGHT"):
        yield one(f"BitShift {direction}", "BitShift", x.astype(np.uint8), by, direction=direction)
    yield made("Where", [numbers((8,), "bool", 1, 0, 1), numbers((4, 8), "float16", 2), numbers((4, 1), "float16", 3)],
               lambda p, c, a, b: p.op("Where", c, a, b, dtype="float16"))  # fmt: skip
    nan = numbers((4, 8), "float16", 5)
    nan[1] = np.nan
    for op in ("Min", "Max"):
        yield one(f"{op} with NaN", op, nan, numbers((4, 8), "float16", 6))
        yield one(f"{op} with NaN behind", op, numbers((4, 8), "float16", 6), nan)
    for source in (*FLOATS, "float64", "int32", "int64", "bool", "uint8", "int8"):
        for target in (*FLOATS, "int32", "int64", "bool", "float64"):
            low = 0 if source in ("bool", "uint8") else -12
            x = numbers((2, 24), source, low=low, high=1 if source == "bool" else 12)
            yield one(f"Cast {source} to {target}", "Cast", x, dtype=target, to=target)
    yield from quantizers()
    large = np.array([-(2**63), -(2**62) + 1, -(2**32), -7, -1, 0, 6, 2**31, 2**32 - 1, 2**40 + 3, 2**63 - 1])
    divisors = large[large != 0]
    yield one("Mod of large int64", "Mod", large[1:, None], divisors[divisors != -1], fmod=0)
    infinite = np.array([1.0, np.inf, -np.inf, np.nan], np.float32)
    yield one("IsInf of +inf", "IsInf", infinite, dtype="bool", detect_negative=0)
    yield one("Gelu by tanh", "Gelu", numbers((64,), "float32"), approximate="tanh")
    yield one("LeakyRelu with alpha", "LeakyRelu", numbers((64,), "float32"), alpha=0.3)
    yield one("HardSigmoid with alpha and beta", "HardSigmoid", numbers((64,), "float16"), alpha=0.1, beta=0.7)


def quantizers() -> Iterator[Made]:
    """Quantizers of ties, special numbers and scales from subnormal to infinite, and all quantized values."""
    extremes = [np.nan, np.inf, -np.inf, -0.0, 3e38, -3e38, 1e-40, 127.5, -128.5, 255.5]
    x = np.concatenate([np.arange(-600, 600) / 4, extremes]).astype(np.float32).reshape(5, -1)
    scales = np.array([[1], [0.25], [0.1], [1e-40], [3e38]], np.float32)
    for dtype in FLOATS:
        for target in QUANTIZED:
            values = np.arange(256, dtype=np.uint8).view(NUMPY[target]).reshape(1, -1)
            zero = np.array([[0], [3], [100], [127], [7]]) * (target not in LARGEST_FLOAT8)
            with np.errstate(over="ignore"):
                operands = x.astype(NUMPY[dtype]), scales.astype(NUMPY[dtype]), zero.astype(NUMPY[target])
            name = f"QuantizeLinear of {dtype} to {target}"
            yield one(name, "QuantizeLinear", *operands, dtype=target, precision="float32")
            yield one(f"{name}, by dtype", "QuantizeLinear", *operands, dtype=target, precision=dtype)
            yield one(f"DequantizeLinear of {target} to {dtype}", "DequantizeLinear", values, *operands[1:],
                      dtype=dtype)  # fmt: skip
    large = np.array([2**31 - 1, -(2**31), 2**24 + 1, 0, 123456789], np.int32)
    yield one("DequantizeLinear of int32", "DequantizeLinear", large, scales[1], np.int32(0), dtype="float32")


def edges() -> Iterator[Made]:
    """Values at which the operators of onnxruntime do what ONNX leaves open, or arithmetic of 32 bits is too narrow."""
    x = np.array([[np.nan, -0.0, 0.0, np.inf, -np.inf, 2, -3, 0]], np.float32)
    yield one("Sign of NaN", "Sign", x)
    for dtype in ("float32", "int32", "int64"):
        for dynamic in ((), (0,)):
            yield one(f"mean of nothing, {dtype} {dynamic}", "ReduceMean", np.zeros((3, 0), dtype), axes=[1],
                      keepdims=1, dynamic=dynamic)  # fmt: skip
    large = np.array([[2**31 - 1] * 40, [-(2**31)] * 40, [*range(2**31 - 40, 2**31)]], np.int32)
    for op in ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceSumSquare"):
        given = large // 2**14 if op == "ReduceSumSquare" else large
        for axis in (0, 1):
            yield one(f"{op} of large int32 over {axis}", op, given, axes=[axis], keepdims=1)
    yield one("ReduceSum of few rows of large int32", "ReduceSum", np.tile(large, (1, 400)), axes=[1], keepdims=1)


def _falling(program: RegionProgram, x: str, y: str) -> list[str]:
    rows = program.op("Slice", program.op("Reshape", x, shape=[-1, 3, 22]), axes=[0], starts=[-2], ends=[3], steps=[1])
    return [program.op("Transpose", rows, perm=[1, 2, 0]), program.op("Add", rows, y)]


def maps() -> Iterator[Made]:
    x = numbers((4, 6, 16), "float16")
    for dynamic in ((), (4,), (4, 6, 16)):
        d = f" {dynamic}" if dynamic else ""
        yield one(f"Transpose{d}", "Transpose", x, dynamic=dynamic, perm=[2, 0, 1])
        yield one(f"Transpose of rows{d}", "Transpose", x, dynamic=dynamic, perm=[1, 0, 2])
        yield one(f"Reshape{d}", "Reshape", x, dynamic=dynamic, shape=[0, 96] if 4 not in dynamic else [0, -1])
        yield one(f"Reshape to one{d}", "Reshape", x, dynamic=dynamic, shape=[-1])
        yield one(f"Unsqueeze{d}", "Unsqueeze", x, dynamic=dynamic, axes=[1, 4])
        yield one(f"Slice{d}", "Slice", x, dynamic=dynamic, axes=[1, 2], starts=[1, 8], ends=[END, -1], steps=[2, 1])
        yield one(f"Slice backwards{d}", "Slice", x, dynamic=dynamic, axes=[0, 2], starts=[-1, END],
                  ends=[-(2**63), 3], steps=[-1, -2])  # fmt: skip
        yield one(f"Concat{d}", "Concat", x, numbers((4, 2, 16), "float16", 1), x, dynamic=dynamic, axis=1)
        yield one(f"Concat of the last axis{d}", "Concat", x, numbers((4, 6, 3), "float16", 1), dynamic=dynamic, axis=2)
        for mode in ("constant", "reflect", "edge", "wrap"):
            value = {"value": -2.0} if mode == "constant" else {}
            yield one(f"Pad {mode}{d}", "Pad", x, dynamic=dynamic, pads=[0, 2, 3, 1, 1, 0], mode=mode, **value)
        yield one(f"Gather{d}", "Gather", x, np.array([[0, -1], [5, 2]]), dynamic=dynamic, axis=1)
        yield one(f"Gather of rows{d}", "Gather", x, np.array([3, 0], np.int32), dynamic=dynamic, axis=0)
        at = np.random.default_rng(5).integers(-6, 6, (3, 8, 16))
        yield one(f"GatherElements{d}", "GatherElements", x, at, dynamic=dynamic, axis=1)
        yield one(f"Tile{d}", "Tile", x, dynamic=dynamic, repeats=[1, 2, 3])
        yield made(f"Tile backwards{d}", [x], lambda p, a: p.op(
            "Slice", p.op("Tile", a, repeats=[2, 1, 1]), axes=[0], starts=[-1], ends=[-(2**63)], steps=[-1]),
            dynamic)  # fmt: skip
        yield one(f"Expand{d}", "Expand", x[:, :1], dynamic=dynamic, shape=[1, 5, 1])
    for shape in ((2, 64, 96), (32, 20), (3, 16, 16), (40, 6, 24)):
        perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        yield one(f"Transpose of tiles {shape}", "Transpose", numbers(shape, "float16"), perm=perm)
        yield one(f"Transpose of tiles {shape}, dynamic", "Transpose", numbers(shape), dynamic=shape[:1], perm=perm)
    # The slice has 5 - n elements of the dynamic axis, a size of which no sign can be proved.
    yield made("Slice whose size falls with the axis, in two orders", [numbers((3, 33, 2)), numbers((22,), seed=1)],
               _falling, (3,))  # fmt: skip
    yield one("Transpose of all", "Transpose", numbers((16, 8, 32), "float16"), perm=[2, 1, 0])
    yield made("Split", [x], lambda p, a: p.ops_of("Split", a, count=3, axis=2, sizes=[8, 6, 2]))
    yield one("Squeeze", "Squeeze", x[:1], axes=[0])
    yield made("Slice of padding alone", [x, x[:, :2]], lambda p, a, b: p.op("Slice", p.op(
        "Pad", p.op("Concat", a, b, axis=1), pads=[0, 3, 0, 0, 2, 0], mode="constant", value=1.5),
        axes=[1], starts=[0], ends=[2], steps=[1]))  # fmt: skip
    yield one("Pad that cuts", "Pad", x, pads=[0, -1, 2, 0, -2, -8], mode="constant", value=1.0)
    yield one("Gather of a scalar place", "Gather", x, np.array(-2), axis=2)
    yield one("Transpose of bytes", "Transpose", numbers((16, 32), "bool", 1, 0, 1), perm=[1, 0])
    yield one("Reshape of int64", "Reshape", numbers((4, 8), "int64"), shape=[8, 4])
    yield one("Slice of nothing", "Slice", x, axes=[0], starts=[3], ends=[1], steps=[1])
    y = numbers((5, 2, 3), "int64")
    yield made("rows of which two dynamic dims make whole vectors", [y, numbers((1, 2, 3), "int64")],
               lambda p, a, b: [p.op("Reshape", a, shape=[30]), p.op("Add", a, b)], dynamic=(2, 3))  # fmt: skip


def reductions() -> Iterator[Made]:
    for op in (*SUMS, "Softmax", "LogSoftmax", "ArgMax", "ArgMin"):
        for axes in ([2], [1], [0, 2], [0, 1, 2], [0, 1]):
            for dtype in ("float32", "float16"):
                x = numbers((3, 40, 16), dtype, low=1 if op == "ReduceProd" else -12, high=5)
                if op in SUMS:
                    keeps = len(axes) % 2
                    yield one(f"{op} {axes} {dtype}", op, x, axes=axes, keepdims=keeps)
                elif len(axes) == 1 and op in ("Softmax", "LogSoftmax"):
                    yield one(f"{op} {axes} {dtype}", op, x, axis=axes[0])
                elif len(axes) == 1:
                    for last in (0, 1):
                        yield one(f"{op} {axes} {dtype} {last}", op, x, dtype="int64", axis=axes[0], keepdims=last,
                                  select_last_index=last)  # fmt: skip
    for dtype in ("int32", "int64", "float64"):
        for op in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"):
            if (op, dtype) not in (("ReduceMean", "int64"), ("ReduceProd", "float64")):
                yield one(f"{op} {dtype}", op, numbers((4, 9, 6), dtype, low=1, high=3), axes=[1], keepdims=1)
    x = numbers((5, 300), "float16")
    x[1, 7], x[2] = np.nan, -np.inf
    yield one("Softmax with NaN", "Softmax", x, axis=1)
    for length in (1, 7, 96, 1000, 2050):
        yield one(f"Softmax of {length}", "Softmax", numbers((4, length), "float16"), axis=1)
        yield one(f"Softmax of {length}, dynamic", "Softmax", numbers((4, length), "float16"), dynamic=(4, length),
                  axis=1)  # fmt: skip


def windows(program: RegionProgram, x: str) -> str:
    """A roll, and windows of 7 x 7, as in Swin."""
    for axis in (1, 2):
        tail = program.op("Slice", x, axes=[axis], starts=[3], ends=[END], steps=[1])
        head = program.op("Slice", x, axes=[axis], starts=[0], ends=[3], steps=[1])
        x = program.op("Concat", tail, head, axis=axis)
    split = program.op("Reshape", x, shape=[0, 2, 7, 2, 7, 24])
    return program.op("Reshape", program.op("Transpose", split, perm=[0, 1, 3, 2, 4, 5]), shape=[-1, 49, 24])


def modulated(program: RegionProgram, x: str, scale: str, shift: str) -> str:
    """The adaptive norm of DiT."""
    norm = layer_norm(program, x, [2])
    unsqueezed = [program.op("Unsqueeze", each, axes=[1]) for each in (scale, shift)]
    above = program.op("Add", unsqueezed[0], program.op("Constant", dtype="float16", value=1))
    return program.op("Add", program.op("Mul", norm, above), unsqueezed[1])


def losses(program: RegionProgram, x: str, labels: str) -> Sequence[str]:
    """Log-probabilities, the index of the largest, and the largest probability."""
    logs = program.op("LogSoftmax", x, axis=1)
    best = program.op("ArgMax", x, dtype="int64", axis=1, keepdims=0, select_last_index=0)
    top = program.op("ReduceMax", program.op("Exp", logs), axes=[1], keepdims=0)
    return logs, best, top, program.op("Equal", best, labels, dtype="bool")


def cosine(program: RegionProgram, x: str) -> str:
    """Rows of unit length, heads in front."""
    heads = program.op("Transpose", program.op("Reshape", x, shape=[0, 0, 3, 16]), perm=[0, 2, 1, 3])
    length = program.op("ReduceL2", heads, axes=[3], keepdims=1)
    least = program.op("Constant", dtype="float16", value=0.001)
    return program.op("Div", heads, program.op("Max", length, least))


def rotated(program: RegionProgram, x: str, cos: str, sin: str) -> str:
    """Rotary embedding by halves."""
    low, high = program.ops_of("Split", x, count=2, axis=2, sizes=[8, 8])
    turned = program.op("Concat", program.op("Neg", high), low, axis=2)
    return program.op("Add", program.op("Mul", x, cos), program.op("Mul", turned, sin))


def masked_softmax(program: RegionProgram, x: str, mask: str) -> str:
    """The probabilities of an attention, which read the scores twice."""
    scores = program.op("Mul", x, program.op("Constant", dtype="float16", value=0.125))
    return program.op("Mul", program.op("Softmax", program.op("Add", scores, mask), axis=3), scores)


def chained_reductions(program: RegionProgram, x: str) -> str:
    """Reductions over the middle axis in a chain: each result is subtracted from x before the next reduction."""
    for op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1", "ReduceLogSumExp", "ReduceMean"):
        x = program.op("Sub", x, program.op(op, x, axes=[1], keepdims=1))
    return x


def models() -> Iterator[Made]:
    scores, mask = numbers((2, 3, 5, 40), "float16"), numbers((2, 1, 5, 40), "float16", 1)
    yield made("a masked softmax, dynamic", [scores, mask], masked_softmax, dynamic=(2, 3, 5, 40))
    yield made("a chain of reductions, dynamic", [numbers((2, 40, 3))], chained_reductions, dynamic=(2, 40, 3))
    rows = numbers((3, 256), "float16")
    yield made("a softmax of sines", [rows], lambda p, x: p.op("Softmax", p.op("Sin", x), axis=1))
    image = numbers((2, 14, 14, 24), "float16")
    yield made("windows of Swin", [image], windows)
    yield made("windows of Swin, dynamic", [image], windows, dynamic=(2,))
    yield made("a clamp of T5", [numbers((2, 8, 16), "float16")], clamp)
    infinite = numbers((2, 8, 16), "float16")
    infinite[1, 2, 3] = np.inf
    yield made("a clamp of T5 that clamps", [infinite], clamp)
    x, vectors = numbers((2, 10, 64), "float16"), numbers((2, 64), "float16", 1)
    yield made("modulate of DiT", [x, vectors, vectors], modulated)
    yield made("modulate of DiT, dynamic", [x, vectors, vectors], modulated, dynamic=(2, 10))
    logits, labels = numbers((6, 90), "float32"), numbers((6,), "int64", 1, 0, 89)
    yield made("a loss", [logits, labels], losses)
    yield made("a loss, dynamic", [logits, labels], losses, dynamic=(6, 90))
    yield made("cosine normalisation", [numbers((2, 5, 48), "float16")], cosine)
    yield made("rotary embedding", [numbers((3, 5, 16), "float16"), *(numbers((5, 16), "float16", i) for i in (1, 2))],
               rotated, dynamic=(5,))  # fmt: skip
    for axes in ([2], [1], [1, 2]):
        yield made(
            f"layer norm {axes}", [numbers((3, 24, 32), "float32")], lambda p, x, axes=axes: layer_norm(p, x, axes)
        )
    yield made("outputs of several shapes", [numbers((4, 6), "float16"), numbers((6, 8), "int32")],
               lambda p, a, b: (p.op("Exp", a), p.op("Neg", b), p.op("Transpose", a, perm=[1, 0])))  # fmt: skip


def all_cases() -> dict[str, RegionProgram]:
    """Return all programs by name."""
    of_plans = (stored_reductions, columns, flat_vectors, short_rows, transposed_tiles, row_outputs, repeated_reads,
                kept_rows, interleaved_axes, prevalent_parts, norms, computed_sizes)  # fmt: skip
    return dict(each for kind in (operators, edges, maps, reductions, *of_plans, models) for each in kind())
