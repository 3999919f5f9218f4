"""Float products that norms have joined: the nodes, their operands, and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.ir.domain import OF_NORM, PROLOGUE
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place, relative to a number
DEVIATIONS = 6  # of a sum of products with rounded factors, each of which deviates by at most ROUNDING
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A product of rms_norm(x), or with `adds` of rms_norm(x + residual), whose sum is the last result.

    n      the columns of each product; a gated product has two weights of n[0] columns
    scale  the dtype of the norm's scale, if it is not x's
    cast   whether a Cast to float32 has joined the product
    """

    m: int
    n: tuple[int, ...]
    k: int
    dtype: str = "float16"
    layout: str = "kn"
    adds: bool = True
    gate: str = ""
    bias: bool = False
    activation: str = "none"
    scale: str = ""
    cast: bool = False

    def __str__(self) -> str:
        parts = [f"{self.m}x{'+'.join(map(str, self.n))}x{self.k}", self.dtype, self.layout, self.gate]
        marks = [
            "adds" * self.adds,
            "bias" * self.bias,
            self.activation.replace("none", ""),
            self.scale,
            "cast" * self.cast,
        ]
        return " ".join(filter(None, [*parts, *marks]))

    @property
    def weights(self) -> dict[str, int]:
        """The columns of each weight, by the operand's name."""
        names = ["w", "up"] if self.gate else ["w", "w_2", "w_3"][: len(self.n)]
        return dict(zip(names, self.n * 2 if self.gate else self.n, strict=True))

    def node(self) -> FusedNode:
        """Return the fused node."""
        fusion = "gated_gemm" if self.gate else "parallel_gemm" if len(self.n) > 1 else "gemm_bias_activation"
        operands = ["x", *(["residual"] if self.adds else []), "scale"]
        norm = {
            "fusion": "add_rms_norm" if self.adds else "rms_norm", "operands": operands,
            "attributes": {"epsilon": EPSILON}, "dtypes": [self.dtype] * (1 + self.adds),
        }  # fmt: skip
        layouts = {name.replace("w", "weight_layout"): self.layout for name in self.weights if name != "up"}
        attributes = {**layouts, "activation": self.gate or self.activation, PROLOGUE: json.dumps(norm)}
        outputs = (self.dtype,) * (len(self.n) + self.adds)
        if self.cast:
            dtypes = {"x0": self.dtype, "v0": "float32"}
            program = {"ops": [["Cast", ["x0"], ["v0"], {"to": "float32"}]], "outputs": ["v0"], "dtypes": dtypes}
            attributes, outputs = {**attributes, "program": json.dumps(program)}, ("float32", *outputs[1:])
        return FusedNode(fusion, str(self), tuple(self.shapes), attributes, outputs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the operands, by name."""
        norm = {f"{OF_NORM}residual": (self.m, self.k)} if self.adds else {}
        found: dict[str, tuple[int, ...]] = {"x": (self.m, self.k), **norm, f"{OF_NORM}scale": (self.k,)}
        for name, n in self.weights.items():
            found[name] = (self.k, n) if self.layout == "kn" else (n, self.k)
            if self.bias:
                found[name.replace("up", "up_w").replace("w", "bias")] = (n,)
        return found

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the operands' specs; all but x and the residual are constants of the model if they are aligned."""
        changing = ("x", f"{OF_NORM}residual")
        return [
            TensorSpec(shape, self.scale if self.scale and "scale" in name else self.dtype, aligned,
                       constant=aligned and name not in changing)
            for name, shape in self.shapes.items()
        ]  # fmt: skip

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the operands by name."""
        random, found = np.random.default_rng(self.m), {}
        for (name, shape), spec in zip(self.shapes.items(), self.specs(), strict=True):
            values = random.standard_normal(shape)
            if name in self.weights:
                values /= np.sqrt(self.k)
            if "scale" in name:
                values = 1 + values / 4
            found[name] = values.astype(NUMPY.get(spec.dtype, np.float32))
        return found

    def expected(self, arrays: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each result in float64, and by how much a result may differ before it is rounded."""
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        total = wide["x"] + wide.get(f"{OF_NORM}residual", 0.0)
        x = total / np.sqrt((total**2).mean(-1, keepdims=True) + EPSILON) * wide[f"{OF_NORM}scale"]
        results = []
        for name in self.weights:
            w = wide[name] if self.layout == "kn" else wide[name].T
            noise = DEVIATIONS * ROUNDING[self.dtype] * np.sqrt(x**2 @ w**2) + 2e-6 * (np.abs(x) @ np.abs(w))
            results.append((x @ w + wide.get(name.replace("up", "up_w").replace("w", "bias"), 0.0), noise))
        if self.gate:
            (gate, noise), (up, noise_of_up) = results
            gate, noise = ACTIVATIONS[self.gate].formula(gate, 0.0, 0.0), 1.2 * noise
            results = [(gate * up, noise * np.abs(up) + np.abs(gate) * noise_of_up)]
        elif self.activation != "none":
            results = [(ACTIVATIONS[self.activation].formula(y, 0.0, 0.0), 1.2 * noise) for y, noise in results]
        return [*results, *([(total, 0.0 * total)] if self.adds else [])]


def check(case: Case, arrays: Mapping[str, np.ndarray], found: Sequence[np.ndarray]) -> None:
    """Fail unless each result is as close to the expected one as its dtype allows."""
    for i, ((y, noise), result) in enumerate(zip(case.expected(arrays), found, strict=True)):
        errors = np.abs(result.astype(np.float64) - y)
        allowed = noise + 1.1 * ROUNDING[case.dtype] * np.abs(y) + 1e-7
        assert (errors <= allowed).all(), f"result {i}: {(~(errors <= allowed)).sum()} wrong, by {np.nanmax(errors)}"


# Every number of rows that a block holds, and more; tiles that end after the last column; k beyond the last stage, and
# less than the warps have; rows of several vectors for a thread, and rows that are too long; slices of k.
FEW_ROWS = [
    Case(1, (64,), 2048), Case(1, (40,), 264, layout="nk", adds=False), Case(2, (64,), 8, "bfloat16", bias=True),
    Case(3, (136,), 1000, layout="nk", bias=True, activation="relu"), Case(4, (96,), 512, "bfloat16", scale="float32"),
    Case(5, (72,), 1032, layout="nk", gate="silu", adds=False), Case(8, (264,), 136, gate="gelu", bias=True),
    Case(8, (33,), 512, "bfloat16", "nk"), Case(1, (136, 24, 40), 520, layout="nk", bias=True),
    Case(7, (64, 128), 2048, adds=False), Case(1, (72,), 8192, layout="nk"), Case(2, (64,), 4096, "bfloat16", "nk"),
    Case(2, (72,), 1032, layout="nk", cast=True), Case(1, (128,), 512, "bfloat16", adds=False, bias=True, cast=True),
]  # fmt: skip
OTHERS = [
    Case(3, (40,), 99), Case(2, (33,), 64, "bfloat16"), Case(9, (64,), 512, adds=False), Case(8, (64,), 16384),
    Case(16, (64,), 256, gate="silu"), Case(17, (40, 24), 136, "bfloat16", "nk", bias=True), Case(65, (96,), 264),
    Case(0, (64,), 256), Case(9, (64,), 256, cast=True), Case(3, (33, 40), 67, layout="nk", adds=False),
]  # fmt: skip
CASES = [*FEW_ROWS, *OTHERS]
