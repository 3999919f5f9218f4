"""The Hopper GEMM on a CPU: its own source and plans, with emulated instructions.

It cannot show how fast it is, nor a missing fence; it does show wrong addresses, swizzles and phases, and what is
reused or read too soon.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from architectures import H200
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.pad import Copy, padded, padded_columns
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.runtime.plan import Launch, Pointer

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LINEAR = ("bias", "column_scale", "residual")
SLOPES, SHIFTED = ("bias", "slope", "residual"), ("bias", "column_scale", "column_shift")
GATED = ("bias", "up", "up_bias", "column_scale", "residual")
GATE_ROWS = 37  # of x, that share a gate


@dataclasses.dataclass(frozen=True)
class Case:
    """A product and its config; `blocks` take all tiles between them, or if None there is one for each tile."""

    config: HopperConfig
    m: int
    n: int
    k: int
    dtype: str
    transposed: bool
    extra: tuple[str, ...]
    blocks: int | None
    grouped: tuple[int, ...] = ()  # n of further products of x, of which the first has no bias
    aligned: bool = True
    residual_first: bool = False

    def __str__(self) -> str:
        marks = f"{' residual first' * self.residual_first}{'' if self.aligned else ' misaligned'}"
        layout = f"{'nk' * self.transposed or 'kn'}{marks}"
        gate = " gate" * ("gate" in self.extra)
        return f"{self.config.name} {self.m}x{self.n}x{self.k} {self.dtype} {layout}{gate}"


# Tiles that end outside y, k that ends inside a stage, rings that go around, consumers with unequal suffixes of tiles;
# then rows that begin anywhere, of y alone, of all but y, of everything; then residuals in front of the activation.
CASES = [
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 456, "float16", False, LINEAR, 2),
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 264, "bfloat16", True, GATED, 2),
    Case(HopperConfig(64, 64, pingpong=True), 200, 264, 136, "float16", False, ("residual",), 3),
    Case(HopperConfig(128, 256), 200, 520, 136, "float16", False, LINEAR, 2),
    Case(HopperConfig(256, 128), 300, 264, 136, "bfloat16", True, (), 2),
    Case(HopperConfig(192, 192), 300, 392, 200, "float16", False, LINEAR, 2),
    Case(HopperConfig(128, 192), 200, 392, 264, "float16", True, LINEAR, 1),
    Case(HopperConfig(192, 128, pingpong=True), 300, 264, 200, "float16", False, ("bias", "residual"), 2),
    Case(HopperConfig(128, 64, split_k=3), 100, 136, 456, "float16", False, LINEAR, None),
    Case(HopperConfig(128, 128, split_k=2), 100, 136, 200, "bfloat16", True, GATED, None),
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 136, "float16", False, ("bias",), 2, (136, 72)),
    Case(HopperConfig(128, 64), 100, 72, 200, "bfloat16", True, ("bias",), 2, (136,)),
    Case(HopperConfig(128, 128, pingpong=True), 201, 265, 136, "float16", True, LINEAR, 2),
    Case(HopperConfig(64, 64, pingpong=True), 131, 129, 201, "bfloat16", False, ("residual",), 2),
    Case(HopperConfig(128, 256), 200, 136, 203, "float16", True, GATED, 2),
    Case(HopperConfig(192, 192), 300, 387, 70, "float16", False, ("bias",), 1),
    Case(HopperConfig(128, 64, split_k=3), 101, 135, 457, "float16", False, LINEAR, None),
    Case(HopperConfig(128, 128, split_k=2), 100, 131, 201, "bfloat16", True, GATED, None),
    Case(HopperConfig(128, 128, pingpong=True), 200, 1, 1, "float16", False, (), 2),
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 137, "float16", False, ("bias",), 2, (135, 72)),
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 136, "float16", False, LINEAR, 2, aligned=False),
    Case(HopperConfig(128, 64, split_k=2), 100, 72, 136, "bfloat16", True, LINEAR, None, aligned=False),
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 136, "float16", True, LINEAR, 2, residual_first=True),
    Case(HopperConfig(128, 256), 200, 520, 136, "bfloat16", True, ("bias", "residual"), 2, residual_first=True),
    Case(HopperConfig(128, 64, split_k=2), 100, 135, 136, "float16", True, ("residual",), None, residual_first=True),
]

# One consumer, whose results take a stage of the ring: rings that go around, k of fewer stages than those, no residual.
HALVES = [
    Case(HopperConfig(128, 128, half=True), 200, 264, 456, "float16", False, LINEAR, 2),
    Case(HopperConfig(128, 128, half=True), 300, 264, 136, "bfloat16", True, GATED, 2),
    Case(HopperConfig(64, 128, half=True), 200, 264, 72, "float16", True, ("residual",), 2),
    Case(HopperConfig(128, 64, half=True), 300, 136, 328, "float16", True, ("bias",), 3, (136, 72)),
    Case(HopperConfig(64, 64, half=True), 200, 136, 520, "bfloat16", False, (), 2),
]

# Gates of fewer and of more rows than a tile, and k that ends inside a stage, by each way to divide tiles and k.
GATES = [
    Case(HopperConfig(64, 64, pingpong=True), 200, 72, 136, "float16", True, ("bias", "gate"), 2),
    Case(HopperConfig(128, 64), 200, 72, 200, "bfloat16", False, ("gate",), 2),
    Case(HopperConfig(128, 128, pingpong=True), 300, 136, 264, "float16", True, ("bias", "residual", "gate"), 2),
    Case(HopperConfig(128, 192), 200, 392, 264, "bfloat16", True, ("gate",), 1),
    Case(HopperConfig(192, 192), 300, 392, 200, "float16", True, ("bias", "gate"), 2),
    Case(HopperConfig(128, 64, split_k=3), 100, 136, 456, "float16", True, ("bias", "residual", "gate"), None),
    Case(HopperConfig(128, 128, split_k=2), 100, 136, 200, "bfloat16", True, ("gate",), None),
]

EPILOGUES = [
    Case(HopperConfig(128, 128, pingpong=True), 200, 264, 136, "float16", False, SLOPES, 2),
    Case(HopperConfig(128, 64, split_k=3), 100, 136, 456, "bfloat16", True, SLOPES, None),
    Case(HopperConfig(128, 192), 200, 392, 136, "float16", True, SHIFTED, 1),
    Case(HopperConfig(128, 64, split_k=2), 100, 72, 136, "float16", False, SHIFTED, None),
]


def operands(case: Case) -> dict[str, np.ndarray]:
    """Return the operands by name; those of the second and third product end in _2 and _3."""
    random = np.random.default_rng(1)
    made = {}
    for suffix, n in zip(("", "_2", "_3"), (case.n, *case.grouped), strict=False):
        weight = (n, case.k) if case.transposed else (case.k, n)
        shapes = {"x": (case.m, case.k), "w": weight, "up": weight, "residual": (case.m, n)}
        shapes["gate"] = (-(-case.m // GATE_ROWS), case.k)
        names = ("x", "w", *case.extra) if not suffix else ("w", "bias") if suffix == "_3" else ("w",)
        for name in names:
            values = random.standard_normal(shapes.get(name, (n,)))
            made[name + suffix] = (values * (case.k**-0.5 if name in ("w", "up") else 1)).astype(NUMPY[case.dtype])
    return made


def expect(case: Case, arrays: dict[str, np.ndarray], suffix: str) -> np.ndarray:
    wide = {name: value.astype(np.float64) for name, value in arrays.items()}
    x, w = wide["x"], wide["w" + suffix].T if case.transposed else wide["w" + suffix]
    if "gate" in wide:
        gate = np.repeat(wide["gate"], GATE_ROWS, axis=0)[: case.m]
        x = (x * gate).astype(NUMPY[case.dtype]).astype(np.float64)
    before, behind = (wide.get("residual", 0) if first == case.residual_first else 0 for first in (True, False))
    y = x @ w + wide.get("bias" + suffix, 0) + before
    y = np.where(y < 0, wide.get("slope", 0) * y, y)
    if "up" in wide:
        y = y * (x @ (wide["up"].T if case.transposed else wide["up"]) + wide["up_bias"])
    return y * wide.get("column_scale", 1) + wide.get("column_shift", 0) + behind


def product(case: Case, pointers: dict[str, Pointer], suffix: str, output: int) -> Gemm:
    named = {"w": pointers["w" + suffix], "bias": pointers.get("bias" + suffix)}
    n = (case.n, *case.grouped)[output]
    sizes, constant = (case.m, n, case.k, case.dtype, case.transposed, case.aligned), case.dtype == "float16"
    others: dict[str, Any] = {name: pointers[name] for name in case.extra if name != "bias"} if not suffix else {}
    activation = "prelu" if "slope" in others else "relu"
    others |= {"gate_rows": GATE_ROWS} if "gate" in others else {}
    return Gemm(*sizes, x=pointers["x"], y=Pointer("output", output), activation=activation, weights_constant=constant,
                residual_first=case.residual_first, **named, **others)  # fmt: skip


def empty(case: Case, shape: tuple[int, int]) -> np.ndarray:
    """Return an array of NaN that begins at a multiple of 16 bytes, or one element after it."""
    count = shape[0] * shape[1]
    values = np.full(count + 8, np.nan, NUMPY[case.dtype])
    skip = -values.ctypes.data // 2 % 8 + (0 if case.aligned else 1)
    return values[skip : skip + count].reshape(shape)


def copied(copy: Copy, source: np.ndarray) -> np.ndarray:
    """Return what gemm_pad.cu writes, with NaN between the rows."""
    target = np.full((copy.rows, padded_columns(copy.columns, copy.dtype)), np.nan, source.dtype)
    target[:, : copy.columns] = source
    return target


@pytest.mark.parametrize("case", [*sampled(CASES, 16), *sampled(GATES, 3), *EPILOGUES, *sampled(HALVES, 3)], ids=str)
def test_matches_float64(case: Case, tmp_path: Path) -> None:
    arrays = operands(case)
    pointers = {name: Pointer("input", i) for i, name in enumerate(arrays)}
    suffixes = ("", "_2", "_3")[: 1 + len(case.grouped)]
    first, *others = (product(case, pointers, suffix, i) for i, suffix in enumerate(suffixes))
    gemm = dataclasses.replace(first, grouped=tuple(others))
    step = hopper.implementation(gemm, case.config, H200).steps[-1]
    assert isinstance(step, Launch)
    found = [empty(case, (case.m + 1, each.n)) for each in (first, *others)]
    _, copies = padded(gemm, residual=case.config.split_k == 1)
    made = {copy.target: copied(copy, list(arrays.values())[copy.source.index]) for copy in copies}
    addresses = {pointer: arrays[name].ctypes.data for name, pointer in pointers.items()}
    addresses |= {pointer: array.ctypes.data for pointer, array in made.items()}
    addresses |= {Pointer("output", i): y.ctypes.data for i, y in enumerate(found)}
    run(dataclasses.replace(step, grid=(case.blocks or step.grid[0], 1, 1)), addresses, tmp_path)
    rounding = {"float16": 2**-11, "bfloat16": 2**-8}[case.dtype]
    for y, suffix in zip(found, suffixes, strict=True):
        expected = expect(case, arrays, suffix)
        np.testing.assert_allclose(y[: case.m].astype(np.float64), expected, rtol=1.02 * rounding, atol=2e-6)
        assert np.isnan(y[case.m].astype(np.float64)).all(), "written beyond the end"
