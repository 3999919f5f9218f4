"""Gates of channels for the tests of kernels: convolutions that read gated images, and what computes the gates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from conv_cases import NUMPY, ConvCase

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime.plan import FusedNode, TensorSpec

BOTH = ("bias", "residual", "gate")
# Images of fewer and of more pixels than a tile has rows, of one pixel, and without a common divisor with it.
IMAGES = ((3, (7, 5)), (300, (1, 1)), (2, (13, 14)), (1, (3, 3)), (5, (29,)), (2, (3, 4, 5)))


def gated_convs() -> Iterator[ConvCase]:
    """Yield convolutions of gated images: sizes of images, whole and odd numbers of channels, dtypes, alignment."""
    for n, sizes in IMAGES:
        ones = (1,) * len(sizes)
        yield ConvCase(n, 64, 24, sizes, ones, extra=BOTH)
        yield ConvCase(n, 96, 40, sizes, ones, extra=("gate",), activation="none")
    for c, m in ((144, 40), (45, 24), (46, 70), (44, 33), (8, 16), (672, 112)):
        for dtype in ("float16", "bfloat16", "float32"):
            yield ConvCase(2, c, m, (9, 7), (1, 1), dtype=dtype, tf32=dtype == "float32", extra=BOTH)
    yield ConvCase(2, 80, 96, (9, 9), (1, 1), extra=BOTH, aligned=False)
    yield ConvCase(2, 33, 24, (9, 9), (1, 1), extra=BOTH, aligned=False, dtype="float32", tf32=True)
    yield ConvCase(2, 64, 24, (9, 9), (1, 1), extra=BOTH, residual_first=False, activation="silu")


@dataclass(frozen=True)
class SqueezeCase:
    """A gate that an image of those sizes and channels computes of itself."""

    n: int
    sizes: tuple[int, ...]
    channels: int
    squeezed: int
    dtype: str = "float16"
    biases: tuple[str, ...] = ("bias", "bias_2")
    activations: tuple[str, str] = ("silu", "sigmoid")
    aligned: bool = True
    rows: bool = False  # whether the weights are those of products of rows

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        marks = [f"{self.n}x{sizes} {self.channels}-{self.squeezed}", self.dtype, *self.biases, *self.activations]
        return " ".join([*marks, *([] if self.aligned else ["misaligned"]), *(["rows"] if self.rows else [])])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the operands."""
        ones, c, s = () if self.rows else (1,) * len(self.sizes), self.channels, self.squeezed
        shapes = {"x": (self.n, *self.sizes, c), "w": (s, *ones, c), "bias": (s,), "w_2": (c, *ones, s), "bias_2": (c,)}
        scales = {"w": 3 / math.sqrt(c), "w_2": 1 / math.sqrt(s)}
        random = np.random.default_rng(3)
        return {
            name: (random.standard_normal(shape) * scales.get(name, 1.0) + (name == "x")).astype(NUMPY[self.dtype])
            for name, shape in shapes.items()
            if "bias" not in name or name in self.biases
        }

    def node(self) -> FusedNode:
        """Return the fused node."""
        first, second = self.activations
        attributes: dict[str, Any] = {"layout": "nhwc", "activation": first, "activation_2": second}
        return FusedNode("squeeze_excite", str(self), tuple(self.arrays()), attributes, (self.dtype,))

    def specs(self) -> list[TensorSpec]:
        """Return the operands as plans are made for them."""
        return [TensorSpec(array.shape, self.dtype, self.aligned, name != "x") for name, array in self.arrays().items()]

    def expect(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the gate in float64."""
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        means = wide["x"].reshape(self.n, -1, self.channels).sum(axis=1) / max(1, math.prod(self.sizes))
        first, second = (ACTIVATIONS[name] for name in self.activations)
        squeezed = means @ wide["w"].reshape(self.squeezed, -1).T + wide.get("bias", 0.0)
        squeezed = first.formula(squeezed, first.alpha, first.beta)
        gate = squeezed @ wide["w_2"].reshape(self.channels, -1).T + wide.get("bias_2", 0.0)
        return second.formula(gate, second.alpha, second.beta).reshape(self.n, *(1,) * len(self.sizes), -1)


def squeezes() -> Iterator[SqueezeCase]:
    """Yield few and many channels, images whose pixels do not divide among blocks, dtypes, and absent operands."""
    yield SqueezeCase(3, (7, 5), 72, 24, activations=("relu", "hard_sigmoid"))
    yield SqueezeCase(2, (3, 3), 1152, 48)
    yield SqueezeCase(3, (3, 3), 960, 240)
    yield SqueezeCase(1, (11,), 33, 7, "float32")
    yield SqueezeCase(2, (5, 4), 32, 8, "bfloat16", ())
    yield SqueezeCase(2, (5, 4), 144, 6, aligned=False)
    yield SqueezeCase(2, (1, 2, 4), 16, 1, biases=("bias_2",))
    yield SqueezeCase(1, (0, 3), 16, 2)
    yield SqueezeCase(2, (61, 67), 96, 4, "float32", activations=("relu", "none"))
    yield SqueezeCase(1, (1, 1), 4104, 12)
    yield SqueezeCase(2, (6, 5), 48, 12, rows=True)
