"""Products with elementwise operators in their epilogue: nodes, operands and expected results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from conv_cases import ConvCase
from region_drafts import NUMPY, RegionProgram

from onnxfuse.runtime.plan import FusedNode, TensorSpec

Build = Callable[[RegionProgram, str, Callable[..., str]], Sequence[str]]  # of the program, x0 and its operands
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


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
    conv: ConvCase | None = None  # in place of x w

    def __str__(self) -> str:
        if self.conv:
            return f"{self.name} {self.conv}"
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
               for name in self.operands} if self.conv is None else self.conv.arrays()  # fmt: skip
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
        if self.case.conv:
            node = self.case.conv.node()
            outputs, operands = self.program.output_dtypes(), (*node.operands, *others)
            attributes = {**node.attributes, "program": text}
            return replace(node, operands=operands, attributes=attributes, output_dtypes=outputs)
        fusion = "gated_gemm" if "up" in self.own else "gemm_bias_activation"
        attributes = {"activation": "relu", "weight_layout": self.case.layout, "program": text}
        return FusedNode(fusion, "y", (*self.own, *others), attributes, self.program.output_dtypes())

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        """Return the operands as plans are made for them."""
        constant = ("w", "up", "bias")
        found = [TensorSpec(a.shape, a.dtype.name, aligned, name in constant) for name, a in self.own.items()]
        return [*found, *self.program.specs(aligned)[1:]]

    def expected(self) -> list[np.ndarray]:
        """Return the outputs, from a product in float64."""
        if self.case.conv:
            operands = {**self.program.operands, "x0": self.case.conv.expect(self.own)[0].astype(np.float32)}
            return replace(self.program, operands=operands).expected()
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
        for name, one, expected in zip(self.program.outputs, found, self.expected(), strict=True):
            dtype = self.program.dtypes[name]
            if dtype not in ROUNDING:
                np.testing.assert_array_equal(one, expected, err_msg=name)
                continue
            given = one.astype(np.float64), expected.astype(np.float64)
            tolerance, least = 2.1 * ROUNDING[dtype], 4e-6 * math.sqrt(self.case.k)
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


def _only_float32(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
    return [p.op("Neg", p.op("Cast", y, dtype="float32", to="float32"))]


def case(kind: str, **sizes: object) -> JoinedCase:
    """Return a case of one of these programs."""
    made = JoinedCase(kind, _only_float32, **sizes)  # type: ignore[arg-type]
    builds: dict[str, Build] = {
        "chain": lambda p, y, operand: chain(p, y, operand, made.lead, made.n),
        "broadcasts": _broadcasts(made.lead, made.n),
        "several": _several(made.lead, made.n),
        "mixed": _mixed(made.lead, made.n),
        "only float32": _only_float32,
    }
    return replace(made, build=builds[kind])


def conv_case(kind: str, conv: ConvCase) -> JoinedCase:
    """Return a case of one of these programs behind a convolution."""
    k = conv.c // conv.group * math.prod(conv.kernel)
    return replace(case(kind, lead=(conv.n, *conv.y_sizes), n=conv.m, k=k, dtype=conv.dtype), conv=conv)


KINDS = ("chain", "broadcasts", "several", "mixed", "only float32")
