"""Products, norms and attention with elementwise operators in their epilogue: nodes, operands and expected results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from attention_cases import Case, formula
from conv_cases import ConvCase
from kernel_references import group_norm_nhwc, layer_norm, rms_norm
from region_drafts import NUMPY, RegionProgram

from onnxfuse.runtime.plan import FusedNode, TensorSpec

Build = Callable[[RegionProgram, str, Callable[..., str]], Sequence[str]]  # of the program, x0 and its operands
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Fused(Protocol):
    """A node without a program, whose first result the program reads."""

    @property
    def dtype(self) -> str: ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Return its operands."""

    def node(self) -> FusedNode:
        """Return the fused node."""

    def expect(self, arrays: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
        """Return its results in float64."""


@dataclass(frozen=True)
class NormCase:
    """A norm of rows of `n` elements."""

    fusion: str
    lead: tuple[int, ...]
    n: int
    dtype: str = "float16"
    has_sum: bool = False  # whether the sum is a result
    scale_dtype: str = ""

    def __str__(self) -> str:
        return f"{self.fusion}{' and sum' if self.has_sum else ''}"

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(2)
        whole, weight = (*self.lead, self.n), (self.n,)
        shapes = {"x": whole, "residual": whole, "scale": weight, "bias": weight}
        names = ["x", *(["residual"] if self.fusion.startswith("add") else []), "scale"]
        names += [] if self.fusion.endswith("rms_norm") else ["bias"]
        dtypes = {"scale": self.scale_dtype, "bias": self.scale_dtype}
        return {n: random.standard_normal(shapes[n]).astype(NUMPY[dtypes.get(n) or self.dtype]) for n in names}

    def node(self) -> FusedNode:
        return FusedNode(self.fusion, "y", tuple(self.arrays()), {"epsilon": 1e-5}, (self.dtype,) * (1 + self.has_sum))

    def expect(self, arrays: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        total = wide["x"] + wide.get("residual", 0)
        if "bias" in wide:
            y = layer_norm(total, wide["scale"], wide["bias"], 1e-5)
        else:
            y = rms_norm(total, wide["scale"], 1e-5)
        return [y, total][: 1 + self.has_sum]


@dataclass(frozen=True)
class GroupNormCase:
    """A group norm with SiLU, of images (n, channels, ...) or, channels-last, (n, ..., channels)."""

    shape: tuple[int, ...]
    groups: int
    layout: str = "nhwc"
    dtype: str = "float16"

    def __str__(self) -> str:
        return f"group_norm {self.layout}"

    @property
    def channels(self) -> int:
        return self.shape[1 if self.layout == "nchw" else -1]

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(3)
        shapes = {"x": self.shape, "scale": (self.channels,), "bias": (self.channels,)}
        return {name: random.standard_normal(shape).astype(NUMPY[self.dtype]) for name, shape in shapes.items()}

    def node(self) -> FusedNode:
        attributes = {"epsilon": 1e-5, "groups": self.groups, "layout": self.layout, "activation": "silu"}
        return FusedNode("group_norm", "y", ("x", "scale", "bias"), attributes, (self.dtype,))

    def expect(self, arrays: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
        x, scale, bias = (array.astype(np.float64) for array in arrays.values())
        x = np.moveaxis(x, 1, -1) if self.layout == "nchw" else x
        y = group_norm_nhwc(x, scale, bias, self.groups, 1e-5)
        y = y / (1 + np.exp(-y))
        return [np.moveaxis(y, -1, 1) if self.layout == "nchw" else y]


@dataclass(frozen=True)
class AttentionCase:
    """An attention."""

    case: Case

    def __str__(self) -> str:
        case = self.case
        sizes = f"{case.queries}x{case.keys} of {case.heads}/{case.kv_heads}x{case.size} {case.out_layout}"
        return f"attention {sizes}{' causal' if case.causal else ''}"

    @property
    def dtype(self) -> str:
        return self.case.dtype

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        case = self.case
        hidden, rows = case.heads * case.value_size, case.batch * case.queries
        return {
            "packed": (case.batch, case.queries, hidden), "rows": (rows, hidden), "seq_first_rows": (rows, hidden),
            "bshd": (case.batch, case.queries, case.heads, case.value_size),
            "seq_first": (case.queries, case.batch, hidden),
            "bhsd": (case.batch, case.heads, case.queries, case.value_size),
        }[case.out_layout]  # fmt: skip

    def arrays(self) -> dict[str, np.ndarray]:
        return self.case.inputs()

    def node(self) -> FusedNode:
        return self.case.node()

    def expect(self, arrays: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
        return [formula(self.case, arrays)[0]]


@dataclass(frozen=True)
class JoinedCase:
    """y = relu(x w + bias), in which x is (*lead, k), and a program that reads y."""

    name: str
    build: Build
    lead: tuple[int, ...] = (5, 13)
    n: int = 24
    k: int = 40
    dtype: str = "float16"
    operands: tuple[str, ...] = ("x", "w", "bias")
    layout: str = "kn"
    instead: Fused | None = None  # of the product

    @property
    def conv(self) -> ConvCase | None:
        return self.instead if isinstance(self.instead, ConvCase) else None

    def __str__(self) -> str:
        if self.conv:
            return f"{self.name} {self.conv}"
        if self.instead:
            return f"{self.name} {self.instead} {'x'.join(map(str, self.lead))}x{self.n} {self.dtype}"
        return f"{self.name} {'x'.join(map(str, self.lead))}x{self.n}x{self.k} {self.dtype}"

    def made(self) -> MadeCase:
        """Return the case with its operands."""
        random = np.random.default_rng(1)
        shapes = {"x": (*self.lead, self.k), "w": (self.k, self.n) if self.layout == "kn" else (self.n, self.k)}
        shapes |= {"up": shapes["w"], "residual": (*self.lead, self.n)}

        def drawn(shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
            values = random.standard_normal(shape) * scale
            return values > 0 if dtype == "bool" else values.astype(NUMPY[dtype])

        own = {name: drawn(shapes.get(name, (self.n,)), self.dtype, self.k**-0.5 if name in ("w", "up") else 1.0)
               for name in self.operands} if self.instead is None else self.instead.arrays()  # fmt: skip
        program = RegionProgram()
        x0 = program.operand(np.zeros((*self.lead, self.n), NUMPY[self.dtype]))

        def operand(*shape: int, dtype: str = "") -> str:
            return program.operand(drawn(shape, dtype or self.dtype))

        program.outputs = list(self.build(program, x0, operand))
        return MadeCase(self, own, program)


@dataclass
class MadeCase:
    """A case with its operands."""

    case: JoinedCase
    own: dict[str, np.ndarray]  # the product's operands
    program: RegionProgram

    @property
    def arrays(self) -> list[np.ndarray]:
        """All operands, in order."""
        return [*self.own.values(), *list(self.program.operands.values())[1:]]

    def node(self) -> FusedNode:
        """Return the fused node."""
        text, others = self.program.node().attributes["program"], list(self.program.operands)[1:]
        if self.case.instead:
            node = self.case.instead.node()
            outputs = (*self.program.output_dtypes(), *node.output_dtypes[1:])
            operands = (*node.operands, *others)
            attributes = {**node.attributes, "program": text}
            return replace(node, operands=operands, attributes=attributes, output_dtypes=outputs)
        fusion = "gated_gemm" if "up" in self.own else "gemm_bias_activation"
        attributes = {"activation": "relu", "weight_layout": self.case.layout, "program": text}
        return FusedNode(fusion, "y", (*self.own, *others), attributes, self.program.output_dtypes())

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the operands as plans are made for them."""
        constant = ("w", "up", "bias", "scale")
        found = [TensorSpec(a.shape, a.dtype.name, aligned, name in constant) for name, a in self.own.items()]
        return [*found, *self.program.specs(aligned)[1:]]

    def expected(self) -> list[np.ndarray]:
        """Return the outputs, from results in float64."""
        if self.case.instead:
            y, *others = self.case.instead.expect(self.own)
            operands = {**self.program.operands, "x0": y.astype(np.float32)}
            results = () if self.case.conv else others  # a convolution's other array is not a result
            return [*replace(self.program, operands=operands).expected(), *results]
        wide = {name: array.astype(np.float64) for name, array in self.own.items()}
        turned = {
            name: wide[name].T if self.case.layout == "nk" else wide[name] for name in ("w", "up") if name in wide
        }
        y = np.maximum(wide["x"] @ turned["w"] + wide.get("bias", 0), 0)
        if "up" in turned:
            y = y * (wide["x"] @ turned["up"])
        y = y + wide.get("residual", 0)
        operands = {**self.program.operands, "x0": y.astype(np.float32)}
        return replace(self.program, operands=operands).expected()

    def check(self, found: Sequence[np.ndarray], in_two_steps: bool = False, tf32: bool = False) -> None:
        """Check outputs; in two steps, the product's result is rounded before the program reads it.

        With TF32, the operands of the product are rounded.
        """
        names, dtypes = self.program.outputs, self.node().output_dtypes
        names = [*names, *(f"result {i}" for i in range(1, len(dtypes) - len(names) + 1))]
        for name, dtype, one, expected in zip(names, dtypes, found, self.expected(), strict=True):
            if dtype == "uint8":  # a result near a tie may move by a step
                steps = np.abs(one.astype(int) - expected)
                assert steps.max() <= 1 and steps.mean() < 0.1, name
                continue
            if dtype not in ROUNDING:
                np.testing.assert_array_equal(one, expected, err_msg=name)
                continue
            given = one.astype(np.float64), expected.astype(np.float64)
            tolerance, least = 2.1 * ROUNDING[dtype], 4e-6 * math.sqrt(self.case.k)
            in_two_steps |= isinstance(self.case.instead, AttentionCase)  # which rounds probabilities
            if tf32:
                tolerance, least = tolerance + 2.0**-9, 2.0**-8
            elif in_two_steps:
                tolerance, least = 4 * ROUNDING[self.case.dtype], 8 * ROUNDING[self.case.dtype] + least
            np.testing.assert_allclose(*given, rtol=tolerance, atol=least, err_msg=name)


def chain(p: RegionProgram, y: str, operand: Callable[..., str], lead: tuple[int, ...], n: int) -> list[str]:
    full, columns = operand(*lead, n), operand(n)
    return [p.op("Add", p.op("Mul", p.op("Sigmoid", y), full), columns)]


def _broadcasts(lead: tuple[int, ...], n: int) -> Build:
    """Return a program with an operand for each row, each image, each position, each column, and for all."""

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        gated = p.op("Mul", y, p.op("Sigmoid", operand(lead[0], *(1 for _ in lead[1:]), n)))
        placed = p.op("Add", gated, operand(*lead[1:], n))
        scaled = p.op("Mul", placed, operand(*lead, 1))
        return [p.op("Sub", p.op("Mul", scaled, operand(1)), operand(1, n))]

    return build


def _several(lead: tuple[int, ...], n: int) -> Build:
    """Return a program of four outputs, the product's result among them, in three dtypes."""

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        full, other = operand(*lead, n), operand(*lead, n)
        total = p.op("Add", p.op("Mul", p.op("Tanh", y), full), other)
        return [total, p.op("Less", full, other), p.op("Cast", total, dtype="float32", to="float32"), y]

    return build


def _mixed(lead: tuple[int, ...], n: int) -> Build:
    """Return a program with operands of other dtypes: a float32 residual, a mask and integers."""

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        own = p.dtypes[y]
        wide = p.op("Add", p.op("Cast", y, dtype="float32", to="float32"), operand(*lead, n, dtype="float32"))
        masked = p.op("Where", operand(*lead, n, dtype="bool"), wide, operand(n, dtype="float32"), dtype="float32")
        counted = p.op("Cast", operand(*lead, 1, dtype="int64"), dtype="float32", to="float32")
        return [p.op("Cast", p.op("Mul", masked, counted), dtype=own, to=own), wide]

    return build


def _of_rows(lead: tuple[int, ...]) -> Build:
    """Return a program that reads nothing but a factor for each row."""
    return lambda p, y, operand: [p.op("Mul", p.op("Tanh", y), operand(*lead, 1))]


def _only_float32(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
    return [p.op("Neg", p.op("Cast", y, dtype="float32", to="float32"))]


def _quantized(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
    scale, zero = p.op("Constant", dtype="float32", value=1 / 64), p.op("Constant", dtype="uint8", value=112)
    return [p.op("QuantizeLinear", y, scale, zero, dtype="uint8", precision="float32")]


def _modulated(lead: tuple[int, ...], n: int) -> Build:
    """Return a program that reads its operands through views: parts of one tensor, heads of another, and one of pairs.

    Of these, vectors of the first begin at multiples of 8 where n is one, and neighbours of the last lie apart.
    """

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        parts, heads = operand(lead[0], 3 * n), operand(*lead, n // 4, 2, 4)
        shift, scale = (
            p.op("Slice", parts, axes=[1], starts=[at * n], ends=[(at + 1) * n], steps=[1]) for at in (0, 2)
        )
        axes = list(range(1, len(lead)))
        shift, scale = ((p.op("Unsqueeze", each, axes=axes) if axes else each) for each in (shift, scale))
        scaled = p.op("Add", p.op("Mul", y, scale), shift)
        gates = p.ops_of("Split", heads, count=2, axis=len(lead) + 1, sizes=[1, 1])[1]
        gated = p.op("Mul", scaled, p.op("Sigmoid", p.op("Reshape", gates, shape=[*(0 for _ in lead), n])))
        pairs = operand(*lead, n, 2)
        last = p.op("Slice", pairs, axes=[len(lead) + 1], starts=[1], ends=[2], steps=[1])
        return [p.op("Add", gated, p.op("Squeeze", last, axes=[len(lead) + 1]))]

    return build


def _reshaped(lead: tuple[int, ...], n: int) -> Build:
    """Return a program whose outputs divide the product's elements by other axes: its rows as one, and columns in two.

    One operand has each of these shapes, and one is broadcast to it.
    """
    rows, pair = math.prod(lead), 2 - n % 2

    def build(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
        merged = p.op("Reshape", y, shape=[rows, 1, n])
        added = p.op("Add", merged, operand(rows, 1, n))
        parts = p.op("Reshape", p.op("Neg", y), shape=[*lead, pair, n // pair])
        return [p.op("Mul", added, operand(rows, 1, 1)), p.op("Mul", parts, operand(*lead[1:], pair, n // pair))]

    return build


def case(kind: str, **sizes: object) -> JoinedCase:
    """Return a case of one of these programs."""
    made = JoinedCase(kind, _only_float32, **sizes)  # type: ignore[arg-type]
    builds: dict[str, Build] = {
        "chain": lambda p, y, operand: chain(p, y, operand, made.lead, made.n),
        "broadcasts": _broadcasts(made.lead, made.n),
        "several": _several(made.lead, made.n),
        "mixed": _mixed(made.lead, made.n),
        "only float32": _only_float32,
        "quantized": _quantized,
        "modulated": _modulated(made.lead, made.n),
        "rows": _of_rows(made.lead),
        "reshaped": _reshaped(made.lead, made.n),
    }
    return replace(made, build=builds[kind])


def conv_case(kind: str, conv: ConvCase) -> JoinedCase:
    """Return a case of one of these programs behind a convolution."""
    k = conv.c // conv.group * math.prod(conv.kernel)
    return replace(case(kind, lead=(conv.n, *conv.y_sizes), n=conv.m, k=k, dtype=conv.dtype), instead=conv)


def norm_case(kind: str, norm: NormCase) -> JoinedCase:
    """Return a case of one of these programs behind a norm."""
    return replace(case(kind, lead=norm.lead, n=norm.n, k=norm.n, dtype=norm.dtype), instead=norm)


def group_norm_case(kind: str, norm: GroupNormCase) -> JoinedCase:
    """Return a case of one of these programs behind a group norm."""
    *lead, n = norm.shape
    return replace(case(kind, lead=tuple(lead), n=n, k=math.prod(norm.shape), dtype=norm.dtype), instead=norm)


def attention_case(kind: str, of: Case) -> JoinedCase:
    """Return a case of one of these programs after an attention; quantizers read it in float32."""
    attention, dtype = AttentionCase(of), "float32" if kind == "quantized" else of.dtype
    *lead, n = attention.shape()
    return replace(case(kind, lead=tuple(lead), n=n, k=of.keys, dtype=dtype), instead=attention)


KINDS = ("chain", "broadcasts", "several", "mixed", "only float32")
KINDS_OF_PRODUCTS = (*KINDS, "modulated", "rows", "reshaped")
