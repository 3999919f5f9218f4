"""Nodes between convolutions of channels-last tensors, their inputs at random, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from kernel_references import PARAMETERS, group_norm_nhwc, with_parameters

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.pooling.windows import windows
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
NORM_WEIGHTS = ("scale", "bias", "mean", "var")
OPERANDS = {
    "channel_scale": ("x", "gate"), "group_norm": ("x", "scale", "bias"), "batch_norm_activation": ("x", *NORM_WEIGHTS),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A node: its fusion, the shape of x (n, *spatial, channels), and its attributes besides the layout."""

    fusion: str
    shape: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.fusion} {'x'.join(map(str, self.shape))} {' '.join(map(str, self.attributes.values()))}"

    @property
    def operands(self) -> tuple[str, ...]:
        own = OPERANDS.get(self.fusion, ("x",))
        return (*own, "residual") if "residual_position" in self.attributes else own

    def node(self, dtype: str) -> FusedNode:
        return FusedNode(self.fusion, "n", self.operands, {"layout": "nhwc", **self.attributes}, (dtype,))

    def shapes(self) -> list[tuple[int, ...]]:
        gate = (self.shape[0], *(1,) * (len(self.shape) - 2), self.shape[-1])
        known = {"x": self.shape, "residual": self.shape, "gate": gate}
        return [known.get(name, self.shape[-1:]) for name in self.operands]

    def specs(self, dtype: str, aligned: bool = True) -> list[TensorSpec]:
        return [TensorSpec(shape, dtype, aligned, aligned and len(shape) == 1) for shape in self.shapes()]

    def inputs(self, dtype: str) -> dict[str, np.ndarray]:
        random = np.random.default_rng(1)
        arrays = {name: random.standard_normal(shape) for name, shape in zip(self.operands, self.shapes(), strict=True)}
        arrays["x"] = arrays["x"] * 2 + 1
        if "var" in arrays:
            arrays["var"] = np.abs(arrays["var"]) + 0.1
        return {name: each.astype(NUMPY[dtype]) for name, each in arrays.items()}

    def expected(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return y in float64."""
        x, *others = (each.astype(np.float64) for each in inputs.values())
        return FORMULAS[self.fusion](self, x, *others)


def activated(case: Case, x: np.ndarray) -> np.ndarray:
    name = case.attributes.get("activation", "none")
    return ACTIVATIONS[name].formula(x, *PARAMETERS.get(name, (0.0, 0.0)))


def pooled(case: Case, x: np.ndarray) -> np.ndarray:
    """Pool by definition: pad with NaN, and reduce what is not NaN of each window."""
    axes = windows(case.node("float32"), x.shape)
    room = [max(0, (w.y_size - 1) * w.stride + (w.kernel - 1) * w.dilation + 1 - w.size - w.pad_begin) for w in axes]
    pads = [(0, 0), *((w.pad_begin, more) for w, more in zip(axes, room, strict=True)), (0, 0)]
    padded = np.pad(x, pads, constant_values=np.nan)
    counted = np.pad(np.ones(x.shape), [(0, 0), *((w.pad_begin, min(w.pad_end, more)) for w, more in
                     zip(axes, room, strict=True)), (0, 0)], constant_values=1)  # fmt: skip
    counted = np.pad(counted, [(0, big - small) for big, small in zip(padded.shape, counted.shape, strict=True)])
    y = np.empty((x.shape[0], *(w.y_size for w in axes), x.shape[-1]))
    with_padding = case.attributes.get("count_include_pad", 0)
    for at in np.ndindex(*(w.y_size for w in axes)):
        taps = tuple(
            slice(i * w.stride, i * w.stride + (w.kernel - 1) * w.dilation + 1, w.dilation)
            for i, w in zip(at, axes, strict=True)
        )
        window = padded[:, *taps].reshape(x.shape[0], -1, x.shape[-1])
        if case.fusion == "max_pool":
            y[:, *at] = np.where(np.isnan(window), -np.inf, window).max(1)
        else:
            inside = (~np.isnan(window)).sum(1)
            number = counted[:, *taps].reshape(x.shape[0], -1, x.shape[-1]).sum(1) if with_padding else inside
            y[:, *at] = np.where(np.isnan(window), 0, window).sum(1) / np.maximum(number, 1)
    return y


def normalized(case: Case, x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    normal = group_norm_nhwc(x, scale, bias, case.attributes["groups"], case.attributes["epsilon"])
    return activated(case, normal)


def keeps_axes(case: Case) -> bool:
    """Return whether the result of a global pool has the axes of pixels."""
    return bool(case.attributes.get("keepdims", 1))


def batch_normalized(case: Case, x: np.ndarray, *weights: np.ndarray) -> np.ndarray:
    scale, bias, mean, var = weights
    return activated(case, (x - mean) * scale / np.sqrt(var + case.attributes["epsilon"]) + bias)


def to_space(case: Case, x: np.ndarray) -> np.ndarray:
    n, h, w, c = x.shape
    b = case.attributes["blocksize"]
    if case.attributes.get("mode") == "CRD":
        blocks = x.reshape(n, h, w, c // b**2, b, b).transpose(0, 1, 4, 2, 5, 3)
    else:
        blocks = x.reshape(n, h, w, b, b, c // b**2).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, h * b, w * b, c // b**2)


def to_depth(case: Case, x: np.ndarray) -> np.ndarray:
    n, h, w, c = x.shape
    b = case.attributes["blocksize"]
    return x.reshape(n, h // b, b, w // b, b, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, h // b, w // b, c * b**2)


FORMULAS: Mapping[str, Callable[..., np.ndarray]] = {
    "max_pool": pooled,
    "average_pool": pooled,
    "global_average_pool": lambda case, x: x.mean(tuple(range(1, x.ndim - 1)), keepdims=keeps_axes(case)),
    "global_max_pool": lambda case, x: x.max(tuple(range(1, x.ndim - 1)), keepdims=keeps_axes(case)),
    "channel_scale": lambda case, x, gate, residual=0.0: activated(case, x * gate + residual),
    "depth_to_space": to_space,
    "space_to_depth": to_depth,
    "batch_norm_activation": batch_normalized,
    "group_norm": normalized,
}


def pool(fusion: str, shape: Sequence[int], kernel: Sequence[int], **attributes: Any) -> Case:
    return Case(fusion, tuple(shape), {"kernel_shape": list(kernel), **attributes})


def group_norm(shape: tuple[int, ...], groups: int, activation: str = "silu") -> Case:
    return Case("group_norm", shape, {"groups": groups, "epsilon": 1e-5, "activation": activation})


def batch_norm(shape: tuple[int, ...], activation: str = "relu") -> Case:
    return Case("batch_norm_activation", shape, {"epsilon": 1e-5, **with_parameters(activation)})


# Each way through the kernels: overlapping windows, windows in loops, larger than x and none, one to three axes, odd
# and few channels; pixels divided among blocks and not; groups of parts of vectors and of several, in one launch and in
# two.
SMALL = [
    pool("max_pool", (2, 13, 17, 64), (3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    pool("max_pool", (1, 20, 20, 72), (5, 5), pads=[2, 2, 2, 2]),
    pool("max_pool", (1, 15, 9, 8), (13, 13), pads=[6, 6, 6, 6]),
    pool("max_pool", (1, 9, 30, 3), (2, 11), dilations=[3, 2], strides=[2, 1], pads=[1, 3, 0, 5]),
    pool("max_pool", (3, 40, 24), (4,), strides=[2], pads=[0, 3], ceil_mode=1),
    pool("max_pool", (2, 5, 6, 7, 16), (3, 2, 3), strides=[2, 1, 1], pads=[1, 0, 2, 1, 1, 0]),
    pool("average_pool", (2, 14, 14, 104), (2, 2), strides=[2, 2]),
    pool("average_pool", (1, 17, 12, 8), (14, 12)),
    pool("average_pool", (2, 6, 7, 12), (3, 3), pads=[1, 1, 1, 1], count_include_pad=1),
    pool("average_pool", (1, 7, 8, 4), (3, 3), strides=[2, 2], pads=[1, 0, 1, 0], ceil_mode=1, count_include_pad=1),
    pool("average_pool", (2, 2, 2, 38), (38, 38), strides=[38, 38], ceil_mode=1, count_include_pad=1),
    pool("average_pool", (1, 3, 2, 8), (5, 3), strides=[3, 2], pads=[1, 0, 0, 1], count_include_pad=1),
    pool("average_pool", (1, 2, 5, 24), (2, 2), strides=[3, 3], dilations=[3, 4]),
    pool("average_pool", (1, 6, 4, 8), (2, 1), strides=[5, 3], auto_pad="SAME_UPPER"),
    pool("max_pool", (2, 2, 2, 8), (7, 7), strides=[7, 7]),
    pool("max_pool", (1, 2, 5, 8), (2, 3), strides=[4, 2], dilations=[3, 2], pads=[0, 2, 0, 2]),
    pool("max_pool", (0, 8, 8, 16), (2, 2)),
    pool("max_pool", (2, 4, 2, 8), (3, 3)),
    Case("global_average_pool", (2, 7, 7, 80)),
    Case("global_average_pool", (1, 60, 60, 24)),
    Case("global_average_pool", (3, 5, 7, 9, 5)),
    Case("global_average_pool", (2, 7, 7, 80), {"keepdims": 0}),
    Case("global_max_pool", (2, 7, 7, 80)),
    Case("global_max_pool", (1, 61, 60, 3)),
    Case("global_max_pool", (2, 500, 24)),
    Case("channel_scale", (3, 14, 15, 72), {"activation": "none"}),
    Case("channel_scale", (2, 5, 33), with_parameters("hard_sigmoid")),
    Case("channel_scale", (2, 1, 1, 8), {"activation": "silu"}),
    Case("channel_scale", (3, 9, 7, 72), {"activation": "relu", "residual_position": "before"}),
    Case("channel_scale", (2, 5, 33), {"activation": "none", "residual_position": "before"}),
    Case("depth_to_space", (2, 5, 7, 64), {"blocksize": 2}),
    Case("depth_to_space", (1, 4, 9, 27), {"blocksize": 3}),
    Case("depth_to_space", (2, 5, 7, 64), {"blocksize": 2, "mode": "CRD"}),
    Case("depth_to_space", (1, 6, 5, 12), {"blocksize": 2, "mode": "CRD"}),
    Case("depth_to_space", (1, 3, 4, 128), {"blocksize": 4, "mode": "CRD"}),
    Case("space_to_depth", (2, 6, 8, 24), {"blocksize": 2}),
    Case("space_to_depth", (1, 9, 6, 3), {"blocksize": 3}),
    batch_norm((2, 14, 15, 72)),
    batch_norm((3, 5, 264), "leaky_relu"),
    batch_norm((1, 40, 40, 33), "hard_swish"),
    group_norm((2, 31, 33, 80), 8),
    group_norm((1, 9, 7, 96), 4, "none"),
    group_norm((1, 40, 40, 48), 24),
    group_norm((1, 5, 3, 40), 1),
    group_norm((3, 1, 1, 64), 8),
    group_norm((2, 65, 33), 3),
    group_norm((1, 700, 64), 64, "none"),
    group_norm((1, 4, 9, 7, 48), 8),
    group_norm((2, 3, 5, 7, 40), 40),
]
# Sizes of models: ResNet, YOLO, EfficientNet, DenseNet, UNet, the end of a VAE, and the InstanceNorm of an nnU-Net.
LARGE = [
    pool("max_pool", (32, 112, 112, 64), (3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    pool("max_pool", (8, 20, 20, 256), (5, 5), pads=[2, 2, 2, 2]),
    pool("average_pool", (32, 56, 56, 128), (2, 2), strides=[2, 2]),
    pool("average_pool", (8, 35, 35, 384), (3, 3), pads=[1, 1, 1, 1], count_include_pad=1),
    Case("global_average_pool", (32, 14, 14, 672)),
    Case("global_average_pool", (32, 7, 7, 1280)),
    Case("global_average_pool", (32, 112, 112, 32)),
    Case("global_max_pool", (32, 56, 56, 64)),
    Case("channel_scale", (32, 56, 56, 144), {"activation": "none"}),
    Case("channel_scale", (32, 56, 56, 256), {"activation": "relu", "residual_position": "before"}),
    Case("depth_to_space", (1, 270, 480, 256), {"blocksize": 2, "mode": "CRD"}),
    Case("space_to_depth", (8, 640, 640, 8), {"blocksize": 2}),
    batch_norm((32, 28, 28, 512)),
    group_norm((2, 64, 64, 320), 32),
    group_norm((2, 32, 32, 640), 32),
    group_norm((2, 16, 16, 1280), 32),
    group_norm((1, 512, 512, 128), 32),
    group_norm((2, 128, 128, 64), 64, "none"),
]
RESIZES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 5, 7, 16), {"scales": [1.0, 2.0, 2.0, 1.0], "coordinate_transformation_mode": "asymmetric",
                     "nearest_mode": "floor"}),
    ((1, 9, 30, 3), {"scales": [1.0, 1.7, 0.61, 1.0]}),
    ((2, 33, 10, 8), {"scales": [1.0, 1.0, 0.3, 1.0], "nearest_mode": "ceil"}),
    ((1, 13, 9, 24), {"sizes": [1, 30, 31, 24], "mode": "linear"}),
    ((1, 13, 9, 8), {"sizes": [1, 5, 18, 8], "mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ((1, 3, 3, 5), {"sizes": [1, 1, 7, 5], "mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    ((2, 6, 8), {"scales": [1.0, 2.5, 1.0], "nearest_mode": "round_prefer_ceil"}),
    ((2, 7, 24), {"scales": [1.0, 3.0, 1.0], "mode": "linear"}),
    ((1, 3, 5, 4, 16), {"scales": [1.0, 2.0, 2.0, 2.0, 1.0], "mode": "linear"}),
    ((2, 4, 3, 5, 3), {"sizes": [2, 7, 3, 9, 3], "coordinate_transformation_mode": "asymmetric",
                       "nearest_mode": "floor"}),
    ((8, 40, 40, 256), {"scales": [1.0, 2.0, 2.0, 1.0], "coordinate_transformation_mode": "asymmetric",
                        "nearest_mode": "floor"}),
]  # fmt: skip
