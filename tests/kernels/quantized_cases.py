"""Products and convolutions of 8-bit integers and of float8: the nodes, their operands, and results in float64."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from described import described

from onnxfuse.algebra.filter_edges import most_taps_beyond, sums_inside
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.region_operators import FLOAT8_E5M2
from onnxfuse.runtime.plan import FusedNode, TensorSpec

Arrays = dict[str, np.ndarray]
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
NUMPY |= {"int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8), FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}
NUMPY |= {"int16": np.dtype(np.int16), "uint16": np.dtype(np.uint16), FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2)}
ULP = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
STEP = 0.4  # of the quantizer that follows a product


@dataclass(frozen=True)
class Case:
    """A product of m x k with k x n or, with sizes, a convolution of m images with k channels and n filters.

    x_zero, w_zero  the zero points; None if the node has none
    per_column      w has a scale for each column of y
    layout          of the weight of a product: kn or nk
    sums            whether the node has the sums of its weights
    first           whether x has its channels first
    after           what follows: nothing, or relu and a quantizer, or a dequantized residual before these
    """

    m: int
    n: int
    k: int
    x_dtype: str = "uint8"
    w_dtype: str = "int8"
    x_zero: int | None = None
    w_zero: int | None = None
    per_column: bool = True
    bias: bool = True
    dtype: str = "float32"
    layout: str = "nk"
    sums: bool = False
    after: str = ""
    sizes: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    group: int = 1
    first: bool = False

    def __str__(self) -> str:
        named = {
            name: value
            for name, value in vars(self).items()
            if name not in "mnk" and value != getattr(Case, name, None)
        }
        parts = [f"{self.m}x{self.n}x{self.k}"]
        for name, value in named.items():
            parts.append(f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(parts)

    @property
    def filter(self) -> dict[str, tuple[int, ...]]:
        """The strides, dilations and pads of a convolution."""
        ones = (1,) * len(self.sizes)
        return {
            "strides": self.strides or ones, "dilations": self.dilations or ones,
            "pads": self.pads or (0,) * 2 * len(self.sizes),
        }  # fmt: skip

    @property
    def y_shape(self) -> tuple[int, ...]:
        """The shape of y."""
        if not self.sizes:
            return (self.m, self.n)
        of, axes = self.filter, len(self.sizes)
        return (self.m, *(
            (size + of["pads"][i] + of["pads"][i + axes] - (taps - 1) * of["dilations"][i] - 1) // of["strides"][i] + 1
            for i, (size, taps) in enumerate(zip(self.sizes, self.kernel, strict=True))
        ), self.n)  # fmt: skip

    @property
    def is_float8(self) -> bool:
        """Whether x and w are float8 numbers."""
        return self.x_dtype in (FLOAT8, FLOAT8_E5M2)

    @property
    def residual(self) -> str:
        """The name of the residual, which comes after the scale and, for integers, the zero point of the quantizer."""
        return "x2" if self.is_float8 else "x3"

    @property
    def step(self) -> tuple[float, int]:
        """The scale and the zero point of the quantizer; with float8, one element in twelve is beyond the range."""
        return float(NUMPY[self.dtype].type(STEP / (128 if self.is_float8 else 16))), 0 if self.is_float8 else 3

    def node(self) -> FusedNode:
        """Return the fused node, with what follows the product as its program."""
        names, outputs = tuple(described(self)), (self.dtype,)
        attributes: dict = {"weight_layout": self.layout}
        if self.sizes:
            attributes = {name: list(value) for name, value in self.filter.items()}
            attributes |= {"layout": "nhwc", "group": self.group, "x_layout": "nchw" if self.first else "nhwc"}
        if self.after:
            attributes["program"] = self._program()
            outputs = (self.x_dtype,)
        return FusedNode("quantized_conv" if self.sizes else "quantized_gemm", "product", names, attributes, outputs)

    def _program(self) -> str:
        """Return the program; the quantizer's scale and zero point are operands before a residual, else constants."""
        ops: list = []
        if self.after == "residual":
            scale, zero, residual = "x1", "v4" if self.is_float8 else "x2", self.residual
            dtypes = {"x0": self.dtype, "x1": self.dtype, zero: self.x_dtype, residual: self.x_dtype}
            ops += [["Constant", [], ["v4"], {"value": 0.0}]] if self.is_float8 else []
            ops += [["DequantizeLinear", [residual, scale, zero], ["v0"], {}], ["Add", ["x0", "v0"], ["v1"], {}]]
            ops += [["Relu", ["v1"], ["v2"], {}]]
        else:
            scale, zero, dtypes = "v5", "v4", {"x0": self.dtype, "v5": self.dtype, "v4": self.x_dtype}
            ops += [
                ["Constant", [], [name], {"value": each}] for name, each in zip(("v5", "v4"), self.step, strict=True)
            ]
            ops += [["Relu", ["x0"], ["v2"], {}]]
        ops += [["QuantizeLinear", ["v2", scale, zero], ["v3"], {}]]
        dtypes |= {"v0": self.dtype, "v1": self.dtype, "v2": self.dtype, "v3": self.x_dtype}
        return json.dumps({"ops": ops, "outputs": ["v3"], "dtypes": dtypes})

    def arrays(self, seed: int = 0) -> Arrays:
        """Return the operands by name, those of the program last."""
        random = np.random.default_rng(seed)

        def values(dtype: str, shape: Sequence[int]) -> np.ndarray:
            if self.is_float8:
                return np.clip(random.standard_normal(tuple(shape)) * 64, -448, 448).astype(NUMPY[dtype])
            limits = np.iinfo(NUMPY[dtype])
            return random.integers(limits.min, limits.max + 1, tuple(shape)).astype(NUMPY[dtype])

        of_w = (self.n, *self.kernel, self.k // self.group) if self.sizes else (self.n, self.k)
        w = values(self.w_dtype, of_w)
        of_x = (self.m, self.k, *self.sizes) if self.first else (self.m, *self.sizes, self.k)
        found = {"x": values(self.x_dtype, of_x)}
        found["x_scale"] = np.array(1 / 128, NUMPY[self.dtype])
        if self.x_zero is not None:
            found["x_zero_point"] = np.array(self.x_zero, NUMPY[self.x_dtype])
        found["w"] = w.T.copy() if self.layout == "kn" else w
        length = math.sqrt(math.prod(of_w[1:]))
        scales = random.uniform(0.5, 1.5, self.n) / 64 / length
        found["w_scale"] = (scales if self.per_column else scales[:1].reshape(())).astype(NUMPY[self.dtype])
        if self.w_zero is not None:
            found["w_zero_point"] = np.full(found["w_scale"].shape, self.w_zero, NUMPY[self.w_dtype])
        if self.sums:
            of = self.filter
            pads = of["pads"][: len(self.sizes)], of["pads"][len(self.sizes) :]
            found["w_sums"] = sums_inside(w, most_taps_beyond(self.kernel, of["dilations"], *pads))
        if self.bias:
            found["bias"] = random.standard_normal(self.n).astype(NUMPY[self.dtype])
        if self.after == "residual":
            scale, zero = self.step
            found["x1"] = np.array(scale, NUMPY[self.dtype])
            found |= {} if self.is_float8 else {"x2": np.array(zero, NUMPY[self.x_dtype])}
            found[self.residual] = values(self.x_dtype, self.y_shape)
        return found

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the shapes and dtypes of the operands; weights, scales and the bias are constants."""
        return [
            TensorSpec(shape, dtype, aligned, constant=aligned and name not in ("x", self.residual))
            for name, (shape, dtype) in described(self).items()
        ]

    def expected(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the product in float64, and the sum of the absolute values of its terms."""
        wide = np.float64 if self.is_float8 else np.int64
        x = arrays["x"].astype(wide) - (self.x_zero or 0)
        w = arrays["w"].astype(wide) - (self.w_zero or 0)
        x = np.moveaxis(x, 1, -1) if self.first else x
        if self.sizes:
            sums, terms = self._convolved(x, w), self._convolved(np.abs(x), np.abs(w))
        else:
            w = w if self.layout == "kn" else w.T
            sums, terms = x @ w, np.abs(x) @ np.abs(w)
        scale = float(arrays["x_scale"]) * arrays["w_scale"].astype(np.float64)
        bias = arrays["bias"].astype(np.float64) if self.bias else 0.0
        return sums * scale + bias, terms * scale + np.abs(bias)

    def _convolved(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        of, axes = self.filter, len(self.sizes)
        padded = np.pad(x, [(0, 0), *zip(of["pads"][:axes], of["pads"][axes:], strict=True), (0, 0)])
        y = np.zeros(self.y_shape, x.dtype)
        for tap in itertools.product(*map(range, self.kernel)):
            window = tuple(
                slice(t * d, t * d + (size - 1) * s + 1, s)
                for t, d, s, size in zip(tap, of["dilations"], of["strides"], self.y_shape[1:-1], strict=True)
            )
            taken, filters = padded[(slice(None), *window)], w[(slice(None), *tap)]
            each, many = self.k // self.group, self.n // self.group
            for g in range(self.group):
                own = slice(g * many, (g + 1) * many)
                y[..., own] += taken[..., g * each : (g + 1) * each] @ filters[own].T
        return y

    def check(self, arrays: Mapping[str, np.ndarray], y: np.ndarray, exact: bool, truncated: bool = False) -> None:
        """Fail unless y is as close to float64 as rounding explains: of the sum if `exact`, else of each operand.

        `truncated`: the sums of 128 products are those of float8 on a GPU, which have 14 bits.
        """
        expected, terms = self.expected(arrays)
        allowed = (2.0**-22 if exact else 2.0**-20) * terms + (0 if exact else 1.5 * ULP[self.dtype] * terms)
        if exact and self.is_float8:
            allowed = (2.0**-11 if truncated else 2.0**-18) * terms
        if not self.after:
            allowed = allowed + ULP[self.dtype] * np.abs(expected)
            found = y.astype(np.float64)
        else:
            scale, zero = self.step
            allowed = allowed + 2 * ULP[self.dtype] * (np.abs(expected) + 1)
            if self.after == "residual":
                residual = arrays[self.residual].astype(np.float64)
                expected = expected + (residual - zero) * scale
            limits = (ml_dtypes.finfo if self.is_float8 else np.iinfo)(NUMPY[self.x_dtype])
            expected = np.clip(np.maximum(expected, 0) / scale + zero, float(limits.min), float(limits.max))
            allowed = allowed / scale + 2.0**-20 * np.abs(expected)
            if self.is_float8:  # half of the distance of two float8 numbers
                allowed = allowed + np.exp2(np.floor(np.log2(np.maximum(expected + allowed, 2.0**-6))) - 4)
            else:
                allowed = allowed + 0.5 + 2.0**-14
            found = y.astype(np.float64)
        assert found.shape == expected.shape, f"{found.shape}, not {expected.shape}"
        errors = np.abs(found - expected) - allowed
        worst = np.unravel_index(np.argmax(errors), errors.shape)
        assert (errors <= 0).all(), (
            f"at {worst}: {found[worst]}, not {expected[worst]}; {(errors > 0).sum()} of {errors.size} wrong"
        )


SAME = (1, 1, 1, 1)
OF_FLOAT8 = [
    replace(each, x_dtype=FLOAT8, w_dtype=FLOAT8)
    for each in (
        Case(256, 256, 256), Case(100, 72, 144, bias=False), Case(33, 40, 16, per_column=False), Case(70, 35, 1040),
        Case(64, 64, 100), Case(64, 64, 128, layout="kn"), Case(512, 320, 1040, dtype="float16"),
        Case(50, 64, 128, dtype="bfloat16"), Case(0, 64, 64), Case(300, 200, 272, after="relu"),
        Case(64, 35, 128, after="residual"), Case(64, 64, 100, after="relu", layout="kn"),
        Case(130, 96, 384, after="residual", dtype="float16"),
        Case(2, 64, 128, sizes=(9, 11), kernel=(3, 3), pads=SAME),
        Case(2, 72, 64, sizes=(9, 11), kernel=(3, 3), pads=SAME, after="relu"),
        Case(1, 35, 144, sizes=(12, 7), kernel=(3, 3), pads=(0, 1, 2, 1), strides=(2, 1), after="residual"),
        Case(3, 64, 32, sizes=(14, 14), kernel=(1, 1)), Case(1, 64, 256, sizes=(9, 9), kernel=(3, 3), dtype="float16"),
        Case(1, 48, 16, sizes=(20, 20), kernel=(5, 5), pads=(2,) * 4, dilations=(2, 2)),
        Case(1, 64, 3, sizes=(32, 32), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4),
        Case(2, 64, 64, sizes=(9, 9), kernel=(3, 3), pads=SAME, group=4),
        Case(2, 64, 64, sizes=(33,), kernel=(3,), pads=(1, 1)),
        Case(1, 32, 32, sizes=(5, 6, 7), kernel=(3, 3, 3), pads=(1,) * 6),
    )
]  # fmt: skip
GEMMS = [
    Case(256, 256, 256), Case(100, 72, 144, x_dtype="int8", bias=False), Case(33, 40, 16, per_column=False),
    Case(130, 200, 512, x_zero=131), Case(1, 96, 272, x_dtype="int8", x_zero=-7), Case(70, 35, 64, x_zero=5),
    Case(64, 64, 100), Case(64, 64, 128, layout="kn"), Case(40, 48, 64, w_dtype="uint8", w_zero=120),
    Case(20, 24, 32, w_zero=-3, layout="kn", x_zero=9), Case(512, 320, 1040, dtype="float16", x_zero=128),
    Case(50, 64, 128, dtype="bfloat16"), Case(0, 64, 64),
]  # fmt: skip
CONVS = [
    Case(2, 64, 128, sizes=(9, 11), kernel=(3, 3), pads=SAME),
    Case(2, 72, 64, sizes=(9, 11), kernel=(3, 3), pads=SAME, x_zero=77),
    Case(1, 35, 144, sizes=(12, 7), kernel=(3, 3), pads=(0, 1, 2, 1), strides=(2, 1), x_dtype="int8", x_zero=-128),
    Case(3, 64, 32, sizes=(14, 14), kernel=(1, 1), x_zero=3), Case(2, 128, 64, sizes=(9, 9), kernel=(1, 1)),
    Case(2, 64, 64, sizes=(14, 14), kernel=(1, 1), strides=(2, 2), x_dtype="int8"),
    Case(1, 48, 16, sizes=(20, 20), kernel=(5, 5), pads=(2,) * 4, dilations=(2, 2), x_zero=200),
    Case(1, 64, 3, sizes=(32, 32), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4, x_zero=128),
    Case(1, 64, 3, sizes=(32, 32), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4, x_zero=128, first=True),
    Case(2, 40, 3, sizes=(17, 19), kernel=(3, 3), pads=(0, 1, 2, 1), x_dtype="int8", x_zero=-7, first=True),
    Case(2, 35, 4, sizes=(8, 12), kernel=(2, 2), strides=(2, 2), per_column=False, first=True, dtype="float16"),
    Case(2, 64, 64, sizes=(9, 9), kernel=(3, 3), pads=SAME, group=64, x_zero=12),
    Case(2, 48, 48, sizes=(19, 15), kernel=(5, 5), pads=(2,) * 4, group=48, x_zero=12, after="residual"),
    Case(2, 64, 64, sizes=(9, 9), kernel=(3, 3), pads=SAME, group=4),
    Case(2, 64, 64, sizes=(33,), kernel=(3,), pads=(1, 1), x_zero=9),
    Case(1, 32, 32, sizes=(5, 6, 7), kernel=(3, 3, 3), pads=(1,) * 6, x_zero=9),
    Case(2, 64, 64, sizes=(9, 9), kernel=(3, 3), pads=SAME, dtype="float16", x_zero=100),
    Case(2, 40, 64, sizes=(9, 9), kernel=(3, 3), pads=SAME, w_zero=2),
]  # fmt: skip
DEQUANTIZED = [
    Case(70, 40, 96, x_dtype="uint16", x_zero=30000), Case(64, 32, 64, x_dtype="int16", w_dtype="int16", after="relu"),
    Case(33, 40, 64, x_dtype=FLOAT8_E5M2, w_dtype=FLOAT8_E5M2, dtype="float16"),
    Case(2, 40, 32, sizes=(9, 11), kernel=(3, 3), pads=SAME, x_dtype="int16", after="residual"),
    Case(1, 32, 32, sizes=(9, 9), kernel=(3, 3), pads=SAME, group=32, x_dtype="uint16", x_zero=7),
    Case(1, 24, 32, sizes=(7, 9), kernel=(3, 3), pads=SAME, x_dtype=FLOAT8_E5M2, w_dtype=FLOAT8_E5M2),
]  # fmt: skip
AFTER = [
    replace(case, after=after)
    for case in (GEMMS[0], GEMMS[1], GEMMS[3], GEMMS[5], GEMMS[6], CONVS[0], CONVS[1], CONVS[2], CONVS[3], CONVS[7])
    for after in ("relu", "residual")
]
SUMS = [
    replace(case, sums=True)
    for case in (*GEMMS, *CONVS, *AFTER)
    if case.x_zero is not None and case.w_zero is None and case.layout == "nk" and case.w_dtype == "int8"
]
CASES = [*GEMMS, *CONVS, *AFTER, *SUMS, *OF_FLOAT8, *DEQUANTIZED]
