"""Products with quantized weights: the nodes, their operands, and their results."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.ir.domain import OF_NORM, PROLOGUE
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.runtime.plan import FusedNode, TensorSpec

Arrays = dict[str, np.ndarray]
Result = tuple[np.ndarray, np.ndarray]  # in float64, and the error of rounded weights in units in the last place
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-20}  # of a weight; sums in float32 are less exact
EPSILON = 1e-5  # of norms
FLOAT8 = "float8_e4m3fn"
LOWEST = {"int4": -8, "int8": -128}  # of the dtypes whose elements are signed


@dataclass(frozen=True)
class Case:
    """A product of m x k with n x k weights, with an operator's attributes of MatMulNBits or DequantizeLinear.

    zeros   the zero points: none, packed like the weights, or typed as x
    stored  the dtype of the weight's elements for the layouts kn and nk; weights of the layout nbits are bytes
    scaled  the elements with one scale: blocks, columns or, with all, the whole weight
    gate    the activation of a gated product, which has a second weight
    others  the columns of one or two further products of x
    size    the factor of all elements of x
    norm    the norm that has joined the product: rms_norm, or add_rms_norm, whose sum is the last result
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    bits: int = 4
    block_size: int = 32
    zeros: str = "none"
    bias: bool = False
    layout: str = "nbits"
    stored: str = "uint8"
    scaled: str = "blocks"
    gate: str = ""
    others: tuple[int, ...] = ()
    size: float = 1.0
    norm: str = ""

    def __str__(self) -> str:
        parts = [f"{self.m}x{self.n}x{self.k}", self.dtype, f"{self.bits}b{self.block_size}", self.zeros]
        parts += [] if self.layout == "nbits" else [self.layout, self.stored, self.scaled]
        parts += ["bias"] if self.bias else []
        parts += [self.gate, *map(str, self.others), *([] if self.size == 1 else [f"times {self.size}"]), self.norm]
        return " ".join(filter(None, parts))

    @property
    def blocks(self) -> int:
        """The blocks of a row of weights."""
        return -(-self.k // self.block_size) if self.scaled == "blocks" else 1

    @property
    def weights(self) -> dict[str, int]:
        """The columns of each weight, by the operand's name."""
        second = {"up": self.n} if self.gate else {f"w_{i}": n for i, n in enumerate(self.others, 2)}
        return {"w": self.n, **second}

    def node(self) -> FusedNode:
        """Return the fused node."""
        fusion = "gated_matmul_nbits" if self.gate else "parallel_matmul_nbits" if self.others else "matmul_nbits"
        attributes: dict[str, int | str] = {"k": self.k, "weight_layout": self.layout}
        attributes |= {"block_size": self.block_size} if self.scaled == "blocks" else {}
        attributes |= {name.replace("w", "n"): n for name, n in self.weights.items() if name != "up"}
        attributes |= {"bits": self.bits} if self.layout == "nbits" else {}
        attributes |= {"activation": self.gate} if self.gate else {}
        outputs = (self.dtype,) * (1 + len(self.others) + (self.norm == "add_rms_norm"))
        if self.norm:
            operands = [name.removeprefix(OF_NORM) for name in _forms(self) if name == "x" or name.startswith(OF_NORM)]
            dtypes = [self.dtype] * (len(operands) - 1)
            norm = {"fusion": self.norm, "operands": operands, "attributes": {"epsilon": EPSILON}, "dtypes": dtypes}
            attributes[PROLOGUE] = json.dumps(norm)
        return FusedNode(fusion, "product", tuple(_forms(self)), attributes, outputs)

    def arrays(self, seed: int = 0) -> Arrays:
        """Return the operands by name; packed elements are bytes, and scales are of both signs."""
        random = np.random.default_rng(seed)
        arrays = {"x": self.size * random.standard_normal((self.m, self.k))}
        if self.norm:
            of_norm = {"residual": random.standard_normal((self.m, self.k))} if self.norm == "add_rms_norm" else {}
            of_norm["scale"] = random.uniform(0.5, 1.5, self.k)
            arrays |= {OF_NORM + name: array for name, array in of_norm.items()}
        for name, n in self.weights.items():
            of = named(name)
            arrays[name] = self._packed(random, (n, self.blocks * self.block_size if self.is_padded else self.k))
            scales = random.choice([-1.0, 1.0], (n, self.blocks)) * random.uniform(0.5, 1.5, (n, self.blocks))
            if self.stored == FLOAT8:
                scales *= 64  # no number becomes subnormal in float16
                scales[n // 2, 1:] = 0
            scales = scales / 2**self.bits
            forms = {"blocks": self._turned(scales), "columns": scales[:, 0], "all": scales[0, 0]}
            arrays[of("scales")] = forms[self.scaled]
            if self.zeros == "packed":
                arrays[of("zero_points")] = self._packed(random, (n, self.blocks))
            if self.zeros == "typed":
                arrays[of("zero_points")] = random.uniform(0, 2**self.bits - 1, (n, self.blocks))
            if self.bias:
                arrays[of("bias")] = random.standard_normal(n)
        storage = np.float32 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        return {name: a if a.dtype == np.uint8 else a.astype(storage) for name, a in arrays.items()}

    @property
    def is_padded(self) -> bool:
        """Whether each row of a weight and of packed zero points is whole blocks or bytes."""
        return self.layout == "nbits"

    def _turned(self, rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows.T) if self.layout == "kn" else rows

    def _packed(self, random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        """Return bytes with random elements of an n x k matrix; each row begins a byte if it is padded."""
        rows, columns = shape if self.is_padded else (1, shape[0] * shape[1])
        packed = random.integers(0, 256, (rows, -(-columns * self.bits // 8)), dtype=np.uint8)
        if self.stored == FLOAT8:  # NaN is in the first and the last column only
            packed[packed & 127 == 127] = 0
            packed[0, [0, -1]] = 127, 255
        return packed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a model declares for an operand."""
        shape, dtype = _forms(self)[name]
        n = next((n for each, n in self.weights.items() if name in (each, named(each)("zero_points"))), 0)
        if self.is_padded or not n or dtype != np.uint8:
            return shape
        inner = self.k if name in self.weights else self.blocks
        return (inner, n) if self.layout == "kn" else (n, inner)

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the shapes and dtypes of the operands, which are all constants but x."""
        dtypes = {name: self.stored if dtype == np.uint8 else self.dtype for name, (_, dtype) in _forms(self).items()}
        return [
            TensorSpec(self.shape(name), dtype, aligned, constant=aligned and name not in ("x", f"{OF_NORM}residual"))
            for name, dtype in dtypes.items()
        ]

    def numbers(self, arrays: Mapping[str, np.ndarray], weight: str) -> np.ndarray:
        """Return a weight as n x k numbers in float64."""
        n, of, signed = self.weights[weight], named(weight), LOWEST.get(self.stored, 0)
        q = self._elements(arrays[weight], n, self.blocks * self.block_size if self.is_padded else self.k)[:, : self.k]
        scales = arrays[of("scales")].astype(np.float64)
        scales = scales.T if self.layout == "kn" else scales
        scales = scales if self.scaled == "blocks" else np.broadcast_to(scales, n)[:, None]
        zeros = arrays.get(of("zero_points"))
        if zeros is None:
            points: np.ndarray = np.full((n, self.blocks), 2.0 ** (self.bits - 1) if self.is_padded else 0.0)
        elif zeros.dtype == np.uint8:
            points = self._elements(zeros, n, self.blocks)
        else:
            points = zeros.astype(np.float64)
        assert self.stored == FLOAT8 or q.min(initial=signed) >= signed
        length = self.block_size if self.scaled == "blocks" else self.k
        points, scales = (np.repeat(each, length, 1)[:, : self.k] for each in (points, scales))
        return np.asarray((q - points) * scales)

    def _elements(self, packed: np.ndarray, n: int, count: int) -> np.ndarray:
        """Return n rows of so many elements as float64."""
        is_float8 = self.stored == FLOAT8
        found = packed.view(ml_dtypes.float8_e4m3fn).astype(np.float64) if is_float8 else unpacked(packed, self.bits)
        if not self.is_padded:
            found = found.reshape(-1)[: n * count]
            found = found.reshape(count, n).T if self.layout == "kn" else found.reshape(n, count)
        lowest = LOWEST.get(self.stored)
        return found[:, :count] if lowest is None else np.where(found >= -lowest, found + 2 * lowest, found)[:, :count]

    def expected(self, arrays: Mapping[str, np.ndarray]) -> Iterator[Result]:
        """Yield each product in float64, and how far rounded weights move it in units in the last place.

        A weight is rounded once, or twice if zero points are fractions, by at most half a unit: each moves y by up to
        that part of a term, in any direction.  The second array has five deviations of the sum.
        """
        x, roundings = self.sum(arrays), 2 if self.zeros == "typed" else 1
        if self.norm:  # which is rounded, too
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * arrays[f"{OF_NORM}scale"].astype(np.float64)
            roundings += 1
        for name in self.weights:
            numbers, bias = self.numbers(arrays, name), arrays.get(named(name)("bias"))
            noise = 1.5 * roundings * np.sqrt(x**2 @ (numbers**2).T)
            y: np.ndarray = x @ numbers.T
            yield (y if bias is None else y + bias.astype(np.float64)), noise

    def sum(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return x, or the sum that a norm normalizes, in float64."""
        added = arrays.get(f"{OF_NORM}residual")
        x = arrays["x"].astype(np.float64)
        return x if added is None else x + added.astype(np.float64)


@functools.cache  # because drawing large operands takes longer than all that is done with their shapes
def _forms(case: Case) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the shapes and dtypes of a case's arrays."""
    return {name: (array.shape, array.dtype) for name, array in case.arrays().items()}


def stored_arrays(case: Case) -> Arrays:
    """Return a case's operands in the dtypes that memory has."""
    return {name: a if a.dtype == np.uint8 else a.astype(NUMPY[case.dtype]) for name, a in case.arrays().items()}


def check_within(case: Case, stored: Mapping[str, np.ndarray], found: Sequence[np.ndarray]) -> None:
    """Fail unless results are as close to float64 as rounded weights, or a rounded gate, explain."""
    products = list(case.expected(stored))
    results = [gated(case.gate, *products)] if case.gate else products
    if case.norm == "add_rms_norm":
        results.append((case.sum(stored), np.zeros(())))
    for y, (expected, noise) in zip(found, results, strict=True):
        allowed = ULP[case.dtype] * (np.abs(expected) + noise)
        wrong = ~(np.abs(y.astype(np.float64) - expected) <= allowed) & ~(np.isnan(y) & np.isnan(expected))
        for at in map(tuple, np.argwhere(wrong)):
            raise AssertionError(f"at {at}: {y[at]}, not {expected[at]} +- {allowed[at]}")


def gated(activation: str, gate: Result, up: Result) -> Result:
    """Return activation(gate) * up, and the error that those of both cause.  The slope of activations is below 1.2."""
    formula = ACTIVATIONS[activation].formula
    activated = formula(gate[0], 0.0, 0.0)
    return activated * up[0], 1.2 * gate[1] * np.abs(up[0]) + np.abs(activated) * up[1] + np.abs(activated * up[0])


def named(weight: str) -> Callable[[str], str]:
    """Return the function from an operand of the first weight, such as scales, to the name of that of another one."""
    return lambda operand: f"up_{operand}" if weight == "up" else f"{operand}{weight.removeprefix('w')}"


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return rows of numbers that bytes hold with the lowest bits first, as float64."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.asarray((packed[..., None] >> shifts & (2**bits - 1)).reshape(len(packed), -1).astype(np.float64))


def model(case: Case, stored: Arrays) -> onnx.ModelProto:
    """Return a model of the operators that a case's node replaces, and of its operands but for x as initializers."""
    constants = {
        name: helper.make_tensor(name, DTYPE_NUMBERS[spec.dtype], spec.shape, array.tobytes(), raw=True)
        for (name, array), spec in zip(stored.items(), case.specs(), strict=True)
        if name != "x"
    }
    nodes, results = list[onnx.NodeProto](), list[str]()
    for weight, n in case.weights.items():
        of = named(weight)
        operands = [weight, of("scales"), *([of("zero_points")] if case.zeros != "none" else [])]
        result = f"{weight}_product"
        if case.layout == "nbits":
            constants[weight].dims[:] = (n, case.blocks, case.block_size * case.bits // 8)
            sizes = {"K": case.k, "N": n, "bits": case.bits, "block_size": case.block_size}
            nodes.append(helper.make_node("MatMulNBits", ["x", *operands], [result], domain="com.microsoft", **sizes))
        else:
            axis, numbers = (0, f"{weight}_kn") if case.layout == "kn" else (1, f"{weight}_nk")
            of_blocks = {"axis": axis, "block_size": case.block_size}
            attributes = {"blocks": of_blocks, "columns": {"axis": 1 - axis}, "all": {}}[case.scaled]
            nodes.append(helper.make_node("DequantizeLinear", operands, [numbers], **attributes))
            if axis:
                nodes.append(helper.make_node("Transpose", [numbers], [f"{weight}_kn"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", ["x", f"{weight}_kn"], [result]))
        if case.bias:
            nodes.append(helper.make_node("Add", [result, of("bias")], [f"{weight}_sum"]))
        results.append(f"{weight}_sum" if case.bias else result)
    if case.gate:
        gate, up = results
        nodes.append(helper.make_node("Sigmoid", [gate], ["sigmoid"]))
        nodes.append(helper.make_node("Mul", [gate, "sigmoid"], ["activated"]))
        nodes.append(helper.make_node("Mul", ["activated", up], ["y"]))
        results = ["y"]
    element = DTYPE_NUMBERS[case.dtype]
    inputs = [helper.make_tensor_value_info("x", element, ["rows", case.k])]
    made = [helper.make_tensor_value_info(name, element, None) for name in results]
    graph = helper.make_graph(nodes, "product", inputs, made, list(constants.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


OF_OPERATOR = [
    Case(1, 64, 256), Case(1, 4096, 4096), Case(3, 48, 200, block_size=16, zeros="packed", bias=True),
    Case(1, 33, 264, zeros="packed"), Case(7, 100, 1000, bits=8, block_size=64, zeros="packed"),
    Case(8, 64, 512, bits=8), Case(0, 64, 256), Case(2, 64, 256, size=200.0), Case(70, 64, 256, size=200.0),
    Case(16, 96, 384, zeros="typed", bias=True), Case(17, 160, 2048, block_size=128, zeros="packed"),
    Case(64, 64, 128, block_size=256), Case(65, 128, 256, zeros="packed", bias=True), Case(200, 72, 136, bits=8),
    Case(1, 7, 50, bits=2, block_size=16, zeros="packed"), Case(9, 10, 33, bits=4, zeros="typed"),
    Case(40, 24, 64, bits=2, block_size=16), Case(5, 40, 4104, block_size=32, zeros="packed"),
    *(Case(m, 80, 320, dtype, bits, 32, zeros, bias=True) for m in (1, 12, 100) for dtype in ("bfloat16", "float32")
      for bits in (2, 4, 8) for zeros in ("none", "packed", "typed")),
]  # fmt: skip
OF_STANDARD_OPERATORS = [
    Case(m, n, k, dtype, 4 if stored.endswith("4") else 8, block, zeros, bias, layout, stored)
    for stored in ("int4", "uint4", "int8", "uint8")
    for layout in ("kn", "nk")
    for m, n, k, dtype, block, zeros, bias in (
        (1, 96, 512, "float16", 32, "packed", True), (6, 64, 136, "bfloat16", 16, "none", False),
        (12, 80, 320, "float16", 64, "none", False), (2, 50, 100, "float32", 16, "packed", True),
        (90, 128, 384, "float16", 128, "packed", False), (3, 33, 49, "float16", 32, "packed", True),
    )
]  # fmt: skip
GATED = [
    replace(case, gate=gate)
    for case in (
        Case(1, 64, 512, zeros="packed", bias=True), Case(12, 96, 256, bits=8), Case(33, 64, 512, "bfloat16"),
        Case(100, 64, 256, zeros="packed"), Case(3, 40, 100, "float32", bits=2, block_size=16),
        Case(2, 64, 512, layout="nk", stored="int4"), Case(2, 64, 512, zeros="packed", layout="kn", stored="uint4"),
    )
    for gate in ("silu", "gelu")
]  # fmt: skip
PARALLEL = [
    replace(case, others=others)
    for case in (
        Case(1, 64, 512, zeros="packed", bias=True), Case(12, 100, 256, bits=8), Case(100, 64, 256, "bfloat16"),
        Case(3, 40, 99, "float32"), Case(2, 64, 512, layout="nk", stored="int4"),
        Case(2, 64, 512, zeros="packed", layout="kn", stored="uint8", bits=8),
    )
    for others in ((32,), (16, 72))
]  # fmt: skip
NORMALIZED = [
    replace(case, norm=norm)
    for case in (
        Case(1, 64, 512, zeros="packed", bias=True), Case(3, 40, 264, bits=8), Case(2, 64, 256, "bfloat16", size=200.0),
        Case(8, 64, 256, gate="silu"), Case(1, 64, 2048, others=(32, 16), zeros="packed"), Case(0, 64, 256),
        Case(12, 100, 256, bits=8), Case(100, 64, 256, gate="silu"), Case(3, 40, 99, "float32", others=(8,)),
        Case(2, 64, 512, layout="nk", stored="int4"), Case(2, 64, 512, layout="kn", stored="uint4"),
        Case(1, 4096, 4096), Case(4, 96, 2080, zeros="typed"),
    )
    for norm in ("rms_norm", "add_rms_norm")
]  # fmt: skip
OF_FLOAT8 = [
    replace(case, bits=8, layout=layout, stored=FLOAT8, scaled=scaled)
    for scaled in ("blocks", "columns", "all")
    for layout in ("kn", "nk")
    for case in (
        Case(1, 96, 512, bias=True), Case(6, 64, 136, "bfloat16", block_size=16), Case(90, 128, 384, block_size=128),
        Case(2, 50, 100, "float32", block_size=16, bias=True), Case(3, 33, 49, bias=True),
        Case(2, 64, 512, gate="silu", size=0.05), Case(70, 40, 264, gate="gelu", size=0.05),
        Case(12, 40, 64, others=(16,)), Case(4, 40, 264, others=(16, 72), norm="add_rms_norm"),
        Case(100, 40, 264, norm="rms_norm"),
    )
]  # fmt: skip
CASES = [*OF_OPERATOR, *OF_STANDARD_OPERATORS, *OF_FLOAT8, *GATED, *PARALLEL, *NORMALIZED]
# Whole models: bits and layouts, odd sizes and blocks that do not divide k, gates and several products.
IN_MODELS = [
    *(Case(5, 64, 200, bits=bits, block_size=block, zeros=zeros, bias=True) for bits in (2, 4, 8)
      for block in (16, 64) for zeros in ("none", "packed", "typed")),
    *(Case(5, 64, 208, zeros="packed", layout=layout, stored=stored, bits=4 if stored.endswith("4") else 8)
      for layout in ("kn", "nk") for stored in ("int4", "uint4", "int8", "uint8")),
    *(Case(5, 64, 208, layout=layout, stored=FLOAT8, bits=8, scaled=scaled) for layout in ("kn", "nk")
      for scaled in ("blocks", "columns", "all")),
    *(Case(1, 33, 49, bits=bits, block_size=block, zeros="packed") for bits, block in ((2, 16), (4, 32), (8, 256))),
    *(Case(3, 33, 49, zeros="packed", layout=layout, stored=stored) for layout in ("kn", "nk")
      for stored in ("int4", "uint4")),
    Case(5, 64, 256, gate="silu"), Case(5, 64, 256, others=(32, 48)),
]  # fmt: skip
