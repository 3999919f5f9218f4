"""Products whose rows end in an ArgMax or ArgMin: the nodes, their operands, and the indices that onnxruntime selects.

Products of these operands are exact in fp32, in every order, so that the indices must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import nbits_cases
import numpy as np
import onnx
import onnxruntime as ort

from onnxfuse.ir.domain import OF_NORM, PROLOGUE
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {**{name: np.dtype(name) for name in ("float32", "float16")}, "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LARGE = {"float32": 2.0**24, "float16": 2048.0, "bfloat16": 256.0}  # from here on, a dtype skips odd numbers
LOGITS = ("ties", "rounded", "zeros", "infinite", "nan", "first nan", "all nan")


@dataclass(frozen=True)
class Case:
    """A product, perhaps with a bias or a Cast to float32, and the index of an element of each row.

    logits  what is special about the rows: several of LOGITS
    bits    0 for a float weight, else the bits of a quantized one, whose layout is nbits or that of integers
    norm    whether an rms_norm has joined the product, whose results are 1 and -1
    """

    lead: tuple[int, ...]
    n: int
    k: int
    dtype: str = "float16"
    layout: str = "kn"
    op: str = "ArgMax"
    last: int = 0
    keepdims: int = 0
    cast: bool = False
    logits: str = "ties"
    bits: int = 0
    norm: bool = False

    def __str__(self) -> str:
        parts = [*map(str, self.lead), f"{self.n}x{self.k}", self.dtype, self.layout, self.op, self.logits]
        return " ".join([*parts, f"{self.bits}b" * bool(self.bits), "last" * self.last, "cast" * self.cast,
                         "norm" * self.norm]).strip()  # fmt: skip

    @property
    def quantized(self) -> nbits_cases.Case:
        """The product with a quantized weight, of rows that are not divided among axes."""
        m, stored = int(np.prod(self.lead)), {"nbits": "uint8"}.get(self.layout, f"int{self.bits}")
        norm = "rms_norm" * self.norm
        return nbits_cases.Case(m, self.n, self.k, self.dtype, self.bits, layout=self.layout, stored=stored, norm=norm)

    @property
    def product(self) -> FusedNode:
        """The node without the operators that follow the product."""
        if self.bits:
            return self.quantized.node()
        norm = {"fusion": "rms_norm", "operands": ["x", "scale"], "attributes": {}, "dtypes": [self.dtype]}
        attributes = {PROLOGUE: json.dumps(norm)} if self.norm else {}
        operands = ("x", *([f"{OF_NORM}scale"] if self.norm else []), "w", "bias")
        return FusedNode("gemm_bias_activation", "", operands, attributes, (self.dtype,))

    def node(self) -> FusedNode:
        """Return the fused node."""
        ops, dtypes, value = list[object](), {"x0": self.dtype}, "x0"
        if self.logits == "zeros":  # an operand of each column, which makes some zeros negative
            ops.append(["Mul", ["x0", "x1"], ["v0"], {}])
            dtypes, value = {"x0": self.dtype, "x1": self.dtype, "v0": self.dtype}, "v0"
        if self.cast:
            ops.append(["Cast", [value], ["v1"], {"to": "float32"}])
            dtypes["v1"], value = "float32", "v1"
        given = {"axis": len(self.lead), "keepdims": self.keepdims, "select_last_index": self.last}
        ops.append([self.op, [value], ["v2"], given])
        program = {"ops": ops, "outputs": ["v2"], "dtypes": {**dtypes, "v2": "int64"}}
        node, attributes = self.product, {"weight_layout": self.layout, "program": json.dumps(program)}
        operands = (*node.operands, *(["x1"] if self.logits == "zeros" else []))
        return replace(node, operands=operands, attributes={**node.attributes, **attributes}, output_dtypes=("int64",))

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the operands' specs; all but x are constants of the model if they are aligned."""
        w = (self.k, self.n) if self.layout == "kn" else (self.n, self.k)
        shapes = [*([(self.k,)] if self.norm else []), w, (self.n,)]
        others = [TensorSpec(shape, self.dtype, aligned, constant=aligned) for shape in shapes]
        if self.bits:
            _, *others = self.quantized.specs(aligned)
        others += [TensorSpec((self.n,), self.dtype, aligned)] if self.logits == "zeros" else []
        return [TensorSpec((*self.lead, self.k), self.dtype, aligned), *others]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the operands by name."""
        random = np.random.default_rng(self.n)
        x = random.integers(1, 3, (*self.lead, self.k)).astype(NUMPY[self.dtype])
        first = {"x": x}
        if self.norm:
            x = random.choice([-2, 2], x.shape).astype(x.dtype)
            first = {"x": x, f"{OF_NORM}scale": np.ones(self.k, x.dtype)}
        signs = {"x1": random.choice([-1, 1], self.n).astype(NUMPY[self.dtype])} if self.logits == "zeros" else {}
        if self.bits:
            case = self.quantized
            arrays = {**nbits_cases.stored_arrays(case), **first}
            arrays["scales"] = np.full_like(arrays["scales"], 0 if signs else 0.25)
            return {**arrays, **signs}
        w, bias = (random.integers(-2, 3, shape).astype(np.float32) for shape in ((self.k, self.n), self.n))
        if self.logits == "zeros":
            w, bias = 0 * w, 0 * bias
        if self.logits == "rounded":
            bias += LARGE[self.dtype]
        places = random.permutation(self.n)[:3]
        if self.logits == "infinite":
            bias[places] = np.inf if self.op == "ArgMax" else -np.inf
        if "nan" in self.logits:
            found = {"nan": places[places > 0], "first nan": [0, self.n - 1], "all nan": slice(None)}
            bias[found[self.logits]] = np.nan
        w = np.ascontiguousarray(w if self.layout == "kn" else w.T)
        return {**first, "w": w.astype(x.dtype), "bias": bias.astype(x.dtype), **signs}

    def logits_of(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows from which indices are selected, rounded to their dtype, in float32."""
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        x = np.sign(wide["x"]) if self.norm else wide["x"]
        w = self.quantized.numbers(arrays, "w").T if self.bits else wide["w"] if self.layout == "kn" else wide["w"].T
        y = (x @ w + wide.get("bias", 0)).astype(NUMPY[self.dtype]).astype(np.float32)
        return np.asarray(y * wide.get("x1", np.ones(1)).astype(np.float32))

    def expected(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the indices that onnxruntime selects on a CPU."""
        attributes = f"axis = -1, keepdims = {self.keepdims}, select_last_index = {self.last}"
        dims = [*"abcd"[: len(self.lead)], "n"]
        model = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 17]>\nmain (float[{",".join(dims)}] x) => '
            f"(int64[{','.join([*dims[:-1], *['1'] * self.keepdims])}] y) {{ y = {self.op} <{attributes}> (x) }}"
        )
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": self.logits_of(arrays)})[0])


# Rows that end inside a tile, columns of one element and of whole vectors, k beyond a stage, clusters, and
# rows of more accumulators than the threads of a block load at once.
FLOATS = [
    *(Case((3,), 136, 72, logits=logits, last=i % 2, op=op) for i, logits in enumerate(LOGITS)
      for op in ("ArgMax", "ArgMin")),
    *(Case((2, 3), 264, 136, dtype, layout, last=1, keepdims=1, cast=dtype != "float32", logits="rounded")
      for dtype in NUMPY for layout in ("kn", "nk")),
    Case((1,), 1000, 1032, "bfloat16", "nk"), Case((), 33, 40, layout="nk"), Case((1,), 8, 8, "bfloat16", "nk"),
    Case((9,), 72, 64, logits="rounded"), Case((2, 20), 64, 96, "bfloat16", "nk", cast=True),
    Case((3,), 136, 520, norm=True, cast=True), Case((1,), 72, 1032, "bfloat16", "nk", last=1, norm=True),
    Case((5,), 21, 19, "float32", logits="first nan"), Case((1,), 4104, 16, "float32", last=1),
    Case((1,), 40008, 8, "float32", "nk", last=1),
]  # fmt: skip
QUANTIZED = [
    *(Case((m,), n, k, dtype, "nbits", bits=bits, last=last, cast=bool(last))
      for bits, m, n, k, dtype, last in ((4, 1, 40, 136, "float16", 0), (8, 3, 200, 264, "float16", 1),
                                         (8, 9, 104, 256, "bfloat16", 0), (4, 8, 72, 544, "bfloat16", 1))),
    Case((2, 2), 56, 128, "float16", "nbits", op="ArgMin", keepdims=1, bits=8, logits="zeros"),
    Case((3,), 104, 544, layout="nbits", bits=8, norm=True, cast=True),
    Case((1,), 40, 136, layout="nbits", bits=4, norm=True), Case((2,), 41, 72, "float32", "nbits", bits=4, last=1),
    Case((3,), 48, 96, "float16", "kn", bits=4),
]  # fmt: skip
MANY_ROWS = [Case((70,), 136, 72, logits="first nan"), Case((13, 10), 40, 96, "float16", "nbits", bits=8, last=1)]
EMPTY = [Case((0,), 136, 72), Case((2, 0), 40, 96, "float16", "nbits", bits=4, keepdims=1)]
