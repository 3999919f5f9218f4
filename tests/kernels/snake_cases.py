"""Nodes of the fusion snake of examples/package, whose kernel is tested like onnxfuse's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Relative to the numbers that are added: half a unit in the last place, and in float32 the error of sin.
TOLERANCE = {"float32": 4e-7, "float16": 5e-4, "bfloat16": 4e-3}
# Batch, channels and length, channels-first. One element; rows shorter than a vector; an odd length, whose vectors
# cross rows; channels that are not a multiple of a vector; as many as a vector; many vectors and a rest; and nothing.
SHAPES = (
    (1, 1, 1), (2, 5, 1), (1, 3, 2), (2, 7, 33), (3, 12, 50), (2, 24, 40), (2, 8, 1023), (1, 64, 257),
    (2, 0, 5), (0, 8, 4), (2, 8, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Snake:
    """A node of snake; `shape` is channels-first."""

    shape: tuple[int, int, int]
    dtype: str = "float16"
    form: str = "product"
    layout: str = "nchw"

    @property
    def node(self) -> FusedNode:
        return FusedNode(
            "snake", "n", ("x", "alpha", "gain"), {"form": self.form, "layout": self.layout}, (self.dtype,)
        )

    def arrays(self, factor: float = 1.0) -> dict[str, np.ndarray]:
        """Return random operands: x is about 2; gain and alpha / factor are ±1/2 to ±2."""
        random = np.random.default_rng(sum(self.shape))
        x = random.standard_normal(self.shape) * 2
        if self.layout == "nhwc":
            x = np.ascontiguousarray(x.transpose(0, 2, 1))
        signs = random.choice([-1, 1], (2, self.shape[1]))
        alpha, gain = signs * np.exp2(random.uniform(-1, 1, (2, self.shape[1])))
        columns = {"alpha": factor * alpha.reshape(1, -1, 1), "gain": gain.reshape(1, -1, 1)}
        return {name: value.astype(NUMPY[self.dtype]) for name, value in {"x": x, **columns}.items()}

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        n, channels, length = self.shape
        x = (n, length, channels) if self.layout == "nhwc" else self.shape
        return [TensorSpec(shape, self.dtype, aligned) for shape in (x, (1, channels, 1), (1, channels, 1))]


def expected(case: Snake, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the output in float64, and for each element how large the numbers are whose rounding errors it has.

    alpha * x is rounded to float32, as every implementation in float32 does.
    """
    layout = (1, -1, 1) if case.layout == "nchw" else (1, 1, -1)
    alpha, gain = (arrays[name].reshape(layout).astype(np.float32) for name in ("alpha", "gain"))
    x, factor = arrays["x"].astype(np.float64), gain if case.form == "product" else 1 / gain.astype(np.float64)
    wave = np.sin((alpha * arrays["x"].astype(np.float32)).astype(np.float64)) ** 2
    return x + wave * factor, np.abs(x) + np.abs(factor)


def check(case: Snake, arrays: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Fail unless every element of an output is as near to the formula as its dtype allows."""
    reference, size = expected(case, arrays)
    assert y.shape == reference.shape and y.dtype.name == case.dtype
    errors = np.abs(y.astype(np.float64) - reference) / size
    assert errors.max(initial=0.0) <= TOLERANCE[case.dtype], f"{case} differs by {errors.max()}"


def cases() -> Iterator[Snake]:
    """Yield every shape in both layouts and forms, in dtypes by turns."""
    for i, shape in enumerate(SHAPES):
        yield Snake(shape, list(NUMPY)[i % 3])
        yield Snake(shape, list(NUMPY)[(i + 1) % 3], "quotient", "nhwc")
        yield Snake(shape, list(NUMPY)[(i + 2) % 3], "product", "nhwc")
