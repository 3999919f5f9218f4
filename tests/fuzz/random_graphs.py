"""Graphs of elementwise operators, views, reductions, products, masks, shape arithmetic, Ifs, Loops and Scans."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import onnx
from drafts import FLOATS, Draft, Unavailable, Value
from onnx import TensorProto, helper

UNARY = ["Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "Softplus", "Softsign", "Sin", "Cos", "Identity", "Elu",
         "Selu", "HardSigmoid", "LeakyRelu", "Floor", "Sign", "Exp"]  # fmt: skip
BOOL, INT64, INT32, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
OLDEST, NEWEST, FIRST_WITH_BFLOAT16 = 7, 24, 13  # opsets
MAX_ELEMENTS = 4096
INT64_MAX, INT32_MAX = 2**63 - 1, 2**31 - 1


def random_graph(random: Random, most_nodes: int = 25) -> Draft:
    """Return a graph over one to three inputs, whose last values and some others are outputs."""
    draft, values = start(random)
    return finish(Writer(draft, values), random.randint(3, most_nodes))


def start(random: Random, empty: float = 0.15) -> tuple[Draft, list[Value]]:
    """Return a draft of a random opset and its inputs; `empty` is the weight of the size 0 among those of dims."""
    opset = random.randint(OLDEST, NEWEST)
    draft = Draft(random, opset)
    dtype = random.choices(FLOATS, (7, 2, 1 if opset >= FIRST_WITH_BFLOAT16 else 0))[0]
    words: list[int | str] = ["batch", "seq", "extra", 2, 3, 4, 1, 8, 0]
    weights = (4, 4, 2, 2, 2, 2, 2, 3, empty)
    values = [
        draft.input(dtype, random.choices(words, weights, k=random.choice([0, 1, 2, 2, 3, 3, 4])))
        for _ in range(random.randint(1, 3))
    ]
    if random.random() < 0.3:
        values.append(draft.input(random.choice([INT64, BOOL, INT32]), random.choices(words, weights, k=2)))
    return draft, values


def finish(writer: Writer, steps: int) -> Draft:
    """Write operators, and make the last values and some others outputs."""
    draft, first = writer.draft, writer.values[0]
    for _ in range(steps):
        writer.step()
    made = {name for node in draft.nodes for name in node.output}
    chosen = [*(v.name for v in writer.values[-3:]), draft.random.choice(writer.values).name, *draft.outputs]
    found = [name for name in dict.fromkeys(chosen) if name in made]
    draft.outputs = found or [draft.node("Identity", [first.name])]
    return draft


class Writer:
    """Writes nodes that read earlier values, and knows each value's shape at the first sizes of the symbols."""

    def __init__(self, draft: Draft, values: list[Value]) -> None:
        self.draft, self.values, self.random = draft, list(values), draft.random

    def step(self) -> None:
        """Write one more operator, or a few that belong together; nothing where the opset has none of them."""
        weights = [2 if step in (self.view, self.binary, self.unary) else 1 for step in self.steps]
        written, values, outputs = len(self.draft.nodes), list(self.values), list(self.draft.outputs)
        try:
            self.random.choices(self.steps, weights)[0]()
        except Unavailable:
            del self.draft.nodes[written:]
            self.values, self.draft.outputs = values, outputs

    @property
    def steps(self) -> list:
        return [self.unary, self.binary, self.view, self.cast, self.where, self.slice, self.concat, self.reduce,
                self.softmax, self.product, self.norm, self.shape_target, self.expand, self.gather, self.split,
                self.mask, self.numbers, self.constants, self.branch, self.loop, self.scan]  # fmt: skip

    def add(self, name: str, dtype: int, shape: tuple[int, ...]) -> Value:
        value = Value(name, dtype, tuple(shape))
        if math.prod(shape) <= MAX_ELEMENTS:
            self.values.append(value)
        return value

    def any(self, *dtypes: int, rank: int = 0) -> Value | None:
        found = [v for v in self.values if v.dtype in (dtypes or FLOATS) and len(v.shape) >= rank]
        return self.random.choice(found[-6:] if self.random.random() < 0.7 else found) if found else None

    def array(self, shape: tuple[int, ...], dtype: int) -> str:
        numbers = np.random.default_rng(self.random.randrange(2**32))
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        values = numbers.standard_normal(shape) if self.random.random() < 0.7 else np.full(shape, self.random.choice(
            [0.0, 1.0, -1.0, 0.5, 2.0, 1e-5, 0.044715, 1.702, 0.70710678, 3.0]))  # fmt: skip
        return self.draft.constant(np.asarray(values).astype(kind))

    def unary(self) -> None:
        if x := self.any():
            op = self.random.choice(UNARY)
            name = x.name
            if self.random.random() < 0.15:
                op, name = self.random.choice(["Sqrt", "Log", "Reciprocal"]), self.draft.node("Abs", [name])
                name = self.draft.node(
                    "Add", [name, self.draft.constant(np.ones((), helper.tensor_dtype_to_np_dtype(x.dtype)))]
                )
            self.add(self.draft.node(op, [name]), x.dtype, x.shape)

    def binary(self) -> None:
        x = self.any()
        if not x:
            return
        y = self.any(x.dtype)
        op = self.random.choice(["Add", "Mul", "Sub", "Div", "Max", "Min", "Add", "Mul", "Pow"])
        shape = broadcast(x.shape, y.shape) if y else None
        if op in ("Div", "Pow") or shape is None or self.random.random() < 0.5:
            small = [self.random.choice([d, 1]) for d in x.shape][self.random.randint(0, len(x.shape)) :]
            if op == "Pow":
                other = self.draft.constant(
                    np.array(self.random.choice([1.0, 2.0, 3.0]), helper.tensor_dtype_to_np_dtype(x.dtype))
                )
            else:
                other = self.array(tuple(small), x.dtype)
            shape = x.shape
        else:
            assert y
            other = y.name
        names = [x.name, other]
        if op in ("Sub", "Add", "Mul") and self.random.random() < 0.4:
            names.reverse()
        self.add(self.draft.node(op, names), x.dtype, shape)

    def view(self) -> None:
        x = self.any(*FLOATS, BOOL, INT64)
        if not x:
            return
        way, rank = self.random.randrange(6), len(x.shape)
        draft, random = self.draft, self.random
        if way == 0 and rank:
            perm = random.sample(range(rank), rank)
            name = draft.node("Transpose", [x.name], perm=perm) if random.random() < 0.8 else None
            shape = tuple(x.shape[p] for p in perm) if name else x.shape[::-1]
            self.add(name or draft.node("Transpose", [x.name]), x.dtype, shape)
        elif way == 1:
            shape = self._factors(x.shape)
            target = list(shape)
            if target and random.random() < 0.5 and 0 not in shape:
                target[random.randrange(len(target))] = -1
            elif random.random() < 0.4:
                target = [
                    0 if i < rank and x.shape[i] == d and random.random() < 0.6 else d for i, d in enumerate(target)
                ]
            if 0 in x.shape and -1 not in target:
                target, shape = [0] * rank, x.shape
            self.add(draft.node("Reshape", [x.name, draft.integers(*target)]), x.dtype, shape)
        elif way == 2:
            axis = random.randint(-rank - 1, rank)
            at = axis if axis >= 0 else axis + rank + 1
            self.add(self._axes("Unsqueeze", x.name, [axis]), x.dtype, (*x.shape[:at], 1, *x.shape[at:]))
        elif way == 3 and 1 in x.shape:
            at = x.shape.index(1)
            axis = at if random.random() < 0.5 else at - rank
            self.add(self._axes("Squeeze", x.name, [axis]), x.dtype, (*x.shape[:at], *x.shape[at + 1 :]))
        elif way == 4:
            axis = random.randint(-rank, rank) if rank else 0
            at = axis if axis >= 0 else axis + rank
            shape = (math.prod(x.shape[:at]), math.prod(x.shape[at:]))
            self.add(draft.node("Flatten", [x.name], axis=axis), x.dtype, shape)
        elif rank:
            repeats = [random.choice([1, 1, 2, 3]) for _ in x.shape]
            self.add(
                draft.node("Tile", [x.name, draft.integers(*repeats)]),
                x.dtype,
                tuple(map(math.prod, zip(x.shape, repeats, strict=True))),
            )

    def _axes(self, op: str, name: str, axes: list[int]) -> str:
        if self.draft.opset < 11 and min(axes) < 0:
            raise Unavailable
        if self.draft.opset < 13:
            return self.draft.node(op, [name], axes=axes)
        return self.draft.node(op, [name, self.draft.integers(*axes)])

    def _factors(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        total, found = math.prod(shape), []
        if not total:
            return shape
        for factor in (2, 3, 4, 2, 5):
            if total % factor == 0 and self.random.random() < 0.4:
                found.append(factor)
                total //= factor
        found.append(total)
        self.random.shuffle(found)
        return tuple(found)

    def cast(self) -> None:
        if x := self.any(*FLOATS, BOOL, INT64, INT32):
            dtype = self.random.choice([*FLOATS, FLOAT, FLOAT, BOOL if x.dtype in (BOOL, INT64) else FLOAT])
            self.add(self.draft.node("Cast", [x.name], to=dtype), dtype, x.shape)

    def where(self) -> None:
        x = self.any()
        if not x or not x.shape:
            return
        kind = helper.tensor_dtype_to_np_dtype(x.dtype)
        limit = self.draft.constant(np.array(0.25, kind))
        condition = self.draft.node(self.random.choice(["Greater", "Less"]), [x.name, limit])
        if self.random.random() < 0.3:
            condition = self.draft.node("Not", [condition])
        self.add(condition, BOOL, x.shape)
        other = self.draft.constant(np.array(self.random.choice([0.0, -10000.0, float("-inf"), 1.0]), kind))
        names = [x.name, other] if self.random.random() < 0.5 else [other, x.name]
        self.add(self.draft.node("Where", [condition, *names]), x.dtype, x.shape)

    def slice(self) -> None:
        x = self.any(*FLOATS, BOOL, INT64, rank=1)
        if not x:
            return
        axis = self.random.randrange(len(x.shape))
        size = x.shape[axis]
        start, step = self.random.randint(-size - 1, size), self.random.choice([1, 1, 1, 2, -1, -2])
        end = self.random.choice([size, INT64_MAX, INT32_MAX, -1, 1, 2, -INT64_MAX, -size - 1])
        count = len(range(size)[slice(start, None if end < -size else end, step)]) if step > 0 or end < -size else len(
            range(size)[slice(start, end, step)])  # fmt: skip
        named = axis - len(x.shape) if self.random.random() < 0.5 else axis
        if step > 0 and end < -size:
            count = 0
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        self.add(self._slice(x, start, end, named, step), x.dtype, shape)

    def _slice(self, x: Value, start: int, end: int, axis: int, step: int = 1) -> str:
        if self.draft.opset >= 10:
            return self.draft.node("Slice", [x.name, *(self.draft.integers(n) for n in (start, end, axis, step))])
        if step != 1:
            raise Unavailable
        return self.draft.node("Slice", [x.name], starts=[start], ends=[end], axes=[axis])

    def concat(self) -> None:
        x = self.any(*FLOATS, INT64, rank=1)
        if not x:
            return
        axis = self.random.randrange(len(x.shape))
        rest = (*x.shape[:axis], *x.shape[axis + 1 :])
        alike = [v for v in self.values if v.dtype == x.dtype and len(v.shape) == len(x.shape)]
        others = [v for v in alike if (*v.shape[:axis], *v.shape[axis + 1 :]) == rest]
        chosen = [x, *self.random.choices(others, k=self.random.randint(0, 2))]
        if self.random.random() < 0.3:
            # A slice, not a constant: onnxruntime does not check that an empty one has the other sizes of x.
            count = min(self.random.choice([0, 1, 2]), x.shape[axis])
            part = (*x.shape[:axis], count, *x.shape[axis + 1 :])
            chosen.append(Value(self._slice(x, 0, count, axis), x.dtype, part))
        self.random.shuffle(chosen)
        shape = (*x.shape[:axis], sum(v.shape[axis] for v in chosen), *x.shape[axis + 1 :])
        self.add(self.draft.node("Concat", [v.name for v in chosen], axis=axis), x.dtype, shape)

    def reduce(self) -> None:
        x = self.any(rank=1)
        if not x or 0 in x.shape:
            return
        op = self.random.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"])
        axes = sorted(self.random.sample(range(len(x.shape)), self.random.randint(1, len(x.shape))))
        keep = self.random.choice([0, 1])
        named = [a - len(x.shape) if self.random.random() < 0.5 else a for a in axes]
        if self.draft.opset >= 18 or (op == "ReduceSum" and self.draft.opset >= 13):
            name = self.draft.node(op, [x.name, self.draft.integers(*named)], keepdims=keep)
        else:
            name = self.draft.node(op, [x.name], axes=named, keepdims=keep)
        shape = [1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes]
        self.add(name, x.dtype, tuple(shape))

    def softmax(self) -> None:
        if x := self.any(rank=1):
            axis = self.random.choice([-1, -1, 0, len(x.shape) - 1])
            self.add(self.draft.node("Softmax", [x.name], axis=axis), x.dtype, x.shape)

    def product(self) -> None:
        x = self.any(rank=2)
        if not x:
            return
        columns = self.random.choice([1, 2, 4, 8])
        w = self.array((x.shape[-1], columns), x.dtype)
        shape = (*x.shape[:-1], columns)
        if len(x.shape) == 2 and self.random.random() < 0.4:
            b = [self.array(self.random.choice([(columns,), (1, columns), (1,), ()]), x.dtype)]
            alpha, beta = self.random.choice([1.0, 1.0, 0.5, 0.0]), self.random.choice([1.0, 1.0, 2.0, 0.0])
            name = self.draft.node("Gemm", [x.name, w, *b], alpha=alpha, beta=beta)
        elif self.random.random() < 0.3:
            name = self.draft.node("MatMul", [x.name, self.draft.node("Transpose", [x.name], perm=[
                *range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2])])  # fmt: skip
            shape = (*x.shape[:-1], x.shape[-2])
        else:
            name = self.draft.node("MatMul", [x.name, w])
        self.add(name, x.dtype, shape)

    def norm(self) -> None:
        x = self.any(rank=1)
        if not x or self.draft.opset < 17:
            return
        d = x.shape[-1:]
        names = [x.name, self.array(d, x.dtype), self.array(d, x.dtype)]
        name = self.draft.node("LayerNormalization", names[: self.random.randint(2, 3)], axis=-1, epsilon=1e-5)
        self.add(name, x.dtype, x.shape)

    def _size(self, x: Value, axis: int) -> str:
        shape = self.draft.node("Shape", [x.name])
        at = self.draft.integers(axis) if self.random.random() < 0.7 else self.draft.constant(np.array(axis, np.int64))
        size = self.draft.node("Gather", [shape, at], axis=0)
        return self.draft.node("Reshape", [size, self.draft.integers(-1)])

    def shape_target(self) -> None:
        """Reshape to a target that is computed from the sizes of the value."""
        x = self.any(rank=1)
        if not x:
            return
        rank = len(x.shape)
        cut = self.random.randrange(rank)
        way = self.random.randrange(4)
        if way == 0:  # merge all axes from `cut` on
            parts = [self._size(x, i) for i in range(cut)]
            rest = self._size(x, cut)
            for i in range(cut + 1, rank):
                rest = self.draft.node("Mul", [rest, self._size(x, i)])
            shape = (*x.shape[:cut], math.prod(x.shape[cut:]))
            target = [*parts, rest]
        elif way == 1 and x.shape[cut] % 2 == 0:  # split one axis in two
            half = self.draft.node("Div", [self._size(x, cut), self.draft.integers(2)])
            target = [
                *(self._size(x, i) for i in range(cut)),
                self.draft.integers(2),
                half,
                *(self._size(x, i) for i in range(cut + 1, rank)),
            ]
            shape = (*x.shape[:cut], 2, x.shape[cut] // 2, *x.shape[cut + 1 :])
        elif way == 2:  # by way of floats, as exporters round sizes
            f = self.draft.node("Cast", [self._size(x, cut)], to=FLOAT)
            f = self.draft.node(
                "Floor",
                [
                    self.draft.node(
                        "Mul", [f, self.draft.constant(np.array(self.random.choice([1.0, 0.5, 0.3]), np.float32))]
                    )
                ],
            )
            n = self.draft.node("Cast", [f], to=INT64)
            self.add(n, INT64, (1,))
            return
        else:
            target = [self._size(x, i) for i in range(rank)]
            shape = x.shape
        name = self.draft.node("Concat", target, axis=0)
        if self.random.random() < 0.2:
            self.add(name, INT64, (len(shape),))
        self.add(self.draft.node("Reshape", [x.name, name]), x.dtype, shape)

    def expand(self) -> None:
        x = self.any(*FLOATS, BOOL)
        if not x:
            return
        y = self.any(*FLOATS)
        shape = broadcast(x.shape, y.shape) if y else None
        if y and shape is not None and self.random.random() < 0.7:
            target = self.draft.node("Shape", [y.name])
        else:
            shape = (self.random.choice([1, 2]), *x.shape)
            target = self.draft.integers(*[d if self.random.random() < 0.6 else 1 for d in shape])
            shape = None
        name = self.draft.node("Expand", [x.name, target])
        if shape is not None:
            self.add(name, x.dtype, shape)
        else:
            self.draft.outputs.append(name)

    def gather(self) -> None:
        x = self.any(*FLOATS, INT64, rank=1)
        if not x or 0 in x.shape:
            return
        axis = self.random.randrange(len(x.shape))
        size = x.shape[axis]
        shape = self.random.choice([(), (1,), (2,), (2, 2)])
        at = np.array([self.random.randint(-size, size - 1) for _ in range(math.prod(shape))], np.int64).reshape(shape)
        name = self.draft.node("Gather", [x.name, self.draft.constant(at)], axis=axis)
        self.add(name, x.dtype, (*x.shape[:axis], *shape, *x.shape[axis + 1 :]))

    def split(self) -> None:
        x = self.any(rank=1)
        if not x:
            return
        axis = self.random.randrange(len(x.shape))
        size = x.shape[axis]
        if size < 2:
            return
        first = self.random.randint(1, size - 1)
        if self.draft.opset < 13:
            name = self.draft.node("Split", [x.name], 2, axis=axis, split=[first, size - first])
        else:
            name = self.draft.node("Split", [x.name, self.draft.integers(first, size - first)], 2, axis=axis)
        for output, part in zip(self.draft.nodes[-1].output, (first, size - first), strict=True):
            self.add(output, x.dtype, (*x.shape[:axis], part, *x.shape[axis + 1 :]))
        assert name

    def mask(self) -> None:
        """Mask scores: by positions, by a triangle, or by a padding mask, then perhaps a softmax."""
        x = self.any(rank=2)
        if not x:
            return
        rows, columns = (self._size(x, len(x.shape) - 2), self._size(x, len(x.shape) - 1))
        kind = helper.tensor_dtype_to_np_dtype(x.dtype)
        way = self.random.randrange(3)
        if way == 0 and self.draft.opset >= 14:
            ones = self.draft.node("ConstantOfShape", [self.draft.node("Concat", [rows, columns], axis=0)],
                                   value=helper.make_tensor("one", FLOAT, [1], [1.0]))  # fmt: skip
            kept = self.draft.node("Trilu", [ones], upper=self.random.choice([0, 1]))
            kept = self.draft.node("Cast", [kept], to=BOOL)
        else:
            zero, one = (self.draft.constant(np.array(n, np.int64)) for n in (0, 1))
            scalars = [self._axes("Squeeze", name, [0]) for name in (rows, columns)]
            at = [self.draft.node("Range", [zero, name, one]) for name in scalars]
            op = self.random.choice(
                ["Less", "Greater", "LessOrEqual"] if self.draft.opset >= 12 else ["Less", "Greater"]
            )
            kept = self.draft.node(op, [self._axes("Unsqueeze", at[0], [1]), self._axes("Unsqueeze", at[1], [0])])
        self.add(kept, BOOL, x.shape[-2:])
        low = self.draft.constant(np.array(self.random.choice([-1e4, float("-inf"), -65504.0, -10.0]), kind))
        if self.random.random() < 0.5:
            name = self.draft.node("Where", [kept, x.name, low])
        else:
            zero = self.draft.constant(np.zeros((), kind))
            name = self.draft.node("Add", [x.name, self.draft.node("Where", [kept, zero, low])])
        self.add(self.draft.node("Softmax", [name], axis=-1) if self.random.random() < 0.6 else name, x.dtype, x.shape)

    def numbers(self) -> None:
        """Integer arithmetic over sizes."""
        x, y = self.any(*FLOATS, INT64, rank=1), self.any(*FLOATS, INT64, rank=1)
        if not x or not y:
            return
        a, b = self._size(x, self.random.randrange(len(x.shape))), self._size(y, self.random.randrange(len(y.shape)))
        op = self.random.choice(["Add", "Mul", "Sub", "Max", "Equal", "Less", "Div", "Mod"])
        if op == "Max" and self.draft.opset < 12:
            op = "Add"
        if op in ("Div", "Mod"):
            b = self.draft.integers(self.random.choice([2, 3, -2]))
        name = self.draft.node(op, [a, b])
        if op in ("Equal", "Less"):
            self.add(name, BOOL, (1,))
        else:
            self.add(name, INT64, (1,))

    def constants(self) -> None:
        """Compute something of constants alone, which folding evaluates."""
        shape = tuple(self.random.choice([0, 1, 2, 3]) for _ in range(self.random.randint(0, 3)))
        dtype = self.random.choice([FLOAT, FLOAT, TensorProto.FLOAT16, INT64])
        numbers = np.random.default_rng(self.random.randrange(2**32))
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        make = (
            (lambda: numbers.integers(1, 2**25, shape).astype(kind))
            if dtype == INT64
            else (lambda: (numbers.random(shape) * self.random.choice([1, 300]) + 0.1).astype(kind))
        )
        if dtype == TensorProto.FLOAT16 and self.draft.opset < 13:
            return
        a, b = self.draft.constant(np.asarray(make())), self.draft.constant(np.asarray(make()))
        name = self.draft.node(self.random.choice(["Add", "Mul", "Sub", "Div"]), [a, b])
        if self.random.random() < 0.4 and shape:
            name, shape = self.draft.node("Transpose", [name]), shape[::-1]
        if self.random.random() < 0.4:
            to = (
                INT32
                if dtype == INT64
                else self.random.choice(
                    [FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, INT32 if dtype == INT64 else FLOAT]
                )
            )
            name, dtype = self.draft.node("Cast", [name], to=to), to
        self.add(name, dtype, shape)

    # --- control flow ------------------------------------------------------------------------------------------------

    def _inner(self, x: Value, steps: int) -> tuple[list[onnx.NodeProto], Value]:
        """Write nodes that read a value and outer ones; return them and their last value of its dtype and shape."""
        end, before = len(self.draft.nodes), list(self.values)
        self.values = [*[v for v in before if v.dtype == x.dtype][-4:], x]
        for _ in range(steps):
            self.random.choice([self.unary, self.binary, self.view, self.cast, self.where, self.norm, self.softmax])()
        same = [v for v in self.values if (v.dtype, v.shape) == (x.dtype, x.shape)]
        result = same[-1]
        nodes = self.draft.nodes[end:]
        del self.draft.nodes[end:]
        self.values = before
        return nodes, result

    def _graph(
        self, nodes: list[onnx.NodeProto], results: list[tuple[str, int]], inputs: list[onnx.ValueInfoProto]
    ) -> onnx.GraphProto:
        ends = [self.draft.fresh("end") for _ in results]
        last = [
            helper.make_node("Identity", [name], [end], f"end_{end}")
            for (name, _), end in zip(results, ends, strict=True)
        ]
        infos = [helper.make_tensor_value_info(end, dtype, None) for end, (_, dtype) in zip(ends, results, strict=True)]
        return helper.make_graph([*nodes, *last], self.draft.fresh("body"), inputs, infos)

    def branch(self) -> None:
        x = self.any()
        if not x:
            return
        branches = []
        for _ in range(2):
            nodes, result = self._inner(x, self.random.randint(0, 4))
            branches.append(self._graph(nodes, [(result.name, x.dtype)], []))
        condition = self.any(BOOL)
        if condition and condition.shape in ((), (1,)):
            name = condition.name
        else:
            name = self.draft.constant(np.array(self.random.random() < 0.5))
        self.add(self.draft.node("If", [name], then_branch=branches[0], else_branch=branches[1]), x.dtype, x.shape)

    def loop(self) -> None:
        x = self.any()
        if not x:
            return
        count, go_in, state, go_out = (self.draft.fresh(stem) for stem in ("count", "go", "state", "go"))
        nodes, result = self._inner(Value(state, x.dtype, x.shape), self.random.randint(1, 4))
        inputs = [
            helper.make_tensor_value_info(count, INT64, []), helper.make_tensor_value_info(go_in, BOOL, []),
            helper.make_tensor_value_info(state, x.dtype, None),
        ]  # fmt: skip
        nodes.append(helper.make_node("Identity", [go_in], [go_out], f"keep_{go_out}"))
        body = self._graph(nodes, [(go_out, BOOL), (result.name, x.dtype)], inputs)
        times, yes = (
            self.draft.constant(np.array(self.random.randint(0, 3), np.int64)),
            self.draft.constant(np.array(True)),
        )
        self.add(self.draft.node("Loop", [times, yes, x.name], body=body), x.dtype, x.shape)

    def scan(self) -> None:
        x = self.any(rank=2)
        if not x or 0 in x.shape or self.draft.opset < 9:  # the first Scan has a batch
            return
        row = self.draft.fresh("row")
        nodes, result = self._inner(Value(row, x.dtype, x.shape[1:]), self.random.randint(1, 3))
        body = self._graph(nodes, [(result.name, x.dtype)], [helper.make_tensor_value_info(row, x.dtype, None)])
        self.add(self.draft.node("Scan", [x.name], body=body, num_scan_inputs=1), x.dtype, x.shape)


def broadcast(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of an elementwise result, or None."""
    try:
        return tuple(np.broadcast_shapes(x, y))
    except ValueError:
        return None
