"""Concat and Split of channels-last tensors: the pixels, and the channels of the tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from onnxfuse.runtime.plan import FusedNode, TensorSpec

# Elements are moved as they are, so that any bits are as good as others: NaN and subnormal numbers among them.
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

NORM_WEIGHTS = ("scale", "bias", "mean", "var")


@dataclass(frozen=True)
class Case:
    """The axes in front of the channels, and the channels of each part."""

    pixels: tuple[int, ...]
    channels: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.channels)) if len(self.channels) < 9 else f"{len(self.channels)} parts"
        return f"{'x'.join(map(str, self.pixels))} of {sizes}"

    def node(self, fusion: str, dtype: str) -> FusedNode:
        count = len(self.channels)
        if fusion == "concat":
            operands = tuple(f"x_{i}" for i in range(count))
            return FusedNode("concat", "n", operands, {"layout": "nhwc", "axis": -1}, (dtype,))
        attributes = {"layout": "nhwc", "axis": -1, "split": list(self.channels)}
        return FusedNode("split", "n", ("x",), attributes, (dtype,) * count)

    def norms(self, dtype: str, aligned: bool = True) -> tuple[list[FusedNode], list[list[TensorSpec]]]:
        """Return the nodes of batch_norm_activation that read the parts and the whole, and their inputs."""
        own = {"layout": "nhwc", "activation": "relu", "epsilon": 1e-3}
        specs = [self.specs("concat", dtype, aligned), self.specs("split", dtype, aligned)]
        names = [tuple(f"x_{i}" for i in range(len(self.channels))), ("x",)]
        weights = [TensorSpec((sum(self.channels),), dtype, aligned, constant=True)] * len(NORM_WEIGHTS)
        nodes = [FusedNode("batch_norm_activation", "n", (*each, *NORM_WEIGHTS), own, (dtype,)) for each in names]
        return nodes, [[*each, *weights] for each in specs]

    def norm_inputs(self, dtype: str) -> list[list[np.ndarray]]:
        """Return the values that each of the nodes of `norms` reads."""
        random = np.random.default_rng(2)
        parts = [random.standard_normal(shape).astype(NUMPY[dtype]) for shape in self.shapes]
        weights = [random.uniform(0.5, 2, sum(self.channels)).astype(NUMPY[dtype]) for _ in NORM_WEIGHTS]
        return [[*parts, *weights], [whole(parts), *weights]]

    def specs(self, fusion: str, dtype: str, aligned: bool = True) -> list[TensorSpec]:
        shapes = self.shapes if fusion == "concat" else [(*self.pixels, sum(self.channels))]
        return [TensorSpec(shape, dtype, aligned) for shape in shapes]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(*self.pixels, channels) for channels in self.channels]

    def parts(self, dtype: str) -> list[np.ndarray]:
        """Return the tensors side by side, of random bits."""
        random, bits = np.random.default_rng(1), BITS[dtype]
        every = (random.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True) for shape in self.shapes)
        return [each.view(NUMPY[dtype]) for each in every]


def bits(array: np.ndarray) -> np.ndarray:
    """Return an array as integers, to compare NaN too."""
    return array.view(BITS[array.dtype.name])


def whole(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the parts side by side."""
    joined = np.concatenate([bits(part) for part in parts], axis=-1)
    return joined.view(parts[0].dtype)


def dense(first: int, growth: int, count: int) -> tuple[int, ...]:
    """Return the channels of what a layer of a DenseNet reads."""
    return (first, *(growth,) * (count - 1))


# Each way through the kernels: vectors of every width, one chunk and several, with pixels left over and without, a part
# without channels, as many parts as there are, and tensors without pixels.
SMALL = [
    Case((2, 5, 7), (16, 32)),
    Case((1, 9, 11), (8, 24, 40, 8)),
    Case((3, 3, 3), (12, 20)),
    Case((1, 6, 5), (6, 10, 4)),
    Case((2, 7, 1), (3, 1, 5)),
    Case((37,), (64, 0, 32)),
    Case((1, 4, 5), dense(16, 8, 25)),
    Case((1, 3, 5), (8,) * 32),
    Case((1, 17, 19), (32, 64)),
    Case((1, 61, 47), (16, 8, 40)),
    Case((0, 8, 8), (16, 16)),
]
# Sizes of models: YOLO, a UNet, DenseNet, the rows of a detector's boxes.
LARGE = [
    Case((8, 80, 80), (64, 64, 64)),
    Case((8, 20, 20), (256, 256, 256, 256)),
    Case((2, 64, 64), (320, 640)),
    Case((32, 14, 14), dense(256, 32, 25)),
    Case((32, 56, 56), dense(64, 32, 7)),
    Case((4, 80, 80), (80, 64, 1)),
]
