"""Products of two computed tensors of integers, with random operands, and their exact sums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {"float32": np.float32, "float16": np.float16, "uint8": np.uint8, "int8": np.int8,
         FLOAT8: ml_dtypes.float8_e4m3fn}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """y is (batch, heads, m, n), in `out_layout`; w has `w_heads` heads, by default as many as x."""

    m: int
    n: int
    k: int
    batch: int = 1
    heads: int = 2
    w_heads: int = 0
    x_layout: str = "bshd"
    w_layout: str = "bshd"
    w_order: str = "nk"
    out_layout: str = "bhsd"
    x_dtype: str = "uint8"
    w_dtype: str = "uint8"
    x_zero: int | None = None
    w_zero: int | None = None
    dtype: str = "float32"
    after: str = ""  # "": numbers; "integers": a quantizer of the node; "mask": a sum and a quantizer as a program

    @property
    def y_dtype(self) -> str:
        """The dtype of the result."""
        return (
            (FLOAT8 if self.x_dtype == FLOAT8 and self.after == "integers" else "uint8") if self.after else self.dtype
        )

    @property
    def y_zero(self) -> int:
        """The zero point of the result."""
        return 0 if self.y_dtype == FLOAT8 else 117

    def __str__(self) -> str:
        sizes = f"{self.batch}x{self.heads}x{self.m}x{self.n}x{self.k}"
        zeros = "".join(name for name, zero in (("x", self.x_zero), ("w", self.w_zero)) if zero is not None)
        return f"{sizes}-{self.w_order}-{self.x_dtype}{self.w_dtype}-{zeros}-{self.out_layout}-{self.after}"

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the operands of the node, by name, in their order."""
        random, w_heads = np.random.default_rng([self.m, self.n, self.k]), self.w_heads or self.heads
        rows = (self.n, self.k) if self.w_order == "nk" else (self.k, self.n)
        found = {}
        for name, heads, (first, second), layout, dtype, zero in (
            ("x", self.heads, (self.m, self.k), self.x_layout, self.x_dtype, self.x_zero),
            ("w", w_heads, rows, self.w_layout, self.w_dtype, self.w_zero),
        ):
            shape: tuple[int, ...] = (
                (self.batch, first, heads, second) if layout == "bshd" else (self.batch, heads, first, second)
            )
            if self.out_layout == "alone":
                shape = (self.batch, first, second)
            if dtype == FLOAT8:
                found[name] = (random.standard_normal(shape) * 20).astype(NUMPY[FLOAT8])
            else:
                limits = np.iinfo(dtype)
                found[name] = random.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
            found[f"{name}_scale"] = np.array(0.01 if name == "x" else 0.03, NUMPY[self.dtype])
            if zero is not None:
                found[f"{name}_zero_point"] = np.array(zero, dtype)
        step = 0.02 * np.sqrt(max(1, self.k))
        if self.after == "integers":
            found |= {"y_scale": np.float32(step), "y_zero_point": np.array(self.y_zero, NUMPY[self.y_dtype])}
        if self.after == "mask":
            ones = (1,) * (1 if self.out_layout == "alone" else 2)
            mask = random.standard_normal((self.batch, *ones, self.n)).astype(NUMPY[self.dtype])
            found |= {"x1": mask, "x2": np.array(step, NUMPY[self.dtype]), "x3": np.uint8(117)}
        return {name: np.asarray(each) for name, each in found.items()}

    def node(self) -> FusedNode:
        names = ("x_layout", "w_layout", "w_order", "out_layout")
        attributes: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.after == "integers":
            attributes["out_layout"] = f"integers_{self.out_layout}"
        if self.after == "mask":
            ops = [["Add", ["x0", "x1"], ["v0"], {}],
                   ["QuantizeLinear", ["v0", "x2", "x3"], ["v1"], {"precision": "float32"}]]  # fmt: skip
            dtypes = dict.fromkeys(("x0", "x1", "x2", "v0"), self.dtype) | {"x3": "uint8", "v1": "uint8"}
            attributes["program"] = json.dumps({"ops": ops, "outputs": ["v1"], "dtypes": dtypes})
        return FusedNode("quantized_matmul", "y", tuple(self.arrays()), attributes,
                         (self.y_dtype,))  # fmt: skip

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        return [TensorSpec(each.shape, each.dtype.name, aligned) for each in self.arrays().values()]

    def check(self, arrays: dict[str, np.ndarray], y: np.ndarray) -> None:
        """Compare y, in its layout, with the exact sums: within a rounding, or the step next to a tie."""
        x, w = (arrays[name].astype(np.float64) - int(arrays.get(f"{name}_zero_point", 0)) for name in "xw")
        if self.out_layout == "alone":
            x, w = x[:, None], w[:, None]
        x, w = (
            each if layout == "bhsd" else each.transpose(0, 2, 1, 3)
            for each, layout in ((x, self.x_layout), (w, self.w_layout))
        )
        w = np.repeat(w, self.heads // w.shape[1], axis=1)
        w = w.swapaxes(2, 3) if self.w_order == "nk" else w
        factor = float(arrays["x_scale"]) * float(arrays["w_scale"])
        expected, terms = x @ w * factor, np.abs(x) @ np.abs(w) * factor
        ulp = {"float32": 2.0**-22, "float16": 2.0**-10}[self.dtype]
        allowed = ulp * np.abs(expected) + (2.0**-18 * terms if self.x_dtype == FLOAT8 else 0)
        if self.after:
            if self.after == "mask":
                mask = arrays["x1"].astype(np.float64).reshape(self.batch, 1, 1, self.n)
                expected = expected + mask
                allowed = 2 * ulp * (np.abs(expected) + np.abs(mask)) + ulp
            scale, zero = (float(arrays[name]) for name in
                           (("x2", "x3") if self.after == "mask" else ("y_scale", "y_zero_point")))  # fmt: skip
            expected, allowed = expected / scale + zero, allowed / scale
            if self.y_dtype == FLOAT8:  # half of the distance of two numbers
                expected = np.clip(expected, -448, 448)
                allowed += np.exp2(np.floor(np.log2(np.maximum(np.abs(expected) + allowed, 2.0**-6))) - 4)
            else:
                expected, allowed = np.clip(expected, 0, 255), allowed + 0.5 + 2.0**-18
        if self.out_layout == "alone":
            expected, allowed = expected[:, 0], np.broadcast_to(allowed, expected.shape)[:, 0]
        elif self.out_layout != "bhsd":
            expected, allowed = (each.transpose(0, 2, 1, 3).reshape(y.shape) for each in (expected, allowed))
        assert y.shape == expected.shape, f"{y.shape}, not {expected.shape}"
        wrong = np.abs(y.astype(np.float64) - expected) > allowed
        assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, the first at {np.argwhere(wrong)[0]}"


CASES = [
    Case(130, 144, 64, x_zero=130, w_zero=121, batch=2, out_layout="bshd", after="integers"),
    Case(70, 64, 144, x_layout="bhsd", w_order="kn", w_zero=125, out_layout="packed", after="integers"),
    Case(129, 200, 48, x_dtype="int8", w_dtype="int8", x_zero=-5, after="mask"),
    Case(64, 40, 272, x_dtype="int8", w_order="kn", w_layout="bhsd", x_zero=-128, out_layout="bshd"),
    Case(40, 72, 64, heads=4, w_heads=2, w_zero=3, w_dtype="int8", after="mask", dtype="float16"),
    Case(33, 35, 27, x_zero=9, w_zero=200, out_layout="packed", after="integers"),  # bytes one by one
    Case(33, 35, 27, w_order="kn", x_zero=9, w_zero=200, out_layout="packed"),
    Case(130, 72, 144, x_dtype=FLOAT8, w_dtype=FLOAT8, out_layout="packed", after="integers"),
    Case(40, 64, 272, x_dtype=FLOAT8, w_dtype=FLOAT8, w_order="kn", x_layout="bhsd"),
    Case(33, 35, 27, x_dtype=FLOAT8, w_dtype=FLOAT8, dtype="float16", after="mask"),
    Case(70, 48, 80, batch=3, heads=1, x_layout="bhsd", w_layout="bhsd", out_layout="alone", x_zero=4, after="mask"),
    Case(70, 48, 80, batch=3, heads=1, x_layout="bhsd", w_layout="bhsd", out_layout="alone", w_order="kn", w_zero=4),
    Case(5, 9, 0, x_zero=9, w_zero=1), Case(1, 16, 128, batch=3, heads=1), Case(0, 16, 16),
]  # fmt: skip
