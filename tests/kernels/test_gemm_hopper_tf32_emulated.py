"""Products of float32 in TF32 on Hopper, on a CPU: their own source and plans, with emulated instructions.

It shows wrong addresses, stages, phases and stores, registers that are loaded too soon, and that both operands are
rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.runtime.plan import Launch, Pointer

PINGPONG = HopperConfig(64, 64, pingpong=True)
ALL = ("bias", "column_scale", "residual")


@dataclass(frozen=True)
class Case:
    """Products of one x; all but the first have no bias.  `blocks` take all tiles between them."""

    config: HopperConfig
    m: int
    n: tuple[int, ...]
    k: int
    extra: tuple[str, ...] = ALL
    blocks: int = 2

    def __str__(self) -> str:
        return f"{self.config.name} {self.m}x{self.n}x{self.k} {len(self.extra)}"


# Tiles that end outside y, k that ends inside a stage and inside half of one, rings that go around, more tiles than
# blocks; consumers that take turns and that share the columns of a tile; several products.
CASES = [
    Case(PINGPONG, 200, (264,), 520, blocks=3),
    Case(PINGPONG, 200, (136, 72, 264), 136, extra=("bias",)),
    Case(HopperConfig(128, 128), 300, (136,), 36, extra=()),
    Case(HopperConfig(128, 128), 100, (72, 136), 200, extra=("bias",)),
    Case(HopperConfig(256, 128), 300, (264,), 456),
    Case(HopperConfig(192, 192), 300, (200,), 264, blocks=1),
    Case(HopperConfig(128, 192, thirds=True), 200, (392,), 200, extra=("residual",)),
]


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the nearest TF32 numbers, in float64."""
    return ((values.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_matches_float64_of_rounded_operands(case: Case, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shapes = {"x": (case.m, case.k)} | {name: (case.m, case.n[0]) if name == "residual" else (case.n[0],)
                                        for name in case.extra}  # fmt: skip
    shapes |= {f"w{i}": (case.k, n) for i, n in enumerate(case.n)}
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    pointers = {name: Pointer("input", i) for i, name in enumerate(arrays)}
    operands = {name: pointers[name] for name in case.extra}
    products = [
        Gemm(case.m, n, case.k, "float32", False, True, pointers["x"], pointers[f"w{i}"],
             Pointer("output", i), activation="relu", tf32=True, weights_constant=True, **({} if i else operands))
        for i, n in enumerate(case.n)
    ]  # fmt: skip
    gemm = replace(products[0], grouped=tuple(products[1:]))
    assert hopper.fits(gemm, case.config, H200)
    (step,) = hopper.implementation(gemm, case.config, H200).steps
    assert isinstance(step, Launch)
    found = [np.full((case.m + 1, n), np.nan, np.float32) for n in case.n]  # one row more than y has
    addresses = {pointer: arrays[name].ctypes.data for name, pointer in pointers.items()}
    addresses |= {Pointer("output", i): y.ctypes.data for i, y in enumerate(found)}
    run(replace(step, grid=(case.blocks, 1, 1)), addresses, tmp_path)
    x, first = rounded(arrays["x"]), {name: arrays[name].astype(np.float64) for name in case.extra}
    for i, y in enumerate(found):
        w = rounded(arrays[f"w{i}"])
        of = {} if i else first
        expected = np.maximum(x @ w + of.get("bias", 0), 0) * of.get("column_scale", 1) + of.get("residual", 0)
        allowed = 2e-6 * (np.abs(x) @ np.abs(w) * np.abs(of.get("column_scale", 1)) + 1)
        wrong = ~(np.abs(y[: case.m] - expected) <= allowed)
        assert not wrong.any(), f"product {i}: {wrong.sum()} wrong, the first at {np.argwhere(wrong)[0]}"
        assert np.isnan(y[case.m]).all(), "written beyond the end"
