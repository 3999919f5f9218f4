"""Programs of regions at random: operators, broadcasts, maps and reductions, whose results onnxruntime can tell.

Operands hold multiples of a quarter, or integers.  Operators that are not continuous read values only that are
determined to the last bit where each result is rounded to its dtype, through Casts as well: neither sums of many nor
functions are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
from region_drafts import NUMPY, RegionProgram

from onnxfuse.region_operators import HALVES, QUANTIZERS

FLOATS = ("float32", "float16", "bfloat16")
REALS = (*FLOATS, "float64")
INTEGERS = {"int8": 128.0, "uint8": 255.0, "int32": 2.0**31, "int64": 2.0**63}  # the largest number, about
OF_DOUBLE = ("Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Sin", "Cos", "Exp", "Sqrt", "Log", "Reciprocal", "Pow", "steps")
QUANTIZED = ("int8", "uint8")  # no other operator computes with float8
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33)


@dataclass(frozen=True)
class Extent:
    """How many elements the first operand and all values have, and how large these become."""

    least: int = 0  # of the first operand
    most: int = 4096  # of each value; a quarter of them in the first operand
    largest: float = 3000.0  # of values on the way, which 16-bit floats hold


@dataclass(frozen=True)
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: float  # of the absolute value
    exact: bool  # arithmetic of its dtype gives no other value


@dataclass
class Draft:
    """A program as it grows; `rows` are the axes that reductions leave, once there is one."""

    chance: random.Random
    program: RegionProgram = field(default_factory=RegionProgram)
    values: list[Value] = field(default_factory=list)
    extent: Extent = Extent()

    def operand(self, shape: tuple[int, ...], dtype: str, bound: float = 0.0) -> Value:
        """Add an operand of values up to a bound, which is 4 by default, or what 8 bits hold."""
        bound = bound or (self.chance.choice([4.0, 127.0]) if dtype in ("int8", "uint8") else 4.0)
        numbers = np.random.default_rng(self.chance.getrandbits(32))
        if dtype == "bool":
            array = numbers.integers(0, 2, shape).astype(bool)
        elif dtype in INTEGERS:
            array = numbers.integers(0 if dtype == "uint8" else -int(bound), int(bound) + 1, shape).astype(dtype)
        else:
            array = (numbers.integers(-int(4 * bound), int(4 * bound) + 1, shape) / 4).astype(NUMPY[dtype])
        return Value(self.program.operand(array), shape, dtype, bound, True)

    def keep(self, value: Value) -> Value:
        self.values.append(value)
        self.program.scale = max(self.program.scale, value.bound)
        return value

    def add(self, op: str, *inputs: Value, shape: tuple[int, ...] | None = None, dtype: str = "",
            bound: float | None = None, exact: bool | None = None, **attributes: object) -> Value:  # fmt: skip
        found = inputs[0]
        name = self.program.op(op, *(each.name for each in inputs), dtype=dtype, **attributes)
        return self.keep(
            Value(
                name,
                found.shape if shape is None else shape,
                dtype or found.dtype,
                found.bound if bound is None else bound,
                found.exact if exact is None else exact,
            )
        )

    def constant(self, value: float, dtype: str) -> Value:
        name = f"v{sum(len(each[2]) for each in self.program.ops)}"
        self.program.ops.append(["Constant", [], [name], {"value": value}])
        self.program.dtypes[name] = dtype
        return Value(name, (), dtype, abs(value), True)


def _broadcastable(draft: Draft, value: Value) -> Value:
    """Return another value or a new operand that broadcasts with one."""
    chance = draft.chance
    others = [
        each for each in draft.values if each.dtype == value.dtype and _broadcast(each.shape, value.shape) is not None
    ]
    if others and chance.random() < 0.6:
        return chance.choice(others)
    if chance.random() < 0.2 and value.dtype != "bool":
        return draft.constant(chance.choice([0.5, 2.0, -1.25]) if value.dtype in REALS else 3, value.dtype)
    shape = tuple(1 if chance.random() < 0.3 else dim for dim in value.shape)
    return draft.operand(shape[chance.randrange(len(shape) + 1) if chance.random() < 0.3 else 0 :], value.dtype)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(np.broadcast_shapes(a, b))
    except ValueError:
        return None


def binary(draft: Draft, x: Value) -> None:
    y = _broadcastable(draft, x)
    shape = _broadcast(x.shape, y.shape)
    if shape is None or math.prod(shape) > draft.extent.most:
        return
    exact = x.exact and y.exact
    if x.dtype == "bool":
        draft.add(draft.chance.choice(["And", "Or", "Xor", "Equal"]), x, y, shape=shape)
        return
    op = draft.chance.choice(["Add", "Sub", "Mul", "Min", "Max", "compare", "Div", "Mod", "Where", "bits"])
    if x.dtype in ("int8", "uint8") and op in ("Add", "Sub", "Mul"):
        draft.add(op, x, y, shape=shape, bound=INTEGERS[x.dtype])
    elif op in ("Add", "Sub") and x.bound + y.bound < draft.extent.largest:
        draft.add(op, x, y, shape=shape, bound=x.bound + y.bound, exact=exact)
    elif op == "Mul" and x.bound * y.bound < draft.extent.largest:
        draft.add(op, x, y, shape=shape, bound=x.bound * y.bound, exact=exact)
    elif op in ("Min", "Max"):
        draft.add(op, x, y, shape=shape, bound=max(x.bound, y.bound), exact=x.exact and y.exact)
    elif op == "compare" and x.exact and y.exact:
        name = draft.chance.choice(["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
        draft.add(name, x, y, shape=shape, dtype="bool", bound=1, exact=True)
    elif op == "Div" and x.dtype in REALS:
        above = draft.add("Add", draft.add("Abs", y), draft.constant(0.5, x.dtype), bound=y.bound + 0.5)
        draft.add("Div", x, above, shape=shape, bound=2 * x.bound, exact=exact and x.dtype in HALVES)
    elif op == "Mod" and x.exact and y.exact and x.dtype in REALS:
        above = draft.add("Add", draft.add("Abs", y), draft.constant(0.5, x.dtype), bound=y.bound + 0.5)
        draft.add("Mod", x, above, shape=shape, fmod=1)
    elif op in ("Div", "Mod") and x.exact and y.exact:
        above = draft.add("Max", y, draft.constant(2, x.dtype))
        if op == "Mod":
            draft.add(op, x, above, shape=shape, bound=max(2.0, y.bound), fmod=draft.chance.randrange(2))
        else:
            draft.add(op, x, above, shape=shape)
    elif op == "bits" and x.dtype in INTEGERS:
        _bits(draft, x, y, shape)
    elif op == "Where":
        _where(draft, x, y, shape)


def _bits(draft: Draft, x: Value, y: Value, shape: tuple[int, ...]) -> None:
    names = ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]
    op = draft.chance.choice([*names, *["BitShift"] * 3 * (x.dtype == "uint8")])
    if op == "BitShift":
        draft.add(op, x, y, shape=shape, bound=255, direction=draft.chance.choice(["LEFT", "RIGHT"]))
    else:
        draft.add(op, x, y, shape=shape, bound=min(INTEGERS[x.dtype], 2 * max(1.0, x.bound, y.bound)))


def _where(draft: Draft, x: Value, y: Value, shape: tuple[int, ...]) -> None:
    found = [each for each in draft.values if each.dtype == "bool" and _broadcast(each.shape, shape) == shape]
    condition = draft.chance.choice(found) if found else draft.operand(shape[-1:], "bool", 1)
    name = draft.program.op("Where", condition.name, x.name, y.name, dtype=x.dtype)
    draft.keep(Value(name, shape, x.dtype, max(x.bound, y.bound), x.exact and y.exact))


def unary(draft: Draft, x: Value) -> None:
    chance = draft.chance
    if x.dtype == "bool":
        draft.add("Not", x)
        return
    if x.dtype in INTEGERS:
        op = chance.choice(["Neg" if x.dtype != "uint8" else "Identity", "Abs", "Sign", "BitwiseNot"])
        draft.add(op, x, bound=min(INTEGERS[x.dtype], x.bound + 1) if x.dtype != "uint8" else 255)
        return
    op = chance.choice([
        "Neg", "Abs", "Relu", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "HardSigmoid", "HardSwish", "Softplus", "Gelu",
        "Mish", "LeakyRelu", "Elu", "Selu", "Softsign", "Exp", "Sqrt", "Log", "Reciprocal", "Pow", "steps",
    ])  # fmt: skip
    if x.dtype == "float64" and op not in OF_DOUBLE:
        op = "Abs"
    if op in ("Neg", "Abs", "Relu"):
        draft.add(op, x)
    elif op == "steps" and x.exact:
        name = chance.choice(["Floor", "Ceil", "Round", "Sign", "IsNaN", "IsInf"])
        draft.add(name, x, dtype="bool" if name.startswith("Is") else "", bound=x.bound + 1)
    elif op in ("Sqrt", "Log", "Reciprocal"):
        above = draft.add("Add", draft.add("Abs", x), draft.constant(0.5, x.dtype), bound=x.bound + 0.5)
        is_nearest = op == "Sqrt" or (op == "Reciprocal" and x.dtype in HALVES)
        draft.add(op, above, bound=max(2.0, x.bound), exact=x.exact and is_nearest)
    elif op == "Exp" and x.bound <= 6:
        draft.add(op, x, bound=math.exp(x.bound), exact=False)
    elif op == "Pow" and x.bound <= 32:
        draft.add(op, x, draft.constant(2, x.dtype), bound=x.bound**2)
    elif op in ("Sin", "Cos", "Tanh", "Sigmoid", "Erf", "HardSigmoid", "Softsign"):
        if op not in ("Sin", "Cos") or x.bound < 30:
            draft.add(op, x, bound=1.0, exact=False)
    elif op not in ("Exp", "Pow", "steps") and x.bound < 100:
        attributes = {"approximate": chance.choice(["none", "tanh"])} if op == "Gelu" else {}
        draft.add(op, x, bound=2 * x.bound + 1, exact=False, **attributes)


def cast(draft: Draft, x: Value) -> None:
    """Add a Cast of a value that the dtype has; to float64, of integers alone, since 32 bits are not as accurate."""
    target = draft.chance.choice([*FLOATS, *INTEGERS, "bool", "float64"])
    if target == x.dtype or (not x.exact and target not in FLOATS) or (x.dtype in REALS and target == "float64"):
        return
    if x.dtype in REALS and (target == "uint8" or (target == "int8" and x.bound > 127)):
        return
    bound = 1.0 if target == "bool" else 255.0 if target == "uint8" else min(x.bound, INTEGERS.get(target, math.inf))
    draft.add("Cast", x, dtype=target, bound=bound, to=target)


def step(draft: Draft, x: Value) -> None:
    """Add an operator that is not continuous, after Casts; it reads a value that differs from `x` only by rounding."""
    if x.dtype not in REALS or not x.exact:
        return
    third = float(np.asarray(1 / 3, NUMPY[x.dtype]))
    near = draft.add("Mul", draft.add("Mul", x, draft.constant(third, x.dtype)), draft.constant(3.0, x.dtype))
    for _ in range(draft.chance.choice([0, 1, 2])):
        target = draft.chance.choice(["float32", "float32", *FLOATS])
        near = draft.add("Cast", near, dtype=target, to=target) if target != near.dtype else draft.add("Neg", near)
    op = draft.chance.choice(["Floor", "Ceil", "Cast", "Equal", "Greater", "ArgMax"])
    if op == "Cast":
        draft.add(op, near, dtype="int64", to="int64")
    elif op in ("Equal", "Greater"):
        other = draft.add("Cast", x, dtype=near.dtype, to=near.dtype) if near.dtype != x.dtype else x
        draft.add(op, near, other, dtype="bool", bound=1)
    elif op == "ArgMax" and near.shape and near.shape[-1]:
        shape, axis = (*near.shape[:-1], 1), len(near.shape) - 1
        draft.add(op, near, shape=shape, dtype="int64", bound=near.shape[-1], axis=axis, keepdims=1,
                  select_last_index=0)  # fmt: skip
    else:
        draft.add("Floor" if op == "ArgMax" else op, near, bound=near.bound + 1)


def quantizer(draft: Draft, x: Value) -> None:
    """Quantize floats, or dequantize integers, with numbers for all elements or along an axis."""
    if x.dtype not in (*FLOATS, *QUANTIZERS["DequantizeLinear"]) or not x.exact:
        return
    chance = draft.chance
    to = chance.choice(QUANTIZED if x.dtype in FLOATS else FLOATS)
    shape = _with_ones(chance, x.shape) if chance.random() < 0.5 else ()
    scales = np.random.default_rng(chance.getrandbits(32)).choice([0.125, 0.25, 0.1, 0.3, 1.5], shape)
    real, integer = (x.dtype, to) if x.dtype in FLOATS else (to, x.dtype)
    bound = 4.0 if integer == "int32" else 127.0
    scale = Value(draft.program.operand(np.asarray(scales, NUMPY[real])), shape, real, 1.5, True)
    zero = draft.operand(shape, integer, bound) if chance.random() < 0.7 else draft.constant(3, integer)
    if real == to:
        if (x.bound + bound) * 1.5 < draft.extent.largest:
            if chance.random() < 0.5:
                scale, zero = draft.constant(chance.choice([0.25, 1.5]), real), draft.constant(3, integer)
            wide = draft.add("DequantizeLinear", x, scale, zero, dtype=to, bound=(x.bound + bound) * 1.5)
            if integer in QUANTIZED and scale.shape == () and chance.random() < 0.5:
                view(draft, wide)
                moved = draft.values[-1]
                draft.add("QuantizeLinear", moved, scale, zero, dtype=integer, bound=255.0, precision="float32")
        return
    precision = chance.choice(["float32", real])
    draft.add("QuantizeLinear", x, scale, zero, dtype=to, bound=255.0, precision=precision)


def view(draft: Draft, x: Value) -> None:
    chance, shape = draft.chance, x.shape
    op = chance.choice(["Reshape", "Reshape", "Transpose", "Transpose", "Unsqueeze", "Squeeze", "Expand"])
    if op == "Transpose" and len(shape) > 1:
        perm = list(range(len(shape)))
        chance.shuffle(perm)
        draft.add(op, x, shape=tuple(shape[i] for i in perm), perm=perm)
    elif op == "Reshape":
        target, attribute = _reshape(chance, shape)
        if any(dim == 0 and (i >= len(shape) or shape[i] != 0) for i, dim in enumerate(attribute)):
            return  # ONNX has no way to say so
        name = draft.program.op("Reshape", x.name, shape=list(attribute))
        draft.keep(Value(name, target, x.dtype, x.bound, x.exact))
    elif op == "Unsqueeze" and len(shape) < 5:
        axis = chance.randrange(len(shape) + 1)
        draft.add(op, x, shape=(*shape[:axis], 1, *shape[axis:]), axes=[axis])
    elif op == "Squeeze" and 1 in shape:
        axis = shape.index(1)
        draft.add(op, x, shape=(*shape[:axis], *shape[axis + 1 :]), axes=[axis])
    elif op == "Expand":
        target = tuple(chance.choice([2, 3]) if dim == 1 else dim for dim in shape)
        if math.prod(target) <= draft.extent.most:
            name = draft.program.op(
                "Expand", x.name, shape=[t if d == 1 else 1 for t, d in zip(target, shape, strict=True)]
            )
            draft.keep(Value(name, target, x.dtype, x.bound, x.exact))


def _reshape(chance: random.Random, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return another shape with as many elements, and a target from which a Reshape computes it."""
    target: list[int] = []
    for dim in shape:
        divisors = _divisors(dim)
        if divisors and chance.random() < 0.5:
            part = chance.choice(divisors)
            target += [dim // part, part]
        elif target and chance.random() < 0.35:
            target[-1] *= dim
        else:
            target.append(dim)
    attribute = list(target)
    if 0 not in shape and target and chance.random() < 0.5:
        attribute[chance.randrange(len(target))] = -1
    for i, dim in enumerate(target):
        if attribute[i] != -1 and i < len(shape) and shape[i] == dim and chance.random() < 0.7:
            attribute[i] = 0
    return tuple(target), tuple(attribute)


def _divisors(size: int) -> list[int]:
    """Return what divides a size, without 1 and itself, in order."""
    low = [d for d in range(2, math.isqrt(max(0, size)) + 1) if size % d == 0]
    return sorted({*low, *(size // d for d in low)})


def cut(draft: Draft, x: Value) -> None:
    """Add a Slice, Pad, Split, Concat, Gather, GatherElements or Tile."""
    chance, shape = draft.chance, x.shape
    if not shape:
        return
    axis = chance.randrange(len(shape))
    dim, op = shape[axis], chance.choice(["Slice", "Pad", "Split", "Concat", "Gather", "Gather", "Tile", "roll"])

    def resized(size: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    if op == "Slice":
        step = chance.choice([1, 1, 1, 2, -1, -2, 3])
        start, end = chance.choice([0, 1, -2, 3, -(2**63)]), chance.choice([2**63 - 1, dim, -1, 5])
        if step < 0:
            start, end = chance.choice([-1, 2**63 - 1, 3]), chance.choice([-(2**63), 0, 1])
        size = len(range(dim)[slice(*(max(-(2**62), min(each, 2**62)) for each in (start, end)), step)])
        draft.add(op, x, shape=resized(size), axes=[axis], starts=[start], ends=[end], steps=[step])
    elif op == "Pad" and x.dtype != "bool" and dim:
        # onnxruntime does not take "wrap" for every shape ("Unexpected mode of 3"); region_cases.py has it.
        mode = chance.choice(["constant", "constant", "reflect", "edge", "edge"])
        before, after = (chance.randrange(max(1, min(dim, 4))) for _ in range(2))
        pads = [0] * 2 * len(shape)
        pads[axis], pads[axis + len(shape)] = before, after
        value = {"value": 1.5 if x.dtype in REALS else 7} if mode == "constant" else {}
        draft.add(op, x, shape=resized(dim + before + after), bound=max(7.0, x.bound), pads=pads, mode=mode, **value)
    elif op == "Split" and dim > 1:
        part = chance.randrange(1, dim)
        names = draft.program.ops_of("Split", x.name, count=2, axis=axis, sizes=[part, dim - part])
        for name, size in zip(names, (part, dim - part), strict=True):
            draft.keep(Value(name, resized(size), x.dtype, x.bound, x.exact))
    elif op == "Concat":
        _joined(draft, x, axis)
    elif op == "roll" and dim > 2:
        at = chance.randrange(1, dim)
        tail = draft.add("Slice", x, shape=resized(dim - at), axes=[axis], starts=[at], ends=[2**63 - 1], steps=[1])
        head = draft.add("Slice", x, shape=resized(at), axes=[axis], starts=[0], ends=[at], steps=[1])
        draft.add("Concat", tail, head, shape=shape, axis=axis)
    elif op.startswith("Gather") and dim:
        _gathered(draft, x, axis)
    elif op == "Tile" and 2 * math.prod(shape) <= draft.extent.most:
        draft.add(op, x, shape=resized(2 * dim), repeats=[2 if i == axis else 1 for i in range(len(shape))])


def _joined(draft: Draft, x: Value, axis: int) -> None:
    chance, shape = draft.chance, x.shape
    other = draft.operand((*shape[:axis], chance.choice([1, 2, 4, 8]), *shape[axis + 1 :]), x.dtype)
    given = chance.choice([(x, other), (other, x), (x, other, x)])
    target = (*shape[:axis], sum(each.shape[axis] for each in given), *shape[axis + 1 :])
    if math.prod(target) <= draft.extent.most:
        draft.add("Concat", *given, shape=target, bound=max(x.bound, other.bound), axis=axis)


def _gathered(draft: Draft, x: Value, axis: int) -> None:
    shape, is_elements = x.shape, draft.chance.random() < 0.4
    places = (draft.chance.choice([1, 3, 8]),) if is_elements else draft.chance.choice([(), (3,), (2, 4), (5,), (1, 6)])
    target = (*shape[:axis], *places, *shape[axis + 1 :])
    if math.prod(target) > draft.extent.most or len(target) > 5:
        return
    indices = _indices(draft, shape[axis], target if is_elements else places)
    draft.add("GatherElements" if is_elements else "Gather", x, indices, shape=target, axis=axis)


def _indices(draft: Draft, size: int, shape: tuple[int, ...]) -> Value:
    """Return indices of a dim: read or computed, some of them the same along axes on which their place depends."""
    chance, dtype = draft.chance, draft.chance.choice(["int32", "int64"])
    way = chance.choice(["read", "read", "sum", "Where", "Cast", "Concat", "Slice", "earlier"])
    found = _places(draft, size, shape, dtype)
    if way == "sum":
        both = draft.add("Add", found, other := _places(draft, size, shape, dtype), shape=_both(found, other))
        found = draft.add("Mod", both, draft.constant(size, dtype), bound=size, fmod=0)
    elif way == "Where":
        other, condition = _places(draft, size, shape, dtype), draft.operand(_with_ones(chance, shape), "bool", 1)
        target = tuple(np.broadcast_shapes(_both(found, other), condition.shape))
        name = draft.program.op("Where", condition.name, found.name, other.name, dtype=dtype)
        found = draft.keep(Value(name, target, dtype, size, True))
    elif way == "Cast":
        real = draft.operand(found.shape, "float32", min(4.0, size))
        found = draft.add("Cast", real, dtype=dtype, to=dtype)
        low, high = (draft.constant(each, dtype) for each in (-size, size - 1))
        found = draft.add("Max", draft.add("Min", found, high), low, bound=size)
    elif way == "Concat" and found.shape and found.shape[-1] > 1:
        parts = [(*found.shape[:-1], each) for each in (1, found.shape[-1] - 1)]
        found = draft.add("Concat", *(_of_places(draft, size, each, dtype) for each in parts), shape=found.shape,
                          bound=size, axis=len(found.shape) - 1)  # fmt: skip
    elif way == "Slice" and found.shape:
        found = draft.add("Slice", found, axes=[0], starts=[-1], ends=[-(2**63)], steps=[-1])
    elif way == "earlier":
        integers = [each for each in draft.values if each.dtype in ("int32", "int64") and each.exact]
        fitting = [each for each in integers if _broadcast(each.shape, shape) == shape]
        if fitting:
            other = chance.choice(fitting)
            found = draft.add("Mod", other, draft.constant(size, other.dtype), bound=size, fmod=0)
    if found.shape == shape:
        return found
    name = draft.program.op("Expand", found.name, shape=list(shape))
    return draft.keep(Value(name, shape, found.dtype, size, True))


def _places(draft: Draft, size: int, shape: tuple[int, ...], dtype: str) -> Value:
    """Return an operand of indices that broadcast to a shape."""
    return _of_places(draft, size, _with_ones(draft.chance, shape), dtype)


def _of_places(draft: Draft, size: int, shape: tuple[int, ...], dtype: str) -> Value:
    numbers = np.random.default_rng(draft.chance.getrandbits(32))
    return Value(draft.program.operand(numbers.integers(-size, size, shape).astype(dtype)), shape, dtype, size, True)


def _with_ones(chance: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to one, often with fewer elements."""
    found = tuple(1 if chance.random() < 0.4 else dim for dim in shape)
    return found[chance.randrange(len(found) + 1) if chance.random() < 0.2 else 0 :]


def _both(a: Value, b: Value) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(a.shape, b.shape))


def reduce(draft: Draft, x: Value) -> None:
    chance, shape = draft.chance, x.shape
    if not shape or 0 in shape or x.dtype in ("bool", "int8", "uint8"):
        return
    axes = sorted(chance.sample(range(len(shape)), chance.choice([1, 1, min(2, len(shape))])))
    if chance.random() < 0.5:
        axes = [len(shape) - 1]
    kept = tuple(1 if i in axes else dim for i, dim in enumerate(shape))
    keeps = chance.random() < 0.7
    target = kept if keeps else tuple(dim for i, dim in enumerate(shape) if i not in axes)
    count = math.prod(shape[axis] for axis in axes)
    if x.dtype in INTEGERS:
        op = chance.choice(["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL1", "ReduceSumSquare",
                            "ReduceProd"])  # fmt: skip
        size = max(1.0, x.bound)
        bounds = {"ReduceSumSquare": size**2 * count, "ReduceProd": size**count if count <= 40 else math.inf}
        bound = bounds.get(op, size * count)
        if bound < draft.extent.largest:
            draft.add(op, x, shape=target, bound=bound, axes=axes, keepdims=int(keeps))
        return
    op = chance.choice([
        "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
        "ReduceLogSumExp", "ArgMax", "ArgMin", "Softmax", "LogSoftmax", "norm",
    ])  # fmt: skip
    if op in ("ArgMax", "ArgMin"):
        if x.exact:
            axis, last = axes[0], chance.randrange(2)
            kept = tuple(1 if i == axis else dim for i, dim in enumerate(shape))
            target = kept if keeps else (*shape[:axis], *shape[axis + 1 :])
            draft.add(op, x, shape=target, dtype="int64", bound=shape[axis], axis=axis, keepdims=int(keeps),
                      select_last_index=last)  # fmt: skip
    elif op in ("Softmax", "LogSoftmax"):
        draft.add(op, x, bound=1.0 if op == "Softmax" else 2 * x.bound + 10, exact=False, axis=axes[0])
    elif op == "norm":
        mean = draft.add("ReduceMean", x, shape=kept, exact=False, axes=axes, keepdims=1)
        moved = draft.add("Sub", x, mean, bound=2 * x.bound, exact=False)
        if moved.bound < 40:
            square = draft.add("Mul", moved, moved, bound=moved.bound**2, exact=False)
            variance = draft.add("ReduceMean", square, shape=kept, exact=False, axes=axes, keepdims=1)
            root = draft.add("Sqrt", draft.add("Add", variance, draft.constant(0.5, x.dtype)), bound=moved.bound + 1)
            draft.add("Div", moved, root, bound=2 * moved.bound, exact=False)
    else:
        bound = x.bound**2 * count if op == "ReduceSumSquare" else x.bound * count + math.log(count)
        if bound < draft.extent.largest:
            exact = x.exact and op in ("ReduceMax", "ReduceMin")
            draft.add(op, x, shape=target, bound=bound, exact=exact, axes=axes, keepdims=int(keeps))


def _enlarged(shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return a shape of at least so many elements, whose axes are doubled in turns."""
    found, axis = list(shape), 0
    while math.prod(found) < least:
        found[axis % len(found)] *= 2
        axis += 1
    return tuple(found)


def random_program(seed: int, extent: Extent | None = None) -> RegionProgram:
    """Return the program of a seed, with dynamic and, at times, empty dims."""
    chance = random.Random(seed)
    draft = Draft(chance, extent=extent or Extent())
    rank = chance.choice([1, 2, 2, 3, 3, 4])
    shape = tuple(chance.choice(SIZES) for _ in range(rank))
    while math.prod(shape) > draft.extent.most // 4:
        shape = tuple(max(1, dim // 2) for dim in shape)
    shape = _enlarged(shape, draft.extent.least)
    if chance.random() < 0.04:
        shape = (*shape[:-1], 0)
    dtype = chance.choice([*FLOATS, "float16", "float16", "int32", "int64", "int8", "uint8", "float64"])
    draft.keep(draft.operand(shape, dtype))
    for _ in range(chance.choice([2, 4, 6, 9])):
        recent = draft.values[-3:]
        way = chance.choice([binary, binary, unary, unary, cast, step, quantizer, view, view, cut, cut, reduce])
        way(draft, chance.choice([recent[-1], recent[-1], *recent]))
    computed = [each for each in draft.values if each.name.startswith("v")]
    if not computed:
        computed = [draft.add("Identity", draft.values[0])]
    used = {name for each in draft.program.ops for name in each[1]}
    leaves = [each for each in computed if each.name not in used] or computed[-1:]
    draft.program.outputs = [each.name for each in leaves][-4:]
    if chance.random() < 0.2:
        draft.program.outputs.append(chance.choice(computed).name)
        draft.program.outputs = list(dict.fromkeys(draft.program.outputs))
    if chance.random() < 0.6:
        draft.program.dynamic = tuple({dim for dim in shape if chance.random() < 0.6})
    return draft.program
