"""Graphs of quantized pairs, dynamic quantizers, integer products and convolutions, and packed weights."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
from drafts import Draft, Unavailable, Value
from onnx import TensorProto, helper
from random_graphs import FLOAT, NEWEST, Writer, finish

FIRST = 10  # the first opset with quantizers
INT8, UINT8 = TensorProto.INT8, TensorProto.UINT8
MICROSOFT = "com.microsoft"


def quantized_graph(random: Random) -> Draft:
    """Return a graph whose products and convolutions read integers, or weights that are dequantized."""
    draft = Draft(random, random.randint(FIRST, NEWEST))
    rows = draft.input(FLOAT, random.choice([["batch", 8], ["batch", "seq", 8], [2, 3, 8], [3, 16]]))
    values = [rows]
    if random.random() < 0.6:
        values.append(draft.input(FLOAT, [random.choice(["batch", 1]), random.choice([2, 4]), 5, 6]))
    return finish(Quantized(draft, values), random.randint(2, 9))


class Quantized(Writer):
    """Writes quantized nodes, and others beside them."""

    @property
    def steps(self) -> list:
        quantized = [self.pair, self.quantized_product, self.dynamic_product, self.linear_product, self.integer_product,
                     self.quantized_conv, self.integer_conv, self.linear_conv, self.dequantized_weight,
                     self.packed_weight, self.blocked_weight, self.quantized_sum, self.integer_operator,
                     self.integer_operator, self.integer_pool, self.quantized_gemm, self.integer_gemm,
                     self.heads_product, self.moved]  # fmt: skip
        return [*quantized, *quantized, self.unary, self.binary, self.view, self.softmax, self.norm, self.where,
                self.reduce, self.concat, self.split, self.expand]  # fmt: skip

    def rows(self, rank: int = 2) -> Value:
        """Return a float of several axes.  Raises Unavailable where there is none."""
        found = self.any(FLOAT, rank=rank)
        if not found or 0 in found.shape:
            raise Unavailable
        return found

    def image(self) -> Value:
        found = [v for v in self.values if len(v.shape) == 4 and v.dtype == FLOAT and 0 not in v.shape[1:]]
        if not found:
            raise Unavailable
        return self.random.choice(found[-3:])

    def normal(self, *shape: int) -> np.ndarray:
        return np.random.default_rng(self.random.randrange(2**32)).standard_normal(shape)

    def scale(self, *shape: int) -> str:
        """Store positive scales, some of them powers of two, at which many values are ties."""
        if self.random.random() < 0.3:
            return self.draft.constant(np.full(shape, self.random.choice([0.0625, 0.125, 0.5]), np.float32))
        return self.draft.constant((np.abs(self.normal(*shape)) * 0.05 + 0.01).astype(np.float32))

    def end(self, dtype: int) -> list[str]:
        """Store the scale and the zero point of an operator's result.

        The scale is not a power of two: operators on integers round ties after they add the zero point.
        """
        return [self.draft.constant(np.float32(abs(self.normal(1)[0]) * 0.05 + 0.01)), self.zero(dtype)]

    def zero(self, dtype: int, *shape: int) -> str:
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        limits = np.iinfo(kind)
        middle = 0 if dtype == INT8 else 128
        value = self.random.choice([middle, middle, 0, limits.min, limits.max, middle + 3 if middle else 3])
        return self.draft.constant(np.full(shape, value, kind))

    def integer_weight(self, dtype: int, *shape: int) -> str:
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        limits = np.iinfo(kind)
        drawn = np.random.default_rng(self.random.randrange(2**32)).integers(limits.min, limits.max + 1, shape)
        return self.draft.constant(drawn.astype(kind))

    def quantized(self, x: Value, dtype: int = 0) -> tuple[str, int, list[str]]:
        """Write a quantizer to `dtype`, or to any; return its result, its dtype, and its scale and zero point."""
        dtype = dtype or self.random.choice([INT8, UINT8])
        how = [self.scale(), self.zero(dtype)]
        return self.draft.node("QuantizeLinear", [x.name, *how], domain=self.domain()), dtype, how

    def domain(self) -> str:
        """Return the domain of a quantizer: onnxruntime has ONNX's operators in its own, too."""
        return MICROSOFT if self.random.random() < 0.1 else ""

    def through(self, x: Value) -> str:
        """Write a quantizer and its inverse, or do nothing."""
        choice = self.random.random()
        if choice < 0.25:
            return x.name
        if choice < 0.4 and self.draft.opset >= 21:  # int8 without a zero point
            scale = self.scale()
            name = self.draft.node("QuantizeLinear", [x.name, scale], output_dtype=INT8)
            return self.draft.node("DequantizeLinear", [name, scale])
        return self.restored(x)

    def pair(self) -> None:
        x = self.rows(1)
        self.add(self.through(x), FLOAT, x.shape)

    def weight(self, shape: tuple[int, ...], axis: int) -> str:
        """Write weights that are dequantized, with a scale for all or one for each channel."""
        dtype = self.random.choice([INT8, INT8, UINT8])
        if self.random.random() < 0.5 or self.draft.opset < 13:
            parts = [self.scale(), self.zero(dtype)]
            return self.draft.node("DequantizeLinear", [self.integer_weight(dtype, *shape), *parts])
        parts = [self.scale(shape[axis]), self.zero(dtype, shape[axis])][: self.random.randint(1, 2)]
        if dtype == UINT8 and len(parts) == 1:
            parts.append(self.zero(dtype, shape[axis]))
        return self.draft.node("DequantizeLinear", [self.integer_weight(dtype, *shape), *parts], axis=axis)

    def _end(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a bias or an activation, and perhaps quantize the result."""
        if self.random.random() < 0.5:
            name = self.draft.node("Add", [name, self.array(shape[-1:], FLOAT)])
        if self.random.random() < 0.5:
            name = self.draft.node(self.random.choice(["Relu", "Sigmoid", "Tanh"]), [name])
        value = Value(name, FLOAT, shape)
        self.add(self.through(value) if self.random.random() < 0.5 else name, FLOAT, shape)

    def quantized_product(self) -> None:
        x, columns = self.rows(), self.random.choice([4, 8, 16])
        if self.random.random() < 0.3:
            weight = self.draft.node("Transpose", [self.weight((columns, x.shape[-1]), 0)], perm=[1, 0])
        else:
            weight = self.weight((x.shape[-1], columns), 1)
        self._end(self.draft.node("MatMul", [self.through(x), weight]), (*x.shape[:-1], columns))

    def restored(self, x: Value) -> str:
        """Write a quantizer and its inverse."""
        name, _, how = self.quantized(x)
        return self.draft.node("DequantizeLinear", [name, *how], domain=self.domain())

    def heads_product(self) -> None:
        """Write a product of two computed tensors, as attention has it; axes are exchanged before it and after it.

        Both operands are quantized: onnxruntime 1.32 crashes when it opens some models that quantize only the first.
        """
        x = self.image()
        alike = [v for v in self.values if len(v.shape) == 4 and v.dtype == FLOAT and v.shape[:2] == x.shape[:2]]
        fitting = [v for v in alike if x.shape[3] in v.shape[2:] and 0 not in v.shape[1:]]
        if not fitting:
            raise Unavailable
        w = self.random.choice(fitting)
        first, columns = self.restored(x), self.restored(w)
        columns_size = w.shape[3]
        if w.shape[2] != x.shape[3]:
            columns, columns_size = self.draft.node("Transpose", [columns], perm=[0, 1, 3, 2]), w.shape[2]
        name = self.draft.node("MatMul", [first, columns])
        value = Value(name, FLOAT, (*x.shape[:3], columns_size))
        name = self.through(value)
        if self.random.random() < 0.5:
            name = self.draft.node("Transpose", [name], perm=[0, 2, 1, 3])
            value = Value(name, FLOAT, (x.shape[0], x.shape[2], x.shape[1], columns_size))
        self.add(self.through(Value(name, FLOAT, value.shape)), FLOAT, value.shape)

    def moved(self) -> None:
        """Write an operator that moves elements between two pairs of quantizers, which often have one scale."""
        x = self.rows(1)
        name, dtype, how = self.quantized(x)
        last = len(x.shape) - 1
        given = self.draft.node("DequantizeLinear", [name, *how])
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        if self.random.random() < 0.5 and last:
            order = [last, *range(last)]
            result, shape = self.draft.node("Transpose", [given], perm=order), tuple(x.shape[i] for i in order)
        else:
            result = self.draft.node("Concat", [given, given], axis=last)
        if self.random.random() < 0.2:
            how = [self.scale(), self.zero(dtype)]
        name = self.draft.node("QuantizeLinear", [result, *how])
        self.add(self.draft.node("DequantizeLinear", [name, *how]), FLOAT, shape)

    def quantized_sum(self) -> None:
        x = self.rows(1)
        alike = [v for v in self.values if (v.dtype, v.shape) == (x.dtype, x.shape)]
        name = self.draft.node("Add", [self.through(x), self.through(self.random.choice(alike))])
        self.add(self.through(Value(name, FLOAT, x.shape)), FLOAT, x.shape)

    def quantized_conv(self) -> None:
        x, channels, kernel = self.image(), self.random.choice([2, 4]), self.random.choice([1, 3])
        inputs = [self.through(x), self.weight((channels, x.shape[1], kernel, kernel), 0)]
        if self.random.random() < 0.6:
            bias = self.integer_weight(INT8, channels)
            wide = self.draft.node("Cast", [bias], to=TensorProto.INT32)
            inputs.append(self.draft.node("DequantizeLinear", [wide, self.scale()]))
        name = self.draft.node("Conv", inputs, pads=[kernel // 2] * 4)
        shape = (x.shape[0], channels, *x.shape[2:])
        if self.random.random() < 0.5:
            name = self.draft.node("Relu", [name])
        self.add(self.through(Value(name, FLOAT, shape)), FLOAT, shape)

    def dynamic_product(self) -> None:
        """Write what dynamic quantization makes of a product."""
        x, columns = self.rows(), self.random.choice([4, 8])
        draft, dtype = self.draft, self.random.choice([INT8, UINT8])
        if draft.opset < 11:
            raise Unavailable
        draft.node("DynamicQuantizeLinear", [x.name], 3)
        quantized, scale, zero = draft.nodes[-1].output
        weight, zeros = (
            self.integer_weight(dtype, x.shape[-1], columns),
            [self.zero(dtype)][: self.random.randint(0, 1)],
        )
        product = draft.node("MatMulInteger", [quantized, weight, zero, *zeros])
        wide = draft.node("Cast", [product], to=FLOAT)
        shapes = [], [], [1], [1, 1], [columns], [columns], [1, columns], [1] * (len(x.shape) - 1) + [columns]
        factor = self.scale(*self.random.choice(shapes))
        scales = draft.node("Mul", [scale, factor])
        self._end(draft.node("Mul", [wide, scales]), (*x.shape[:-1], columns))

    def integer_product(self) -> None:
        x, columns = self.rows(), self.random.choice([4, 8])
        quantized, dtype, how = self.quantized(x)
        weight = self.integer_weight(dtype, x.shape[-1], columns)
        zeros = [how[1], *([self.zero(dtype)] if self.random.random() < 0.5 else [])]
        product = self.draft.node("MatMulInteger", [quantized, weight, *zeros])
        self._end(self.draft.node("Cast", [product], to=FLOAT), (*x.shape[:-1], columns))

    def linear_product(self) -> None:
        x, columns = self.rows(), self.random.choice([4, 8])
        quantized, dtype, how = self.quantized(x)
        weight = [self.integer_weight(dtype, x.shape[-1], columns), self.scale(), self.zero(dtype)]
        end = self.end(dtype)
        name = self.draft.node("QLinearMatMul", [quantized, *how, *weight, *end])
        self.add(self.draft.node("DequantizeLinear", [name, *end]), FLOAT, (*x.shape[:-1], columns))

    def linear_conv(self) -> None:
        x, channels = self.image(), self.random.choice([2, 4])
        quantized, dtype, how = self.quantized(x)
        weight = [self.integer_weight(dtype, channels, x.shape[1], 3, 3), self.scale(), self.zero(dtype)]
        end = self.end(dtype)
        name = self.draft.node("QLinearConv", [quantized, *how, *weight, *end], pads=[1, 1, 1, 1])
        self.add(self.draft.node("DequantizeLinear", [name, *end]), FLOAT, (x.shape[0], channels, *x.shape[2:]))

    def integer_conv(self) -> None:
        x, channels = self.image(), self.random.choice([2, 4])
        how = [self.scale(), self.zero(UINT8)]
        quantized = self.draft.node("QuantizeLinear", [x.name, *how])
        weight = self.integer_weight(UINT8, channels, x.shape[1], 3, 3)
        zeros = [how[1], *([self.zero(UINT8)] if self.random.random() < 0.5 else [])]
        product = self.draft.node("ConvInteger", [quantized, weight, *zeros], pads=[1, 1, 1, 1])
        name = self.draft.node("Cast", [product], to=FLOAT)
        scale = self.scale(*self.random.choice(([], [1], [channels, 1, 1], [1, channels, 1, 1])))
        if self.random.random() < 0.7:
            scale = self.draft.node("Mul", [how[0], scale])
        self.add(self.draft.node("Mul", [name, scale]), FLOAT, (x.shape[0], channels, *x.shape[2:]))

    def integer_operator(self) -> None:
        """Write an operator on integers of onnxruntime's own, as quantizers write it, and the numbers of its result."""
        x = self.rows(1)
        quantized, dtype, how = self.quantized(x)
        first, end = [quantized, *how], self.end(dtype)
        op = self.random.choice(["Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "Softmax"])
        inputs, shape, attributes = [*first, *end], x.shape, {}
        if op in ("Add", "Mul", "Concat"):
            other = self.random.choice([v for v in self.values if (v.dtype, v.shape) == (x.dtype, x.shape)])
            name, _, scale = self.quantized(other, dtype)
            inputs = [*first, name, *scale, *end]
        if op == "Concat":
            inputs, shape, attributes = (
                [*end, *inputs[:6]],
                (*x.shape[:-1], 2 * x.shape[-1]),
                {"axis": len(x.shape) - 1},
            )
        elif op == "Softmax":
            if self.random.random() < 0.5:  # the scale of quantizers; others are rounded to 1 / n
                end = [self.draft.constant(np.float32(1 / 256)), end[1]]
                inputs = [*first, *end]
            attributes = {"axis": len(x.shape) - 1, "opset": self.draft.opset}
        elif op == "LeakyRelu":
            attributes = {"alpha": 0.1}
        name = self.draft.node(f"QLinear{op}", inputs, domain=MICROSOFT, **attributes)
        self.add(self.draft.node("DequantizeLinear", [name, *end]), FLOAT, shape)

    def integer_pool(self) -> None:
        x = self.image()
        quantized, dtype, how = self.quantized(x)
        end = self.end(dtype)
        kind, attributes, sizes = "GlobalAverage", {"channels_last": 0}, (1, 1)
        if self.random.random() < 0.5:
            kind, attributes, sizes = "Average", {"kernel_shape": [2, 2]}, tuple(size - 1 for size in x.shape[2:])
            if min(sizes) < 1:
                raise Unavailable
        name = self.draft.node(f"QLinear{kind}Pool", [quantized, *how, *end], domain=MICROSOFT, **attributes)
        self.add(self.draft.node("DequantizeLinear", [name, *end]), FLOAT, (*x.shape[:2], *sizes))

    def matrix(self) -> Value:
        """Return a float of two axes.  Raises Unavailable where there is none."""
        found = [v for v in self.values if len(v.shape) == 2 and v.dtype == FLOAT and 0 not in v.shape]
        if not found:
            raise Unavailable
        return self.random.choice(found[-3:])

    def quantized_gemm(self) -> None:
        """Write a Gemm of dequantized operands, perhaps with a factor and a bias of two axes."""
        x, columns = self.matrix(), self.random.choice([4, 8])
        is_turned = self.random.random() < 0.5
        shape = (columns, x.shape[-1]) if is_turned else (x.shape[-1], columns)
        inputs = [self.through(x), self.weight(shape, 0 if is_turned else 1)]
        inputs.append(self.array(self.random.choice([(columns,), (1, columns)]), FLOAT))
        alpha = self.random.choice([1.0, 1.0, 0.5, -1.0])
        name = self.draft.node("Gemm", inputs, transB=int(is_turned), alpha=alpha)
        self._end(name, (x.shape[0], columns))

    def integer_gemm(self) -> None:
        """Write a QGemm, whose result is integers or floats."""
        x, columns = self.matrix(), self.random.choice([4, 8])
        quantized, dtype, how = self.quantized(x)
        kind = self.random.choice([INT8, dtype])
        is_turned, bias = self.random.random() < 0.5, ""
        shape = (columns, x.shape[-1]) if is_turned else (x.shape[-1], columns)
        sizes = [columns] if self.draft.opset >= 13 and self.random.random() < 0.4 else []
        weight = [self.integer_weight(kind, *shape), self.scale(*sizes), self.zero(kind, *sizes)]
        if self.random.random() < 0.5:
            bias = self.draft.node("Cast", [self.integer_weight(INT8, columns)], to=TensorProto.INT32)
        end = self.end(dtype) if self.random.random() < 0.6 else []
        inputs = [quantized, *how, *weight, *([bias, *end] if bias or end else [])]
        attributes = {"transB": int(is_turned), "alpha": self.random.choice([1.0, 1.0, 0.5])}
        name = self.draft.node("QGemm", inputs, domain=MICROSOFT, **attributes)
        if end:
            name = self.draft.node("DequantizeLinear", [name, *end])
        self._end(name, (x.shape[0], columns))

    def dequantized_weight(self) -> None:
        x, columns = self.rows(), self.random.choice([4, 8])
        self._end(self.draft.node("MatMul", [x.name, self.weight((x.shape[-1], columns), 1)]), (*x.shape[:-1], columns))

    def blocked_weight(self) -> None:
        """Write products with weights that are dequantized in blocks, as weight-only quantization stores them."""
        x, columns, block = self.rows(), 8, self.random.choice([4, 16])
        if self.draft.opset < 21 or x.shape[-1] % 4:
            raise Unavailable
        dtype, axis = self.random.choice([INT8, UINT8, TensorProto.INT4, TensorProto.UINT4]), self.random.choice([0, 1])
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        shape, blocks = ([columns, size] for size in (x.shape[-1], -(-x.shape[-1] // block)))
        shape, blocks = (each if axis else each[::-1] for each in (shape, blocks))

        def product() -> str:
            numbers = np.random.default_rng(self.random.randrange(2**32)).integers(0, 8, shape)
            parts = [self.draft.constant(numbers.astype(kind)), self.scale(*blocks)]
            if self.random.random() < 0.5:
                parts.append(self.draft.constant(np.full(blocks, 3).astype(kind)))
            weight = self.draft.node("DequantizeLinear", parts, axis=axis, block_size=block)
            weight = self.draft.node("Transpose", [weight], perm=[1, 0]) if axis else weight
            return self.draft.node("MatMul", [x.name, weight])

        self._end_products(product, (*x.shape[:-1], columns))

    def packed_weight(self) -> None:
        """Write products of onnxruntime's own with packed weights."""
        x, columns, block, bits = self.rows(), 8, self.random.choice([16, 32]), self.random.choice([2, 4, 4, 8])
        depth = x.shape[-1]
        blocks, is_flat = -(-depth // block), self.random.random() < 0.3

        def product() -> str:
            packed = self.integer_weight(UINT8, columns, blocks, block * bits // 8)
            inputs = [x.name, packed, self.scale(*([columns * blocks] if is_flat else [columns, blocks]))]
            if self.random.random() < 0.5:
                inputs.append(self.integer_weight(UINT8, columns, -(-blocks * bits // 8)))
            sizes = {"K": depth, "N": columns, "bits": bits, "block_size": block}
            return self.draft.node("MatMulNBits", inputs, domain=MICROSOFT, **sizes)

        self._end_products(product, (*x.shape[:-1], columns))

    def _end_products(self, product: Callable[[], str], shape: tuple[int, ...]) -> None:
        """Write one to three products of one input; a gate of two of them, or what follows each."""
        names = [product() for _ in range(self.random.choice([1, 1, 2, 3]))]
        if len(names) == 2 and self.random.random() < 0.7:
            sigmoid = self.draft.node("Sigmoid", names[:1])
            names = [self.draft.node("Mul", [self.draft.node("Mul", [names[0], sigmoid]), names[1]])]
        for name in names:
            self._end(name, shape)
