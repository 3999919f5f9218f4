"""Convolutions for the tests of kernels, and what they compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np
from kernel_references import PARAMETERS

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime.plan import FusedNode, Pointer

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class ConvCase:
    """A convolution with its epilogue; `extra` names the operands beside x and w.

    `strides`, `dilations` and `pads` are those of ONNX Conv; empty means its defaults.
    """

    FUSION: ClassVar = "conv_bias_activation"

    n: int
    c: int
    m: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    group: int = 1
    dtype: str = "float16"
    extra: tuple[str, ...] = ("bias",)
    activation: str = "relu"
    residual_first: bool = True
    x_nchw: bool = False
    w_hwio: bool = False
    tf32: bool = False
    aligned: bool = True
    scale: float = 1.0  # of x
    constant: bool = field(default=True)  # the weights

    def __str__(self) -> str:
        def x(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        geometry = zip("spd", (self.strides, self.pads, self.dilations), strict=True)

        marks = [f"{self.n}x{x(self.sizes)}", f"{self.c}-{self.m}", f"k{x(self.kernel)}"]
        marks += [f"{name}{x(values)}" for name, values in geometry if values]
        marks += [f"g{self.group}", "tf32" if self.tf32 else self.dtype, *self.extra, self.activation]
        marks += ["" if self.residual_first else "after", "nchw" * self.x_nchw, "hwio" * self.w_hwio]
        marks += ["" if self.aligned else "misaligned", "" if self.constant else "computed"]
        marks += ["" if self.scale == 1 else f"x{self.scale:g}"]
        return " ".join(mark for mark in marks if mark)

    @property
    def w_layout(self) -> str:
        return "hwio" if self.w_hwio else "ohwi"

    @property
    def axes(self) -> int:
        return len(self.kernel)

    @property
    def y_sizes(self) -> tuple[int, ...]:
        stride, pads, dilation = self._geometry()
        found = []
        for i, size in enumerate(self.sizes):
            padded = size + pads[i] + pads[i + self.axes]
            found.append((padded - (self.kernel[i] - 1) * dilation[i] - 1) // stride[i] + 1)
        return tuple(found)

    @property
    def w_shape(self) -> tuple[int, ...]:
        width = self.c // self.group
        return (*self.kernel, width, self.m) if self.w_hwio else (self.m, *self.kernel, width)

    def _geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        ones = (1,) * self.axes
        return self.strides or ones, self.pads or (0,) * (2 * self.axes), self.dilations or ones

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the operands in the layouts that the kernel gets."""
        taps, width = math.prod(self.kernel), self.c // self.group
        shapes = {
            "x": (self.n, self.c, *self.sizes) if self.x_nchw else (self.n, *self.sizes, self.c),
            "w": self.w_shape,
            **dict.fromkeys(("bias", "slope", "column_scale", "column_shift"), (self.m,)),
            "residual": (self.n, *self.y_sizes, self.m),
            "gate": (self.n, *[1] * self.axes, self.c),
        }
        factors = {"x": self.scale, "w": 1 / math.sqrt(taps * width), "slope": 0.25, "column_scale": 0.5}
        made = {}
        for i, name in enumerate(("x", "w", *self.extra)):
            values = np.random.default_rng(i).standard_normal(shapes[name], dtype=np.float32)
            made[name] = (values * factors.get(name, 1.0)).astype(NUMPY[self.dtype])
        return made

    def problem(self) -> Conv:
        """Return the convolution; its inputs come in the order of `arrays`."""
        strides, pads, dilations = self._geometry()
        pointers = {name: Pointer("input", i) for i, name in enumerate(("x", "w", *self.extra))}
        alpha, beta = PARAMETERS.get(self.activation, (0.0, 0.0))
        return Conv(
            self.n, self.c, self.m, self.sizes, self.y_sizes, self.kernel, strides, dilations,
            pads[: self.axes], pads[self.axes :], self.group, self.dtype, self.aligned, y=Pointer("output", 0),
            residual_first=self.residual_first, activation=self.activation, alpha=alpha, beta=beta,
            x_nchw=self.x_nchw, w_hwio=self.w_hwio, tf32=self.tf32, weights_constant=self.constant, **pointers,
        )  # fmt: skip

    def node(self) -> FusedNode:
        """Return the fused node of the convolution."""
        strides, pads, dilations = self._geometry()
        attributes: dict[str, Any] = {
            "layout": "nhwc", "x_layout": "nchw" if self.x_nchw else "nhwc", "w_layout": self.w_layout,
            "residual_position": "before" if self.residual_first else "after", "activation": self.activation,
            "strides": list(strides), "pads": list(pads), "dilations": list(dilations), "group": self.group,
        }  # fmt: skip
        attributes |= dict(zip(("alpha", "beta"), PARAMETERS.get(self.activation, ()), strict=False))
        return FusedNode(self.FUSION, str(self), ("x", "w", *self.extra), attributes, (self.dtype,))

    def expect(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return y in float64, and the sums of the magnitudes of the terms of each element."""
        wide = {name: value.astype(np.float64) for name, value in arrays.items()}
        x = np.moveaxis(wide["x"], 1, -1) if self.x_nchw else wide["x"]
        if "gate" in arrays:  # the products are rounded
            x = (x * wide["gate"]).astype(NUMPY[self.dtype]).astype(np.float64)
        w = np.moveaxis(wide["w"], -1, 0) if self.w_hwio else wide["w"]
        y, magnitude = self._convolve(x, w), self._convolve(np.abs(x), np.abs(w))
        for name in ("bias", "column_shift", "residual"):
            magnitude = magnitude + np.abs(wide.get(name, 0.0))
        y = y + wide.get("bias", 0.0)
        residual = wide.get("residual", 0.0)
        y = self._activate(y + residual if self.residual_first else y, wide)
        y = y * wide.get("column_scale", 1.0) + wide.get("column_shift", 0.0)
        return y if self.residual_first else y + residual, magnitude

    def _activate(self, y: np.ndarray, wide: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.activation == PRELU:
            return np.where(y < 0, wide["slope"] * y, y)
        return ACTIVATIONS[self.activation].formula(y, *PARAMETERS.get(self.activation, (0.0, 0.0)))

    def _convolve(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        strides, pads, dilations = self._geometry()
        x = np.pad(x, ((0, 0), *zip(pads[: self.axes], pads[self.axes :], strict=True), (0, 0)))
        cuts = {
            tap: tuple(
                slice(t * dilations[i], t * dilations[i] + (self.y_sizes[i] - 1) * strides[i] + 1, strides[i])
                for i, t in enumerate(tap)
            )
            for tap in itertools.product(*map(range, self.kernel))
        }
        if self.group == 1:  # a matrix product for each image, whose rows hold the taps of a pixel
            y = np.empty((self.n, *self.y_sizes, self.m))
            for image, result in zip(x, y, strict=True):
                taps = np.stack([image[cut] for cut in cuts.values()], axis=-2)
                result[...] = taps.reshape(*self.y_sizes, -1) @ w.reshape(self.m, -1).T
            return y
        y = np.zeros((self.n, *self.y_sizes, self.group, self.m // self.group))
        w = w.reshape(self.group, self.m // self.group, *w.shape[1:])
        for tap, cut in cuts.items():
            part = x[(slice(None), *cut)].reshape(self.n, *self.y_sizes, self.group, -1)
            y += np.einsum("...gc,gmc->...gm", part, w[(slice(None), slice(None), *tap)])
        return y.reshape(self.n, *self.y_sizes, self.m)


def depthwise(
    n: int, c: int, sizes: tuple[int, ...], kernel: tuple[int, ...], *more: tuple[int, ...], **named: Any
) -> ConvCase:
    """Return a depthwise convolution; `more` are strides, pads and dilations."""
    return ConvCase(n, c, c, sizes, kernel, *more, **{"group": c, "w_hwio": True, **named})


def image(
    n: int, c: int, m: int, sizes: tuple[int, ...], kernel: tuple[int, ...], *more: tuple[int, ...], **named: Any
) -> ConvCase:
    """Return a convolution of an image that is channels first; `more` are strides, pads and dilations."""
    return ConvCase(n, c, m, sizes, kernel, *more, **{"x_nchw": True, **named})


BOTH: Final = ("bias", "residual")

# Filters that are unrolled and looped over; strides; dilations; asymmetric padding; widths that are not a multiple of a
# strip; channels that are not a multiple of a vector; one and three axes; long rows of the filter, which are cut.
DEPTHWISE: Final = [
    depthwise(1, 24, (9, 11), (3, 3), (2, 2), (1, 1, 1, 1), extra=BOTH),
    depthwise(2, 40, (7, 7), (3, 3), (1, 1), (1, 1, 1, 1), dtype="bfloat16", extra=BOTH, residual_first=False),
    depthwise(1, 16, (10, 17), (5, 5), (1, 1), (2, 2, 2, 2), dtype="float32"),
    depthwise(1, 20, (15, 15), (7, 7), (1, 1), (3, 3, 3, 3), activation="silu"),
    depthwise(1, 7, (9, 8), (7, 7), (1, 1), (3, 3, 3, 3), w_hwio=False, constant=False),
    depthwise(1, 16, (9, 30), (3, 3), (1, 2), (0, 4, 2, 1), (2, 3)),
    depthwise(2, 12, (9, 8), (3, 3), (1, 1), (1, 1, 1, 1), aligned=False, extra=BOTH),
    depthwise(1, 8, (50,), (31,), (1,), (15, 15), dtype="float32", extra=()),
    depthwise(2, 8, (5, 6, 7), (3, 3, 3), (2, 1, 1), (1, 1, 1, 1, 1, 1), extra=()),
    depthwise(1, 8, (40, 20), (11, 17), (3, 5), (5, 8, 5, 8), (2, 1)),
    depthwise(1, 16, (4, 4), (4, 4), (4, 4)),
    depthwise(1, 8, (3, 40), (1, 3), (1, 1), (0, 20, 0, 20), (1, 20)),
]

# Taps in pairs along rows and along an odd last column, of even and odd heights; strides 1 to 4; dilations; asymmetric
# padding; one row, one column, one axis; channels that are not whole blocks; a strip without a partner; large filters.
DEPTHWISE_MMA: Final = [
    depthwise(1, 24, (9, 11), (3, 3), (2, 2), (1, 1, 1, 1), extra=BOTH),
    depthwise(2, 40, (7, 7), (3, 3), (1, 1), (1, 1, 1, 1), dtype="bfloat16", extra=BOTH, residual_first=False),
    depthwise(1, 16, (15, 29), (5, 5), (1, 1), (2, 2, 2, 2), activation="silu"),
    depthwise(1, 72, (14, 14), (7, 7), (1, 1), (3, 3, 3, 3), w_hwio=False, constant=False),
    depthwise(1, 16, (9, 30), (3, 3), (1, 2), (0, 4, 2, 1), (2, 3)),
    depthwise(1, 8, (17, 23), (4, 5), (3, 3), (2, 1, 0, 4), (1, 2), dtype="bfloat16"),
    depthwise(1, 16, (10, 12), (6, 4), (2, 1), (3, 2, 2, 1), extra=()),
    depthwise(1, 16, (8, 8), (4, 4), (4, 4)),
    depthwise(1, 8, (3, 40), (1, 3), (1, 1), (0, 20, 0, 20), (1, 20)),
    depthwise(1, 8, (21, 5), (9, 1), (1, 1), (4, 0, 4, 0)),
    depthwise(2, 88, (35,), (31,), (1,), (15, 15)),
    depthwise(1, 24, (301,), (15,), (2,), (7, 8), (2,), dtype="bfloat16", extra=BOTH),
]

# Filters of odd and even sizes, of one column, with strides and dilations along the width; rows of padding alone.
DEPTHWISE_SLIDING: Final = [
    depthwise(2, 40, (7, 7), (3, 3), (1, 1), (1, 1, 1, 1), dtype="bfloat16", extra=BOTH, residual_first=False),
    depthwise(1, 16, (10, 17), (5, 5), (1, 1), (2, 2, 2, 2), dtype="float32"),
    depthwise(1, 20, (15, 15), (7, 7), (1, 1), (3, 3, 3, 3), activation="silu"),
    depthwise(1, 7, (9, 8), (7, 7), (1, 1), (3, 3, 3, 3), w_hwio=False, constant=False),
    depthwise(1, 12, (9, 30), (3, 3), (1, 2), (5, 4, 2, 1), (1, 3)),
    depthwise(2, 12, (9, 8), (3, 3), (1, 1), (1, 1, 1, 1), aligned=False, extra=BOTH),
    depthwise(1, 8, (21, 5), (9, 1), (1, 1), (4, 0, 4, 0)),
    depthwise(1, 8, (17, 23), (4, 5), (1, 3), (2, 1, 0, 4), (1, 2), dtype="bfloat16"),
    depthwise(3, 264, (6, 5), (2, 2), extra=()),
]

# Weights in registers and in shared memory; odd and even strides and padding; widths that are whole vectors, even and
# odd; filters that are not a multiple of 8; k that ends inside an mma, where the bias is a weight, and k that does not;
# several slices of filters; one axis.
STEMS: Final = [
    image(2, 3, 64, (30, 32), (7, 7), (2, 2), (3, 3, 3, 3)),
    image(1, 3, 32, (20, 40), (3, 3), (2, 2), (1, 1, 1, 1), activation="silu", extra=BOTH),
    image(1, 3, 24, (15, 17), (3, 3), (2, 2), (1, 0, 1, 2), dtype="bfloat16", extra=BOTH, residual_first=False),
    image(1, 4, 136, (10, 24), (3, 3), (1, 1), (1, 1, 1, 1), w_hwio=True),
    image(1, 3, 96, (16, 32), (4, 4), (4, 4), extra=()),
    image(1, 1, 10, (12, 22), (5, 5), (1, 3), (2, 2, 2, 2)),
    image(1, 2, 7, (9, 16), (6, 6), (3, 2), (0, 1, 4, 2), aligned=False, constant=False, extra=BOTH),
    image(1, 3, 16, (20, 24), (7, 7), (2, 2), (3, 3, 3, 3), dtype="float32", tf32=True, extra=BOTH),
    image(1, 3, 65, (9, 14), (3, 3), (1, 1), (1, 1, 1, 1), dtype="float32", tf32=True),
    image(2, 2, 16, (70,), (9,), (2,), (4, 4), dtype="bfloat16"),
    image(1, 1, 136, (1501,), (10,), (5,), extra=(), activation="gelu"),
    image(2, 1, 24, (1600,), (10,), (5,), (3, 0)),
    image(1, 3, 64, (34, 40), (11, 11), (4, 4), (2, 2, 2, 2)),
    image(1, 4, 64, (40, 40), (8, 8), (8, 8), (4, 0, 0, 4)),
    image(1, 3, 12, (11, 18), (5, 3), (2, 1), (2, 1, 2, 1), w_hwio=True, extra=BOTH),
]

# Groups that are one or several mma tiles of filters; groups that are merged; weights in registers and in shared
# memory; k that ends inside an mma; strides, dilations and asymmetric padding; one axis.
GROUPED: Final = [
    ConvCase(2, 64, 64, (9, 14), (3, 3), (1, 1), (1, 1, 1, 1), group=8),
    ConvCase(1, 32, 64, (9, 10), (3, 3), (2, 2), (1, 1, 1, 1), group=4, extra=BOTH, dtype="bfloat16"),
    ConvCase(1, 64, 64, (12, 12), (3, 3), (1, 1), (0, 2, 1, 1), group=4, activation="silu", extra=BOTH),
    ConvCase(1, 128, 128, (7, 7), (3, 3), (1, 1), (1, 1, 1, 1), group=4, residual_first=False, extra=BOTH),
    ConvCase(1, 128, 128, (6, 7), (3, 3), (1, 1), (1, 1, 1, 1), group=2),
    ConvCase(1, 32, 32, (9, 9), (3, 3), (1, 1), (1, 1, 1, 1), group=8),
    ConvCase(1, 24, 48, (9, 9), (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), group=12, w_hwio=True, constant=False),
    ConvCase(1, 48, 48, (5, 9), (5, 5), (1, 1), (2, 2, 2, 2), group=2, extra=()),
    ConvCase(1, 16, 32, (9, 9), (2, 2), (1, 1), (0, 0, 1, 1), group=16),
    ConvCase(1, 32, 32, (9, 10), (3, 3), (1, 1), (1, 1, 1, 1), group=4, dtype="float32", tf32=True),
    ConvCase(2, 32, 32, (40,), (9,), (1,), (4, 4), group=2),
    ConvCase(1, 64, 64, (310,), (5,), (2,), (2, 2), group=8, extra=BOTH),
]


def with_vectors(*cases: ConvCase) -> list[ConvCase]:
    """Return each case with the slopes of a PRelu, and with a scale and a shift of channels behind an activation."""
    slope, affine = ("bias", "slope", "residual"), ("column_scale", "column_shift", "residual")
    return [
        made
        for case in cases
        for made in (
            replace(case, extra=slope, activation=PRELU),
            replace(case, extra=slope[1:], activation=PRELU, residual_first=False),
            replace(case, extra=affine, activation="hard_swish", residual_first=False),
            replace(case, extra=("bias", *affine), residual_first=True),
        )
    ]


WITH_VECTORS: Final = {
    "depthwise": with_vectors(DEPTHWISE[0], DEPTHWISE[2]),
    "depthwise_mma": with_vectors(DEPTHWISE_MMA[0]),
    "depthwise_sliding": with_vectors(DEPTHWISE_SLIDING[1], DEPTHWISE_SLIDING[3]),
    "grouped": with_vectors(GROUPED[1], GROUPED[6]),
    "stem": with_vectors(STEMS[1], STEMS[6]),
}
WITH_VECTORS_OF_ANY: Final = with_vectors(
    ConvCase(2, 16, 72, (9, 7), (3, 3), (), (1, 1, 1, 1)),
    ConvCase(1, 5, 33, (9, 7), (3, 3), (), (1, 1, 1, 1), dtype="bfloat16"),
    ConvCase(1, 24, 20, (12,), (3,), (2,), (1, 0), dtype="float32", tf32=True),
)


NOT_FINITE: Final = [
    depthwise(1, 24, (19, 21), (k, k), (s, s), (k // 2,) * 4, activation="none", dtype=dtype, w_hwio=w_hwio)
    for k, s, dtype, w_hwio in ((3, 1, "float16", True), (5, 2, "bfloat16", False), (4, 1, "float16", True))
]


def not_finite(case: ConvCase) -> dict[str, np.ndarray]:
    """Return the operands of a depthwise case, with infinities and NaN in one channel of x each."""
    arrays = case.arrays()
    for channel, value, at in ((1, np.inf, 0), (2, -np.inf, 3), (8, np.nan, 7), (13, np.inf, 18), (23, np.inf, 11)):
        arrays["x"][:, at, at, channel] = value
    return arrays


def large_shapes() -> dict[str, list[ConvCase]]:
    """Return the convolutions of well-known networks whose times count, by the kind of kernel that runs them."""
    same = {3: (1, 1, 1, 1), 5: (2, 2, 2, 2), 7: (3, 3, 3, 3)}

    def square(k: int, stride: int = 1) -> tuple[tuple[int, ...], ...]:
        return (k, k), (stride, stride), same[k]

    return {
        "depthwise": [
            depthwise(32, 96, (112, 112), *square(3, 2)),
            depthwise(32, 240, (28, 28), *square(5)),
            depthwise(32, 480, (14, 14), *square(3)),
            depthwise(16, 96, (56, 56), *square(7)),
            depthwise(16, 384, (14, 14), *square(7)),
            depthwise(16, 512, (500,), (31,), (1,), (15, 15), activation="silu"),
        ],
        "grouped": [
            ConvCase(32, 256, 256, (28, 28), *square(3), group=32),
            ConvCase(4, 256, 256, (1000,), (9,), (1,), (4, 4), group=32),
        ],
        "stem": [
            image(8, 3, 64, (224, 224), *square(7, 2)),
            image(2, 3, 32, (640, 640), *square(3, 2)),
            image(1, 1, 512, (80000,), (10,), (5,), extra=()),
        ],
    }
